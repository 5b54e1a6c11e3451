"""Arrays, their element types, and what models take and give."""
