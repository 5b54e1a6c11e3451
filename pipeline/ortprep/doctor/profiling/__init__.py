"""`doctor profile`: which operators, on which execution provider, a run spends its time in."""
