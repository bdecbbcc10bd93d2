"""Repair: one walk over any provider's history, telling every finding, losing nothing."""
