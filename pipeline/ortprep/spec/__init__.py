"""Specs of models: YAML, validated, as frozen values."""
