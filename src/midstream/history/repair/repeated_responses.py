"""Retries: exact copies of a response with calls and its results."""

from __future__ import annotations

from midstream.history.codecs.codec_spec import MessageTurn, PartKind, Role
from midstream.history.repair.repair_task import Task, is_silent


def without_retries(turns: list[MessageTurn], task: Task) -> list[MessageTurn]:
    """Drop an exact copy directly after a step, if ids must be unique in the list.

    Otherwise such a copy is accepted. The calls of a copy with any difference get new ids.
    """
    if task.profile.ids_are_unique != "list" or _are_distinct(turns):
        return turns
    kept: list[MessageTurn] = []
    before: list[MessageTurn] = []
    here = 0
    while here < len(turns):
        end = _end_of_step(turns, here)
        step = turns[here:end]
        if end > here + 1 and before and _are_equal(step, before):
            task.report.note("repeated-step", max(step[0].at, 0), "dropped the copy")
            here = end
            continue
        kept += step
        before = step
        here = end
    return turns if len(kept) == len(turns) else kept


def _are_distinct(turns: list[MessageTurn]) -> bool:
    """Whether no two calls have the same id: then there is no copy."""
    ids = [part.id for turn in turns for part in turn.parts if part.kind is PartKind.CALL]
    return all(type(each) is str for each in ids) and len(set(ids)) == len(ids)


def _end_of_step(turns: list[MessageTurn], here: int) -> int:
    """Return the end of the step that begins here; one turn if none does."""
    end = here
    if turns[here].role is not Role.ASSISTANT:
        return here + 1
    while end < len(turns) and turns[end].role is Role.ASSISTANT and is_silent(turns[end]):
        end += 1
    answers = end
    while here < end < len(turns) and turns[end].role is not Role.ASSISTANT and is_silent(turns[end]):
        end += 1
    return end if end > answers else here + 1


def _are_equal(step: list[MessageTurn], before: list[MessageTurn]) -> bool:
    return len(step) == len(before) and all(
        turn.source is not None and not turn.is_changed and turn.source == other.source
        for turn, other in zip(step, before, strict=True)
    )
