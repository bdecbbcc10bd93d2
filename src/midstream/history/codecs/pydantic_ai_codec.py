"""pydantic-ai: the JSON of `ModelMessage`, `{"kind": "request" | "response", "parts": [...]}`."""

from __future__ import annotations

from midstream.history.codecs.codec_spec import (
    CodecSpec,
    Json,
    MessageTurn,
    Part,
    PartKind,
    ResultPlacement,
    Role,
    Value,
    as_words,
    both_words,
    name_of,
    object_in_text,
    role_in,
)
from midstream.history.messages import File

_ROLES = {"request": Role.USER, "response": Role.ASSISTANT}
_RETRY = "retry-prompt"
_TEXTS = {Role.USER: "user-prompt", Role.ASSISTANT: "text"}


def _write_file(file: File) -> Json:
    if file.data is not None:
        # pydantic-ai's own base64 has another alphabet.
        data = file.data.replace("+", "-").replace("/", "_")
        return {"kind": "binary", "data": data, "media_type": file.media_type}
    kind = file.media_type.partition("/")[0]
    kinds = {"image": "image-url", "audio": "audio-url", "video": "video-url"}
    value: Value = kinds.get(kind, "document-url")
    return {"kind": value, "url": file.url, "media_type": file.media_type}


def _write_thought(words: str, signature: str | None, signer: str) -> Json:
    raw = {"content": words, "part_kind": "thinking"}
    return raw | {"signature": signature, "provider_name": signer} if signature and signer else raw


def _write_own_thought(words: str, signature: str | None, is_withheld: bool) -> Json:  # noqa: FBT001 - a table's function
    raw = {"part_kind": "thinking", "content": words, "signature": signature}
    return raw | {"id": "redacted_thinking"} if is_withheld else raw


class PydanticAI:
    """The format of `ModelMessagesTypeAdapter`."""

    name = "pydantic-ai"
    layout = ResultPlacement.GROUPED
    spec = CodecSpec(
        roles=frozenset({"request", "response"}),
        role_key="kind",
        user_role="request",
        response_role="response",
        system_role="",
        content_key="parts",
        system="parts",
        stores_responses=True,
        is_thought_hollow=True,
        has_text_arguments=True,
        write_file=_write_file,
        write_thought=_write_thought,
        write_own_thought=_write_own_thought,
        write_signature=lambda signature: {"provider_details": {"thought_signature": signature}},
        arguments_key="args",
        has_outcomes=True,
    )
    profile = "pydantic-ai"
    wire = ""

    def parse(self, message: Json, at: int) -> MessageTurn:
        """Read one message."""
        role = role_in(_ROLES, message.get("kind"))
        parts = message.get("parts")
        if parts is not None and not isinstance(parts, list):
            return MessageTurn(role, [_part(parts)], message, at, is_changed=True)
        pieces = parts if isinstance(parts, list) else []
        return MessageTurn(role, [_part(part) for part in pieces], message, at)

    def build(self, turn: MessageTurn) -> Json:
        """Write one message."""
        kind = "response" if turn.role is Role.ASSISTANT else "request"
        return {**(turn.source or {}), "kind": kind, "parts": [part.raw for part in turn.parts]}

    def text(self, words: str, role: Role) -> Part:
        """Create a text part of a response, or a user prompt."""
        side = Role.ASSISTANT if role is Role.ASSISTANT else Role.USER
        raw: Json = {"content": words, "part_kind": _TEXTS[side]}
        return Part(PartKind.TEXT, raw, body=words, side=side, is_new=True)

    def call(self, call_id: str, name: str, arguments: Json) -> Part:
        """Create a tool call part."""
        raw: Json = {"tool_name": name, "args": arguments, "tool_call_id": call_id, "part_kind": "tool-call"}
        return Part(PartKind.CALL, raw, call_id, name, arguments, is_new=True)

    def answer(self, call: Part, words: str, *, is_failed: bool) -> Part:
        """Create a tool return for a call."""
        del is_failed
        raw: Json = {
            "tool_name": call.name,
            "content": words,
            "tool_call_id": call.id,
            "part_kind": "tool-return",
        }
        return Part(PartKind.RESULT, raw, call.id, call.name, words, side=Role.USER, is_new=True)

    def rename(self, part: Part, new_id: str) -> None:
        """Set the id of a call or a return."""
        part.id, part.raw = new_id, {**part.raw, "tool_call_id": new_id}

    def reargue(self, part: Part, arguments: Json) -> None:
        """Set the arguments of a call."""
        part.body, part.raw = arguments, {**part.raw, "args": arguments}

    def retool(self, part: Part, name: str) -> None:
        """Set the tool name of a call or a return."""
        part.name, part.raw = name, {**part.raw, "tool_name": name}

    def bad_arguments(self, part: Part) -> Json | None:
        """Return valid arguments if the call's own are no object and no JSON text of one, else None."""
        body = part.body
        return None if body is None or isinstance(body, dict) or body == "" else object_in_text(body)

    def refill(self, part: Part, words: str) -> None:
        """Set the content of a text or a return."""
        part.body, part.raw = words, {**part.raw, "content": words}

    def pieces(self, part: Part) -> tuple[str, list[Part]]:
        """Split a return; its files stay in its text, as JSON."""
        return as_words(part.body), []

    def join(self, first: Part, second: Part) -> None:
        """Append the second return's content."""
        self.refill(first, both_words(as_words(first.body), as_words(second.body)))

    def tidy(self, part: Part) -> str | None:
        """Make a return valid: any JSON value except null, and a retry needs text."""
        is_blank = isinstance(part.body, str) and not part.body.strip()
        if is_blank or "content" not in part.raw:
            self.refill(part, "(failed without a message)" if part.failed else "(no output)")
            return "empty-result"
        if part.raw.get("part_kind") == _RETRY and not part.body:
            self.refill(part, "(failed without a message)")
            return "empty-result"
        return None


def _is_kind(raw: Value) -> bool:
    return isinstance(raw, dict) and isinstance(raw.get("part_kind"), str)


def _kind_by_keys(raw: Value) -> str | None:
    """Return the kind of a part without one, by keys that only one kind has."""
    if not isinstance(raw, dict):
        return None
    if "tool_name" in raw and "tool_call_id" in raw:
        return "tool-call" if "args" in raw else "tool-return" if "content" in raw else None
    return "thinking" if isinstance(raw.get("content"), str) and "signature" in raw else None


def _part(raw: Value) -> Part:
    if not _is_kind(raw):
        kind = _kind_by_keys(raw)
        if kind is not None:
            part = _part({**raw, "part_kind": kind})
            part.is_new = True
            return part
        words = as_words(raw.get("content", raw) if isinstance(raw, dict) else raw)
        raw = {"content": words, "part_kind": "user-prompt"}
        return Part(PartKind.TEXT, raw, body=words, side=Role.USER, is_new=True)
    kind, content = raw["part_kind"], raw.get("content")
    if kind == "user-prompt":
        return Part(PartKind.TEXT, raw, body=content, side=Role.USER)
    if kind == "text":
        return Part(PartKind.TEXT, raw, body=content, side=Role.ASSISTANT)
    if kind == "system-prompt":
        return Part(PartKind.SYSTEM, raw, body=content, side=Role.USER)
    if kind == "tool-call":
        return Part(
            PartKind.CALL, raw, raw.get("tool_call_id"), name_of(raw.get("tool_name")), raw.get("args")
        )
    if kind == "tool-return" or (kind == _RETRY and raw.get("tool_name")):
        name, call_id, failed = name_of(raw.get("tool_name")), raw.get("tool_call_id"), kind == _RETRY
        return Part(PartKind.RESULT, raw, call_id, name, content, failed=failed, side=Role.USER)
    if kind == "thinking":
        return Part(PartKind.THINKING, raw, body=content, signature=raw.get("signature"))
    if kind in ("builtin-tool-call", "native-tool-call"):
        return Part(
            PartKind.HOSTED_CALL, raw, raw.get("tool_call_id"), name_of(raw.get("tool_name")), raw.get("args")
        )
    if kind in ("builtin-tool-return", "native-tool-return"):
        return Part(
            PartKind.HOSTED_RESULT, raw, raw.get("tool_call_id"), name_of(raw.get("tool_name")), content
        )
    return Part(PartKind.OPAQUE, raw, side=Role.USER if kind == _RETRY else None)
