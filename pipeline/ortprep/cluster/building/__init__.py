"""Prepares bundles on a Ray cluster: the same stages, each on a node with the hardware that it is for."""
