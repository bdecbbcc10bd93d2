"""Repair of any provider's history in one pass, with a finding for every edit."""
