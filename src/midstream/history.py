"""Histories of any agent: check them, repair them, convert them.

Needs nothing else of midstream: plain dicts of one provider in, plain dicts out, no SDK, no I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from midstream.core.convert import Converted, converted
from midstream.core.formats.named import format_named
from midstream.core.formats.parts import Value
from midstream.core.profiles import profile_for
from midstream.core.repair.engine import repaired
from midstream.core.repair.modes import dropped, rolled_back
from midstream.core.repair.refusals import REFUSALS
from midstream.core.repair.report import Advice, Edit, Finding, Repaired
from midstream.errors import HistoryRefusedError, InvalidHistoryError

__all__ = ["Advice", "Converted", "Edit", "Finding", "Repaired", "check", "convert", "repair"]

Mode = Literal["repair", "strict", "drop", "rollback"]
Outcome = Literal["unknown", "interrupted", "denied", "not-started"]


def repair(
    messages: list[Value],
    *,
    format: str = "anthropic",  # noqa: A002 - the word every caller will look for
    profile: str | None = None,
    model: str | None = None,
    thinking: bool | None = None,
    system: Value = None,
    live_tail: bool = False,
    mode: Mode = "repair",
    outcomes: Mapping[str, Outcome] | None = None,
) -> Repaired:
    """Make a history acceptable to its provider, losing nothing.

    One linear walk. Nothing wrong: the very list that was given comes back. Otherwise a new list, in which
    every message that needed no change is still the same object; the input is never changed. The next prompt
    may follow whatever comes back. Repairing the result again changes nothing, so store it.

    Args:
        messages: One provider's messages, as plain dicts.
        format: `anthropic`, `openai-chat`, `openai-responses`, `gemini`, `mistral`, `bedrock`, `pydantic-ai` or
            `langchain`.
        profile: Whose rules hold; the format's own provider unless named (`midstream.core.profiles.PROFILES`).
        model: The model that will be asked; thinking that says it was signed for another one is dropped.
        thinking: Whether the coming request has thinking on, if known; `advice.thinking` may turn it off.
        system: The system prompt that is sent beside the list; comes back in `Repaired.system`, with system
            messages of the list moved into it where the provider wants them there.
        live_tail: The last reply is still at work (an approval is pending, a tool is running): its open calls
            are no defect and stay open.
        mode: `repair`; `strict` to raise instead; `drop` to leave out what is incomplete, user words too;
            `rollback` to cut the list at the last complete exchange.
        outcomes: How calls without a result ended, by call id, where the caller knows: `denied` by the user,
            `not-started`, `interrupted`, `unknown`. Unknown is assumed.

    Raises:
        InvalidHistoryError: This is no list, or a message is no JSON value (cyclic, too deep, other objects).
        HistoryRefusedError: In mode `strict`, something would be refused; `findings` says what and where.
        UsageError: There is no format or profile of this name.
    """
    if not isinstance(messages, list):
        raise InvalidHistoryError(f"a history is a list of messages, not {type(messages).__name__}")
    form = format_named(format)
    rules = profile_for(form, profile)
    if mode == "rollback":
        return rolled_back(messages, form, rules, system=system)
    if mode == "drop":
        return dropped(messages, form, rules, system=system)
    done = repaired(
        messages,
        form,
        rules,
        system=system,
        model=model,
        thinking=thinking,
        live_tail=live_tail,
        outcomes=dict(outcomes or {}),
    )
    if mode == "strict" and done.edits:
        findings = [_finding(edit) for edit in done.edits]
        first = findings[0]
        message = f"message {first.at}: {first.code}; {len(findings)} findings in all"
        raise HistoryRefusedError(message, findings=findings)
    return done


def check(
    messages: list[Value],
    profile: str | None = None,
    *,
    format: str = "anthropic",  # noqa: A002 - the word every caller will look for
    system: Value = None,
    live_tail: bool = False,
) -> list[Finding]:
    """List everything a provider would refuse, with its place and the rule it breaks; empty if nothing.

    Nothing is found exactly when `repair` would give back the list it was given.

    Raises:
        InvalidHistoryError: This is no list, or a message is no JSON value.
        UsageError: There is no format or profile of this name.
    """
    done = repair(messages, format=format, profile=profile, system=system, live_tail=live_tail)
    return [_finding(edit) for edit in done.edits]


def convert(messages: list[Value], *, source: str, target: str, system: Value = None) -> Converted:
    """Write one provider's messages as another's.

    Literal: nothing is repaired, so repair before or after. What the target cannot hold (another provider's
    signed thinking, hosted tools, unknown parts) is told in `findings` and kept as words where it has any.

    Raises:
        InvalidHistoryError: This is no list, or a message is no object.
        UsageError: There is no format of this name.
    """
    if not isinstance(messages, list):
        raise InvalidHistoryError(f"a history is a list of messages, not {type(messages).__name__}")
    return converted(messages, format_named(source), format_named(target), system=system)


def _finding(edit: Edit) -> Finding:
    return Finding(edit.code, edit.at, REFUSALS[edit.code].rule, edit.part, edit.call_id)
