"""Stateful upstream agents, and the pool that reuses them."""
