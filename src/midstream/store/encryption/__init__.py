"""Encryption in front of any store."""
