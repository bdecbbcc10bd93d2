"""Durable agents beside one another: effects that happen twice after SIGKILL, and what a step costs."""
