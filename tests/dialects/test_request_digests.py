"""Digests of requests: they are in the names of stored streams, so later versions compute the same ones."""

from __future__ import annotations

from midstream.dialects.request_digests import digest_of


def test_equal_values_have_one_digest_in_their_dialect() -> None:
    assert digest_of("mcp", "call", {"a": 1, "b": 2}) == digest_of("mcp", "call", {"b": 2, "a": 1})
    assert digest_of("mcp", "call") != digest_of("a2a", "call")
    assert digest_of("chat", "c", None, [1]) == "e8eec869823885268e2eaecd18bead7e"
