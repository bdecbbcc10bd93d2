"""Other answers to a broken history than repairing it: leave out, or go back."""

from __future__ import annotations

from midstream.core.formats.parts import Format, Json, Kind, Role, Turn, Value
from midstream.core.profiles import Profile
from midstream.core.repair.engine import repaired
from midstream.core.repair.report import Edit, Repaired
from midstream.core.repair.task import is_text

RUN_KEYS = ("run_id",)
"""What binds a message to a run that is over (pydantic-ai)."""


def rolled_back(messages: list[Value], form: Format, profile: Profile, *, system: Value = None) -> Repaired:
    """Cut a history before the first thing a provider would refuse, at the end of a complete exchange.

    What is left is the longest such beginning in which nothing is wrong; it is a new list of the same objects.
    """
    end = len(messages)
    while end:
        found = repaired(messages[:end], form, profile, system=system).edits
        if not found:
            break
        end = min(*(edit.at for edit in found), end - 1)
    if end == len(messages):
        return Repaired(messages, system)
    lost = f"{len(messages) - end} messages"
    return Repaired(messages[:end], system, (Edit("rolled-back", end, "cut the rest off", lost=lost),))


def dropped(messages: list[Value], form: Format, profile: Profile, *, system: Value = None) -> Repaired:
    """Leave out what is incomplete, as rustey-shelley's filter and tunacode's passes do, in one walk.

    System prompts in the list, run ids, replies whose calls are not all answered in the next message (with
    the results they have), replies without anything, all but the last of requests in a row, and a request at
    the end: the next prompt takes its place. User words are lost; that is what this mode is for.
    """
    edits: list[Edit] = []
    kept: list[Turn] = []
    turns = [form.parse(message, at) for at, message in enumerate(messages) if isinstance(message, dict)]
    here = 0
    while here < len(turns):
        turn = turns[here]
        here += 1
        end = _end_of_results(turns, here) if turn.role is Role.ASSISTANT else here
        unit = turns[here - 1 : end]
        here = end
        if turn.role is Role.SYSTEM or all(part.kind is Kind.SYSTEM for part in turn.parts):
            what = "a system prompt" if turn.parts else "an empty message"
        elif not any(is_text(part.body) or part.kind is not Kind.TEXT for part in turn.parts):
            what = "an empty message"
        elif turn.has_calls and not _is_answered(turn, unit[1:]):
            what = "an incomplete exchange"
        else:
            if _is_request(turn) and kept and _is_request(kept[-1]):
                _leave_out(kept.pop(), "a request before another one", edits)
            kept += unit
            continue
        for each in unit:
            _leave_out(each, what, edits)
    if kept and _is_request(kept[-1]):
        _leave_out(kept.pop(), "a request at the end", edits)
    if not edits and not any(_is_bound(message) for message in messages):
        return repaired(messages, form, profile, system=system)
    rest = repaired([_unbound(turn.source, edits, turn.at) for turn in kept], form, profile, system=system)
    edits.sort(key=lambda edit: edit.at)
    return Repaired(rest.messages, rest.system, (*edits, *rest.edits), rest.advice)


def _is_request(turn: Turn) -> bool:
    return turn.role is Role.USER and not _has_results(turn)


def _is_bound(message: Value) -> bool:
    return isinstance(message, dict) and any(message.get(key) for key in RUN_KEYS)


def _leave_out(turn: Turn, what: str, edits: list[Edit]) -> None:
    edits.append(Edit("dropped", turn.at, f"left out {what}", lost=what))


def _unbound(message: Json, edits: list[Edit], at: int) -> Json:
    """A message without its run id."""
    if not _is_bound(message):
        return message
    edits.append(Edit("dropped", at, "left out the run id", lost="a run id"))
    return {key: value for key, value in message.items() if key not in RUN_KEYS}


def _has_results(turn: Turn) -> bool:
    return any(part.kind is Kind.RESULT for part in turn.parts)


def _end_of_results(turns: list[Turn], here: int) -> int:
    while here < len(turns) and turns[here].role is not Role.ASSISTANT and _has_results(turns[here]):
        here += 1
    return here


def _is_answered(turn: Turn, after: list[Turn]) -> bool:
    asked = [part for part in turn.parts if part.kind is Kind.CALL]
    answers = [part for other in after for part in other.parts if part.kind is Kind.RESULT]
    if any(part.is_by_name for part in asked):
        return sorted(part.name for part in asked) == sorted(part.name for part in answers)
    return sorted(str(part.id) for part in asked) == sorted(str(part.id) for part in answers)
