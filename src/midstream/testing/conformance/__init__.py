"""Conformance scripts of the stream protocol, as data: frames of one side, and required answers of the other."""
