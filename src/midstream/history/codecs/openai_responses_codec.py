"""OpenAI Responses: one flat list of items, with calls and outputs matched by `call_id`."""

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
    is_sound,
    join_content,
    name_of,
    object_in_text,
    role_in,
    sound_blocks,
    split_result,
    stated_type,
    type_of,
    words_of_block,
)
from midstream.history.messages import File

_ROLES = {
    "user": Role.USER,
    "assistant": Role.ASSISTANT,
    "system": Role.SYSTEM,
    "developer": Role.SYSTEM,
}
# By a call item's type: the type of its output, and the key of the output.
OUTPUTS = {
    "function_call": "function_call_output",
    "custom_tool_call": "custom_tool_call_output",
    "computer_call": "computer_call_output",
    "local_shell_call": "local_shell_call_output",
    "shell_call": "shell_call_output",
    "apply_patch_call": "apply_patch_call_output",
}
_CALLS = {output: call for call, output in OUTPUTS.items()}
_MEDIA = {"input_image", "input_file", "input_audio"}
_NAMED = {"function_call", "custom_tool_call"}
_USERS = {"mcp_approval_response"}


def _with_type(message: Json) -> Json:
    """Return the item with a type, by keys that only one type has."""
    if isinstance(message.get("type"), str):
        return message
    if "role" in message:
        return message if "type" not in message else {**message, "type": "message"}
    if "output" in message:
        return {**message, "type": "function_call_output"}
    if "arguments" in message:
        return {**message, "type": "function_call"}
    if "summary" in message or "encrypted_content" in message:
        return {**message, "type": "reasoning"}
    if "content" in message:
        return {**message, "type": "message"}
    return {"type": "message", "role": "user", "content": as_words(message)}


def _write_media(media: Media) -> Json | None:
    if not media.media_type.startswith("image/"):
        return None
    url = media.url or f"data:{media.media_type};base64,{media.data}"
    return {"type": "input_image", "image_url": url, "detail": media.detail or "auto"}


def _write_file(file: File) -> Json | None:
    if file.media_type != "application/pdf":
        return None
    if file.data is None:
        return {"type": "input_file", "file_url": file.url}
    data_url = f"data:{file.media_type};base64,{file.data}"
    return {"type": "input_file", "filename": file.name or "attachment.pdf", "file_data": data_url}


class ResponsesCodec:
    """Items of the Responses API, as input or as stored output."""

    name = "openai-responses"
    layout = ResultPlacement.FLAT
    spec = CodecSpec(
        roles=frozenset({"user", "assistant", "system", "developer"}),
        has_text_arguments=True,
        typed=_with_type,
        write_media=_write_media,
        write_file=_write_file,
    )
    profile = "responses"
    wire = "responses"

    def parse(self, message: Json, at: int) -> MessageTurn:
        """Read one item."""
        kind = type_of(message) or None
        if kind in OUTPUTS:
            body = message.get("arguments") if kind == "function_call" else message.get("input")
            name = name_of(message.get("name")) or ("" if kind in _NAMED else str(kind))
            return MessageTurn(
                Role.ASSISTANT,
                [Part(PartKind.CALL, message, message.get("call_id"), name, body)],
                message,
                at,
            )
        if kind in _CALLS:
            part = Part(PartKind.RESULT, message, message.get("call_id"), "", message.get("output"))
            return MessageTurn(Role.TOOL, [part], message, at)
        if kind == "reasoning":
            return MessageTurn(
                Role.ASSISTANT, [Part(PartKind.THINKING, message, message.get("id"))], message, at
            )
        if kind == "message" or (kind is None and "role" in message):
            role = role_in(_ROLES, message.get("role"))
            return MessageTurn(role, _chunks(message.get("content"), role), message, at)
        role = Role.USER if kind in _USERS else Role.ASSISTANT
        return MessageTurn(role, [Part(PartKind.OPAQUE, message, message.get("id"))], message, at)

    def build(self, turn: MessageTurn) -> Json:
        """Write one item."""
        first = turn.parts[0] if turn.parts else None
        if first is not None and _is_item(first):
            raw: Json = first.raw
            return raw
        source: Json = turn.source or {"type": "message", "role": str(turn.role)}
        if role_in(_ROLES, source.get("role")) is not turn.role:
            source = {**source, "role": str(turn.role)}
        if first is None and source.get("content") == "":
            return source  # an empty text is a message, an empty list is none
        if len(turn.parts) == 1 and (turn.parts[0].raw is None or turn.source is None or _is_plain(turn)):
            return {**source, "content": turn.parts[0].body}
        content = [_text(part.body, turn.role) if part.raw is None else part.raw for part in turn.parts]
        return {**source, "content": content}

    def text(self, words: str, role: Role) -> Part:
        """Create a text chunk."""
        return Part(PartKind.TEXT, _text(words, role), body=words, is_new=True)

    def call(self, call_id: str, name: str, arguments: Json) -> Part:
        """Create a function call item, without an item id."""
        body = as_json(arguments)
        raw: Json = {"type": "function_call", "call_id": call_id, "name": name, "arguments": body}
        return Part(PartKind.CALL, raw, call_id, name, body, is_new=True)

    def answer(self, call: Part, words: str, *, is_failed: bool) -> Part:
        """Create the output item of a call, in the form that its kind requires."""
        kind = call.raw.get("type", "function_call")
        output: Value = words
        if kind == "shell_call":
            outcome = {"type": "exit", "exit_code": 1}
            output = [{"stdout": "", "stderr": words, "outcome": outcome}]
        raw: Json = {"type": OUTPUTS[kind], "call_id": call.id, "output": output}
        if kind == "apply_patch_call":
            raw["status"] = "failed"
        return Part(PartKind.RESULT, raw, call.id, call.name, output, failed=is_failed, is_new=True)

    def rename(self, part: Part, new_id: str) -> None:
        """Set the call id of a call or an output; the item's own id stays."""
        part.id, part.raw = new_id, {**part.raw, "call_id": new_id}

    def reargue(self, part: Part, arguments: Json) -> None:
        """Set the arguments of a call, as JSON text."""
        part.body = as_json(arguments)
        part.raw = {**part.raw, "arguments": part.body}

    def retool(self, part: Part, name: str) -> None:
        """Set the tool name of a call."""
        part.name = name
        if part.kind is PartKind.CALL:
            part.raw = {**part.raw, "name": name}

    def bad_arguments(self, part: Part) -> Json | None:
        """Return valid arguments if a function call's own are no JSON text of an object, else None."""
        return object_in_text(part.body) if part.raw.get("type") == "function_call" else None

    def refill(self, part: Part, words: str) -> None:
        """Set the content of a text or an output."""
        part.body = words
        if part.kind is PartKind.RESULT:
            part.raw = {**part.raw, "output": words}
        elif part.raw is not None:
            part.raw = {**part.raw, "text": words}

    def pieces(self, part: Part) -> tuple[str, list[Part]]:
        """Split an output into its text and its media."""
        return split_result(part.body, _chunk)

    def join(self, first: Part, second: Part) -> None:
        """Append the second output's content."""
        output = join_content(first.body, second.body, _outputs)
        first.body, first.raw = output, {**first.raw, "output": output}

    def tidy(self, part: Part) -> str | None:
        """Make an output a text or chunks."""
        body = part.body
        if isinstance(body, str) or (isinstance(body, list) and body and all(map(is_sound, body))):
            return None
        if part.raw.get("type") != "function_call_output" and body:
            return None
        if isinstance(body, list) and body:
            part.body = sound_blocks(body, "input_text")
            part.raw = {**part.raw, "output": part.body}
            return "bad-result"
        self.refill(part, as_words(body) if body else "(no output)")
        return "bad-result" if body else "null-content"


def _is_item(part: Part) -> bool:
    """Whether a part is an item of its own, and not a chunk of a message."""
    return part.kind in (PartKind.CALL, PartKind.RESULT, PartKind.THINKING) or (
        part.kind is PartKind.OPAQUE and "content" not in part.raw and part.name != "chunk"
    )


def _chunk(chunk: Value, role: Role = Role.USER) -> Part:
    """Read a chunk of a message; texts of responses and of other messages have different types."""
    wanted = "output_text" if role is Role.ASSISTANT else "input_text"
    kind = stated_type(chunk)
    if kind == wanted:
        return Part(PartKind.TEXT, chunk, body=chunk.get("text"))
    if kind in (None, "input_text", "output_text", "text"):
        words = words_of_block(chunk)
        return Part(PartKind.TEXT, _text(words, role), body=words, is_new=True)
    return Part(PartKind.MEDIA if kind in _MEDIA else PartKind.OPAQUE, chunk, name="chunk")


def _text(words: Value, role: Role) -> Json:
    """Return a chunk of text; a response's text has its citations."""
    if role is Role.ASSISTANT:
        return {"type": "output_text", "text": words, "annotations": []}
    return {"type": "input_text", "text": words}


def _is_plain(turn: MessageTurn) -> bool:
    """Whether this is a response of one text, from a chunk of another kind, in an item without an id.

    Output chunks require items with an id; without one, the API reads a response as plain text.
    """
    (part,) = turn.parts
    is_text = turn.role is Role.ASSISTANT and part.kind is PartKind.TEXT and part.is_new
    return is_text and "id" not in (turn.source or {})


def _chunks(content: Value, role: Role) -> list[Part]:
    if isinstance(content, str):
        return [Part(PartKind.TEXT, None, body=content)] if content else []
    if isinstance(content, list):
        return [_chunk(chunk, role) for chunk in content]
    return [] if content is None else [_chunk(content, role)]


def _outputs(output: Value) -> list[Value]:
    if isinstance(output, list):
        return output
    return [{"type": "input_text", "text": as_words(output)}] if output else []
