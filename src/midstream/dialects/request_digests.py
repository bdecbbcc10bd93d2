"""Digests that identify a repeated request at any server."""

from __future__ import annotations

import hashlib

import msgspec


def digest_of(dialect: str, *values: object) -> str:
    """Return a digest of JSON values (32 hexadecimal digits), which differs between dialects."""
    body = msgspec.json.encode(values, order="sorted")
    return hashlib.blake2b(body, digest_size=16, person=f"midstream-{dialect}".encode()).hexdigest()
