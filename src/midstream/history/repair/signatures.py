"""Detection of signatures that another provider made, by comparison with the others of the history.

Only the provider can verify a signature. But Claude's are the base64 of a message that begins with a field and its
length (since Opus 5 after a version number). A truncated one, or one of another provider, has another form. If a
history has no signature in Claude's form at all (a test, a proxy), all are kept.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable

from midstream.history.codecs.codec_spec import Value

_LIKE_CLAUDE = re.compile(r"(?:E|CAIS)[A-Za-z0-9+/]{15,}={0,2}").fullmatch
_VERSION = b"\x08\x02"
"""Beginning of newer signatures: field 1, the number two."""
_FIELD_2 = 0x12
"""The byte after it, or the first byte: field 2, a length and so many bytes."""
_MORE = 0x80
_HEADER_MAX = 6
"""Bytes: the field and a length of up to five."""
_HEAD_DIGITS = 12
"""Base64 digits of nine bytes, a version and a header; every signature of Claude has more."""


def odd_signatures(messages: Iterable[Value]) -> frozenset[str]:
    """Return the signatures of thinking in these messages whose form differs from the rest."""
    every: set[str] = set()
    for message in messages:
        content = message.get("content") if type(message) is dict else None
        if type(content) is list:
            for block in content:
                if type(block) is dict and ("signature" in block or "reasoningContent" in block):
                    every.update(_in_block(block))
    alike = {signature for signature in every if _LIKE_CLAUDE(signature)}
    if not alike:
        return frozenset()
    whole = {signature for signature in alike if _is_whole(signature)}
    return frozenset(every - (whole or alike))


def _in_block(block: Value) -> list[str]:
    signature = block.get("signature")
    if signature is None and isinstance(thought := block.get("reasoningContent"), dict):
        text = thought.get("reasoningText")
        signature = text.get("signature") if isinstance(text, dict) else None
    return [signature] if isinstance(signature, str) and signature else []


def _is_whole(signature: str) -> bool:
    """Whether the outer length in a signature is the actual length; only its beginning is decoded."""
    digits = len(signature.rstrip("="))
    if digits % 4 and len(signature) % 4:
        return False
    head = base64.b64decode(signature[:_HEAD_DIGITS])
    data = head.removeprefix(_VERSION)
    size = digits * 6 // 8 - len(head) + len(data)
    if data[0] != _FIELD_2:
        return False
    length = shift = 0
    for place, byte in enumerate(data[1:_HEADER_MAX], start=2):
        length |= (byte & ~_MORE) << shift
        shift += 7
        if not byte & _MORE:
            return place + length <= size
    return False
