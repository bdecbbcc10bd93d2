"""The engine: does what a session decides."""
