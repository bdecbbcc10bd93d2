"""Harmless shapes in which hosts send a message back: `tool_calls: null`, words that are blank, an id that is null.

A provider may refuse such a message, so repair has an opinion of it, and a transcript with one was read whole in every
turn. Here a message is put into the plain shape that means the same, by itself and whatever stands around it. The
shapes are those of OpenAI's, LiteLLM's and LangChain's dumps, of hosts that gather streams by hand (a call without its
type, arguments that are ""), of Continue (" " for no words), of Codex (reasoning without its id), of what a stopped
answer leaves (a reply of nothing), and of our own Anthropic answers (thinking whose signature is "").
"""

from __future__ import annotations

from msgspec import Struct

from midstream.core.formats.parts import Json, Value
from midstream.core.repair.reasoning import UNNAMED
from midstream.core.repair.words import NO_OUTPUT

_BLANK: tuple[Value, ...] = ("", None, [])
_WORDS = "-"
"""Stands for words that are beyond doubt."""


class Shaped(Struct, frozen=True):
    """A message in its plain shape.

    Args:
        seen: What is judged in its place: words that are blank are others there.
        said: What is read; None where it says nothing.
    """

    seen: Json
    said: Json | None


def shaped(message: Json, form: str, at: int) -> Shaped:
    """Return a message in its plain shape; as it is where nothing is known that means the same.

    Args:
        message: A message in doubt; anything may stand in it.
        form: The name of its format (`midstream.core.formats`).
        at: Its place among those that are judged with it.
    """
    if form == "openai-responses":
        return _responses(message, at)
    return _anthropic(message) if form == "anthropic" else _chat(message)


# --- chat completions -----------------------------------------------------------------------------------------


def _chat(message: Json) -> Shaped:
    said = {
        name: value
        for name, value in message.items()
        if not (name == "tool_calls" and value in _BLANK) and not (name == "function_call" and value is None)
    }
    role, content = said.get("role"), said.get("content")
    match role:
        case "assistant":
            return _chat_reply(said)
        case "system" | "developer" if _is_blank(content):
            return _nothing("system")
        case "tool" if content is None or content == []:
            return _with_words({**said, "content": NO_OUTPUT})
        case "user" | "tool":
            return _with_words(said)
    return Shaped(said, said)


def _chat_reply(said: Json) -> Shaped:
    calls, content = said.get("tool_calls"), _without_empty(said.get("content")) or None
    if content is None and calls is None:
        others = {name: value for name, value in said.items() if value and name not in ("role", "content")}
        if not others:
            return _nothing("system")
        is_refusal = others.keys() == {"refusal"} and isinstance(others["refusal"], str)
        return Shaped({"role": "assistant", "content": _WORDS} if is_refusal else said, said)
    said = {**said, "content": content}
    if isinstance(calls, list):
        said["tool_calls"] = [_chat_call(call) for call in calls]
    return _with_words(said)


def _chat_call(call: Value) -> Value:
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        return call
    function = call["function"]
    if _is_blank(function.get("arguments")):
        function = {**function, "arguments": "{}"}
    return {**call, "type": call.get("type") or "function", "function": function}


# --- Anthropic's messages -------------------------------------------------------------------------------------


def _anthropic(message: Json) -> Shaped:
    if message.get("role") != "assistant":
        return _with_words(message)
    content = _without_empty(message.get("content"))
    if content in _BLANK:
        return _nothing("user")  # its system prompt stands apart
    said = {**message, "content": content}
    seen = _with_words(said).seen
    if isinstance(seen["content"], list):
        seen["content"] = [block for block in seen["content"] if not _is_unsigned(block)]
    return Shaped(seen, said)


def _is_unsigned(block: Value) -> bool:
    is_thinking = isinstance(block, dict) and block.get("type") == "thinking"
    return is_thinking and block.get("signature") in ("", None)


# --- OpenAI's responses ---------------------------------------------------------------------------------------


def _responses(item: Json, at: int) -> Shaped:
    said = {name: value for name, value in item.items() if not (name == "id" and value is None)}
    match said.get("type", "message"):
        case "function_call" if _is_blank(said.get("arguments")):
            said["arguments"] = "{}"
        case "function_call_output":
            return _with_words(said, "output")
        case "reasoning" if "id" not in said:
            return Shaped({**said, "id": f"{UNNAMED}{at}"}, said)
        case "message":
            return _responses_message(said)
    return Shaped(said, said)


def _responses_message(said: Json) -> Shaped:
    role, content = said.get("role"), said.get("content")
    if role == "assistant":
        content = _without_empty(content)
        if content in _BLANK:
            return _nothing("system")
    elif role in ("system", "developer") and _is_blank(content):
        return _nothing("system")
    return _with_words({**said, "content": content})


# --- what they share ------------------------------------------------------------------------------------------


def _nothing(role: str) -> Shaped:
    return Shaped({"role": role, "content": _WORDS}, None)


def _with_words(said: Json, field: str = "content") -> Shaped:
    """Return a message that is judged as if none of its words were blank."""
    content = said.get(field)
    if isinstance(content, list):
        return Shaped({**said, field: [_piece_with_words(piece) for piece in content]}, said)
    return Shaped({**said, field: _WORDS}, said) if isinstance(content, str) else Shaped(said, said)


def _piece_with_words(piece: Value) -> Value:
    is_text = isinstance(piece, dict) and isinstance(piece.get("text"), str)
    return {**piece, "text": _WORDS} if is_text else piece


def _without_empty(content: Value) -> Value:
    """Return the content of a reply without pieces of no words."""
    return [piece for piece in content if not _is_empty(piece)] if isinstance(content, list) else content


def _is_empty(piece: Value) -> bool:
    return (
        isinstance(piece, dict) and piece.get("type") in ("text", "output_text") and piece.get("text") == ""
    )


def _is_blank(words: Value) -> bool:
    return words in _BLANK or (isinstance(words, str) and words.isspace())
