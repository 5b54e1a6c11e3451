"""The kinds of registries: each stores records and files, and knows nothing of what they mean."""
