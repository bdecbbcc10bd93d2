"""LangChain messages: `{"type", "data"}`, flat dumps, `lc` constructors, and `{"role", "content"}`."""

from __future__ import annotations

import json
from operator import itemgetter

from midstream.history.codecs.codec_spec import (
    CodecSpec,
    Json,
    MessageTurn,
    Part,
    PartKind,
    ResultPlacement,
    Role,
    Value,
    as_json,
    as_words,
    is_sound,
    join_content,
    name_of,
    object_in_text,
    object_of,
    role_in,
    sound_blocks,
    split_result,
    stated_type,
)
from midstream.history.codecs.openai_chat_codec import image_chunk

_ROLES = {
    "human": Role.USER,
    "user": Role.USER,
    "ai": Role.ASSISTANT,
    "assistant": Role.ASSISTANT,
    "tool": Role.TOOL,
    "function": Role.TOOL,
    "system": Role.SYSTEM,
    "developer": Role.SYSTEM,
    "HumanMessage": Role.USER,
    "HumanMessageChunk": Role.USER,
    "AIMessage": Role.ASSISTANT,
    "AIMessageChunk": Role.ASSISTANT,
    "ToolMessage": Role.TOOL,
    "FunctionMessage": Role.TOOL,
    "SystemMessage": Role.SYSTEM,
}
_FIELDS = frozenset({"content", "kwargs", "tool_calls", "role"})
"""Fields of a message that is not wrapped in `data`."""
_TYPES = {Role.USER: "human", Role.ASSISTANT: "ai", Role.TOOL: "tool", Role.SYSTEM: "system"}
_CLASSES = {
    Role.USER: "HumanMessage",
    Role.ASSISTANT: "AIMessage",
    Role.TOOL: "ToolMessage",
    Role.SYSTEM: "SystemMessage",
}


_TYPELESS_KEYS = ("role", "lc", "kwargs")
_KNOWN_TYPES = frozenset(
    {"human", "ai", "tool", "system", "function", "chat", "remove", "developer", "user", "assistant"}
    | {"HumanMessageChunk", "AIMessageChunk", "ToolMessageChunk", "SystemMessageChunk", "constructor"}
    | {"not_implemented"}
)


def _with_type(message: Json) -> Json:
    """Return a LangChain message with a type, by its own data or by fields that only one type has."""
    kind = message.get("type")
    is_known = isinstance(kind, str) and kind in _KNOWN_TYPES
    if not is_known and "lc" in message and isinstance(message.get("kwargs"), dict):
        return {**message, "type": "constructor"}
    if is_known or any(key in message for key in _TYPELESS_KEYS):
        return message
    data = message.get("data")
    inner: Json = data if isinstance(data, dict) else message
    named = inner.get("type")
    if named not in ("human", "ai", "tool", "system"):
        named = "tool" if "tool_call_id" in inner else "ai" if "tool_calls" in inner else "human"
    return {**message, "type": named}


def _write_thought(words: str, signature: str | None, _signer: str) -> Json:
    raw = {"type": "thinking", "thinking": words}
    return raw | {"signature": signature} if signature else raw


class LangChain:
    """Messages of `messages_to_dict`, `model_dump` or `dumpd`.

    New messages have the form of the first one that was read, so that a list has one form.
    """

    name = "langchain"
    layout = ResultPlacement.SEPARATE
    spec = CodecSpec(
        roles=frozenset(),
        has_tool_messages=True,
        own_shapes=frozenset({"anthropic"}),
        is_thought_hollow=True,
        typed=_with_type,
        write_media=image_chunk,
        write_thought=_write_thought,
    )
    profile = "neutral"
    wire = ""

    def __init__(self) -> None:
        self._wrap = ""

    def parse(self, message: Json, at: int) -> MessageTurn:
        """Read one message."""
        if "data" in message and not isinstance(message["data"], dict) and not message.keys() & _FIELDS:
            content = message["data"]
            content = content if isinstance(content, list) else as_words(content)
            turn = self.parse({**message, "data": {"content": content}}, at)
            turn.is_changed = True
            return turn
        inner, wrap = _inside(message)
        self._wrap = self._wrap or wrap
        role = _role(message, inner)
        if role is Role.TOOL:
            failed = inner.get("status") == "error"
            body, name = inner.get("content"), name_of(inner.get("name"))
            call_id = inner.get("tool_call_id")
            part = Part(PartKind.RESULT, message, call_id, name, body, failed=failed)
            return MessageTurn(role, [part], message, at)
        parts = _content(inner.get("content"))
        if role is not Role.ASSISTANT:
            parts = [_as_text(part) if _is_mirrored(part) else part for part in parts]
        turn = MessageTurn(role, parts, message, at)
        if not isinstance(inner.get("content"), str | list):
            turn.faults = ("null-content",)
        if role is Role.ASSISTANT:
            self._read_calls(turn, inner, is_wrapped=wrap != "role")
        return turn

    def _read_calls(self, turn: MessageTurn, inner: Json, *, is_wrapped: bool) -> None:
        """Read the calls; a block in the content only mirrors an entry of the list, if there is one."""
        lists = [inner[key] for key in ("tool_calls", "invalid_tool_calls") if key in inner]
        listed = [call for calls in lists if isinstance(calls, list) for call in calls]
        if not all(map(_is_list, lists)):
            turn.faults = (*turn.faults, "empty-calls")
        calls = [_call(call, is_wrapped=is_wrapped) for call in listed if isinstance(call, dict)]
        if len(calls) < len(listed):
            turn.faults = (*turn.faults, "empty-calls")
        mirrors = [part for part in turn.parts if _is_mirrored(part)]
        if mirrors:
            turn.parts = [part for part in turn.parts if not _is_mirrored(part)]
            calls = self._with_unlisted_calls(turn, calls, mirrors)
        turn.parts += calls

    def _with_unlisted_calls(self, turn: MessageTurn, calls: list[Part], mirrors: list[Part]) -> list[Part]:
        """Return the listed calls, and those that only the content has."""
        places = {call.id: place for place, call in enumerate(calls) if isinstance(call.id, str)}
        listed: dict[str, list[tuple[Value, int]]] = {}
        for place, call in enumerate(calls):
            listed.setdefault(call.name, []).append((call.body, place))
        unlisted: list[tuple[int, Part]] = []
        after = -1  # the place of the listed call that the content mirrored last
        for part in mirrors:
            if (call_id := as_words(part.raw.get("id"))) in places:
                after = places[call_id]
                continue
            name, args = part.raw.get("name") or "", part.raw.get("input", part.raw.get("args"))
            same = next((place for body, place in listed.get(as_words(name), ()) if body == args), None)
            if same is not None:  # the same call under an older id
                after = same
                continue
            unlisted.append((after, self.call(part.raw.get("id"), name, args)))
            turn.faults = (*turn.faults, "unlisted-call")
        return _among(calls, unlisted)

    def build(self, turn: MessageTurn) -> Json:
        """Write one turn. Results are messages already."""
        if turn.role is Role.TOOL:
            raw: Json = turn.parts[0].raw
            return raw
        if turn.source is None:
            return self._new(turn.role, self._fields(turn, {}))
        inner, wrap = _inside(turn.source)
        fields = self._fields(turn, inner)
        if wrap == "data":
            return {**turn.source, "data": {**inner, **fields}}
        if wrap == "kwargs":
            return {**turn.source, "kwargs": {**inner, **fields}}
        return {**turn.source, **fields}

    def _new(self, role: Role, fields: Json) -> Json:
        if self._wrap == "kwargs":
            path = ["langchain", "schema", "messages", _CLASSES[role]]
            return {"lc": 1, "type": "constructor", "id": path, "kwargs": {"type": _TYPES[role], **fields}}
        if self._wrap == "role":
            return {"role": "user" if role is Role.USER else str(role), **fields}
        if self._wrap == "flat":
            return {"type": _TYPES[role], **fields}
        return {"type": _TYPES[role], "data": {"type": _TYPES[role], **fields}}

    def _fields(self, turn: MessageTurn, inner: Json) -> Json:
        parts = [part for part in turn.parts if part.kind not in (PartKind.CALL, PartKind.RESULT)]
        fields: Json = {"content": _write_content(parts, inner)}
        if turn.role is not Role.ASSISTANT:
            return fields
        calls = [part for part in turn.parts if part.kind is PartKind.CALL]
        if isinstance(fields["content"], list):
            fields["content"] = _mirror_blocks(inner.get("content"), fields["content"], calls)
        if calls or "tool_calls" in inner:
            fields["tool_calls"] = [part.raw for part in calls if part.raw.get("type") != "invalid_tool_call"]
        if "invalid_tool_calls" in inner:
            fields["invalid_tool_calls"] = [
                part.raw for part in calls if part.raw.get("type") == "invalid_tool_call"
            ]
        return fields

    def text(self, words: str, role: Role) -> Part:
        """Create a text, written as a string."""
        del role
        return Part(PartKind.TEXT, None, body=words, is_new=True)

    def call(self, call_id: str, name: str, arguments: Json) -> Part:
        """Create an entry of `tool_calls`."""
        raw: Json = {"name": name, "args": arguments, "id": call_id, "type": "tool_call"}
        return Part(PartKind.CALL, raw, call_id, name, arguments, is_new=True)

    def answer(self, call: Part, words: str, *, is_failed: bool) -> Part:
        """Create a tool message for a call."""
        fields: Json = {"content": words, "name": call.name or None, "tool_call_id": call.id}
        fields["status"] = "error" if is_failed else "success"
        raw = self._new(Role.TOOL, fields)
        return Part(PartKind.RESULT, raw, call.id, call.name, words, failed=is_failed, is_new=True)

    def rename(self, part: Part, new_id: str) -> None:
        """Set the id of a call or a result."""
        if part.kind is PartKind.CALL:
            part.signature = part.signature or part.id
            part.id, part.raw = new_id, {**part.raw, "id": new_id}
        else:
            part.id = new_id
            part.raw = _with(part.raw, "tool_call_id", new_id)

    def reargue(self, part: Part, arguments: Json) -> None:
        """Set the arguments of a call; an invalid call becomes a valid one."""
        if isinstance(inner := part.raw.get("function"), dict):
            part.body = as_json(arguments)
            part.raw = {**part.raw, "function": {**inner, "arguments": part.body}}
            return
        kept = {key: value for key, value in part.raw.items() if key != "error"}
        part.body, part.raw = arguments, {**kept, "args": arguments, "type": "tool_call"}

    def retool(self, part: Part, name: str) -> None:
        """Set the tool name of a call or a result."""
        part.name = name
        if part.kind is not PartKind.CALL:
            part.raw = _with(part.raw, "name", name)
        elif isinstance(inner := part.raw.get("function"), dict):
            part.raw = {**part.raw, "function": {**inner, "name": name}}
        else:
            part.raw = {**part.raw, "name": name}

    def bad_arguments(self, part: Part) -> Json | None:
        """Return valid arguments if the call's own are no object (in OpenAI's form: no JSON text of one), else None."""
        return object_in_text(part.body) if "function" in part.raw else object_of(part.body)

    def refill(self, part: Part, words: str) -> None:
        """Set the content of a text or a result."""
        part.body = words
        if part.kind is PartKind.RESULT:
            part.raw = _with(part.raw, "content", words)
        elif isinstance(part.raw, dict):
            part.raw = {**part.raw, "text": words}

    def pieces(self, part: Part) -> tuple[str, list[Part]]:
        """Split a result into its text and its media."""
        return split_result(part.body, _block)

    def join(self, first: Part, second: Part) -> None:
        """Append the second result's content."""
        content = join_content(first.body, second.body, _blocks)
        first.body, first.raw = content, _with(first.raw, "content", content)

    def tidy(self, part: Part) -> str | None:
        """Make a result's content a text or blocks."""
        if isinstance(part.body, list):
            if all(isinstance(block, str) or is_sound(block) for block in part.body):
                return None
            part.body = sound_blocks(part.body)
            part.raw = _with(part.raw, "content", part.body)
            return "bad-result"
        if isinstance(part.body, str):
            return None
        is_empty = part.body is None
        self.refill(part, "(no output)" if is_empty else as_words(part.body))
        return "null-content" if is_empty else "bad-result"


def _inside(message: Json) -> tuple[Json, str]:
    """Return the fields of a message, and the form of its wrapper."""
    if isinstance(data := message.get("data"), dict):
        return data, "data"
    if isinstance(kwargs := message.get("kwargs"), dict):
        return kwargs, "kwargs"
    return message, "flat" if "type" in message else "role"


def _role(message: Json, inner: Json) -> Role:
    if message.get("type") == "constructor":
        path = message.get("id")
        return role_in(_ROLES, path[-1] if isinstance(path, list) and path else inner.get("type"))
    return role_in(_ROLES, message.get("type") or inner.get("type") or message.get("role"))


def _with(message: Json, key: str, value: Value) -> Json:
    inner, wrap = _inside(message)
    changed = {**inner, key: value}
    return {**message, wrap: changed} if wrap in ("data", "kwargs") else changed


def _is_list(value: Value) -> bool:
    return isinstance(value, list)


def _call(call: Json, *, is_wrapped: bool) -> Part:
    """Read an entry of `tool_calls`; in OpenAI's form only for messages with a role."""
    if isinstance(inner := call.get("function"), dict):
        name, body = name_of(inner.get("name")), inner.get("arguments")
        if not is_wrapped:
            return Part(PartKind.CALL, call, call.get("id"), name, body)
        args = _arguments(body)
        raw: Json = {"name": name, "args": args, "id": call.get("id"), "type": "tool_call"}
        return Part(PartKind.CALL, raw, call.get("id"), name, args, is_new=True)
    return Part(PartKind.CALL, call, call.get("id"), name_of(call.get("name")), call.get("args"))


def _arguments(text: Value) -> Value:
    """Return the object in a JSON text; other text unchanged."""
    found = object_in_text(text)
    return json.loads(text) if found is None else found


def _among(calls: list[Part], unlisted: list[tuple[int, Part]]) -> list[Part]:
    """Insert calls that only the content has after the listed ones that precede them there."""
    listed = list(enumerate(calls))
    return [call for _, call in sorted([*listed, *unlisted], key=itemgetter(0))]


def _is_mirrored(part: Part) -> bool:
    """Whether a content block only repeats `tool_calls`."""
    raw = part.raw
    return (
        part.kind is PartKind.OPAQUE
        and isinstance(raw, dict)
        and raw.get("type") in ("tool_use", "tool_call")
    )


def _as_text(part: Part) -> Part:
    """Return a call in a message of another role as text."""
    words = as_json(part.raw)
    return Part(PartKind.TEXT, {"type": "text", "text": words}, body=words, is_new=True)


def _mirror_blocks(before: Value, content: list[Value], calls: list[Part]) -> list[Value]:
    """Insert the blocks that mirror the remaining calls, under their new ids."""
    by_id = {as_words(part.signature or part.id): part for part in calls}
    if not isinstance(before, list):
        return content
    mirrors = []
    for block in before:
        if isinstance(block, dict) and block.get("type") in ("tool_use", "tool_call"):
            call = by_id.get(as_words(block.get("id")))
            if call is not None:
                mirrors.append(block if block.get("id") == call.id else {**block, "id": call.id})
    return [*content, *mirrors]


def _write_content(parts: list[Part], inner: Json) -> Value:
    if all(part.raw is None for part in parts):
        has_blocks = isinstance(inner.get("content"), list)
        return [] if has_blocks and not parts else "\n\n".join(part.body for part in parts)
    return [part.body if part.raw is None else part.raw for part in parts]


def _content(content: Value) -> list[Part]:
    if isinstance(content, str):
        return [Part(PartKind.TEXT, None, body=content)] if content else []
    return [_block(block) for block in content] if isinstance(content, list) else []


def _block(block: Value) -> Part:
    if isinstance(block, str):
        return Part(PartKind.TEXT, block, body=block)
    kind = stated_type(block)
    if kind is None:
        return Part(PartKind.TEXT, as_json(block), body=as_json(block), is_new=True)
    if kind == "text":
        return Part(PartKind.TEXT, block, body=block.get("text"))
    if kind in ("thinking", "redacted_thinking", "reasoning"):
        body = block.get("thinking") or block.get("reasoning")
        return Part(
            PartKind.THINKING, block, body=body, signature=block.get("signature") or block.get("data")
        )
    is_media = kind in (
        "image",
        "image_url",
        "file",
        "audio",
        "video",
        "document",
        "input_image",
        "input_audio",
    )
    return Part(PartKind.MEDIA if is_media else PartKind.OPAQUE, block)


def _blocks(content: Value) -> list[Value]:
    if isinstance(content, list):
        return content
    return [{"type": "text", "text": as_words(content)}] if content else []
