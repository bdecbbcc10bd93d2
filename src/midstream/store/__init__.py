"""Stores: journals with their owners, and small values beside them. One method is one transaction."""
