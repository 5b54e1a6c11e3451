"""`optimize`: the graph optimised once, linted and loaded again; a ladder of lesser steps if that fails."""
