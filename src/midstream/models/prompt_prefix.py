"""The prefix keeper: requests to stateless providers whose beginning stays the same, byte for byte, turn after turn.

Providers keep what they have read under its exact beginning: tools, then the system prompt, then the messages. The
messages are kept stable by `history/rendering.py`, which writes forwards; here stand the order and the encoding of the
tools, the key that brings a session's requests to the same machine, and the marks that Anthropic requires.
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
"""Marks that Anthropic takes in one request."""
LOOK_BACK_BLOCKS = 20
"""Blocks before a mark in which Anthropic looks for what it has kept: a response with more calls needs a second
mark."""
OPENAI_HOSTS = ("api.openai.com",)
"""Servers, with those below them, known to take `prompt_cache_key`; others may refuse an unknown field."""
_INSTRUCTING = ("system", "developer")
_UNMARKABLE = frozenset(
    {"thinking", "redacted_thinking", "image_url", "input_audio", "file"}  # the last three: chat completions'
)
_AS_GIVEN = frozenset(
    {"properties", "$defs", "definitions", "patternProperties", "default", "const", "examples"}
)
"""Members of a schema whose own order means something: models write arguments in the order of the properties."""


def canonical_tools(tools: Iterable[ToolSpec]) -> tuple[ToolSpec, ...]:
    """Return tools in the order of their names, each schema's keywords in one order at every depth.

    The same tools give the same bytes, however they were collected. Properties keep the order they were declared in.
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
    """Return what to send as `prompt_cache_key`: the same for every request of a session, and nothing of its name."""
    return f"midstream-{_digest(session.encode('utf-8', 'replace'), size=16)}"


def takes_cache_key(host: str) -> bool:
    """Whether the server of this name is known to take `prompt_cache_key`."""
    return any(host == known or host.endswith(f".{known}") for known in OPENAI_HOSTS)


def anchor(body: Mapping[str, Any], *, ttl: str = "") -> Json:
    """Return the body of a request for Anthropic's Messages with its cache marks: a new one, `body` stays as it is.

    One mark ends the tools, one the system prompt, two slide along the messages: at the end, and where the request
    before this one ended, so that what was kept then is found however many blocks have come since. A body that has
    marks already is returned as it is. But for the marks, the body of a longer conversation begins with that of a
    shorter one: texts of the user become blocks whether they carry a mark or not.

    Args:
        body: `tools`, `system` and `messages` as Anthropic has them.
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
    """Return the body of a request for chat completions with Anthropic's cache marks, as `anchor` does.

    For servers that pass them on. The marks stand within the texts of messages (beside them, on the result of a tool,
    one such server is reported to hang); results and system prompts become blocks like the texts of the user.
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
    """Return messages with the two anchors; those of `askers` (all but the model) are in blocks."""
    slid = [_in_blocks(message) if message.get("role") in askers else message for message in messages]
    for place in _anchor_places(slid, askers):
        slid[place] = {**slid[place], "content": _with_mark(slid[place]["content"], mark)}
    return slid


def _anchor_places(messages: Sequence[Json], askers: Collection[str]) -> list[int]:
    """Return where the newest request of the conversation ends, and where the one before it ended."""
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
    """Mark the last block that can carry a mark; thinking and empty texts cannot."""
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
