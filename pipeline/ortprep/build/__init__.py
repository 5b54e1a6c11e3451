"""From specs to tasks: what is built, what is up to date, and why; the only package that imports doit."""
