"""Decisions: pure functions and values. Nothing here waits, reads a clock, makes an id or touches a disk."""
