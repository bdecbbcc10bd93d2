"""Values of an agent's process as JSON text: arguments and results of the tools that it runs itself.

A model chooses the arguments, and a web page may choose a result. So the depth of values is limited here, for all
upstreams, before they are journaled, shown or processed.
"""

from __future__ import annotations

import msgspec

from midstream.json_depth import TOO_DEEP, is_text_too_deep, is_too_deep
from midstream.models.stream_json import joined_json

DEEP_VALUE = f'{{"midstream":"a value {TOO_DEEP} is not shown"}}'
"""Replacement for a value that is too deep."""
_encode = msgspec.json.Encoder(order="deterministic", enc_hook=str).encode


def json_text(value: object) -> str:
    """Return a value as JSON text, or `DEEP_VALUE` if it has more than `json_depth.DEPTH_MAX` levels."""
    if is_too_deep(value):
        return DEEP_VALUE
    try:
        text = _encode(value)
    except RecursionError:  # in objects of a package other than lists and dicts
        return DEEP_VALUE
    except UnicodeEncodeError:  # half a character
        text = joined_json(value, enc_hook=str).encode()
    return DEEP_VALUE if is_text_too_deep(text) else text.decode()
