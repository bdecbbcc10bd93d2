"""The only file of the golden histories that imports midstream; a rename is applied here, never in the data."""

from __future__ import annotations

import copy
from typing import Any

from midstream.errors import HistoryRefusedError, MidstreamError
from midstream.history.operations import check, convert, repair

Json = dict[str, Any]


def repaired(case: Json) -> Json:
    """Run one case; return its outcome as plain JSON values without names of classes or modules."""
    given = copy.deepcopy(case["messages"])
    named = {"format": case["format"], "profile": case["profile"]}
    options = case["options"]
    outcome: Json
    try:
        done = repair(given, **named, **options)
    except HistoryRefusedError as refusal:
        outcome = {"refused": [_finding(each) for each in refusal.findings]}
    except MidstreamError as error:
        outcome = {"error": error.code}
    else:
        outcome = {
            "edits": [_edit(each) for each in done.edits],
            "same": done.messages is given,
            "messages": None if done.messages is given else done.messages,
            "system": done.system,
            "advice": [done.advice.thinking, done.advice.tools],
        }
    if given != case["messages"]:
        outcome["input"] = "changed"
    if "mode" not in options:
        taken = {key: options[key] for key in ("system", "live_tail", "prefill") if key in options}
        outcome["found"] = _found(given, named, taken)
    if case["target"]:
        outcome["converted"] = _converted(given, case)
    return outcome


def _found(messages: list[Any], named: Json, options: Json) -> list[Any] | str:
    try:
        return [_finding(each) for each in check(messages, **named, **options)]
    except MidstreamError as error:
        return error.code


def _converted(messages: list[Any], case: Json) -> Json | str:
    system = case["options"].get("system")
    try:
        done = convert(messages, source=case["format"], target=case["target"], system=system)
    except MidstreamError as error:
        return error.code
    return {
        "messages": done.messages,
        "system": done.system,
        "findings": [_finding(each) for each in done.findings],
    }


RENAMED = {
    "repeated-step": "repeated-exchange",
    "response-in-user-turn": "reply-in-user-turn",
    "split-response": "split-reply",
    "starts-with-response": "starts-with-reply",
    "user-in-response": "user-in-reply",
}
"""Codes of findings with another name in the data."""


def _edit(edit: Any) -> list[Any]:  # noqa: ANN401 - the name of its class may change
    return [RENAMED.get(edit.code, edit.code), edit.at, edit.part, edit.call_id, edit.lost]


def _finding(finding: Any) -> list[Any]:  # noqa: ANN401 - as above
    return [RENAMED.get(finding.code, finding.code), finding.at, finding.part, finding.call_id]
