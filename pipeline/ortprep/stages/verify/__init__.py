"""Third stage: the prepared model's answers against its source's."""
