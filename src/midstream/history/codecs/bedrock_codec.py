"""Bedrock Converse: `{"role", "content": [block, ...]}`, each block an object with one key."""

from __future__ import annotations

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
    as_json,
    as_words,
    both_words,
    name_of,
    object_of,
    one_each,
    parts_of,
    role_in,
)
from midstream.history.messages import File

_ROLES = {"user": Role.USER, "assistant": Role.ASSISTANT, "system": Role.SYSTEM}
_RESULT_BLOCKS = frozenset({"text", "json", "image", "document", "video", "searchResult", "cachePoint"})
_BLOCKS = frozenset(
    {"text", "image", "document", "video", "audio", "toolUse", "toolResult", "reasoningContent", "cachePoint"}
    | {"guardContent", "citationsContent", "searchResult"}
)
_MEDIA = frozenset({"image", "document", "video", "audio"})


def _read_media(raw: Json) -> Media | None:
    image = raw.get("image")
    data = image.get("source", {}).get("bytes") if isinstance(image, dict) else None
    return Media(f"image/{image['format']}", data=data) if isinstance(data, str) and image else None


def _write_file(file: File) -> Json | None:
    kind, _, ending = file.media_type.partition("/")
    if kind != "image":
        return None
    return {"image": {"format": ending.partition(";")[0], "source": {"bytes": file.data}}}


def _write_thought(words: str, signature: str | None, _signer: str) -> Json:
    return {"reasoningContent": {"reasoningText": {"text": words, "signature": signature}}}


def _write_own_thought(words: str, signature: str | None, is_withheld: bool) -> Json | None:  # noqa: FBT001 - a table's function
    return None if is_withheld else _write_thought(words, signature, "anthropic")


class Bedrock:
    """Messages of the Converse API."""

    name = "bedrock"
    layout = ResultPlacement.GROUPED
    spec = CodecSpec(
        system="apart",
        system_keys=("system",),
        write_system=lambda words: [{"text": words}],
        own_shapes=frozenset({"bedrock"}),
        signs_thinking=True,
        takes_addresses=False,
        read_media=_read_media,
        write_file=_write_file,
        write_thought=_write_thought,
        write_own_thought=_write_own_thought,
    )
    profile = "bedrock-claude"
    wire = "converse"

    def parse(self, message: Json, at: int) -> MessageTurn:
        """Read one message."""
        role = role_in(_ROLES, message.get("role"))
        content = message.get("content")
        if isinstance(content, str | dict):
            return MessageTurn(role, parts_of([content], _BLOCKS, _part), message, at, is_changed=True)
        blocks = content if isinstance(content, list) else []
        return MessageTurn(role, parts_of(blocks, _BLOCKS, _part), message, at)

    def build(self, turn: MessageTurn) -> Json:
        """Write one turn."""
        return {**(turn.source or {}), "role": str(turn.role), "content": [part.raw for part in turn.parts]}

    def text(self, words: str, role: Role) -> Part:
        """Create a text block."""
        del role
        return Part(PartKind.TEXT, {"text": words}, body=words, is_new=True)

    def call(self, call_id: str, name: str, arguments: Json) -> Part:
        """Create a call block."""
        raw: Json = {"toolUse": {"toolUseId": call_id, "name": name, "input": arguments}}
        return Part(PartKind.CALL, raw, call_id, name, arguments, is_new=True)

    def answer(self, call: Part, words: str, *, is_failed: bool) -> Part:
        """Create a result block for a call."""
        inner: Json = {"toolUseId": call.id, "content": [{"text": words}]}
        if is_failed:
            inner["status"] = "error"
        return Part(
            PartKind.RESULT,
            {"toolResult": inner},
            call.id,
            call.name,
            inner["content"],
            failed=is_failed,
            is_new=True,
        )

    def rename(self, part: Part, new_id: str) -> None:
        """Set the id of a call or a result."""
        part.id = new_id
        _set(part, "toolUseId", new_id)

    def reargue(self, part: Part, arguments: Json) -> None:
        """Set the input of a call."""
        part.body = arguments
        _set(part, "input", arguments)

    def retool(self, part: Part, name: str) -> None:
        """Set the tool name of a call; results have none."""
        if part.kind is PartKind.CALL:
            part.name = name
            _set(part, "name", name)

    def bad_arguments(self, part: Part) -> Json | None:
        """Return a valid input if the call's own is no object, else None."""
        return object_of(part.body)

    def refill(self, part: Part, words: str) -> None:
        """Set the content of a text or a result."""
        if part.kind is PartKind.RESULT:
            part.body = [{"text": words}]
            _set(part, "content", part.body)
        else:
            part.body, part.raw = words, {**part.raw, "text": words}

    def pieces(self, part: Part) -> tuple[str, list[Part]]:
        """Split a result into its text and its media."""
        words, others = "", []
        for block in part.body if isinstance(part.body, list) else [part.body]:
            if isinstance(block, dict) and not _MEDIA.isdisjoint(block):
                others.append(_part(block))
            elif isinstance(block, dict) and "text" in block:
                words = both_words(words, as_words(block["text"]))
            elif isinstance(block, dict) and "json" in block:
                words = both_words(words, as_json(block["json"]))
            else:
                words = both_words(words, as_words(block))
        return words, others

    def join(self, first: Part, second: Part) -> None:
        """Append the second result's content; an error stays one only if both were."""
        first.body = [*_blocks(first.body), *_blocks(second.body)]
        _set(first, "content", first.body)
        if first.failed and not second.failed:
            first.failed = False
            _set(first, "status", "success")

    def tidy(self, part: Part) -> str | None:
        """Drop blank text, wrap invalid content, and give an error without text a message."""
        content = part.body
        blocks = _blocks(content)
        kept = [block for block in blocks if not _is_blank(block)]
        inner = part.raw["toolResult"]
        if inner.get("status", "success") not in ("success", "error"):
            inner = {key: value for key, value in inner.items() if key != "status"}
            part.raw = {**part.raw, "toolResult": inner}
            if kept == content:
                return "bad-result"
        if kept == content and (kept or not part.failed):
            return None
        words = "(failed without a message)" if part.failed else "(no output)"
        part.body = kept or [{"text": words}]
        _set(part, "content", part.body)
        return "bad-result" if kept and not isinstance(content, list) else "empty-result"


def _set(part: Part, name: str, value: Value) -> None:
    key = "toolUse" if part.kind is PartKind.CALL else "toolResult"
    part.raw = {**part.raw, key: {**part.raw[key], name: value}}


def _is_blank(block: Value) -> bool:
    return not block or ("text" in block and not as_words(block["text"]).strip())


def _is_whole(block: Json) -> bool:
    """Whether a block of a known kind has its required object."""
    for key, value in block.items():  # noqa: SIM110 - for each block: `all` takes three times as long
        if key in _BLOCKS and not isinstance(value, dict):
            return False
    return True


def _blocks(content: Value) -> list[Value]:
    if isinstance(content, list):
        return [_result_block(piece) for block in content for piece in one_each(block, _RESULT_BLOCKS)]
    return [{"text": as_words(content)}] if content else []


def _result_block(block: Value) -> Json:
    """Return a valid block of a result: an unknown one becomes JSON, or text."""
    if not isinstance(block, dict):
        return {"text": as_words(block)}
    if "text" in block:
        return block if _is_sound(block) else {"text": as_words(block["text"])}
    if not block or block.keys() & _RESULT_BLOCKS:
        return block
    return {"json": block}


def _is_sound(block: Json) -> bool:
    return len(block) == 1 and isinstance(block["text"], str)


def _part(block: Value) -> Part:
    if not isinstance(block, dict):
        words = as_words(block)
        return Part(PartKind.TEXT, {"text": words}, body=words, is_new=True)
    if "text" in block:
        if "type" in block:  # Anthropic's
            block = {"text": block["text"]}
            return Part(PartKind.TEXT, block, body=block["text"], is_new=True)
        return Part(PartKind.TEXT, block, body=block["text"])
    if isinstance(call := block.get("toolUse"), dict):
        return Part(PartKind.CALL, block, call.get("toolUseId"), name_of(call.get("name")), call.get("input"))
    if isinstance(result := block.get("toolResult"), dict):
        failed = result.get("status") == "error"
        return Part(PartKind.RESULT, block, result.get("toolUseId"), "", result.get("content"), failed=failed)
    if isinstance(thought := block.get("reasoningContent"), dict):
        text = thought.get("reasoningText") or {}
        if "redactedContent" in thought:
            return Part(PartKind.THINKING, block, signature="redacted")
        if not isinstance(text, dict):
            words = as_words(text)
            raw = {"reasoningContent": {"reasoningText": {"text": words}}}
            return Part(PartKind.THINKING, raw, body=words, is_new=True)
        if "signature" in text and text["signature"] is None:  # a missing signature is valid, null is not
            unsigned = {key: value for key, value in text.items() if key != "signature"}
            made = {**block, "reasoningContent": {**thought, "reasoningText": unsigned}}
            return Part(PartKind.THINKING, made, body=text.get("text"), is_new=True)
        return Part(PartKind.THINKING, block, body=text.get("text"), signature=text.get("signature"))
    if not _is_whole(block):
        held = [value for value in block.values() if value and not isinstance(value, bool)]
        words = as_words(held[0]).strip() if held else ""
        return Part(PartKind.TEXT, {"text": words}, body=words, is_new=True)
    if not _MEDIA.isdisjoint(block):
        return Part(PartKind.MEDIA, block)
    return Part(PartKind.OPAQUE, block, name="" if block else "nothing")
