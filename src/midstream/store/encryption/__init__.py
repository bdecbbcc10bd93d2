"""Encryption for any store."""
