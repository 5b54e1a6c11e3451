"""The search for the best way to store, load and run a model: space of plans, search, and trials."""
