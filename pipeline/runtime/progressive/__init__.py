"""Loading in two phases."""
