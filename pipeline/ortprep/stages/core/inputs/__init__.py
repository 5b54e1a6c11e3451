"""Inputs of a model: declared shapes, seeded values, the user's own samples."""
