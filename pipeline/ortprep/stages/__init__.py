"""The build, one stage per file: fetch, optimize, verify, measure, package."""
