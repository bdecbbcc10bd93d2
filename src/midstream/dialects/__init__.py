"""Foreign wire protocols in front of sessions and models."""
