"""Registry of the formats."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from midstream.errors import UsageError
from midstream.history.codecs.anthropic_codec import Anthropic
from midstream.history.codecs.bedrock_codec import Bedrock
from midstream.history.codecs.codec_spec import Format
from midstream.history.codecs.gemini_codec import Gemini
from midstream.history.codecs.langchain_codec import LangChain
from midstream.history.codecs.mistral_codec import Mistral
from midstream.history.codecs.openai_chat_codec import OpenAIChat
from midstream.history.codecs.openai_responses_codec import ResponsesCodec
from midstream.history.codecs.pydantic_ai_codec import PydanticAI

FormatName = Literal[
    "anthropic",
    "openai-chat",
    "openai-responses",
    "gemini",
    "mistral",
    "bedrock",
    "pydantic-ai",
    "langchain",
    # Aliases.
    "openai",
    "chat",
    "chat-completions",
    "responses",
    "google",
    "bedrock-converse",
    "converse",
    "pydantic",
    "pydanticai",
    "langgraph",
    "claude",
    "anthropic-messages",
]
"""The names of formats, for a type checker: those of `FORMATS` and their aliases."""

FORMATS: dict[str, Callable[[], Format]] = {
    made.name: made
    for made in (
        Anthropic,
        OpenAIChat,
        ResponsesCodec,
        Gemini,
        Mistral,
        Bedrock,
        PydanticAI,
        LangChain,
    )
}
"""A factory for each format, by its name."""

_ALIASES = {
    "openai": "openai-chat",
    "chat": "openai-chat",
    "chat-completions": "openai-chat",
    "responses": "openai-responses",
    "google": "gemini",
    "bedrock-converse": "bedrock",
    "converse": "bedrock",
    "pydantic": "pydantic-ai",
    "pydanticai": "pydantic-ai",
    "langgraph": "langchain",
    "claude": "anthropic",
    "anthropic-messages": "anthropic",
}


def find_format(name: str) -> Format:
    """Return a format by its name; `_` and `-` are equal, and providers' names are accepted.

    Raises:
        UsageError: There is none with this name; the message lists all names.
    """
    plain = name.strip().lower().replace("_", "-")
    made = FORMATS.get(plain) or FORMATS.get(_ALIASES.get(plain, ""))
    if made is None:
        raise UsageError(f"unknown format {name!r}; known: {', '.join(FORMATS)}")
    return made()
