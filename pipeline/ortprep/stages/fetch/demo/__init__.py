"""Real architectures with seeded weights, made offline."""
