"""Histories of any agent: check them, repair them, convert them.

Needs nothing else of midstream: plain dicts of one provider in, plain dicts out, no SDK, no I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from midstream.errors import InvalidHistoryError, UnreadableHistoryError
from midstream.history.codecs.codec_spec import Format, Value
from midstream.history.codecs.format_registry import FORMATS, FormatName, find_format
from midstream.history.codecs.recognition import candidates_for
from midstream.history.conversion import Converted, convert_messages
from midstream.history.profiles import ProfileName, find_profile, profile_for
from midstream.history.repair.modes import CallerKnowledge, Mode, finding_of, repair_in_mode, require_mode
from midstream.history.repair.report import Advice, Edit, Finding, Repaired
from midstream.history.repair.walk import Thinking

__all__ = [
    "Advice",
    "Converted",
    "Edit",
    "Finding",
    "FormatName",
    "Mode",
    "ProfileName",
    "Repaired",
    "check",
    "convert",
    "repair",
]

Outcome = Literal["unknown", "interrupted", "denied", "not-started"]


def repair(
    messages: list[Value],
    *,
    format: FormatName | None = None,  # noqa: A002 - the word every caller will look for
    profile: ProfileName | None = None,
    model: str | None = None,
    thinking: Thinking = None,
    system: Value = None,
    live_tail: bool = False,
    mode: Mode = "repair",
    outcomes: Mapping[str, Outcome] | None = None,
    prefill: bool = False,
) -> Repaired:
    """Make a history acceptable to its provider, losing nothing.

    One linear walk. Nothing wrong: the very list that was given comes back. Otherwise a new list, in which
    every message that needed no change is still the same object; the input is never changed. The next prompt
    may follow whatever comes back. Repairing the result again changes nothing, so store it.

    Args:
        messages: One provider's messages, as plain dicts.
        format: `anthropic`, `openai-chat`, `openai-responses`, `gemini`, `mistral`, `bedrock`, `pydantic-ai` or
            `langchain`. Without a name, it is recognized by the messages' content. A list whose messages fit several
            formats comes back as it is where none of them finds anything wrong, and is refused otherwise.
        profile: Whose rules hold; the format's own provider unless named (`midstream.history.profiles.PROFILES`).
        model: The model that will be asked; thinking that was signed for another one is dropped.
        thinking: Whether the coming request has thinking on, if known; `advice.thinking` may turn it off. `every`:
            it has, and the provider requires the reasoning of every response, not only of those with calls.
        system: The system prompt that is sent beside the list; comes back in `Repaired.system`, with system
            messages of the list moved into it where the provider requires that.
        live_tail: The last response is still at work (an approval is pending, a tool is running): its open calls
            are no defect and stay open.
        mode: `repair`; `strict` to raise instead; `drop` to leave out steps that are not complete, and nothing of a
            user; `sanitize` for what an aborted run left, as a run of another framework takes it: without open
            calls, empty responses, system prompts, run ids, and all but the last of requests in a row; `rollback` to
            cut the list at the last complete step. `Edit.lost` holds the text that went.
        outcomes: How calls without a result ended, by call id, where the caller has them: `denied` by the user,
            `not-started`, `interrupted`, `unknown`. Unknown is assumed.
        prefill: The last response is one that the model is to continue.

    Raises:
        InvalidHistoryError: This is no list, or a message is no JSON value (cyclic, too deep, other objects).
        HistoryRefusedError: In mode `strict`, something would be refused; `findings` has what and where.
        UnreadableHistoryError: No format was named, and the messages fit several; the message lists them.
        UsageError: There is no format, profile or mode of this name.
    """
    if not isinstance(messages, list):
        raise InvalidHistoryError(f"a history must be a list of messages; got {type(messages).__name__}")
    require_mode(mode)
    given = CallerKnowledge(
        system=system,
        model=model,
        thinking=thinking,
        live_tail=live_tail,
        outcomes=dict(outcomes or {}),
        prefill=prefill,
    )
    form = find_format(format) if format is not None else _recognize(messages, profile, given)
    return repair_in_mode(mode, messages, form, profile_for(form, profile, model), given)


def _recognize(messages: list[Value], profile: str | None, given: CallerKnowledge) -> Format:
    """Recognize the format of a list.

    Raises:
        UnreadableHistoryError: It may be of several formats, and they disagree about what is wrong.
    """
    spoken = find_profile(profile).speaks if profile is not None else None
    names = candidates_for(messages, system=given.system, spoken=spoken)
    forms = [find_format(name) for name in names if name in FORMATS]
    if len(forms) == len(names) == 1:
        return forms[0]
    if len(forms) == len(names) and not any(
        repair_in_mode("repair", messages, form, profile_for(form, profile, given.model), given).edits
        for form in forms
    ):
        return forms[0]
    raise UnreadableHistoryError(
        f"these messages may be of several formats ({', '.join(names)}); choose one with format=",
        reason="mixed-formats",
    )


def check(
    messages: list[Value],
    profile: ProfileName | None = None,
    *,
    format: FormatName | None = None,  # noqa: A002 - the word every caller will look for
    system: Value = None,
    live_tail: bool = False,
    prefill: bool = False,
) -> list[Finding]:
    """List everything a provider would refuse, with its place and the rule it breaks; empty if nothing.

    Nothing is found exactly when `repair` would give back the list it was given. Without a `format`, it is
    recognized by the messages' content.

    Raises:
        InvalidHistoryError: This is no list, or a message is no JSON value.
        UnreadableHistoryError: No format was named, and the messages fit several; the message lists them.
        UsageError: There is no format or profile of this name.
    """
    done = repair(
        messages, format=format, profile=profile, system=system, live_tail=live_tail, prefill=prefill
    )
    return [finding_of(edit) for edit in done.edits]


def convert(
    messages: list[Value], *, source: FormatName, target: FormatName, system: Value = None
) -> Converted:
    """Write one provider's messages as another's.

    Literal: nothing is repaired, so repair before or after. What the target cannot hold (another provider's
    signed thinking, hosted tools, unknown parts) is listed in `findings` and kept as words where it has any.

    Raises:
        InvalidHistoryError: This is no list, or a message is no object.
        UsageError: There is no format of this name.
    """
    if not isinstance(messages, list):
        raise InvalidHistoryError(f"a history must be a list of messages; got {type(messages).__name__}")
    return convert_messages(messages, find_format(source), find_format(target), system=system)


repair_by_name: Callable[..., Repaired] = repair
check_by_name: Callable[..., list[Finding]] = check
convert_by_name: Callable[..., Converted] = convert
"""The same three for formats and profiles that are known at run time only, such as from a file: a wrong name raises."""
