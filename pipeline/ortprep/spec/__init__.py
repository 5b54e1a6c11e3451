"""What the user wrote about a model: YAML, validated, as frozen values."""
