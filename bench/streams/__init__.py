"""Durable commands and idle readers of a server process, compared with the Durable Streams reference server."""
