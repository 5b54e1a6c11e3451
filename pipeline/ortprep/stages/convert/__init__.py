"""`convert`: graph passes before the one-time optimisation, each gated by measured accuracy."""
