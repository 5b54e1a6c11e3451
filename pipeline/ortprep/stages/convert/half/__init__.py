"""Conversion to float16 and bfloat16."""
