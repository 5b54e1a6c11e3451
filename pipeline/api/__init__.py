"""The build as a function, for notebooks and pipelines: `from ortprep import prepare, Spec`."""
