"""Conformance scripts of the stream protocol: the frames of one side and the required answers of the other, as data."""
