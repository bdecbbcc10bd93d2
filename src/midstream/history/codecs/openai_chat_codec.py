"""OpenAI Chat Completions, the format of many servers."""

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
    words_of_block,
)
from midstream.history.messages import File

_ROLES = {
    "user": Role.USER,
    "assistant": Role.ASSISTANT,
    "tool": Role.TOOL,
    "function": Role.TOOL,
    "system": Role.SYSTEM,
    "developer": Role.SYSTEM,
}
_AUDIO_FORMATS = {"audio/wav": "wav", "audio/x-wav": "wav", "audio/mpeg": "mp3", "audio/mp3": "mp3"}
_MEDIA = {"image_url", "input_audio", "file", "image", "audio", "document_url"}


def image_chunk(media: Media) -> Json | None:
    """Write an image as a chunk; None for other media."""
    if not media.media_type.startswith("image/"):
        return None
    url = media.url or f"data:{media.media_type};base64,{media.data}"
    return {
        "type": "image_url",
        "image_url": {"url": url} | ({"detail": media.detail} if media.detail else {}),
    }


def _write_file(file: File) -> Json | None:
    kind, _, ending = file.media_type.partition("/")
    if file.data is None or kind == "image":
        return None
    if file.media_type in _AUDIO_FORMATS:
        audio = {"data": file.data, "format": _AUDIO_FORMATS[file.media_type]}
        return {"type": "input_audio", "input_audio": audio}
    data_url = f"data:{file.media_type};base64,{file.data}"
    named = {"filename": file.name or f"attachment.{ending.partition(';')[0]}", "file_data": data_url}
    return {"type": "file", "file": named}


class OpenAIChat:
    """Messages of the Chat Completions API."""

    name = "openai-chat"
    layout = ResultPlacement.SEPARATE
    spec = CodecSpec(
        roles=frozenset(_ROLES),
        has_tool_messages=True,
        is_thought_hollow=True,
        reasoning="written",
        has_text_arguments=True,
        takes_plain=True,
        write_media=image_chunk,
        write_file=_write_file,
        write_signature=lambda signature: {"extra_content": {"google": {"thought_signature": signature}}},
        claude_profile="claude-proxy",
    )
    profile = "openai-chat"
    wire = ""
    is_type_needed = True
    """Whether a call has the type `function`."""

    def parse(self, message: Json, at: int) -> MessageTurn:
        """Read one message."""
        role = role_in(_ROLES, message.get("role"))
        if role is Role.TOOL:
            return MessageTurn(role, [self._result(message)], message, at)
        content = message.get("content")
        parts: list[Part] = []
        if isinstance(content, str):
            if content:
                parts.append(Part(PartKind.TEXT, None, body=content))
        elif isinstance(content, list):
            parts = [_chunk(chunk) for chunk in content]
        elif content is not None:
            parts = [Part(PartKind.TEXT, None, body=as_words(content), is_new=True)]
        turn = MessageTurn(role, parts, message, at)
        if role is Role.ASSISTANT:
            self._read_response(message, turn)
        elif content is None or content == []:
            turn.faults = ("null-content",)
        if role is not Role.ASSISTANT and "tool_calls" in message:
            # With calls, it would have been read as a response.
            turn.faults = (
                *turn.faults,
                "empty-calls",
            )
        return turn

    def _read_response(self, message: Json, turn: MessageTurn) -> None:
        """Read the fields of a response: reasoning before the text, calls after it."""
        if message.get("content") == []:
            turn.faults = ("empty-content",)
        reasoning = message.get("reasoning_content")
        if isinstance(reasoning, str) and reasoning:
            turn.parts.insert(0, Part(PartKind.THINKING, None, body=reasoning))
        if "tool_calls" in message:
            calls = message["tool_calls"]
            if calls and isinstance(calls, list):
                turn.parts += [self._call(call) for call in calls if call]
                if not all(calls):
                    turn.faults = (*turn.faults, "empty-calls")
            else:
                turn.faults = (*turn.faults, "empty-calls")
        legacy = message.get("function_call")
        if isinstance(legacy, dict):
            name, body = name_of(legacy.get("name")), legacy.get("arguments")
            turn.parts.append(Part(PartKind.CALL, legacy, None, name, body, is_by_name=True))
        for key in ("refusal", "audio"):
            if message.get(key):
                turn.parts.append(Part(PartKind.OPAQUE, {key: message[key]}, name=key))

    def _call(self, call: Value) -> Part:
        if not isinstance(call, dict):
            return Part(PartKind.TEXT, None, body=as_words(call), is_new=True)
        function = call.get("function")
        if type(function) is dict and function and call.get("type") == "function" and "custom" not in call:
            return Part(
                PartKind.CALL, call, call.get("id"), name_of(function.get("name")), function.get("arguments")
            )
        inner = call.get("function") or call.get("custom") or {}
        if not isinstance(inner, dict):
            inner = {}
        body = inner.get("arguments") if "custom" not in call else inner.get("input")
        is_new = call.get("type") not in ("function", "custom") and (self.is_type_needed or "type" in call)
        if is_new:
            call = {**call, "type": "custom" if "custom" in call else "function"}
        return Part(PartKind.CALL, call, call.get("id"), name_of(inner.get("name")), body, is_new=is_new)

    def _result(self, message: Json) -> Part:
        body, name = message.get("content"), name_of(message.get("name"))
        by_name = message.get("role") == "function"
        return Part(PartKind.RESULT, message, message.get("tool_call_id"), name, body, is_by_name=by_name)

    def build(self, turn: MessageTurn) -> Json:
        """Write one turn. Results are messages already."""
        if turn.role is Role.TOOL:
            raw: Json = turn.parts[0].raw
            return raw
        source: Json = turn.source or {}
        role = source.get("role") if role_in(_ROLES, source.get("role")) is turn.role else str(turn.role)
        message: Json = {**source, "role": role, "content": self._content(turn, source)}
        if turn.role is Role.ASSISTANT:
            self._write_response(turn, message)
        else:
            message.pop("tool_calls", None)
        return message

    def _content(self, turn: MessageTurn, source: Json) -> Value:
        parts = [
            part for part in turn.parts if part.kind in (PartKind.TEXT, PartKind.MEDIA) or _is_chunk(part)
        ]
        if not parts:
            before = source.get("content")
            return before if before in (None, "") else None
        if all(part.raw is None for part in parts):
            return "\n\n".join(part.body for part in parts)
        return [{"type": "text", "text": part.body} if part.raw is None else part.raw for part in parts]

    def _write_response(self, turn: MessageTurn, message: Json) -> None:
        for key in ("reasoning_content", "tool_calls", "function_call"):
            message.pop(key, None)
        thoughts = [part.body for part in turn.parts if part.kind is PartKind.THINKING and part.raw is None]
        if thoughts:
            message["reasoning_content"] = "\n\n".join(thoughts)
        calls = [part for part in turn.parts if part.kind is PartKind.CALL]
        modern = [part.raw for part in calls if not part.is_by_name]
        if modern:
            message["tool_calls"] = modern
        if len(modern) < len(calls):
            message["function_call"] = next(part.raw for part in calls if part.is_by_name)
        for part in turn.parts:
            if part.kind is PartKind.OPAQUE and not _is_chunk(part):
                message.update(part.raw)

    def text(self, words: str, role: Role) -> Part:
        """Create a text, written as a string."""
        del role
        return Part(PartKind.TEXT, None, body=words, is_new=True)

    def call(self, call_id: str, name: str, arguments: Json) -> Part:
        """Create an entry of `tool_calls`."""
        body = as_json(arguments)
        raw: Json = {"id": call_id, "type": "function", "function": {"name": name, "arguments": body}}
        return Part(PartKind.CALL, raw, call_id, name, body, is_new=True)

    def answer(self, call: Part, words: str, *, is_failed: bool) -> Part:
        """Create a tool message for a call (a function message for an old function call)."""
        if call.is_by_name:
            raw: Json = {"role": "function", "name": call.name, "content": words}
        else:
            raw = {"role": "tool", "tool_call_id": call.id, "content": words}
        return Part(PartKind.RESULT, raw, call.id, call.name, words, failed=is_failed, is_new=True)

    def rename(self, part: Part, new_id: str) -> None:
        """Set the id of a call or a result."""
        key = "id" if part.kind is PartKind.CALL else "tool_call_id"
        part.id, part.raw = new_id, {**part.raw, key: new_id}
        if part.is_by_name:  # it was of a function, and answers a tool's call
            part.is_by_name, part.raw["role"] = False, "tool"

    def reargue(self, part: Part, arguments: Json) -> None:
        """Set the arguments of a call, as JSON text."""
        part.body = as_json(arguments)
        part.raw = self._with_call_field(part, "arguments", part.body)

    def retool(self, part: Part, name: str) -> None:
        """Set the tool name of a call."""
        part.name = name
        if part.kind is PartKind.CALL:
            part.raw = self._with_call_field(part, "name", name)
        else:
            part.raw = {**part.raw, "name": name}

    def _with_call_field(self, part: Part, key: str, value: Value) -> Json:
        raw: Json = part.raw
        if part.is_by_name:
            return {**raw, key: value}
        inner = raw.get("function")
        inner = inner if isinstance(inner, dict) else {}
        return {"type": "function", **raw, "function": {"name": "", **inner, key: value}}

    def bad_arguments(self, part: Part) -> Json | None:
        """Return valid arguments if the call's own are no JSON text of an object, else None."""
        return None if "custom" in part.raw else object_in_text(part.body)

    def refill(self, part: Part, words: str) -> None:
        """Set the content of a text or a result."""
        part.body = words
        if part.kind is PartKind.RESULT:
            part.raw = {**part.raw, "content": words}
        elif part.raw is not None:
            part.raw = {**part.raw, "text": words}

    def pieces(self, part: Part) -> tuple[str, list[Part]]:
        """Split a result into its text and its media."""
        return split_result(part.body, _chunk)

    def join(self, first: Part, second: Part) -> None:
        """Append the second result's content."""
        content = join_content(first.body, second.body, _chunks)
        first.body, first.raw = content, {**first.raw, "content": content}

    def tidy(self, part: Part) -> str | None:
        """Make a result's content a text or text chunks."""
        content = part.body
        if isinstance(content, str):
            return None
        if isinstance(content, list) and content:
            if all(map(is_sound, content)):
                return None
            part.body = sound_blocks(content)
            part.raw = {**part.raw, "content": part.body}
            return "bad-result"
        self.refill(part, as_words(content) if content else "(no output)")
        return "bad-result" if content else "null-content"


def name_answer(result: Part, name: str) -> None:
    """Turn a tool's result into a function's, which is matched by name."""
    kept = {key: value for key, value in result.raw.items() if key != "tool_call_id"}
    result.raw = {**kept, "role": "function", "name": name}
    result.id, result.name, result.is_by_name = None, name, True


def _is_chunk(part: Part) -> bool:
    """Whether a part is in the content, and not beside it."""
    if part.raw is None or part.name in ("refusal", "audio"):
        return False
    return part.kind in (PartKind.THINKING, PartKind.OPAQUE)


def _chunk(chunk: Value) -> Part:
    kind = stated_type(chunk)
    if kind is None:
        words = words_of_block(chunk)
        return Part(PartKind.TEXT, {"type": "text", "text": words}, body=words, is_new=True)
    if kind == "text":
        return Part(PartKind.TEXT, chunk, body=chunk.get("text"))
    if kind in ("input_text", "output_text"):  # the Responses API's
        words = words_of_block(chunk)
        return Part(PartKind.TEXT, {"type": "text", "text": words}, body=words, is_new=True)
    if kind == "thinking":
        return Part(PartKind.THINKING, chunk, body=chunk.get("thinking"), signature=chunk.get("signature"))
    return Part(PartKind.MEDIA if kind in _MEDIA else PartKind.OPAQUE, chunk)


def _chunks(content: Value) -> list[Value]:
    if isinstance(content, list):
        return content
    return [{"type": "text", "text": as_words(content)}] if content else []
