"""Parts that the stages share."""
