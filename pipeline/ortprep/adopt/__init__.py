"""From what an application did with its models to specs that keep its options."""
