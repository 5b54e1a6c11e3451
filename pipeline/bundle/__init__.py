"""The on-disk contract between the build and the jobs; see docs/format.md."""
