"""`optimize`: the graph optimised once, linted and loaded again; lesser steps if that fails."""
