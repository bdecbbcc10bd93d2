"""State that the steps of one repair share."""

from __future__ import annotations

from operator import is_

from midstream.history.codecs.codec_spec import (
    Format,
    MessageTurn,
    Part,
    PartKind,
    ResultPlacement,
    Role,
    Value,
)
from midstream.history.profiles import Profile
from midstream.history.repair.placeholders import ANSWERS
from midstream.history.repair.report import EditLog
from midstream.history.repair.tool_names import names_of


class Task:
    """One repair: the format, the profile, and the findings so far."""

    def __init__(
        self,
        *,
        form: Format,
        profile: Profile,
        is_live: bool = False,
        model: str | None = None,
        outcomes: dict[str, str] | None = None,
        is_prefill: bool = False,
    ) -> None:
        self.form = form
        self.profile = profile
        self.is_live = is_live
        self.model = model
        self.outcomes = outcomes or {}
        self.is_prefill = is_prefill
        """Whether the model must continue the last response."""
        self.odd_signatures: frozenset[str] = frozenset()
        self.report = EditLog()
        self.names = names_of(form, profile)
        """The valid tool names."""

    @property
    def is_grouped(self) -> bool:
        """Whether results are parts of the next user message."""
        return self.form.layout is ResultPlacement.GROUPED

    @property
    def is_flat(self) -> bool:
        """Whether calls and results are items of one list."""
        return self.form.layout is ResultPlacement.FLAT

    def turn_of(self, role: Role, words: str) -> MessageTurn:
        """Create a turn of one text."""
        return MessageTurn(role, [self.form.text(words, role)], is_changed=True)

    def drop(self, turn: MessageTurn, gone: set[int]) -> None:
        """Remove parts (by identity) from a turn."""
        turn.parts = [part for part in turn.parts if id(part) not in gone]
        turn.is_changed = True


def is_silent(turn: MessageTurn) -> bool:
    """Whether a turn has calls or only results, so that it does not count as a user's or assistant's."""
    if turn.role is Role.TOOL:
        return True
    if turn.role is Role.ASSISTANT:
        return turn.has_calls
    return bool(turn.parts) and turn.has_only(PartKind.RESULT)


def are_same(parts: list[Part], others: list[Part]) -> bool:
    """Whether both lists have the same objects in the same order."""
    return len(parts) == len(others) and all(map(is_, parts, others))


def words_in(part: Part) -> str:
    """Return the text of a text or thinking part, or an empty text."""
    return part.body if isinstance(part.body, str) else ""


def is_text(value: Value) -> bool:
    """Whether a value is a text that is not blank."""
    return isinstance(value, str) and bool(value.strip())


def stands_in(result: Part) -> bool:
    """Whether a result is only a stand-in of a repair."""
    body = result.body
    if isinstance(body, dict):
        body = body.get("error")
    elif isinstance(body, list) and len(body) == 1 and isinstance(body[0], dict):
        body = body[0].get("text")
    return isinstance(body, str) and body in ANSWERS
