"""Placement of system prompts as the profile requires, without copies."""

from __future__ import annotations

import re
from collections.abc import Callable

from midstream.history.codecs.codec_spec import (
    Json,
    MessageTurn,
    Part,
    PartKind,
    Role,
    Value,
    as_words,
    both_words,
)
from midstream.history.repair.placeholders import SYSTEM_NOTE
from midstream.history.repair.repair_task import Task, are_same, words_in
from midstream.history.repair.tidy import is_refused_empty


def place_systems(turns: list[MessageTurn], system: Value, task: Task) -> tuple[list[MessageTurn], Value]:
    """Move, merge or mark the system prompts in a list; return it with the system parameter.

    System prompts before the first other message are moved to the top (or into the parameter). Later ones become marked
    text of the user at their place, so that the prefix before them stays cached.
    """
    profile = task.profile
    if not profile.repeats_system and task.form.spec.system == "parts":
        _drop_copies(turns, task)
    if profile.system == "any" or not any(turn.role is Role.SYSTEM for turn in turns):
        return turns, system
    known = {words_of_system(system)} if system is not None else set()
    kept: list[MessageTurn] = []
    added: list[str] = []
    is_top, has_first, notes_read = True, False, 0
    for turn in turns:
        if turn.role is not Role.SYSTEM:
            is_top = is_top and not turn.parts and is_refused_empty(turn, task)
            kept.append(turn)
            continue
        words = _words(turn.parts)
        if words not in known:
            known.update(note for before in kept[notes_read:] for note in _notes(before))
            notes_read = len(kept)
        if not words.strip() or (words in known and profile.system != "after-user"):
            task.report.note(
                "repeated-system" if words.strip() else "empty-message", turn.at, "dropped the copy"
            )
        elif is_top and profile.system == "apart":
            added.append(words)
            task.report.note("system-in-list", turn.at, "moved into the system parameter")
        elif is_top and not has_first:
            kept.insert(0, turn)
            has_first = True
        elif profile.system == "after-user" and _may_stand(kept):
            kept.append(turn)
        elif not is_top and _takes_later(task):
            kept.append(turn)  # `settle_systems` decides later
        else:
            kept.append(_as_note(turn, words, task))
        known.add(words)
    if added:
        system = with_words(system, "\n\n".join(added), task.form.spec.write_system)
    return kept, system


def place_system_parts(turns: list[MessageTurn], task: Task) -> list[MessageTurn]:
    """Place the system prompts of pydantic-ai, which are parts of requests.

    pydantic-ai writes them into the parameter itself if there is one, so that only the other profiles matter. A request
    that has only system prompts, at the top of the list, is not a user's turn. Requires tidied turns, because tidying
    may drop the turn before a system prompt.
    """
    if task.form.spec.system != "parts":
        return turns
    if task.profile.system in ("after-user", "first"):
        before: Role | None = None
        known: set[str] = set()
        for turn in turns:
            if turn.role is Role.USER:
                before = _note_parts(turn, before, known, task)
            else:
                before = Role.ASSISTANT
        turns = [turn for turn in turns if turn.parts]
    for turn in turns:
        is_request = turn.role is Role.USER and bool(turn.parts)
        if not is_request or any(part.kind is not PartKind.SYSTEM for part in turn.parts):
            break
        turn.role = Role.SYSTEM
    return turns


def _note_parts(turn: MessageTurn, before: Role | None, known: set[str], task: Task) -> Role | None:
    """Mark the misplaced system prompts of a request; return the role of the last part."""
    is_first = task.profile.system == "first"
    parts: list[Part] = []
    for place, part in enumerate(turn.parts):
        if part.kind is not PartKind.SYSTEM:
            before = Role.TOOL if part.kind is PartKind.RESULT else Role.USER
            parts.append(part)
            continue
        words = as_words(part.body)
        may_stand = before is None or (before in (Role.USER, Role.SYSTEM) and not is_first)
        if may_stand:
            parts.append(part)
            before = Role.SYSTEM
        elif not words.strip() or (words in known and is_first):
            code = "repeated-system" if words.strip() else "blank-text"
            task.report.note(code, turn.at, "dropped the copy" if words.strip() else "dropped", part=place)
        else:
            parts.append(task.form.text(f"{SYSTEM_NOTE} {words}", Role.USER))
            task.report.note("system-in-list", turn.at, "kept in its place as a user's words", part=place)
            before = Role.USER
        known.add(words)
    if not are_same(parts, turn.parts):
        turn.parts, turn.is_changed = parts, True
    if not parts:
        task.report.note("empty-message", turn.at, "dropped: it is empty")
    return before


def _notes(turn: MessageTurn) -> list[str]:
    """Return the system prompts that an earlier repair kept as marked text."""
    if turn.role is not Role.USER:
        return []
    return [
        part.body[len(SYSTEM_NOTE) + 1 :]
        for part in turn.parts
        if part.kind is PartKind.TEXT and words_in(part).startswith(SYSTEM_NOTE)
    ]


def _drop_copies(turns: list[MessageTurn], task: Task) -> None:
    """Drop repeated system prompts inside user messages, which some agents insert again."""
    known: set[str] = set()
    for turn in turns:
        systems = [part for part in turn.parts if part.kind is PartKind.SYSTEM]
        for part in systems:
            words = as_words(part.body)
            if words in known:
                task.drop(turn, {id(part)})
                task.report.note("repeated-system", turn.at, "dropped the copy")
            known.add(words)
        known.update(_notes(turn))


def settle_systems(turns: list[MessageTurn], task: Task) -> list[MessageTurn]:
    """Mark the system prompts that a model accepts within the list, but not at their place."""
    if task.profile.system != "apart" or task.form.spec.system == "parts":
        return turns
    if not any(turn.role is Role.SYSTEM for turn in turns):
        return turns
    settled: list[MessageTurn] = []
    for number, turn in enumerate(turns):
        if turn.role is not Role.SYSTEM:
            settled.append(turn)
            continue
        is_after_user = bool(settled) and settled[-1].role is Role.USER and turns[number - 1] is settled[-1]
        is_before_response = number + 1 < len(turns) and turns[number + 1].role is Role.ASSISTANT
        is_fine = is_after_user and is_before_response
        settled.append(turn if is_fine else _as_note(turn, _words(turn.parts), task))
    return settled


def _takes_later(task: Task) -> bool:
    """Whether the requested model accepts system prompts within the list."""
    pattern = task.profile.system_models
    return bool(pattern and task.model and re.fullmatch(pattern, task.model))


def _may_stand(before: list[MessageTurn]) -> bool:
    """Whether a system prompt may follow these turns: none, another one, or a user's."""
    for turn in reversed(before):
        if turn.parts:  # an empty one is dropped later
            return turn.role in (Role.SYSTEM, Role.USER)
    return True


def _as_note(turn: MessageTurn, words: str, task: Task) -> MessageTurn:
    note = task.turn_of(Role.USER, f"{SYSTEM_NOTE} {words}")
    note.at = turn.at
    task.report.note("system-in-list", turn.at, "kept in its place as a user's words")
    return note


def _words(parts: list[Part]) -> str:
    words = ""
    for part in parts:
        words = both_words(words, as_words(part.body if part.kind is PartKind.TEXT else part.raw))
    return words


def words_of_system(system: Value) -> str:
    """Return the text of a system parameter of any form."""
    if isinstance(system, dict):
        system = system.get("parts")
    if isinstance(system, list):
        words = ""
        for block in system:
            words = both_words(words, as_words(block.get("text") if isinstance(block, dict) else block))
        return words
    return as_words(system)


def with_words(system: Value, words: str, write: Callable[[str], Value] = str) -> Value:
    """Add text to a system parameter, in its form or the format's default."""
    if system is None or system == "":
        return write(words)
    if isinstance(system, str):
        return f"{system}\n\n{words}"
    if isinstance(system, dict):
        pieces: list[Json] = [*system.get("parts", []), {"text": words}]
        return {**system, "parts": pieces}
    if isinstance(system, list):
        is_typed = any(isinstance(block, dict) and "type" in block for block in system)
        block: Value = {"type": "text", "text": words} if is_typed or not system else {"text": words}
        return [*system, words if system and isinstance(system[0], str) else block]
    return system
