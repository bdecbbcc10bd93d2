"""Recognition of the conversation of a request.

A conversation is identified by the first of these: a header, a key of the request's `metadata`, or its exact messages.
The messages match only if all of them, up to the newest response, are equal. So conversations with equal beginnings
stay separate, and an unknown transcript begins a new conversation. Values that several conversations may share (`user`,
`prompt_cache_key`) only limit the search.
"""

from __future__ import annotations

import functools
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import msgspec
from msgspec import Struct

from midstream.dialects.dialect import Asked
from midstream.history.messages import Entry, File, History, Response, Text, UserMessage

SESSION_HEADERS = (
    "x-midstream-session",
    "x-opencode-session",
    "x-session-affinity",  # opencode, pi and others, with a custom provider
    "x-claude-code-session-id",
    "session-id",  # Codex
    "session_id",
    "x-session-id",
    "x-conversation-id",  # LibreChat, by its documentation
)
"""Headers with the name of a conversation; the first one present counts."""
AGENT_HEADERS = ("x-claude-code-agent-id", "thread-id", "x-openai-subagent")
"""Headers with the name of an agent or task within a conversation: the sub-agents of Claude Code and Codex send the
session header of the main agent. The thread of Codex's main agent has the name of the session."""
SIDE_HEADERS: Mapping[str, frozenset[str]] = {
    "x-claude-code-request-class": frozenset({"auxiliary", "side_reply"}),
}
"""Headers, with their values, that mark side calls."""
SESSION_NOTES = ("session_id", "conversation_id", "thread_id", "chat_id")
"""Keys of `metadata` with the name of a conversation."""
EPHEMERAL_HEADER = "x-midstream-ephemeral"
EPHEMERAL_NOTE = "ephemeral"
KEY_CHARS_MAX = 200
"""Longest name that is kept unchanged; a longer one is replaced by its digest."""
OPENINGS_MAX = 10_000
"""Conversations that are recognized by their messages; the least recently used ones are evicted."""

DIGEST_BYTES = 16
_CLAUDE_CODE = re.compile(r"_session_([0-9a-fA-F-]{36})$")
_SPACE = re.compile(r"\s+")
_KEPT = "c:"
_FALSE = frozenset({"", "0", "false", "no"})

SIDE_CALLS: tuple[str, ...] = (
    "you are a title generator",  # opencode
    "generate a title for this conversation",  # opencode
    "generate a short title based on the first message",  # crush
    "please response with a title for the chat",  # Continue
    "provide a concise, 5-word-or-less title for the conversation",  # LibreChat
    "create a concise title for this conversation",  # LibreChat
    "generate a concise, 3-5 word title",  # Open WebUI
    "### task:\ngenerate 1-3 broad tags",  # Open WebUI
    "### task:\nsuggest 3-5 relevant follow-up questions",  # Open WebUI
    "please write a 5-10 word title",  # Claude Code
    "summarize this coding conversation in under 50 characters",  # Claude Code
    "analyze if this message indicates a new conversation topic",  # Claude Code
    "generates concise, one-line git commit messages",  # aider
    "*briefly* summarize this partial conversation about programming",  # aider
)
"""Text in side calls of client applications, in lower case; it counts only in requests without tools."""
TITLE_PROPERTIES = frozenset({"title", "branch", "isNewTopic", "is_new_topic", "emoji", "summary"})
"""Properties in the response schema of a side call for a title."""
SIDE_CALLS_KEPT = 256
"""System prompts in the cache of `_is_side_prompt`: a few megabytes at most."""
SIDE_CALL_CHARS = 4000
"""Characters of the system prompt and of the newest message that are searched for this text."""


def read_session_name(headers: Mapping[str, str], params: Asked, principal: str = "") -> str:
    """Return the client application's name of the conversation, or "".

    Args:
        principal: See `name_within`. It does not apply to conversations of `/v1/conversations`.
    """
    if params.conversation:
        return kept_name(params.conversation)
    name = _given_name(headers, params)
    return name_within(principal, name) if principal else name


def _given_name(headers: Mapping[str, str], params: Asked) -> str:
    agents = [value for name in AGENT_HEADERS if (value := headers.get(name, "").strip())]
    for header in SESSION_HEADERS:
        if value := headers.get(header, "").strip():
            return _shorten_name("\0".join([f"h:{value}", *(agent for agent in agents if agent != value)]))
    for note in SESSION_NOTES:
        if value := params.metadata.get(note, "").strip():
            return _shorten_name(f"m:{value}")
    found = _CLAUDE_CODE.search(params.metadata.get("user_id", ""))
    return f"m:{found[1]}" if found else ""


def kept_name(conversation: str) -> str:
    """Return the name of a conversation of `/v1/conversations`, by its id."""
    return _shorten_name(f"{_KEPT}{conversation}")


def is_kept_name(name: str) -> bool:
    """Return whether a name is that of a conversation of `/v1/conversations`; see `kept_name`."""
    return name.startswith(_KEPT)


def name_within(principal: str, name: str) -> str:
    """Return the stored name of a principal's conversation or key, which other principals cannot produce.

    Args:
        principal: See `ApiCaller`; "" returns the name unchanged.
        name: The client application's name, or "".
    """
    if not (principal and name):
        return name
    whose = f"{principal}\0{name}".encode("utf-8", "replace")
    return f"u:{blake2b(whose, digest_size=32).hexdigest()}"


def scope_of(params: Asked, principal: str = "") -> str:
    """Return the scope in which a conversation without a name is searched.

    Args:
        principal: See `ApiCaller`.
    """
    scope = f"{params.model}\0{params.user}\0{params.cache_key}"
    return f"{principal}\0{scope}" if principal else scope


def newest_words(entries: Sequence[Entry]) -> str | None:
    """Return the beginning (`SIDE_CALL_CHARS`) of the newest user message; None without one."""
    newest = next((entry for entry in reversed(entries) if isinstance(entry, UserMessage)), None)
    if newest is None:
        return None
    return "".join(part.text for part in newest.parts if isinstance(part, Text))[:SIDE_CALL_CHARS]


def is_ephemeral(headers: Mapping[str, str], params: Asked, instructions: str, newest: str) -> bool:
    """Return whether a request is a side call, such as one for a title, which must not be stored.

    Args:
        newest: Beginning of the newest user message (`newest_words`), or "".
    """
    marked = headers.get(EPHEMERAL_HEADER, params.metadata.get(EPHEMERAL_NOTE))
    if marked is not None:
        return marked.strip().lower() not in _FALSE
    if any(headers.get(name, "").strip() in values for name, values in SIDE_HEADERS.items()):
        return True
    if params.tools:
        return False
    if _wants_title(params.wished.settings.response_format):
        return True
    return _is_side_prompt(instructions[:SIDE_CALL_CHARS]) or _has_side_call(newest)


def _wants_title(response_format: Mapping[str, Any] | None) -> bool:
    """Return whether the response schema has only properties of side calls, such as a title."""
    schema = (response_format or {}).get("schema")
    properties = schema.get("properties") if isinstance(schema, dict) else None
    return isinstance(properties, dict) and "title" in properties and properties.keys() <= TITLE_PROPERTIES


@functools.lru_cache(SIDE_CALLS_KEPT)
def _is_side_prompt(instructions: str) -> bool:
    """Return whether a system prompt is that of a side call. Cached, because applications repeat a few prompts."""
    return _has_side_call(instructions)


def _has_side_call(text: str) -> bool:
    lowercase_text = text.lower()
    return any(words in lowercase_text for words in SIDE_CALLS)


class ConversationPlace(Struct, frozen=True):
    """Position of a request in its conversation.

    Args:
        before: Digest of the messages up to the newest response, without its results; empty before the first one.
        after: Digest of all messages.
    """

    before: bytes
    after: bytes

    def then(self, entries: Sequence[Entry]) -> ConversationPlace:
        """Return the place after further entries."""
        before, after = self.before, self.after
        for entry in entries:
            if isinstance(entry, UserMessage):
                after = _link(after, _digest_message(entry))
            else:
                before = after = _link(after, _digest_response(entry.response))
        return ConversationPlace(before, after)


def place_of(scope: str, history: History) -> ConversationPlace:
    """Return the place of a history; places of different scopes are different."""
    start = blake2b(scope.encode("utf-8", "replace"), digest_size=DIGEST_BYTES).digest()
    return ConversationPlace(b"", start).then(history.entries)


class ConversationIndex:
    """Recognizes conversations by their messages. Call `look_up` before a response, `add_response` after it."""

    def __init__(self, limit: int = OPENINGS_MAX) -> None:
        self._limit = limit
        self._sessions: OrderedDict[bytes, str] = OrderedDict()
        """Names of conversations by the digest of their messages up to the newest response."""

    def __len__(self) -> int:
        return len(self._sessions)

    def look_up(self, place: ConversationPlace) -> str:
        """Return the name of the conversation that continues at a place, or ""."""
        return self._sessions.get(place.before, "")

    def add_response(self, session: str, place: ConversationPlace, response: Response) -> bytes:
        """Record a response; return the new digest of the conversation (`ConversationPlace.before` of the next
        request).

        The old digest is removed.
        """
        if self._sessions.get(place.before) == session:
            del self._sessions[place.before]
        known_by = _link(place.after, _digest_response(response))
        self._sessions[known_by] = session
        while len(self._sessions) > self._limit:
            self._sessions.popitem(last=False)
        return known_by


def _link(before: bytes, entry_digest: bytes) -> bytes:
    return blake2b(before + entry_digest, digest_size=DIGEST_BYTES).digest()


def _digest_message(message: UserMessage) -> bytes:
    first = message.parts[0] if len(message.parts) == 1 else None
    if isinstance(first, Text):
        return b"t" + first.text.encode()
    parts = [
        part.text if isinstance(part, Text) else [part.media_type, _content(part)] for part in message.parts
    ]
    return b"u" + msgspec.json.encode(parts)


def _content(file: File) -> str:
    return blake2b((file.data or file.url or "").encode(), digest_size=16).hexdigest()


def _digest_response(response: Response) -> bytes:
    """Return a digest of a response's text (or calls) without white space, which client applications may change."""
    words = _SPACE.sub("", response.text)
    return b"a" + (words.encode() or msgspec.json.encode([call.id for call in response.calls]))


def _shorten_name(name: str) -> str:
    if len(name) <= KEY_CHARS_MAX:
        return name
    return f"{name[:2]}{blake2b(name.encode('utf-8', 'replace'), digest_size=32).hexdigest()}"
