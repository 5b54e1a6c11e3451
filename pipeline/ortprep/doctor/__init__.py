"""`ortprep doctor`: where the time of loading a model goes, measured on this machine, and what would help."""
