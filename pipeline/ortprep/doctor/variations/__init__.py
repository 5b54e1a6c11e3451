"""`doctor options`: ways to load a model that people compare by hand, compared."""
