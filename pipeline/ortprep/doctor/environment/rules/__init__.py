"""Rules that judge the facts. Pure."""
