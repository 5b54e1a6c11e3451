"""Graph passes: one child function each, by the library the field uses."""
