"""What acts: the only place with obligations in flight."""
