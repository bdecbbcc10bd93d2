"""Attachments that a response or a result must not have are moved to a user message after it."""

from __future__ import annotations

from midstream.history.codecs.codec_spec import MessageTurn, Part, PartKind, Role, Value
from midstream.history.repair.placeholders import ATTACHED, ATTACHED_BELOW
from midstream.history.repair.repair_task import Task


def take_out(turn: MessageTurn, task: Task) -> list[Part]:
    """Remove attachments that a turn's results or a response must not have; return them for a user's turn."""
    taken: list[Part] = []
    allowed = task.profile.result_files
    shows_files = turn.role is not Role.ASSISTANT or task.profile.responses_show_files
    for place, part in enumerate(turn.parts):
        kind = part.kind
        if kind is PartKind.RESULT and not _may_carry(part, allowed):
            words, media = task.form.pieces(part)
            task.form.refill(part, words.strip() or ATTACHED_BELOW)
            taken += media
            turn.is_changed = True
        elif kind is PartKind.MEDIA and not shows_files:
            taken.append(part)
        else:
            continue
        task.report.note("misplaced-file", turn.at, "shown behind it", part=place, call_id=_known_id(part.id))
    if not taken:
        return []
    gone = {id(part) for part in taken}
    task.drop(turn, gone)
    return [task.form.text(ATTACHED, Role.USER), *taken]


def _may_carry(result: Part, allowed: str) -> bool:
    """Whether a result may have its content; see `Profile.result_files`."""
    if allowed == "any" or (allowed == "unless-failed" and not result.failed):
        return True
    return not isinstance(result.body, list) or all(map(_is_words, result.body))


def _is_words(block: Value) -> bool:
    if isinstance(block, dict) and isinstance(block.get("type"), str):
        return bool(block["type"].endswith("text"))
    return isinstance(block, str) or (isinstance(block, dict) and block.keys() <= {"text", "json"})


def _known_id(call_id: object) -> str | None:
    return call_id if isinstance(call_id, str) else None
