"""opencode's storage: `session/PROJECT/SESSION.json`, `message/SESSION/MESSAGE.json`, `part/MESSAGE/PART.json`.

A call and its result are one part with a state, so that a result cannot be lost; what can be is a call that never
came to an end, a part whose message is gone, and a file that was cut while it was written.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from midstream.core.repair.words import UNKNOWN
from midstream.doctor.shapes import Json


class StoredMessage(Struct):
    """One message with its parts, in their order."""

    name: str
    """Its file below the storage folder."""
    info: Json
    parts: list[tuple[str, Json]]
    """Each with its file."""


def messages_of(stored: Sequence[StoredMessage]) -> tuple[list[Json], list[str]]:
    """Return what opencode would send, in Anthropic's shape, and the file each message comes from.

    A reply that failed before it said anything is not sent, nor is what was only shown.
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
    """Whether a part is a call that never came to an end."""
    state = part.get("state")
    return part.get("type") == "tool" and (
        not isinstance(state, dict) or state.get("status") not in ("completed", "error")
    )


def ended(part: Json) -> Json:
    """Return an open call as one that was interrupted; it ended when it began, as far as anybody knows."""
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
