"""Reuse: whether an upstream's memory fits what a host sent, and what to send it then. Pure."""
