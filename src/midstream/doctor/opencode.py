"""opencode's storage: `session/PROJECT/SESSION.json`, `message/SESSION/MESSAGE.json`, `part/MESSAGE/PART.json`.

A call and its result are one part with a state, so a result cannot be lost. Possible faults are a call without an end,
a part without its message, and a truncated file.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from midstream.doctor.findings import HistoryReport, LocatedFinding, finding, finding_of, status_of
from midstream.doctor.shapes import Json
from midstream.history.operations import repair_by_name as repair
from midstream.history.repair.placeholders import UNKNOWN

CORRECTED_BY_OPENCODE = {"dangling-call"}
"""Faults that opencode corrects itself when it sends."""


class StoredMessage(Struct):
    """One message with its parts, in order."""

    name: str
    """Its file in the storage folder."""
    info: Json
    parts: list[tuple[str, Json]]
    """The parts with their files."""


def messages_of(stored: Sequence[StoredMessage]) -> tuple[list[Json], list[str]]:
    """Return the messages that opencode would send, in Anthropic's format, with their files.

    Failed responses without output, and content that was only shown, are not sent.
    """
    messages: list[Json] = []
    files: list[str] = []
    for each in stored:
        spoken, results = _blocks(each)
        role = each.info.get("role")
        if spoken:
            messages.append({"role": role, "content": spoken})
            files.append(each.name)
        if results:
            messages.append({"role": "user", "content": results})
            files.append(each.name)
    return messages, files


class StorageFindings:
    """The findings in the sessions of a storage.

    Args:
        profile: The provider whose rules apply; None without those that opencode corrects itself.
    """

    def __init__(self, profile: str | None) -> None:
        self.findings: list[LocatedFinding] = []
        self.messages = 0
        self.sessions = 0
        self._profile = profile

    def judge(self, stored: Sequence[StoredMessage]) -> None:
        """Examine one session.

        Raises:
            UsageError: There is no profile with this name.
        """
        self.sessions += 1
        self.messages += len(stored)
        messages, files = messages_of(stored)
        edits = repair(messages, format="anthropic", profile=self._profile or "neutral").edits
        self.findings += [
            finding_of(edit, message=edit.at, file=files[edit.at] if 0 <= edit.at < len(files) else "")
            for edit in edits
            if self._profile is not None or edit.code in CORRECTED_BY_OPENCODE
        ]

    def note_orphan(self, file: str) -> None:
        """Record parts without their message."""
        self.findings.append(finding("orphan-part", "none: opencode does not read it", file=file))

    def report(self, path: Path) -> HistoryReport:
        """Return the report about the whole storage."""
        return HistoryReport(
            str(path),
            status_of(self.findings),
            "opencode",
            self._profile or "opencode",
            self.messages,
            self.sessions,
            tuple(self.findings),
        )


def _blocks(stored: StoredMessage) -> tuple[list[Json], list[Json]]:
    spoken: list[Json] = []
    results: list[Json] = []
    for _, part in stored.parts:
        if part.get("ignored"):
            continue
        match part.get("type"):
            case "text" if part.get("text"):
                spoken.append({"type": "text", "text": part["text"]})
            case "reasoning" if signature := _signature(part):
                spoken.append({"type": "thinking", "thinking": part.get("text", ""), "signature": signature})
            case "file" if isinstance(part.get("url"), str):
                spoken.append({"type": "document", "source": {"type": "url", "url": part["url"]}})
            case "tool":
                call, result = _call(part)
                spoken.append(call)
                results.extend(result)
            case _:
                pass
    return spoken, results


def _signature(part: Json) -> str | None:
    metadata = part.get("metadata")
    of_provider = metadata.get("anthropic") if isinstance(metadata, dict) else None
    found = of_provider.get("signature") if isinstance(of_provider, dict) else None
    return found if isinstance(found, str) else None


def _call(part: Json) -> tuple[Json, list[Json]]:
    state = part.get("state")
    state = state if isinstance(state, dict) else {}
    call_id = part.get("callID")
    call = {"type": "tool_use", "id": call_id, "name": part.get("tool"), "input": state.get("input") or {}}
    match state.get("status"):
        case "completed":
            return call, [
                {"type": "tool_result", "tool_use_id": call_id, "content": _words(state.get("output"))}
            ]
        case "error":
            words = _words(state.get("error")) or "(failed without a message)"
            return call, [{"type": "tool_result", "tool_use_id": call_id, "content": words, "is_error": True}]
        case _:
            return call, []


def _words(value: object) -> str:
    return value if isinstance(value, str) else ""


def is_open(part: Json) -> bool:
    """Whether a part is a call without an end."""
    state = part.get("state")
    return part.get("type") == "tool" and (
        not isinstance(state, dict) or state.get("status") not in ("completed", "error")
    )


def end_call(part: Json) -> Json:
    """Return an open call as an interrupted one; its recorded end is its start."""
    state = part.get("state")
    state = state if isinstance(state, dict) else {}
    time = state.get("time")
    start = time.get("start", 0) if isinstance(time, dict) else 0
    kept = {key: value for key, value in state.items() if key in ("input", "metadata", "raw", "title")}
    closed = {
        "input": {},
        **kept,
        "status": "error",
        "error": UNKNOWN,
        "time": {"start": start, "end": start},
    }
    return {**part, "state": closed}


def newer_message(kind: str, value: Json) -> tuple[Json, list[Json]] | None:
    """Return a message of the newer tables as an older one and its parts; None for one that is never sent."""
    match kind:
        case "user" | "synthetic":
            return {"role": "user"}, [{"type": "text", "text": value.get("text")}]
        case "assistant":
            return {"role": "assistant"}, [_older(block) for block in _content(value)]
        case _:
            return None


def end_newer_calls(value: Json) -> Json:
    """Return a message of the newer tables with open calls as interrupted ones; unchanged if there are none."""
    content = _content(value)
    if not any(map(_is_open_newer, content)):
        return value
    return {
        **value,
        "content": [_end_newer_call(block) if _is_open_newer(block) else block for block in content],
    }


def _content(value: Json) -> list[Json]:
    content = value.get("content")
    return [block for block in content if isinstance(block, dict)] if isinstance(content, list) else []


def _older(block: Json) -> Json:
    if block.get("type") != "tool":
        return {**block, "metadata": block.get("providerMetadata")}
    state = block.get("state")
    state = state if isinstance(state, dict) else {}
    content = state.get("content")
    words = (
        [each.get("text") for each in content if isinstance(each, dict)] if isinstance(content, list) else []
    )
    output = "\n".join(each for each in words if isinstance(each, str))
    error = state.get("error")
    older = {"status": state.get("status"), "input": _input(state), "output": output}
    if isinstance(error, dict):
        older["error"] = error.get("message")
    return {"type": "tool", "callID": block.get("id"), "tool": block.get("name"), "state": older}


def _input(state: Json) -> Json:
    found = state.get("input")
    return found if isinstance(found, dict) else {}


def _is_open_newer(block: Json) -> bool:
    return block.get("type") == "tool" and is_open(_older(block))


def _end_newer_call(block: Json) -> Json:
    state = block.get("state")
    state = state if isinstance(state, dict) else {}
    closed = {
        "content": [],
        "structured": {},
        **state,
        "input": _input(state),
        "status": "error",
        "error": {"type": "unknown", "message": UNKNOWN},
    }
    return {**block, "state": closed}
