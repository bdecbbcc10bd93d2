"""Conformance scripts of the stream protocol: what one side says and what the other must answer, as data."""
