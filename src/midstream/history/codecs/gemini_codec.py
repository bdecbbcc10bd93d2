"""Gemini: `{"role", "parts"}`, with calls and responses matched by id, else by name and place."""

from __future__ import annotations

import re

from midstream.history.codecs.codec_spec import (
    CodecSpec,
    Json,
    Media,
    MessageTurn,
    Part,
    PartKind,
    ResultPlacement,
    Role,
    Value,
    as_words,
    both_words,
    name_of,
    object_of,
    parts_of,
    role_in,
)

_ROLES = {
    "user": Role.USER,
    "model": Role.ASSISTANT,
    "system": Role.SYSTEM,
}
_MEDIA = ("inlineData", "fileData", "inline_data", "file_data")
_HOSTED = ("executableCode", "executable_code", "codeExecutionResult", "code_execution_result")
_DATA = frozenset({*_MEDIA, *_HOSTED, "toolCall", "toolResponse", "tool_call", "tool_response"})
_KEYS = _DATA | {"text", "functionCall", "function_call", "functionResponse", "function_response"}
"""The contents of a part: exactly one of these."""


def _read_media(raw: Json) -> Media | None:
    inline: Value = raw.get("inlineData") or raw.get("inline_data")
    if isinstance(inline, dict):
        return Media(inline.get("mimeType") or inline.get("mime_type") or "", data=inline.get("data"))
    filed: Value = raw.get("fileData") or raw.get("file_data")
    if isinstance(filed, dict):
        kind = filed.get("mimeType") or filed.get("mime_type") or ""
        return Media(kind, url=filed.get("fileUri") or filed.get("file_uri"))
    return None


def _write_media(media: Media) -> Json:
    if media.data is not None:
        return {"inlineData": {"mimeType": media.media_type, "data": media.data}}
    return {"fileData": {"mimeType": media.media_type, "fileUri": media.url}}


class Gemini:
    """Contents of the Gemini API, with camelCase or snake_case keys."""

    name = "gemini"
    layout = ResultPlacement.GROUPED
    spec = CodecSpec(
        roles=frozenset(_ROLES),
        response_role="model",
        content_key="parts",
        system="apart",
        system_keys=("systemInstruction", "system_instruction"),
        write_system=lambda words: {"parts": [{"text": words}]},
        names=re.compile(r"[a-zA-Z_][a-zA-Z0-9_.:-]{0,127}"),
        matches_by_name=True,
        takes_addresses=False,
        takes_any_media=True,
        read_media=_read_media,
        write_media=_write_media,
        write_thought=lambda words, _signature, _signer: {"text": words, "thought": True},
        write_signature=lambda signature: {"thoughtSignature": signature},
    )
    profile = "gemini"
    wire = "gemini"

    def parse(self, message: Json, at: int) -> MessageTurn:
        """Read one content. Without a role it is a user's; `function` and `assistant` are no longer roles."""
        named = message.get("role") or "user"
        role = role_in(_ROLES, named)
        if named == "assistant":
            turn = self.parse({**message, "role": "model"}, at)
            turn.source, turn.is_changed = message, True
            return turn
        parts = message.get("parts")
        if isinstance(parts, dict | str):
            return MessageTurn(role, parts_of([parts], _KEYS, _part), message, at, is_changed=True)
        pieces = parts if isinstance(parts, list) else []
        return MessageTurn(role, parts_of(pieces, _KEYS, _part), message, at)

    def build(self, turn: MessageTurn) -> Json:
        """Write one content."""
        role = {Role.ASSISTANT: "model", Role.SYSTEM: "system"}.get(turn.role, "user")
        source: Json = turn.source or {"role": role}
        if "role" in source:
            source = {**source, "role": role}
        return {**source, "parts": [part.raw for part in turn.parts]}

    def text(self, words: str, role: Role) -> Part:
        """Create a text part."""
        del role
        return Part(PartKind.TEXT, {"text": words}, body=words, is_new=True)

    def call(self, call_id: str, name: str, arguments: Json) -> Part:
        """Create a function call with an id."""
        raw: Json = {"functionCall": {"id": call_id, "name": name, "args": arguments}}
        return Part(PartKind.CALL, raw, call_id, name, arguments, is_new=True)

    def answer(self, call: Part, words: str, *, is_failed: bool) -> Part:
        """Create a function response; a failure is under `error`."""
        del is_failed
        inner: Json = {"name": call.name, "response": {"error": words}}
        if not call.is_by_name:
            inner = {"id": call.id, **inner}
        key = "function_response" if "function_call" in call.raw else "functionResponse"
        return Part(
            PartKind.RESULT,
            {key: inner},
            call.id,
            call.name,
            inner["response"],
            is_by_name=call.is_by_name,
            is_new=True,
        )

    def rename(self, part: Part, new_id: str) -> None:
        """Set the id of a call or a response."""
        part.id = new_id
        _set(part, "id", new_id)

    def reargue(self, part: Part, arguments: Json) -> None:
        """Set the arguments of a call."""
        part.body = arguments
        _set(part, "args", arguments)

    def retool(self, part: Part, name: str) -> None:
        """Set the name of a call or a response."""
        part.name = name
        _set(part, "name", name)

    def bad_arguments(self, part: Part) -> Json | None:
        """Return valid arguments if the call's own are no object, else None; missing arguments are valid."""
        inner = part.raw[_key(part.raw)]
        return None if part.body is None and "args" not in inner else object_of(part.body)

    def refill(self, part: Part, words: str) -> None:
        """Set the content of a text or a response."""
        if part.kind is PartKind.RESULT:
            part.body = {"result": words}
            _set(part, "response", part.body)
        else:
            part.body, part.raw = words, {**part.raw, "text": words}

    def pieces(self, part: Part) -> tuple[str, list[Part]]:
        """Split a response into its text, with the tool's name, and its media."""
        inner = part.raw[_key(part.raw)]
        media = [_part(piece) for piece in inner.get("parts") or () if isinstance(piece, dict)]
        return as_words(part.body), media

    def join(self, first: Part, second: Part) -> None:
        """Join two responses: their keys, or both as texts if they share keys."""
        mine, its = first.body, second.body
        if isinstance(mine, dict) and isinstance(its, dict) and not mine.keys() & its.keys():
            response: Json = {**mine, **its}
        else:
            response = {"result": both_words(as_words(mine), as_words(its))}
        first.body = response
        _set(first, "response", response)

    def tidy(self, part: Part) -> str | None:
        """Make a response an object."""
        if isinstance(part.body, dict):
            return None
        is_empty = part.body is None or part.body == ""
        response = {"result": "(no output)" if is_empty else part.body}
        part.body = response
        _set(part, "response", response)
        return "empty-result" if is_empty else "bad-result"


def _key(raw: Json) -> str:
    return next(
        key
        for key in raw
        if key in ("functionCall", "function_call", "functionResponse", "function_response")
    )


def _set(part: Part, name: str, value: Value) -> None:
    key = _key(part.raw)
    part.raw = {**part.raw, key: {**part.raw[key], name: value}}


def _part(raw: Value) -> Part:
    if not isinstance(raw, dict):
        words = as_words(raw)
        return Part(PartKind.TEXT, {"text": words}, body=words, is_new=True)
    call = raw.get("functionCall") or raw.get("function_call")
    signature = raw.get("thoughtSignature") or raw.get("thought_signature")
    if isinstance(call, dict):
        by_name = not call.get("id")
        name = name_of(call.get("name"))
        return Part(PartKind.CALL, raw, call.get("id"), name, call.get("args"), signature, is_by_name=by_name)
    answer = raw.get("functionResponse") or raw.get("function_response")
    if isinstance(answer, dict):
        by_name = not answer.get("id")
        name = name_of(answer.get("name"))
        return Part(PartKind.RESULT, raw, answer.get("id"), name, answer.get("response"), is_by_name=by_name)
    if raw.get("thought") and _DATA.isdisjoint(raw):
        return _thought(raw, signature)
    if "text" in raw:
        return Part(PartKind.TEXT, raw, body=raw["text"], signature=signature)
    if any(key in raw for key in _MEDIA):
        return _media(raw)
    return Part(PartKind.OPAQUE, raw, name="nothing" if _DATA.isdisjoint(raw) else "")


def _thought(raw: Json, signature: Value) -> Part:
    """Read a thought; without text and signature it is empty."""
    words = raw.get("text")
    if isinstance(words, str):
        return Part(PartKind.THINKING, raw, body=words, signature=signature)
    words = as_words(words)
    if not words and not signature:
        return Part(PartKind.OPAQUE, raw, name="nothing")
    return Part(PartKind.THINKING, {**raw, "text": words}, body=words, signature=signature, is_new=True)


def _media(raw: Json) -> Part:
    """Read an attachment; a part without one is described as text."""
    held = next(raw[key] for key in _MEDIA if key in raw)
    if isinstance(held, dict) and any(held.get(key) for key in ("data", "fileUri", "file_uri")):
        return Part(PartKind.MEDIA, raw)
    words = as_words(held) if held else ""
    return Part(PartKind.TEXT, {"text": words}, body=words, is_new=True)
