"""Second stage: the graph optimised once, linted, loaded again; down a ladder when that does not hold."""
