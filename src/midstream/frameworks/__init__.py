"""Integrations of other frameworks: agents and hooks."""
