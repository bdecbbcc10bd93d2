"""The quick look: which messages are beyond doubt, so that the walk can step over them.

A mark is given only to what every later step would leave alone: a message of plain words, or a reply with the
results of all its calls right behind it. What has no mark may still be fine; the walk decides. Marking costs
about a microsecond a message, the walk ten.
"""

from __future__ import annotations

from collections.abc import Callable

from midstream.core.formats.parts import Mark, Value
from midstream.core.profiles import Profile
from midstream.core.repair.quick_grouped import (
    look_at_anthropic,
    look_at_bedrock,
    look_at_gemini,
    look_at_pydantic_ai,
)
from midstream.core.repair.quick_separate import look_at_chat, look_at_langchain, look_at_responses
from midstream.core.repair.signatures import has_any

DOUBT, USER, REPLY, CALLS, ANSWER, SYSTEM = Mark

Look = Callable[[list[Value], Profile, bytearray, dict[int, list[str]]], None]

_LOOKS: dict[str, Look] = {
    "anthropic": look_at_anthropic,
    "bedrock": look_at_bedrock,
    "gemini": look_at_gemini,
    "pydantic-ai": look_at_pydantic_ai,
    "openai-chat": look_at_chat,
    "mistral": look_at_chat,
    "langchain": look_at_langchain,
    "openai-responses": look_at_responses,
}

_EVERY = bytes((USER, REPLY, CALLS, ANSWER, SYSTEM))
_GROUPED_ROLES = bytes.maketrans(_EVERY, b"uaaus")
_SEPARATE_ROLES = bytes.maketrans(_EVERY, b"uaats")
_SPOKEN = bytes.maketrans(bytes((USER, REPLY)), b"ua")
_SILENT = bytes((CALLS, ANSWER))


class Marks:
    """What the quick look found: one mark a message, and the ids of the marked calls."""

    def __init__(self, messages: list[Value], form: str, profile: Profile) -> None:
        self.marks = bytearray(len(messages))
        self.ids: dict[int, list[str]] = {}
        self.form = form
        self.messages = messages
        _LOOKS[form](messages, profile, self.marks, self.ids)

    def doubt_signatures(self, odd: frozenset[str]) -> None:
        """Take the marks off the messages with one of these signatures, and off their results."""
        marks = self.marks
        for at, message in enumerate(self.messages):
            if marks[at] in (REPLY, CALLS) and has_any(message, odd):
                if marks[at] == CALLS:
                    marks[at + 1] = DOUBT
                    self.ids.pop(at, None)
                marks[at] = DOUBT

    def are_all_fine(self, profile: Profile) -> bool:
        """Whether nothing at all is in doubt, neither in the messages nor between them."""
        marks = bytes(self.marks)
        if DOUBT in marks:
            return False
        if profile.ids_are_unique == "list" and not _are_distinct(self.ids):
            return False
        if self.form == "openai-responses" and not _has_distinct_items(self.messages):
            return False
        if profile.system == "after-user":
            if any(bytes((before, SYSTEM)) in marks for before in (REPLY, CALLS, ANSWER)):
                return False
        elif SYSTEM in marks and profile.system != "any":
            if profile.system == "apart" or SYSTEM in marks[1:]:
                return False
        return _is_order_fine(marks.lstrip(bytes((SYSTEM,))), profile, is_separate=self.form in _SEPARATE)


_SEPARATE = {"openai-chat", "mistral", "langchain", "openai-responses"}


def _are_distinct(ids: dict[int, list[str]]) -> bool:
    every = [call_id for some in ids.values() for call_id in some]
    return len(set(every)) == len(every)


def _has_distinct_items(messages: list[Value]) -> bool:
    every = [message["id"] for message in messages if "id" in message]
    return len(set(every)) == len(every)


def _is_order_fine(marks: bytes, profile: Profile, *, is_separate: bool) -> bool:
    first = marks[0] if marks else USER
    if first == CALLS and profile.first != "any":
        return False
    if first == REPLY and profile.first == "user":
        return False
    if profile.alternates == "no" and not profile.call_follows_user:
        return True
    roles = marks.translate(_SEPARATE_ROLES if is_separate else _GROUPED_ROLES)
    if b"aa" in roles or (profile.alternates != "no" and b"uu" in roles):
        return False
    spoken = marks.translate(_SPOKEN, _SILENT)
    return profile.alternates != "spoken" or not (
        b"uu" in spoken or b"aa" in spoken or spoken.startswith(b"a")
    )
