"""Between verifying and measuring: the search for the best way to store, load and run what was prepared."""
