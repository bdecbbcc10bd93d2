"""Recognition of the format of messages by their content.

Each message has marks of one format, or none: `{"role": "user", "content": "hi"}` is valid in many formats.
"""

from __future__ import annotations

from collections.abc import Iterable

from midstream.history.codecs.openai_responses_codec import OUTPUTS

_ITEMS = {"reasoning", "item_reference", "web_search_call", "file_search_call", *OUTPUTS, *OUTPUTS.values()}
_CHUNKS = {"input_text", "output_text", "input_image", "input_file"}
_LANGCHAIN_TYPES = {"human", "ai", "system", "tool", "function", "remove", "chat", "AIMessageChunk"}
_BEDROCK_BLOCKS = {
    "text",
    "toolUse",
    "toolResult",
    "reasoningContent",
    "cachePoint",
    "image",
    "document",
    "video",
}
_ANTHROPIC_BLOCKS = {
    "tool_use",
    "tool_result",
    "thinking",
    "redacted_thinking",
    "server_tool_use",
    "image",
    "document",
}
_CHAT_CHUNKS = {"image_url", "input_audio", "refusal", "file"}
_CHAT_KEYS = ("tool_calls", "tool_call_id", "function_call", "refusal", "reasoning_content")

ALIKE = {"openai-chat": "chat", "mistral": "chat"}
"""Formats with equal messages: each of them is accepted for the others."""
_TAKE_PLAIN = ("openai-chat", "anthropic", "openai-responses", "mistral")
"""Formats in which messages without marks are valid; the first is the default for such a list."""


def candidates_for(
    messages: Iterable[object], *, system: object = None, spoken: str | None = None
) -> tuple[str, ...]:
    """Return the possible formats of a list of messages, the likeliest first.

    One name if a mark decides. Several names if no message has a mark, or the marks disagree.

    Args:
        messages: The list.
        system: The separate system prompt, if there is one: only some APIs have it.
        spoken: The provider's format, if it is known.
    """
    votes: dict[str, int] = {}
    excluded: set[str] = set()
    for message in messages:
        if form := recognize_by_marks(message):
            votes[form] = votes.get(form, 0) + 1
        elif isinstance(message, dict):
            if message.get("role") in ("system", "developer"):
                excluded.add("anthropic")
            if isinstance(message.get("content"), list):
                excluded.add("openai-responses")  # its texts have a mark
    if {ALIKE.get(form, form) for form in votes} == {"chat"}:
        return ("openai-chat",) if "openai-chat" in votes else ("mistral",)
    if votes:
        found = sorted(votes, key=lambda form: -votes[form])
        return (spoken,) if spoken in found else tuple(found)
    if spoken in _TAKE_PLAIN:
        return (spoken,)
    if system is not None:
        return ("anthropic",)
    return tuple(form for form in _TAKE_PLAIN if form not in excluded)


def recognize_by_marks(message: object) -> str:
    """Return the format whose marks a message has, or an empty string."""
    if not isinstance(message, dict):
        return ""
    kind, role, content = _word(message.get("type")), _word(message.get("role")), message.get("content")
    if "parts" in message and message.get("kind") in ("request", "response"):
        return "pydantic-ai"
    if isinstance(message.get("parts"), list) and "content" not in message:
        return "gemini"
    if message.get("lc") == 1 or (kind in _LANGCHAIN_TYPES and (content is not None or "data" in message)):
        return "langchain"
    if kind in _ITEMS or (kind == "message" and role and "id" not in message):
        return "openai-responses"
    if role == "tool_result" or (role == "assistant" and _has_tiny_calls(content)):
        return "tinyagent"
    if isinstance(content, list) and _of_blocks(content) == "mistral":
        return "mistral"
    if role in ("tool", "function") or any(key in message for key in _CHAT_KEYS):
        return "openai-chat"
    return _of_blocks(content) if isinstance(content, list) else ""


def _has_tiny_calls(content: object) -> bool:
    blocks = content if isinstance(content, list) else []
    return any(
        isinstance(block, dict) and block.get("type") == "tool_call" and "arguments" in block
        for block in blocks
    )


def _of_blocks(content: list[object]) -> str:
    for block in content:
        if not isinstance(block, dict):
            continue
        kind = _word(block.get("type"))
        if "type" not in block and _BEDROCK_BLOCKS & block.keys():
            return "bedrock"
        if kind == "thinking" and isinstance(block.get("thinking"), list):
            return "mistral"
        if kind in _ANTHROPIC_BLOCKS:
            return "anthropic"
        if kind in _CHUNKS:
            return "openai-responses"
        if kind in _CHAT_CHUNKS:
            return "openai-chat"
    return ""


def _word(value: object) -> str:
    """Return a text unchanged and any other value as an empty text, for look-ups in sets."""
    return value if isinstance(value, str) else ""
