"""Benchmarks. Each module measures one subject: `python -m bench steps`."""
