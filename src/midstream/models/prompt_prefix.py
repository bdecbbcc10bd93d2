"""Requests to stateless providers whose beginning stays the same, byte for byte, in all turns.

Providers cache prompts by their exact beginning: tools, then the system prompt, then the messages.
`history/rendering.py` keeps the messages stable. This module has the order and the encoding of tools, the key that
routes a session's requests to the same machine, and the marks that Anthropic requires.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from midstream.history.codecs.codec_spec import Json, Value
from midstream.history.messages import ToolSpec
from midstream.session.records import PromptHead

ANCHORS_MAX = 4
"""Marks that Anthropic accepts in one request."""
LOOK_BACK_BLOCKS = 20
"""Blocks before a mark in which Anthropic searches its cache: a response with more calls needs a second mark."""
OPENAI_HOSTS = ("api.openai.com",)
"""Servers, and their subdomains, known to accept `prompt_cache_key`; others may refuse an unknown field."""
_INSTRUCTING = ("system", "developer")
_UNMARKABLE = frozenset(
    {
        "thinking",
        "redacted_thinking",
        "image_url",
        "input_audio",
        "file",
    }  # the last three: of chat completions
)
_AS_GIVEN = frozenset(
    {"properties", "$defs", "definitions", "patternProperties", "default", "const", "examples"}
)
"""Members of a schema whose order is significant: models write arguments in the order of the properties."""


def canonical_tools(tools: Iterable[ToolSpec]) -> tuple[ToolSpec, ...]:
    """Return tools sorted by name, with sorted schema keywords at every depth.

    So the same tools always give the same bytes. Properties keep their declared order.
    """
    ordered = sorted(tools, key=lambda tool: tool.name)
    return tuple(replace(tool, parameters=_canonical(tool.parameters)) for tool in ordered)


def head_of(instructions: str, tools: Iterable[ToolSpec]) -> PromptHead:
    """Return the digests of a request's system prompt and tools."""
    return PromptHead(
        _digest(instructions.encode("utf-8", "replace")),
        _digest(msgspec.json.encode(canonical_tools(tools))),
    )


def cache_key_of(session: str) -> str:
    """Return the `prompt_cache_key` of a session: the same for all its requests, and without its name."""
    return f"midstream-{_digest(session.encode('utf-8', 'replace'), size=16)}"


def takes_cache_key(host: str) -> bool:
    """Whether the server of this name is known to accept `prompt_cache_key`."""
    return any(host == known or host.endswith(f".{known}") for known in OPENAI_HOSTS)


def anchor(body: Mapping[str, Any], *, ttl: str = "") -> Json:
    """Return a copy of a request for Anthropic's Messages with `cache_control` marks (prompt caching).

    There are marks at the end of the tools, of the system prompt, of the messages, and of the previous request, so that
    its cache entry is found after any number of new blocks. A body with marks is returned unchanged. Apart from the
    marks, the body of a longer conversation begins with that of a shorter one: all texts of the user become blocks.

    Args:
        body: `tools`, `system` and `messages` in Anthropic's form.
        ttl: "" for the provider's five minutes, else such as `1h`.
    """
    made = dict(body)
    if _is_marked(made):
        return made
    mark = _mark(ttl)
    _mark_tools(made, mark)
    if system := made.get("system"):
        made["system"] = _with_mark(_blocks(system), mark)
    made["messages"] = _slide_anchors(made.get("messages") or (), mark, askers=("user",))
    return made


def anchor_chat(body: Mapping[str, Any], *, ttl: str = "") -> Json:
    """Return the body of a request for chat completions with Anthropic's `cache_control` marks, as `anchor` does.

    For servers that pass them on. The marks are inside the texts of messages (one server is reported to hang if a
    tool's result itself has a mark); results and system prompts become blocks like the texts of the user.
    """
    made = dict(body)
    if _is_marked(made):
        return made
    mark = _mark(ttl)
    _mark_tools(made, mark)
    messages = _slide_anchors(made.get("messages") or (), mark, askers=("user", "tool"))
    if messages and messages[0].get("role") in _INSTRUCTING:
        content = _with_mark(_blocks(messages[0].get("content") or []), mark)
        messages[0] = {**messages[0], "content": content}
    made["messages"] = messages
    return made


def _mark(ttl: str) -> Json:
    return {"type": "ephemeral"} | ({"ttl": ttl} if ttl else {})


def _mark_tools(made: Json, mark: Json) -> None:
    if tools := made.get("tools"):
        made["tools"] = [*tools[:-1], {**tools[-1], "cache_control": mark}]


def _slide_anchors(messages: Sequence[Json], mark: Json, *, askers: Collection[str]) -> list[Json]:
    """Return messages with the two marks; those of `askers` (all roles except the model) become blocks."""
    slid = [_in_blocks(message) if message.get("role") in askers else message for message in messages]
    for place in _anchor_places(slid, askers):
        slid[place] = {**slid[place], "content": _with_mark(slid[place]["content"], mark)}
    return slid


def _anchor_places(messages: Sequence[Json], askers: Collection[str]) -> list[int]:
    """Return the ends of the newest request of the conversation, and of the one before it."""
    tail = _find_last_request(messages, len(messages), askers)
    response = next(
        (place for place in range(tail - 1, -1, -1) if messages[place].get("role") == "assistant"), -1
    )
    return [place for place in (_find_last_request(messages, response, askers), tail) if place >= 0]


def _find_last_request(messages: Sequence[Json], end: int, askers: Collection[str]) -> int:
    for place in range(end - 1, -1, -1):
        if messages[place].get("role") in askers and any(map(_can_carry, messages[place]["content"])):
            return place
    return -1


def _in_blocks(message: Json) -> Json:
    return {**message, "content": _blocks(message.get("content") or [])}


def _blocks(content: Value) -> list[Json]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


def _with_mark(blocks: Sequence[Json], mark: Json) -> list[Json]:
    """Mark the last block that can have a mark; thinking and empty texts cannot."""
    marked = list(blocks)
    for place in range(len(marked) - 1, -1, -1):
        if _can_carry(marked[place]):
            marked[place] = {**marked[place], "cache_control": mark}
            break
    return marked


def _can_carry(block: Json) -> bool:
    kind = block.get("type")
    if kind == "text":
        return bool(str(block.get("text") or "").strip())
    return kind not in _UNMARKABLE


def _is_marked(body: Json) -> bool:
    if "cache_control" in body:
        return True
    messages = body.get("messages") or ()
    groups = [body.get("tools"), body.get("system"), *(message.get("content") for message in messages)]
    return any(
        "cache_control" in block
        for group in groups
        if isinstance(group, list)
        for block in group
        if isinstance(block, dict)
    )


def _canonical(schema: Value) -> Value:
    if isinstance(schema, list):
        return [_canonical(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: _canonical_unless_given(key, schema[key]) for key in sorted(schema)}


def _canonical_unless_given(key: str, value: Value) -> Value:
    if key not in _AS_GIVEN or not isinstance(value, dict):
        return _canonical(value)
    return {name: _canonical(inner) for name, inner in value.items()}


def _digest(body: bytes, *, size: int = 8) -> str:
    return hashlib.blake2b(body, digest_size=size, person=b"midstream-prefix").hexdigest()
