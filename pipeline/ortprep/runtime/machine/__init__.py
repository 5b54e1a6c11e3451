"""What this machine is, and what its memory holds."""
