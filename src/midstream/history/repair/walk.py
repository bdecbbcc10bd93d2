"""The repair in one pass: parse, tidy, pair, lay out, order, write."""

from __future__ import annotations

from typing import Literal

from msgspec.structs import replace

from midstream.history.codecs.codec_spec import Format, MessageTurn, PartKind, Role, Value
from midstream.history.profiles import Profile
from midstream.history.repair.call_ids import settle_ids
from midstream.history.repair.layout import LayoutWriter
from midstream.history.repair.pairing import Pairing
from midstream.history.repair.parsing import sendable, turns_of
from midstream.history.repair.reasoning import settle_reasoning
from midstream.history.repair.repair_task import Task
from midstream.history.repair.repeated_responses import without_retries
from midstream.history.repair.report import Advice, Repaired
from midstream.history.repair.signatures import odd_signatures
from midstream.history.repair.system_prompts import place_system_parts, place_systems
from midstream.history.repair.tidy import tidy_turns
from midstream.history.repair.turn_order import settle_edges, trim_prefill

Thinking = Literal[True, False, "every"] | None
"""Whether the coming request has thinking on, if known; `every`: and requires the reasoning of every response."""


def repair_messages(
    messages: list[Value],
    form: Format,
    profile: Profile,
    *,
    system: Value = None,
    model: str | None = None,
    thinking: Thinking = None,
    live_tail: bool = False,
    outcomes: dict[str, str] | None = None,
    prefill: bool = False,
) -> Repaired:
    """Repair a history for a profile; return the same list if it is valid.

    Raises:
        InvalidHistoryError: A message is not a JSON value.
    """
    if thinking == "every":
        profile, thinking = replace(profile, wants_reasoning="every"), True
    is_prefill = prefill and profile.trims_prefill
    task = Task(
        form=form, profile=profile, is_live=live_tail, model=model, outcomes=outcomes, is_prefill=is_prefill
    )
    clean = sendable(messages, task)
    if profile.signs == "anthropic" and task.is_grouped:
        task.odd_signatures = odd_signatures(clean)
    turns = turns_of(clean, task)
    turns, system = place_systems(turns, system, task)
    turns = without_retries(place_system_parts(tidy_turns(turns, task), task), task)
    pairing = Pairing(turns, task)
    turns = pairing.run()
    settle_ids(pairing.turns, pairing.calls, task)
    turns = LayoutWriter(turns, pairing.turns, task).run()
    turns = settle_edges(turns, task)
    turns = settle_reasoning(turns, task, thinking=thinking)
    if task.is_prefill:
        trim_prefill(turns, task)
    edits = tuple(task.report.edits)
    has_calls = any(turn.has_calls for turn in turns)
    advice = advice_for(turns, profile, has_calls=has_calls, thinking=thinking)
    if not edits:
        return Repaired(messages, system, (), advice)
    written = [turn.source if not turn.is_changed else form.build(turn) for turn in turns]
    return Repaired(written, system, edits, advice)


def advice_for(
    turns: list[MessageTurn], profile: Profile, *, has_calls: bool, thinking: bool | None
) -> Advice:
    """Return the settings for the coming request."""
    is_lost = thinking is True and profile.is_thinking_signed and _has_lost_thinking(turns)
    tools = True if has_calls and profile.name.startswith("bedrock") else None
    return Advice(thinking=False if is_lost else None, tools=tools)


def _has_lost_thinking(turns: list[MessageTurn]) -> bool:
    """Whether the running tool loop began without a thought, so that thinking must be off."""
    opening: MessageTurn | None = None
    is_tail = True  # a user's message after the last results belongs to the same turn
    for turn in reversed(turns):
        if turn.role is Role.ASSISTANT:
            if not turn.has_calls:
                break
            opening, is_tail = turn, False
        elif not is_tail and any(part.kind is not PartKind.RESULT for part in turn.parts):
            break
    return opening is not None and opening.parts[0].kind is not PartKind.THINKING
