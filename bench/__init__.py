"""Measurements, each a program of its own: `python -m bench.steps`."""
