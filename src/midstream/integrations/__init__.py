"""Adapters to outside things, one module each. They do not know one another, and none is imported unasked."""
