"""The search for a precision that passes the spec's gate: ladder, trials, nodes to keep."""
