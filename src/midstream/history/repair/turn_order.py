"""Rules about the first message, and about successive messages."""

from __future__ import annotations

from itertools import pairwise

from midstream.history.codecs.codec_spec import MessageTurn, PartKind, Role
from midstream.history.repair.placeholders import FIRST, GO_ON, NO_RESPONSE
from midstream.history.repair.repair_task import Task, is_silent, stands_in
from midstream.history.repair.system_prompts import settle_systems

_ALTERNATING = (Role.USER, Role.ASSISTANT)
_ITEMS = (PartKind.THINKING, PartKind.OPAQUE)
"""Independent items of a flat list: reasoning, and results of hosted tools."""


def settle_edges(turns: list[MessageTurn], task: Task) -> list[MessageTurn]:
    """Return the turns with a valid first one, and without invalid neighbours."""
    profile = task.profile
    turns = settle_systems(_begin_with_user(turns, task), task)
    if not profile.mixes_results and task.is_grouped:
        turns = _split_mixed(turns, task)
    if profile.alternates != "no" or profile.call_follows_user:
        turns = _join_neighbours(turns, task)
    if not profile.user_follows_results and not task.is_flat:
        turns = _add_responses(turns, task)
    if profile.alternates == "spoken":
        if task.form.spec.system == "parts":
            turns = [piece for turn in turns for piece in _one_prompt_each(turn)]
        turns = _alternate(turns, task)
    return turns


def _begin_with_user(turns: list[MessageTurn], task: Task) -> list[MessageTurn]:
    """Insert a user's turn before a response that must not be first."""
    place = 0
    while place < len(turns) and turns[place].role is Role.SYSTEM:
        place += 1
    if place == len(turns) or task.profile.first == "any":
        return turns
    first = turns[place]
    if first.role is not Role.ASSISTANT:
        return turns
    if task.profile.first == "call-later" and (place or not _calls_at_once(turns, task)):
        return turns
    task.report.note("starts-with-response", max(first.at, 0), "a user's turn was put before it")
    return [*turns[:place], task.turn_of(Role.USER, FIRST), *turns[place:]]


def _calls_at_once(turns: list[MessageTurn], task: Task) -> bool:
    """Whether the first response has calls; in a flat list it may be of several items."""
    if not task.is_flat:
        return turns[0].has_calls
    for turn in turns:
        if turn.role is not Role.ASSISTANT:
            return False
        if turn.has_calls:
            return True
        if turn.parts and turn.parts[0].kind is not PartKind.THINKING:
            return False
    return False


def _split_mixed(turns: list[MessageTurn], task: Task) -> list[MessageTurn]:
    """Separate results from a user's text where both must not share a message."""
    out: list[MessageTurn] = []
    for turn in turns:
        may_mix = turn.role is Role.USER
        results = [part for part in turn.parts if part.kind is PartKind.RESULT] if may_mix else []
        if not results or len(results) == len(turn.parts):
            out.append(turn)
            continue
        others = [part for part in turn.parts if part.kind is not PartKind.RESULT]
        out.append(MessageTurn(Role.USER, results, turn.source, turn.at, is_changed=True))
        if task.profile.alternates != "no":
            out.append(task.turn_of(Role.ASSISTANT, NO_RESPONSE))
        out.append(MessageTurn(Role.USER, others, at=turn.at, is_changed=True))
        task.report.note("mixed-turn", turn.at, "parted the results from the words")
    return out


def _join_neighbours(turns: list[MessageTurn], task: Task) -> list[MessageTurn]:
    """Join neighbours of one role, or separate them if they cannot be joined."""
    out: list[MessageTurn] = []
    start, count = 0, len(turns)
    while start < count:
        end = start + 1
        while end < count and turns[end].role is turns[start].role:
            end += 1
        run = turns[start:end]
        out += _run(run, task) if _is_refused_run(run, task) else run
        start = end
    return out


def _is_refused_run(run: list[MessageTurn], task: Task) -> bool:
    """Whether these must not follow one another; a response with calls is always the last of its run."""
    if len(run) == 1 or run[0].role not in _ALTERNATING or task.is_flat:
        return False
    return task.profile.alternates != "no" or run[-1].has_calls


def _run(run: list[MessageTurn], task: Task) -> list[MessageTurn]:
    out = [run[0]]
    for turn in run[1:]:
        before = out[-1]
        if _can_join(before, turn, task):
            parts = [*before.parts, *turn.parts]
            out[-1] = MessageTurn(before.role, parts, _source(before, turn), turn.at, is_changed=True)
            task.report.note("same-role-twice", max(turn.at, 0), "joined with the results before")
        else:
            other, words = (
                (Role.USER, GO_ON) if turn.role is Role.ASSISTANT else (Role.ASSISTANT, NO_RESPONSE)
            )
            out += [task.turn_of(other, words), turn]
            task.report.note("same-role-twice", max(turn.at, 0), "parted from the message before")
    return out


def _source(before: MessageTurn, turn: MessageTurn) -> object:
    return before.source if before.source is not None else turn.source


def _can_join(before: MessageTurn, turn: MessageTurn, task: Task) -> bool:
    """Whether a turn can be joined with the next: only stand-ins can.

    Any other join would change a message before the fault, and the provider's cached prefix. A constant filler between
    the two does not.
    """
    if not all(part.kind is PartKind.RESULT and stands_in(part) for part in before.parts):
        return False
    return task.profile.mixes_results or is_silent(before) == is_silent(turn)


def _one_prompt_each(turn: MessageTurn) -> list[MessageTurn]:
    """Split a request with several prompts: pydantic-ai sends each as a message."""
    if turn.role is not Role.USER:
        return [turn]
    prompts = [place for place, part in enumerate(turn.parts) if part.kind is PartKind.TEXT]
    edges = [0, *prompts[1:], len(turn.parts)]
    if len(edges) == 2:  # noqa: PLR2004 - nothing but its two ends
        return [turn]
    return [
        MessageTurn(Role.USER, turn.parts[start:end], turn.source, turn.at, is_changed=True)
        for start, end in pairwise(edges)
    ]


def _add_responses(turns: list[MessageTurn], task: Task) -> list[MessageTurn]:
    """Insert a response between results and a user's text."""
    out: list[MessageTurn] = []
    for turn in turns:
        is_behind_results = out and out[-1].role is not Role.ASSISTANT and is_silent(out[-1])
        if is_behind_results and turn.role is Role.USER and not is_silent(turn):
            out.append(task.turn_of(Role.ASSISTANT, NO_RESPONSE))
            task.report.note("user-after-result", max(turn.at, 0), "a response was put before it")
        out.append(turn)
    return out


def _is_uncounted(turn: MessageTurn, task: Task) -> bool:
    """Whether a template does not count this turn: calls, results, and items that are no message."""
    if is_silent(turn):
        return True
    if not task.is_flat or turn.role is not Role.ASSISTANT:
        return False
    return all(part.kind in _ITEMS and part.name != "chunk" for part in turn.parts)


def _alternate(turns: list[MessageTurn], task: Task) -> list[MessageTurn]:
    """Make user and assistant alternate, not counting calls and results."""
    out: list[MessageTurn] = []
    expected = Role.USER
    for turn in turns:
        if turn.role not in _ALTERNATING or _is_uncounted(turn, task):
            out.append(turn)
            continue
        if turn.role is not expected:
            words = GO_ON if expected is Role.USER else NO_RESPONSE
            out.append(task.turn_of(expected, words))
            task.report.note("same-role-twice", max(turn.at, 0), "parted from the message before")
        out.append(turn)
        expected = Role.ASSISTANT if turn.role is Role.USER else Role.USER
    return out


def trim_prefill(turns: list[MessageTurn], task: Task) -> None:
    """Remove the white space at the end of a response that the model must continue."""
    last = turns[-1] if turns else None
    part = last.parts[-1] if last is not None and last.role is Role.ASSISTANT and last.parts else None
    if last is None or part is None or part.kind is not PartKind.TEXT or not isinstance(part.body, str):
        return
    trimmed = part.body.rstrip()
    if trimmed != part.body:
        task.form.refill(part, trimmed)
        last.is_changed = True
        task.report.note("white-prefill", max(last.at, 0), "took the white space off its end")
