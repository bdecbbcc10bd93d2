"""Transports of the stream protocol: WebSocket, server-sent events, long polling."""
