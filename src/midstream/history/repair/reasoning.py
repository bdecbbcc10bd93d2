"""Reasoning that must stay with its consequence: item pairs, call signatures, reasoning content."""

from __future__ import annotations

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
from midstream.history.repair.placeholders import NO_REASONING, SENTINEL
from midstream.history.repair.repair_task import Task, is_text

_ITEM_ID_SIZE_MAX = 64
"""Characters of an item id (Responses)."""
_REASONING_MODELS = ("o1", "o3", "o4", "gpt-5", "codex")
UNNAMED = "rs_unnamed_"
"""Prefix of the replacement for a missing id of a reasoning item, whose followers need none."""
_PREFIXES = {"function_call": "fc_", "reasoning": "rs_"}


def settle_reasoning(turns: list[MessageTurn], task: Task, *, thinking: bool | None) -> list[MessageTurn]:
    """Apply the profile's or format's rules about reasoning."""
    if task.is_flat:
        return _item_pairs(turns, task)
    if task.profile.signs_calls and task.form.spec.matches_by_name:
        _sign_calls(turns, task)
    if task.profile.wants_reasoning != "no" and task.form.spec.reasoning != "no":
        _fill_reasoning(turns, task, thinking=thinking)
    return turns


def _item_pairs(turns: list[MessageTurn], task: Task) -> list[MessageTurn]:
    """Make item ids unique; make each reasoning item precede its follower, or drop it and the follower's id."""
    kept: list[MessageTurn] = []
    seen: set[str] = set()
    for turn in turns:
        item_id = turn.source.get("id") if isinstance(turn.source, dict) else None
        fault = _item_fault(turn, item_id, seen) if item_id is not None else None
        if isinstance(item_id, str):
            seen.add(item_id)
        if fault is None:
            kept.append(turn)
        elif _is_reasoning(turn):
            lost = "" if fault == "repeated-item" else _summary(turn.source)
            task.report.note(fault, turn.at, "dropped the reasoning", lost=lost)
        else:
            _drop_item_id(turn)
            task.report.note(fault, turn.at, "left out the item's id")
            kept.append(turn)
    followed = _drop_unfollowed(kept, task)
    if task.model is not None and task.model.startswith(_REASONING_MODELS):
        _drop_lone_call_ids(followed, task)
    return _with_named_followers(_without_lost_partners(turns, followed, task), task)


def _drop_lone_call_ids(turns: list[MessageTurn], task: Task) -> None:
    """Drop the item id of a reasoning model's call without its reasoning, which the server would require."""
    is_thought = False
    for turn in turns:
        if turn.role is not Role.ASSISTANT:
            is_thought = False
        elif _is_reasoning(turn):
            is_thought = True
        elif turn.has_calls and not is_thought and isinstance(turn.source, dict) and "id" in turn.source:
            _drop_item_id(turn)
            task.report.note("item-without-reasoning", turn.at, "left out the item's id")


def _drop_unfollowed(turns: list[MessageTurn], task: Task) -> list[MessageTurn]:
    """Drop reasoning items that no item of their response follows."""
    kept: list[MessageTurn] = []
    for turn in reversed(turns):
        if _is_reasoning(turn) and not (kept and kept[-1].role is Role.ASSISTANT):
            code, did = "reasoning-without-follower", "dropped the reasoning"
            task.report.note(code, turn.at, did, lost=_summary(turn.source))
        else:
            kept.append(turn)
    kept.reverse()
    return kept


def _with_named_followers(turns: list[MessageTurn], task: Task) -> list[MessageTurn]:
    """Drop reasoning before a message without an id: the server uses that id to find the reasoning's follower."""
    kept: list[MessageTurn] = []
    is_nameless = False
    for turn in reversed(turns):
        if not _is_reasoning(turn):
            source = turn.source if isinstance(turn.source, dict) else {}
            is_message = turn.role is Role.ASSISTANT and source.get("type", "message") == "message"
            is_nameless = is_message and source.get("id") is None
        elif is_nameless and not str(turn.source.get("id") or UNNAMED).startswith(UNNAMED):
            code, did = "nameless-follower", "dropped the reasoning"
            task.report.note(code, turn.at, did, lost=_summary(turn.source))
            continue
        kept.append(turn)
    kept.reverse()
    return kept


def _is_reasoning(turn: MessageTurn) -> bool:
    return isinstance(turn.source, dict) and turn.source.get("type") == "reasoning"


def _item_fault(turn: MessageTurn, item_id: Value, seen: set[str]) -> str | None:
    if turn.source.get("type") == "item_reference":
        return None
    if turn.role is Role.USER or turn.role is Role.SYSTEM:
        return "repeated-item" if isinstance(item_id, str) and item_id in seen else None
    if not isinstance(item_id, str) or not item_id or len(item_id) > _ITEM_ID_SIZE_MAX:
        return "bad-item-id"
    kind = turn.source.get("type")
    prefix = "msg_" if kind in (None, "message") else _PREFIXES.get(str(kind))
    if prefix is not None and not item_id.startswith(prefix):
        return "bad-item-id"
    return "repeated-item" if item_id in seen else None


def _drop_item_id(turn: MessageTurn) -> None:
    """Write an item without its id; an output message then becomes plain input."""
    kept = {key: value for key, value in turn.source.items() if key != "id"}
    first = turn.parts[0] if turn.parts else None
    if first is not None and first.kind in (PartKind.CALL, PartKind.RESULT) and isinstance(first.raw, dict):
        first.raw = {key: value for key, value in first.raw.items() if key != "id"}
    elif turn.role is Role.ASSISTANT and turn.source.get("type") == "message":
        words = ""
        for part in turn.parts:
            text = part.body if part.kind is PartKind.TEXT else part.raw.get("refusal", part.raw)
            words = both_words(words, as_words(text))
        turn.parts = [Part(PartKind.TEXT, None, body=words)]
        kept.pop("status", None)
    elif first is not None and first.raw is turn.source:
        first.raw = kept
    turn.source, turn.is_changed = kept, True


def _without_lost_partners(
    turns: list[MessageTurn], kept: list[MessageTurn], task: Task
) -> list[MessageTurn]:
    """Drop the ids of items whose reasoning was dropped, because the server would require the reasoning."""
    if len(kept) == len(turns):
        return kept
    remaining = {id(turn) for turn in kept}
    is_waiting = False
    for turn in turns:
        if id(turn) not in remaining:
            is_waiting = True
        elif turn.role is Role.ASSISTANT:
            is_thought = _is_reasoning(turn)
            if is_waiting and not is_thought and isinstance(turn.source, dict) and "id" in turn.source:
                _drop_item_id(turn)
                task.report.note("item-without-reasoning", turn.at, "left out the item's id")
            is_waiting = False
    return [turn for turn in kept if not _is_left_blank(turn, task)]


def _is_left_blank(turn: MessageTurn, task: Task) -> bool:
    """Whether a response that lost its id has no text either, so that it can be dropped."""
    if turn.role is not Role.ASSISTANT or not turn.is_changed:
        return False
    is_blank = all(part.kind is PartKind.TEXT and not part.body for part in turn.parts)
    if is_blank:
        task.report.note("empty-message", turn.at, "dropped: it is empty")
    return is_blank


def _summary(item: Json) -> str:
    words = ""
    summary = item.get("summary")
    for piece in summary if isinstance(summary, list) else [summary]:
        words = both_words(words, as_words(piece.get("text") if isinstance(piece, dict) else piece))
    return words


def _sign_calls(turns: list[MessageTurn], task: Task) -> None:
    """Give the first call of each step of the current turn the documented stand-in for its signature."""
    if not turns or turns[-1].role is not Role.USER:
        return  # the answer is complete: the next prompt begins a new turn
    start = len(turns) - 1
    while start and not _has_user_content(turns[start]):
        start -= 1
    for turn in turns[start:]:
        call = next((part for part in turn.parts if part.kind is PartKind.CALL), None)
        if call is None or is_text(call.signature):
            continue
        key = "thought_signature" if "function_call" in call.raw else "thoughtSignature"
        call.raw, call.signature, turn.is_changed = {**call.raw, key: SENTINEL}, SENTINEL, True
        task.report.note("call-without-signature", max(turn.at, 0), "gave it the documented stand-in")


def _has_user_content(turn: MessageTurn) -> bool:
    """Whether a user's turn has content besides tool results."""
    if turn.role is not Role.USER:
        return False
    return not turn.has_only(PartKind.RESULT)


def _fill_reasoning(turns: list[MessageTurn], task: Task, *, thinking: bool | None) -> None:
    """Give responses with calls a valid placeholder for lost reasoning."""
    is_every = task.profile.wants_reasoning == "every"
    is_thinking = thinking
    if thinking is None and not is_every:
        is_thinking = any(map(_has_thinking, turns))
    if is_thinking is False or not (is_thinking or is_every):
        return
    for turn in turns:
        if (turn.has_calls or (is_every and turn.role is Role.ASSISTANT)) and not _has_thinking(turn):
            turn.parts = [Part(PartKind.THINKING, None, body=NO_REASONING), *turn.parts]
            turn.is_changed = True
            task.report.note("missing-reasoning", max(turn.at, 0), "added a placeholder")


def _has_thinking(turn: MessageTurn) -> bool:
    return turn.has(PartKind.THINKING)
