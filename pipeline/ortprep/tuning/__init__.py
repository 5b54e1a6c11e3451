"""How a model is best stored, loaded and run: the space of plans, the search, and its trials."""
