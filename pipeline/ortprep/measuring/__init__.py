"""Figures, taken and compared: the order of measurements, their inputs, and their noise."""
