"""Fusion of transformer subgraphs."""
