"""History files of other programs: find out what a file is, read the histories in it, write them back.

Reads Claude Code and Codex JSONL, JSON lists and requests of every provider, LangGraph states, tunacode sessions and
plain JSONL of messages. A last line that was cut is accepted: that is how a killed program leaves its file.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msgspec import Struct

from midstream.errors import InvalidHistoryError

Json = dict[str, Any]  # what is in the file: anything

LOOK_MAX = 50
"""Messages looked at to tell which provider's they are."""
_RESPONSES = {"function_call", "function_call_output", "reasoning", "custom_tool_call", "web_search_call"}
_LISTS = ("messages", "input", "contents", "message_history")
_STATES = ("channel_values", "values", "state", "session")


class Stored(Struct):
    """One history of a file.

    `at` is the way to it in a JSON document (keys); `records` are the lines it was gathered from, if any.
    """

    kind: str
    form: str
    messages: list[Any]
    at: tuple[str, ...] = ()
    system: Any = None
    notes: tuple[str, ...] = ()
    records: dict[int, Json] = {}
    """Of a line file: the record of each message, by the identity of the message."""


def read_history(path: Path, form: str | None = None) -> Stored:
    """Read the history in a file; `form` says which provider's messages they are, where the file cannot.

    Raises:
        InvalidHistoryError: This is no history that midstream can read; the message says what it is instead.
        OSError: The file cannot be read.
    """
    with path.open("rb") as file:
        head = file.read(1 << 16).lstrip()
    if not head:
        raise InvalidHistoryError("the file is empty")
    if path.suffix == ".jsonl" or _is_lines(head):
        return _of_lines(path, form)
    try:
        document = json.loads(path.read_bytes().decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError) as error:
        raise InvalidHistoryError(f"this is no JSON: {error}") from error
    return _of_document(document, form)


def write_history(stored: Stored, messages: list[Any], source: Path, target: Path) -> None:
    """Write a file like `source` with other messages, whole or not at all.

    The target is written beside itself and moved into place, so that nobody ever sees half of it.
    """
    if stored.kind in ("claude-code", "codex", "lines"):
        text = "".join(f"{json.dumps(record, ensure_ascii=False)}\n" for record in _records(stored, messages))
    else:
        document = json.loads(source.read_bytes().decode("utf-8", "surrogatepass"))
        text = json.dumps(_with(document, stored.at, messages), ensure_ascii=False, indent=2) + "\n"
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors="replace") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def format_of(messages: list[Any]) -> str:
    """Tell which provider's messages these are."""
    seen = [message for message in messages[:LOOK_MAX] if isinstance(message, dict)]
    for message in seen:
        if (found := _told_by(message)) is not None:
            return found
    has_roles = any(message.get("role") in ("system", "developer") for message in seen)
    return "openai-chat" if has_roles else "anthropic"


def _told_by(message: Json) -> str | None:
    """The provider, where one message is enough to tell."""
    kind, content = message.get("type"), message.get("content")
    if message.get("kind") in ("request", "response"):
        return "pydantic-ai"
    if isinstance(message.get("parts"), list):
        return "gemini"
    if "data" in message or "lc" in message or kind in ("human", "ai"):
        return "langchain"
    if kind in _RESPONSES:
        return "openai-responses"
    if message.get("role") in ("tool", "function") or "tool_calls" in message:
        return "openai-chat"
    for block in content if isinstance(content, list) else ():
        kind = block.get("type") if isinstance(block, dict) else None
        if kind in ("input_text", "output_text"):
            return "openai-responses"
        if kind in ("tool_use", "tool_result", "thinking", "redacted_thinking"):
            return "anthropic"
        if kind == "image_url":
            return "openai-chat"
        if kind is None and isinstance(block, dict) and block.keys() & {"text", "toolUse", "toolResult"}:
            return "bedrock"
    return None


def _is_lines(head: bytes) -> bool:
    first, newline, rest = head.partition(b"\n")
    if not newline or not first.strip().startswith(b"{") or not rest.strip().startswith(b"{"):
        return False
    try:
        json.loads(first)
    except ValueError:
        return False
    return True


def _of_document(document: object, form: str | None) -> Stored:
    if isinstance(document, list):
        return Stored("json", form or format_of(document), document)
    if not isinstance(document, dict):
        raise InvalidHistoryError(f"a history is a list of messages, this is {type(document).__name__}")
    for key in _LISTS:
        if isinstance(found := document.get(key), list):
            told = form or (
                "openai-responses" if key == "input" else "gemini" if key == "contents" else format_of(found)
            )
            system = document.get("system") or document.get("systemInstruction")
            kind = "tunacode" if "session_id" in document and told == "pydantic-ai" else "json"
            return Stored(kind, told, found, (key,), system)
    for key in _STATES:
        if isinstance(document.get(key), dict):
            inner = _of_document(document[key], form)
            inner.at = (key, *inner.at)
            return inner
    raise InvalidHistoryError("this JSON object has no list of messages in it")


def _with(document: Any, at: tuple[str, ...], messages: list[Any]) -> Any:  # noqa: ANN401 - any document
    if not at:
        return messages
    return {**document, at[0]: _with(document[at[0]], at[1:], messages)}


def _of_lines(path: Path, form: str | None) -> Stored:
    records: list[Json] = []
    notes: list[str] = []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line.decode("utf-8", "surrogatepass"))
            except (ValueError, RecursionError):
                notes.append(f"line {number} was cut and is left out")
                continue
            if isinstance(record, dict):
                records.append(record)
    if any("uuid" in record and "message" in record for record in records):
        return _of_claude_code(records, notes)
    if any(record.get("type") in ("session_meta", "response_item") for record in records):
        return _of_codex(records, notes)
    if not records:
        raise InvalidHistoryError("no line of this file is a JSON object")
    messages: list[Any] = list(records)
    return Stored("lines", form or format_of(messages), messages, notes=tuple(notes))


def _of_codex(records: list[Json], notes: list[str]) -> Stored:
    messages: list[Any] = []
    of: dict[int, Json] = {}
    for record in records:
        payload = record.get("payload")
        if record.get("type") == "compacted" and isinstance(payload, dict):
            messages = list(payload.get("replacement_history") or messages)
        elif record.get("type") == "response_item" and isinstance(payload, dict):
            if payload.get("type") == "ghost_snapshot":
                continue
            messages.append(payload)
            of[id(payload)] = record
    return Stored("codex", "openai-responses", messages, notes=tuple(notes), records=of)


def _of_claude_code(records: list[Json], notes: list[str]) -> Stored:
    """Follow the last message to the root, with the results that stand on its side branches."""
    lines = {r["uuid"]: r for r in records if isinstance(r.get("uuid"), str) and not r.get("isSidechain")}
    spoken = [uuid for uuid, record in lines.items() if isinstance(record.get("message"), dict)]
    if not spoken:
        raise InvalidHistoryError("no message in this session file")
    chain = _chain(lines, spoken[-1])
    on_chain = set(chain)
    asked = {block["id"] for uuid in chain for block in _blocks(lines[uuid], "tool_use") if "id" in block}
    answered = {b.get("tool_use_id") for uuid in chain for b in _blocks(lines[uuid], "tool_result")}
    aside = [
        uuid
        for uuid in spoken
        if uuid not in on_chain
        and any(b.get("tool_use_id") in asked - answered for b in _blocks(lines[uuid], "tool_result"))
    ]
    if aside:
        notes.append(f"{len(aside)} results stand on side branches: they are kept")
    kept = on_chain | set(aside)
    messages: list[Any] = []
    of: dict[int, Json] = {}
    for uuid in (uuid for uuid in spoken if uuid in kept):
        record = lines[uuid]
        if messages and _is_snapshot(of[id(messages[-1])], record):
            messages[-1] = _folded(messages[-1], record["message"])
        else:
            messages.append(
                {key: record["message"][key] for key in ("role", "content") if key in record["message"]}
            )
        of[id(messages[-1])] = record
    return Stored("claude-code", "anthropic", messages, notes=tuple(notes), records=of)


def _chain(lines: dict[str, Json], last: str) -> list[str]:
    chain: list[str] = []
    seen: set[str] = set()
    uuid: Any = last
    while isinstance(uuid, str) and uuid in lines and uuid not in seen:
        seen.add(uuid)
        if isinstance(lines[uuid].get("message"), dict):
            chain.append(uuid)
        uuid = lines[uuid].get("parentUuid") or lines[uuid].get("logicalParentUuid")
    return chain[::-1]


def _blocks(record: Json, kind: str) -> list[Json]:
    content = record["message"].get("content") if isinstance(record.get("message"), dict) else None
    return (
        [b for b in content if isinstance(b, dict) and b.get("type") == kind]
        if isinstance(content, list)
        else []
    )


def _is_snapshot(before: Json, record: Json) -> bool:
    """Whether two lines are of one response: Claude Code writes a line for each of its blocks."""
    first, second = before.get("message", {}), record["message"]
    return (
        bool(second.get("id")) and first.get("id") == second.get("id") and second.get("role") == "assistant"
    )


def _folded(before: Json, message: Json) -> Json:
    """Join a response's lines; a later line may repeat the blocks of an earlier one."""
    mine, its = before["content"], message.get("content")
    if not isinstance(mine, list) or not isinstance(its, list):
        return before
    return {
        **before,
        "content": its if its[: len(mine)] == mine else [*mine, *(b for b in its if b not in mine)],
    }


def _records(stored: Stored, messages: list[Any]) -> Iterator[Json]:
    """The lines of a repaired file: each message in the envelope it had, new ones in one like their neighbour's."""
    if stored.kind == "lines":
        yield from messages
        return
    envelope: Json = next(iter(stored.records.values()), {})
    if stored.kind == "codex":
        for message in messages:
            envelope = stored.records.get(id(message), envelope)
            yield {**envelope, "type": "response_item", "payload": message}
        return
    parent: str | None = None
    for message in messages:
        known = stored.records.get(id(message))
        envelope = known or envelope
        inner = known["message"] if known else {}
        uuid = known["uuid"] if known else _uuid_after(parent)
        role = message["role"]
        yield {
            **envelope,
            "type": role,
            "uuid": uuid,
            "parentUuid": parent,
            "message": {**inner, **message},
        }
        parent = uuid


def _uuid_after(parent: str | None) -> str:
    """An id for a new line: it follows from the line before, so that the same repair writes the same file."""
    digest = hashlib.blake2b((parent or "").encode(), digest_size=16).hexdigest()
    return "-".join((digest[:8], digest[8:12], digest[12:16], digest[16:20], digest[20:]))
