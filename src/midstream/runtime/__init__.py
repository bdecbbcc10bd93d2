"""Actions: the only place with obligations in flight."""
