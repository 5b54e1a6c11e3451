"""Whether answers are as recorded."""
