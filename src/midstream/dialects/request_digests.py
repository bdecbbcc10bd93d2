"""Digests by which a request that comes again is recognized at any server."""

from __future__ import annotations

import hashlib

import msgspec


def digest_of(dialect: str, *values: object) -> str:
    """Return 32 hexadecimal digits that follow from JSON values, and differ between dialects."""
    body = msgspec.json.encode(values, order="sorted")
    return hashlib.blake2b(body, digest_size=16, person=f"midstream-{dialect}".encode()).hexdigest()
