"""The ASGI server: the stream protocol over WebSocket and plain HTTP, and the pages that show sessions."""
