"""Anthropic Messages: `{"role", "content": text or [block, ...]}`."""

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
    is_sound,
    name_of,
    object_of,
    role_in,
    sound_blocks,
    stated_type,
    words_of_block,
)
from midstream.history.messages import File

_ROLES = {"user": Role.USER, "assistant": Role.ASSISTANT, "system": Role.SYSTEM}
_MEDIA = {"image", "document", "search_result"}
_PDF = "application/pdf"


def _read_media(raw: Json) -> Media | None:
    source = raw.get("source")
    if raw.get("type") != "image" or not isinstance(source, dict):
        return None
    if source.get("type") == "base64":
        return Media(source.get("media_type") or "image/png", data=source.get("data"))
    return Media("image/*", url=source.get("url")) if source.get("type") == "url" else None


def _write_media(media: Media) -> Json | None:
    if not media.media_type.startswith("image/"):
        return None
    return {"type": "image", "source": _source(media.media_type, media.data, media.url)}


def _write_file(file: File) -> Json | None:
    if file.media_type != _PDF:
        return None
    return {"type": "document", "source": _source(_PDF, file.data, file.url)}


def _source(media_type: str, data: str | None, url: str | None) -> Json:
    if data is None:
        return {"type": "url", "url": url}
    return {"type": "base64", "media_type": media_type, "data": data}


def _write_thought(words: str, signature: str | None, _signer: str) -> Json:
    return {"type": "thinking", "thinking": words, "signature": signature}


def _write_own_thought(words: str, signature: str | None, is_withheld: bool) -> Json:  # noqa: FBT001 - a table's function
    if is_withheld:
        return {"type": "redacted_thinking", "data": signature}
    return {"type": "thinking", "thinking": words, "signature": signature}


def hosted_answer(call: Part, words: str) -> Part | None:
    """Create the error result of a hosted tool that was cut; None for an unknown tool."""
    raw: Json
    if call.raw.get("type") == "mcp_tool_use":
        content = [{"type": "text", "text": words}]
        raw = {"type": "mcp_tool_result", "tool_use_id": call.id, "is_error": True, "content": content}
    elif call.name in HOSTED_ERRORS:
        outer, inner = HOSTED_ERRORS[call.name]
        error = {"type": inner, "error_code": "unavailable"}
        raw = {"type": outer, "tool_use_id": call.id, "content": error}
    else:
        return None
    return Part(PartKind.HOSTED_RESULT, raw, call.id, raw["type"], raw["content"], is_new=True)


class Anthropic:
    """Messages of the Messages API."""

    name = "anthropic"
    layout = ResultPlacement.GROUPED
    spec = CodecSpec(
        system="apart",
        system_keys=("system",),
        names=re.compile(r"[a-zA-Z0-9_-]{1,128}"),
        own_shapes=frozenset({"anthropic"}),
        signs_thinking=True,
        takes_plain=True,
        read_media=_read_media,
        write_media=_write_media,
        write_file=_write_file,
        write_thought=_write_thought,
        write_own_thought=_write_own_thought,
        hosted_answer=hosted_answer,
    )
    profile = "anthropic"
    wire = "anthropic"

    def parse(self, message: Json, at: int) -> MessageTurn:
        """Read one message."""
        role = role_in(_ROLES, message.get("role"))
        content = message.get("content")
        if isinstance(content, str):
            return MessageTurn(role, [Part(PartKind.TEXT, None, body=content)], message, at)
        if not isinstance(content, list):
            parts = [] if content is None else [_part(content)]
            return MessageTurn(role, parts, message, at, is_changed=content is not None)
        return MessageTurn(role, [_part(block) for block in content], message, at)

    def build(self, turn: MessageTurn) -> Json:
        """Write one turn; a single new text is written as a string."""
        first = turn.parts[0] if len(turn.parts) == 1 else None
        if turn.source is None and first is not None and first.kind is PartKind.TEXT and first.is_new:
            return {"role": str(turn.role), "content": first.body}
        content = [_block(part) for part in turn.parts]
        return {**(turn.source or {}), "role": str(turn.role), "content": content}

    def text(self, words: str, role: Role) -> Part:
        """Create a text block."""
        del role
        return Part(PartKind.TEXT, {"type": "text", "text": words}, body=words, is_new=True)

    def call(self, call_id: str, name: str, arguments: Json) -> Part:
        """Create a call block."""
        raw: Json = {"type": "tool_use", "id": call_id, "name": name, "input": arguments}
        return Part(PartKind.CALL, raw, call_id, name, arguments, is_new=True)

    def answer(self, call: Part, words: str, *, is_failed: bool) -> Part:
        """Create a result block for a call."""
        raw: Json = {"type": "tool_result", "tool_use_id": call.id, "content": words}
        if is_failed:
            raw["is_error"] = True
        return Part(PartKind.RESULT, raw, call.id, call.name, words, failed=is_failed, is_new=True)

    def rename(self, part: Part, new_id: str) -> None:
        """Set the id of a call or a result."""
        key = "id" if part.kind in (PartKind.CALL, PartKind.HOSTED_CALL) else "tool_use_id"
        part.id, part.raw = new_id, {**part.raw, key: new_id}

    def reargue(self, part: Part, arguments: Json) -> None:
        """Set the input of a call."""
        part.body, part.raw = arguments, {**part.raw, "input": arguments}

    def retool(self, part: Part, name: str) -> None:
        """Set the tool name of a call; results have none."""
        if part.kind is PartKind.CALL:
            part.name, part.raw = name, {**part.raw, "name": name}

    def bad_arguments(self, part: Part) -> Json | None:
        """Return a valid input if the call's own is no object, else None."""
        return object_of(part.body)

    def refill(self, part: Part, words: str) -> None:
        """Set the content of a text or a result."""
        key = "text" if part.kind is PartKind.TEXT else "content"
        part.body, part.raw = words, {**(part.raw or {"type": "text"}), key: words}

    def pieces(self, part: Part) -> tuple[str, list[Part]]:
        """Split a result into its text and its other blocks, which a user may also send."""
        if not isinstance(part.body, list):
            return as_words(part.body), []
        words, others = "", []
        for block in part.body:
            if isinstance(block, dict) and block.get("type") in _MEDIA:
                others.append(_part(block))
            elif isinstance(block, dict) and block.get("type") == "text":
                words = both_words(words, as_words(block.get("text")))
            else:
                words = both_words(words, as_words(block))
        return words, others

    def join(self, first: Part, second: Part) -> None:
        """Append the second result's content; an error stays one only if both were."""
        if isinstance(first.body, list) or isinstance(second.body, list):
            content: Value = [*_blocks(first.body), *_blocks(second.body)]
        else:
            content = both_words(as_words(first.body), as_words(second.body))
        first.body, first.raw = content, {**first.raw, "content": content}
        if first.failed and not second.failed:
            first.failed, first.raw = False, {k: v for k, v in first.raw.items() if k != "is_error"}

    def tidy(self, part: Part) -> str | None:
        """Drop blank text, wrap invalid content, and give an error without text a message."""
        content = part.body
        if isinstance(content, list):
            kept = [block for block in sound_blocks(content) if not _is_refused(block)]
            if not all(map(is_sound, content)):
                part.body, part.raw = kept, {**part.raw, "content": kept or no_output(part)}
                return "bad-result"
            if len(kept) == len(content) and (content or not part.failed):
                return None
            kept = kept or [{"type": "text", "text": no_output(part)}]
            part.body, part.raw = kept, {**part.raw, "content": kept}
            return "blank-text" if content else "empty-result"
        if content is None or isinstance(content, str):
            if (content and content.strip()) or (not content and not part.failed):
                return None if content is not None or "content" not in part.raw else _drop_null(part)
            self.refill(part, no_output(part))
            return "empty-result"
        self.refill(part, as_words(content))
        return "bad-result"


def no_output(part: Part) -> str:
    """The content of an empty result."""
    return "(failed without a message)" if part.failed else "(no output)"


def _drop_null(part: Part) -> str:
    part.raw = {key: value for key, value in part.raw.items() if key != "content"}
    return "null-content"


def _is_refused(block: Value) -> bool:
    """Whether a result must not contain this block: blank text."""
    return block.get("type") == "text" and not as_words(block.get("text")).strip()


def _blocks(content: Value) -> list[Value]:
    if isinstance(content, list):
        return content
    return [{"type": "text", "text": as_words(content)}] if content else []


def _part(block: Value) -> Part:
    kind = stated_type(block)
    if kind is None:
        kind = _type_by_keys(block)
        if kind is None:
            words = words_of_block(block)
            return Part(PartKind.TEXT, {"type": "text", "text": words}, body=words, is_new=True)
        part = _part({**block, "type": kind})
        part.is_new = True
        return part
    if kind == "text":
        return Part(PartKind.TEXT, block, body=block.get("text"))
    if kind == "tool_use":
        return Part(PartKind.CALL, block, block.get("id"), name_of(block.get("name")), block.get("input"))
    if kind == "tool_result":
        body, failed = block.get("content"), block.get("is_error") is True
        return Part(PartKind.RESULT, block, block.get("tool_use_id"), "", body, failed=failed)
    if kind == "thinking":
        return Part(PartKind.THINKING, block, body=block.get("thinking"), signature=block.get("signature"))
    if kind == "redacted_thinking":
        return Part(PartKind.THINKING, block, body=None, signature=block.get("data"))
    if kind in ("server_tool_use", "mcp_tool_use"):
        return Part(
            PartKind.HOSTED_CALL, block, block.get("id"), name_of(block.get("name")), block.get("input")
        )
    if kind.endswith("_tool_result"):
        return Part(PartKind.HOSTED_RESULT, block, block.get("tool_use_id"), kind, block.get("content"))
    return Part(PartKind.MEDIA if kind in _MEDIA else PartKind.OPAQUE, block)


def _type_by_keys(block: Value) -> str | None:
    """Return the type of a block without one, by keys that only one type has."""
    if not isinstance(block, dict):
        return None
    if "tool_use_id" in block:
        return "tool_result"
    if "name" in block and "input" in block:
        return "server_tool_use" if str(block.get("id")).startswith("srvtoolu_") else "tool_use"
    if isinstance(block.get("thinking"), str):
        return "thinking"
    return "image" if isinstance(block.get("source"), dict) else None


def _block(part: Part) -> Value:
    """Return the block of a part; a text that was read from a plain string has none."""
    return {"type": "text", "text": part.body} if part.raw is None else part.raw


# By a hosted tool's name: the type of its result block and of its error.
HOSTED_ERRORS = {
    "web_search": ("web_search_tool_result", "web_search_tool_result_error"),
    "web_fetch": ("web_fetch_tool_result", "web_fetch_tool_result_error"),
    "code_execution": ("code_execution_tool_result", "code_execution_tool_result_error"),
    "bash_code_execution": ("bash_code_execution_tool_result", "bash_code_execution_tool_result_error"),
    "text_editor_code_execution": (
        "text_editor_code_execution_tool_result",
        "text_editor_code_execution_tool_result_error",
    ),
    "tool_search_tool_regex": ("tool_search_tool_result", "tool_search_tool_result_error"),
    "tool_search_tool_bm25": ("tool_search_tool_result", "tool_search_tool_result_error"),
    "advisor": ("advisor_tool_result", "advisor_tool_result_error"),
}
