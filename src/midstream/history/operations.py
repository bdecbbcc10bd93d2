"""Check, repair and conversion of histories.

Independent of the rest of midstream: plain dicts of one provider in, plain dicts out, no SDK, no I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from midstream.errors import InvalidHistoryError, UnreadableHistoryError, UsageError
from midstream.history.codecs.codec_spec import Format, Value
from midstream.history.codecs.format_registry import FORMATS, FormatName, find_format
from midstream.history.codecs.recognition import candidates_for
from midstream.history.conversion import Converted, convert_messages
from midstream.history.profiles import ProfileName, find_profile, profile_for
from midstream.history.repair.modes import CallerKnowledge, Mode, finding_of, repair_in_mode, require_mode
from midstream.history.repair.placeholders import OUTCOMES
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
    format: FormatName | None = None,  # noqa: A002 - the usual name for it
    profile: ProfileName | None = None,
    model: str | None = None,
    thinking: Thinking = None,
    system: Value = None,
    live_tail: bool = False,
    mode: Mode = "repair",
    outcomes: Mapping[str, Outcome] | None = None,
    prefill: bool = False,
) -> Repaired:
    """Repair a history so that its provider accepts it, without loss of content.

    Takes linear time. A valid list is returned itself. Otherwise the result is a new list, in which every unchanged
    message is the same object; the input is never changed. The next prompt may follow the result. A repeated repair
    changes nothing, so store the result.

    Args:
        messages: One provider's messages, as plain dicts.
        format: `anthropic`, `openai-chat`, `openai-responses`, `gemini`, `mistral`, `bedrock`, `pydantic-ai` or
            `langchain`. Without a name, it is recognized by the messages' content. A list that may be of several
            formats is returned unchanged if it is valid in each of them, and refused otherwise.
        profile: The provider whose rules apply; by default the format's own (`midstream.history.profiles.PROFILES`).
        model: The model of the coming request; thinking that was signed for another one is dropped.
        thinking: Whether the coming request has thinking on, if known; `advice.thinking` may turn it off. `every`:
            thinking is on, and the provider requires the reasoning of every response, not only of those with calls.
        system: The separate system prompt; returned in `Repaired.system`, with system messages if required.
        live_tail: Whether the last response is unfinished (an approval or a tool is running); its open calls are valid.
        mode: `repair`; `strict` raises instead; `drop` removes incomplete steps, and no user message; `sanitize`
            prepares the rest of an aborted run for a new one: without open calls, empty responses, system prompts, run
            ids, and all but the last of successive requests; `rollback` cuts the list after the last complete step.
            `Edit.lost` has the removed text.
        outcomes: Known outcomes of calls without a result, by call id: `denied` by the user, `not-started`,
            `interrupted`, `unknown` (the default).
        prefill: Whether the model must continue the last response.

    Raises:
        InvalidHistoryError: The history is not a list, or a message is not a JSON value (cyclic, too deep, objects).
        HistoryRefusedError: In mode `strict`, the provider would refuse the history; `findings` has the reasons.
        UnreadableHistoryError: No format was named, and several are possible; the message lists them.
        UsageError: There is no format, profile, mode or outcome with this name.
    """
    if not isinstance(messages, list):
        raise InvalidHistoryError(f"a history must be a list of messages; got {type(messages).__name__}")
    require_mode(mode)
    if unknown := sorted({str(each) for each in (outcomes or {}).values()} - OUTCOMES.keys()):
        raise UsageError(f"unknown outcome {unknown[0]!r}; known: {', '.join(OUTCOMES)}")
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
        UnreadableHistoryError: Several formats are possible, and their findings differ.
    """
    spoken = find_profile(profile).format if profile is not None else None
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
    format: FormatName | None = None,  # noqa: A002 - the usual name for it
    system: Value = None,
    live_tail: bool = False,
    prefill: bool = False,
) -> list[Finding]:
    """Return everything that a provider would refuse, with its place and its rule.

    The result is empty exactly if `repair` would return the list itself. The content determines the default format.

    Raises:
        InvalidHistoryError: The history is not a list, or a message is not a JSON value.
        UnreadableHistoryError: No format was named, and several are possible; the message lists them.
        UsageError: There is no format or profile with this name.
    """
    done = repair(
        messages, format=format, profile=profile, system=system, live_tail=live_tail, prefill=prefill
    )
    return [finding_of(edit) for edit in done.edits]


def convert(
    messages: list[Value], *, source: FormatName, target: FormatName, system: Value = None
) -> Converted:
    """Write one provider's messages as another's.

    The conversion is literal, so repair before or after it. Content that the target has no place for (another
    provider's signed thinking, hosted tools, unknown parts) is listed in `findings`, and kept as text if possible.

    Raises:
        InvalidHistoryError: The history is not a list, or a message is not an object.
        UsageError: There is no format with this name.
    """
    if not isinstance(messages, list):
        raise InvalidHistoryError(f"a history must be a list of messages; got {type(messages).__name__}")
    return convert_messages(messages, find_format(source), find_format(target), system=system)


repair_by_name: Callable[..., Repaired] = repair
check_by_name: Callable[..., list[Finding]] = check
convert_by_name: Callable[..., Converted] = convert
"""The same functions for names of formats and profiles that are known only at run time; an unknown name raises."""
