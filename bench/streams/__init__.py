"""Durable commands and idle readers of a served process, beside the Durable Streams reference server."""
