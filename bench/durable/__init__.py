"""Comparison of durable agents: repeated effects after SIGKILL, and the cost of a step."""
