"""The quick look: which messages are beyond doubt, so that the walk can step over them.

A mark is given only to what every later step would leave alone: a message of plain words, or a reply with the
results of all its calls right behind it. What has no mark may still be fine; the walk decides. Marking costs
about a microsecond a message, the walk ten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain

from midstream.core.formats.parts import Value
from midstream.core.profiles import Profile
from midstream.core.repair.quick_grouped import (
    look_at_anthropic,
    look_at_bedrock,
    look_at_gemini,
    look_at_pydantic_ai,
)
from midstream.core.repair.quick_rules import (
    ANSWER,
    CALLS,
    DOUBT,
    ITEM,
    MIXED,
    REPLY,
    SYSTEM,
    THOUGHT,
    USER,
    Key,
    Rules,
    Sight,
    says,
)
from midstream.core.repair.quick_separate import look_at_chat, look_at_langchain, look_at_responses, thinks
from midstream.core.repair.signatures import has_any, odd_signatures

_LOOKS: dict[str, Callable[[Value, Rules], Sight]] = {
    "anthropic": look_at_anthropic,
    "bedrock": look_at_bedrock,
    "gemini": look_at_gemini,
    "pydantic-ai": look_at_pydantic_ai,
    "openai-chat": look_at_chat,
    "mistral": look_at_chat,
    "langchain": look_at_langchain,
    "openai-responses": look_at_responses,
}
_ODD = (LookupError, TypeError, AttributeError, ValueError, RecursionError)
"""What looking at a message of another shape raises."""
_CHAT_LIKE = frozenset({"openai-chat", "mistral", "langchain"})
_SEPARATE = frozenset({"openai-chat", "mistral", "langchain", "openai-responses"})

_EVERY = bytes((USER, REPLY, CALLS, ANSWER, SYSTEM, MIXED, THOUGHT, ITEM))
_GROUPED_ROLES = bytes.maketrans(_EVERY, b"uaausuaa")
_SEPARATE_ROLES = bytes.maketrans(_EVERY, b"uaatsuaa")
_SPOKEN = bytes.maketrans(bytes((USER, REPLY, MIXED)), b"uau")
_SILENT = bytes((CALLS, ANSWER, THOUGHT, ITEM))


_PIECE = 64
"""Messages that are made sendable and looked at together: few enough for a processor's cache."""

UNNAMED = "rs_unnamed_"
"""Begins the id that stands for one which a reasoning item lacks: its followers need none."""


class Marks:
    """What the quick look found: one mark a message, and the ids of the marked calls."""

    def __init__(
        self,
        messages: list[Value],
        form: str,
        profile: Profile,
        *,
        model: str | None = None,
        made_sendable: Callable[[list[Value], int], list[Value]] | None = None,
    ) -> None:
        self.messages = messages
        """The very list, or a copy with what had to be made sendable."""
        self.made_sendable = made_sendable
        """Makes a piece of the list, of which the first has this number, such that it can be sent."""
        self.form = form
        self.profile = profile
        self.marks = bytearray(len(messages))
        self.ids: dict[int, list[str]] = {}
        """By the place of a reply: the ids of the calls of its unit."""
        self.ends: dict[int, int] = {}
        """By the place of a reply: where its unit ends, the results included."""
        rules = Rules(form, profile, model)
        keys = self._look(rules)
        self.signatures = rules.signatures
        """Of the thinking in all sound messages, and perhaps in others."""
        self.sound = bytearray(self.marks)
        """Which messages are sendable by themselves, whether or not calls and results match."""
        self._match(keys)

    def _look(self, rules: Rules) -> dict[int, list[Key]]:
        """Mark every message by itself; return the keys of calls and results by their places."""
        look, marks = _LOOKS[self.form], self.marks
        has_parts, has_calls = self.form in ("gemini", "pydantic-ai"), self.form in _CHAT_LIKE
        key, reply = ("type", "ai") if self.form == "langchain" else ("role", "assistant")
        keys: dict[int, list[Key]] = {}
        for at, message in self._sendable():
            try:
                mark, found = look(message, rules)
                if "parts" in message and not has_parts:
                    continue  # another provider's shape
                if "tool_calls" in message and not (has_calls and message.get(key) == reply):
                    continue  # only replies have calls: its role is in doubt
            except _ODD:
                continue
            marks[at] = mark
            if found:
                keys[at] = found
        return keys

    def _sendable(self) -> Iterator[tuple[int, Value]]:
        """Go through the messages, each made sendable before, and say their numbers.

        A piece at a time: what was just written for a trial is looked at while the processor still has it at hand.
        """
        whole = self.messages
        for first in range(0, len(whole), _PIECE):
            piece = whole[first : first + _PIECE]
            if self.made_sendable is not None and (made := self.made_sendable(piece, first)) is not piece:
                if self.messages is whole:
                    self.messages = [*whole]
                self.messages[first : first + _PIECE] = piece = made
            yield from enumerate(piece, first)

    def _match(self, keys: dict[int, list[Key]]) -> None:
        """Take the marks off calls without their results right behind them, and off other results."""
        until, marks = 0, self.marks
        is_flat = self.form == "openai-responses"
        for at, mine in keys.items():
            if at < until:
                continue
            if len(mine) == 1 and not is_flat and marks[at] == CALLS and keys.get(at + 1) == mine:
                if marks[at + 1] in (ANSWER, MIXED):  # nearly always: one call, and its result behind it
                    self.ends[at] = until = at + 2
                    call_id = mine[0] if type(mine[0]) is str else mine[0][1]
                    if type(call_id) is str:
                        self.ids[at] = [call_id]
                    continue
            until, asked = self._asked(at, keys)
            end = self._end_of_answers(until, asked, keys) if asked else 0
            if end:
                self.ends[at] = until = end
                if type(asked[0]) is str:
                    self.ids[at] = asked
                elif ids := [call_id for _, call_id in asked if type(call_id) is str]:
                    self.ids[at] = ids
            else:
                until = max(until, at + 1)
                self.marks[at:until] = bytes(until - at)

    def _asked(self, at: int, keys: dict[int, list[Key]]) -> tuple[int, list[Key]]:
        """Return the end and the keys of the calls that begin here; no keys where any is in doubt."""
        marks = self.marks
        if marks[at] != CALLS:
            return at + 1, []
        asked, end = keys[at], at + 1
        if self.form == "openai-responses":
            if end < len(marks) and marks[end] == CALLS:
                asked = [*asked]
            while end < len(marks) and marks[end] == CALLS:
                asked += keys[end]
                end += 1
            before = at - 1
            while before >= 0 and self._kind(before) == "reasoning":
                before -= 1
            if before >= 0 and not marks[before] and self._kind(before) != "function_call_output":
                return end, []  # it may be one more call of the same reply
        return end, asked if len(asked) == 1 or len(set(asked)) == len(asked) else []

    def _kind(self, at: int) -> Value:
        message = self.messages[at]
        return message.get("type") if isinstance(message, dict) and message else "not a message"

    def _end_of_answers(self, here: int, asked: list[Key], keys: dict[int, list[Key]]) -> int:
        """Return where the results of all these calls end, or 0 where they do not stand here."""
        marks = self.marks
        is_one = self.form not in _SEPARATE and not self.profile.joins_users
        waiting = set(asked)
        start = here
        while waiting:
            if here == len(marks) or marks[here] not in (ANSWER, MIXED) or (is_one and here > start):
                return 0
            if marks[here] == MIXED and len(keys[here]) != len(waiting):
                return 0
            for key in keys[here]:
                if key not in waiting:
                    return 0
                waiting.remove(key)
            here += 1
        return here

    def odd_signatures(self) -> frozenset[str]:
        """Return the signatures of thinking that do not look like the rest."""
        sights = zip(self.messages, self.sound, strict=True)
        return odd_signatures((message for message, is_sound in sights if not is_sound), self.signatures)

    def doubt_signatures(self, odd: frozenset[str]) -> None:
        """Take the marks off the messages with one of these signatures, and off their results."""
        marks = self.marks
        for at, message in enumerate(self.messages):
            if self.sound[at] in (REPLY, CALLS) and has_any(message, odd):
                self.sound[at] = DOUBT
                if not marks[at]:
                    continue
                end = self.ends.pop(at, at + 1)
                self.ids.pop(at, None)
                marks[at:end] = bytes(end - at)

    def are_all_fine(self, *, system: Value = None, thinking: bool | None = None) -> bool:
        """Whether nothing at all is in doubt, neither in the messages nor between them."""
        marks, profile = bytes(self.marks), self.profile
        if DOUBT in marks:
            return False
        if profile.ids_are_unique == "list" and not _are_distinct(self.ids):
            return False
        if self.form == "openai-responses" and not (
            _has_distinct_items(self.messages)
            and _is_thinking_followed(marks)
            and _are_followers_named(self.messages, marks)
        ):
            return False
        if profile.signs_calls and self.form == "gemini" and not self._are_signed():
            return False
        if profile.wants_reasoning != "no" and self.form in ("openai-chat", "mistral"):
            if not self._are_reasoned(thinking=thinking):
                return False
        return _are_systems_fine(marks, profile, system) and self._is_order_fine(
            marks.lstrip(bytes((SYSTEM,)))
        )

    def _are_signed(self) -> bool:
        """Whether the first call of each step of the turn in progress bears its signature (Gemini 3)."""
        marks = self.marks
        if not marks or marks[-1] not in (USER, ANSWER, MIXED):
            return True
        for at in range(len(marks) - 1, -1, -1):
            if marks[at] in (USER, MIXED):
                break
            if marks[at] == CALLS and not _is_call_signed(self.messages[at]):
                return False
        return True

    def _are_reasoned(self, *, thinking: bool | None) -> bool:
        """Whether every reply with calls brings its reasoning along, if any does (DeepSeek); or every reply at all."""
        if thinking is False:
            return True
        if self.profile.wants_reasoning == "every":
            sights = zip(self.messages, self.marks, strict=True)
            return all(thinks(message) for message, mark in sights if mark in (REPLY, CALLS))
        calls = [thinks(self.messages[at]) for at in self.ends]
        if all(calls):
            return True
        return not (thinking or any(calls) or any(map(thinks, self.messages)))

    def _is_order_fine(self, marks: bytes) -> bool:
        profile, is_flat = self.profile, self.form == "openai-responses"
        first = marks[0] if marks else USER
        if first in (CALLS, THOUGHT) and profile.first != "any":
            return False
        if first in (REPLY, ITEM) and profile.first == "user":
            return False
        if profile.call_follows_user and bytes((REPLY, CALLS)) in marks and not is_flat:
            return False
        if not profile.user_follows_results and bytes((ANSWER, USER)) in marks:
            return False
        if profile.alternates == "no":
            return True
        roles = marks.translate(_SEPARATE_ROLES if self.form in _SEPARATE else _GROUPED_ROLES)
        if not is_flat and (b"aa" in roles or b"uu" in roles):
            return False
        spoken = marks.translate(_SPOKEN, _SILENT)
        return profile.alternates != "spoken" or not (
            b"uu" in spoken or b"aa" in spoken or spoken.startswith(b"a")
        )


def _are_distinct(ids: dict[int, list[str]]) -> bool:
    every = list(chain.from_iterable(ids.values()))
    return len(set(every)) == len(every)


def _has_distinct_items(messages: list[Value]) -> bool:
    every = [message["id"] for message in messages if "id" in message]
    return len(set(every)) == len(every)


def _is_thinking_followed(marks: bytes) -> bool:
    """Whether what follows reasoning is always what it led to."""
    return not marks.endswith(bytes((THOUGHT,))) and not any(
        bytes((THOUGHT, after)) in marks for after in (USER, ANSWER, SYSTEM)
    )


def _are_followers_named(messages: list[Value], marks: bytes) -> bool:
    """Whether a message that follows reasoning still has its id: by it the server knows that they belong together."""
    pair = bytes((THOUGHT, REPLY))
    at = marks.find(pair)
    while at >= 0:
        named = messages[at].get("id")
        is_named = named is not None and not str(named).startswith(UNNAMED)
        if is_named and messages[at + 1].get("id") is None:
            return False
        at = marks.find(pair, at + 1)
    return True


def _are_systems_fine(marks: bytes, profile: Profile, system: Value) -> bool:
    """Whether system prompts stand where the profile wants them, beside none that says the same."""
    if SYSTEM not in marks or profile.system == "any":
        return True
    if profile.system == "after-user":
        return not any(bytes((before, SYSTEM)) in marks for before in (REPLY, CALLS, ANSWER))
    return profile.system == "first" and SYSTEM not in marks[1:] and system is None


def _is_call_signed(message: Value) -> bool:
    for part in message["parts"]:
        if part.get("functionCall") or part.get("function_call"):
            return says(part.get("thoughtSignature") or part.get("thought_signature"))
    return False
