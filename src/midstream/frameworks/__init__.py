"""Agents and hooks of other frameworks."""
