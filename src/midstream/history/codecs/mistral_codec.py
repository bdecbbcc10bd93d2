"""Mistral chat completions: as OpenAI's, with arguments that may be objects and prefix messages."""

from __future__ import annotations

from msgspec.structs import replace

from midstream.history.codecs.codec_spec import Json, Part, object_in_text
from midstream.history.codecs.openai_chat_codec import OpenAIChat


class Mistral(OpenAIChat):
    """Messages of Mistral's API; the TypeScript client's `toolCalls` and `toolCallId` are not read."""

    name = "mistral"
    profile = "mistral"
    spec = replace(
        OpenAIChat.spec,
        roles=OpenAIChat.spec.roles - {"developer"},
        reasoning="read",
        write_file=None,
        write_signature=None,
        claude_profile="",
    )
    is_type_needed = False

    def bad_arguments(self, part: Part) -> Json | None:
        """Return valid arguments if the call's own are neither an object nor its JSON text, else None."""
        return None if isinstance(part.body, dict) else object_in_text(part.body)
