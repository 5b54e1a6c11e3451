"""Bundles in model registries: publish, pull, promote; see docs/registry.md."""
