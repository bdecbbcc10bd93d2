"""Stores: journals with their nodes, and small values beside them. One method is one transaction."""
