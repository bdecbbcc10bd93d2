"""Frames, both halves of the stream protocol, checkpoint, server-sent events. Pure."""
