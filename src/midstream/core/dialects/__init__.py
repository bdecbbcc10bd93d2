"""Requests and answers of a gateway, in the formats of three APIs. Pure: bytes in, values out, and back."""
