"""Conformance scripts of the stream protocol, as data: the frames of one side, and the required answers of the
other.
"""
