"""What a model is fed with: declared shapes, seeded values, the user's own samples."""
