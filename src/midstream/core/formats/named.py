"""Every format by its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from midstream.core.formats.anthropic import Anthropic
from midstream.core.formats.bedrock import Bedrock
from midstream.core.formats.chat import OpenAIChat
from midstream.core.formats.gemini import Gemini
from midstream.core.formats.langchain import LangChain
from midstream.core.formats.mistral import Mistral
from midstream.core.formats.openai_responses import OpenAIResponses
from midstream.core.formats.parts import Format
from midstream.core.formats.pydantic_ai import PydanticAI
from midstream.errors import UsageError

FormatName = Literal[
    "anthropic",
    "openai-chat",
    "openai-responses",
    "gemini",
    "mistral",
    "bedrock",
    "pydantic-ai",
    "langchain",
    # The same by other names.
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
        OpenAIResponses,
        Gemini,
        Mistral,
        Bedrock,
        PydanticAI,
        LangChain,
    )
}
"""What makes each format, by its name."""

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


def format_named(name: str) -> Format:
    """Find a format by its name; `_` and `-` are the same, and providers' names are understood.

    Raises:
        UsageError: There is none of this name; the message lists those there are.
    """
    plain = name.strip().lower().replace("_", "-")
    made = FORMATS.get(plain) or FORMATS.get(_ALIASES.get(plain, ""))
    if made is None:
        raise UsageError(f"no format is called {name!r}; there are {', '.join(FORMATS)}")
    return made()
