"""The only file of the golden journals that imports midstream: read, fold and show a journal.

The data holds the names at its recording. A commit that renames a stored name adds it to `RENAMED`; a commit
that represents a state in another way changes `_SHOWN` or `_plain`. The data stays in both cases.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from functools import cache
from typing import Any, get_args

import msgspec
from msgspec import Struct

from midstream.history.profiles import PROFILES
from midstream.history.rendering import render
from midstream.protocol.events import EventReader
from midstream.protocol.frames import EventId
from midstream.server.api.session_snapshot import snapshot_of
from midstream.session import session as sessions
from midstream.session.journal_reading import JournalReader
from midstream.session.questions import questions_of
from midstream.session.records import (
    JournalPruned,
    OutcomeDamaged,
    Record,
    TurnEnded,
    encode,
    is_durable,
)
from midstream.session.session import Session, StreamState
from midstream.session.turn.deciding import response_so_far
from midstream.session.turn.states import AwaitingModel

Json = dict[str, Any]
Journal = list[tuple[int, str]]
"""The epoch and the stored body of each record."""

RENAMED: Mapping[str, str] = {"AwaitingModel.said": "deltas", "RunningTurn.said": "output"}
"""Names in the data and their new ones.

A key is a tag (`turn_ended`), a field of a stored body by its path (`response_completed.body.parts`), a class
(`AwaitingModel`) or a field of a class (`AwaitingModel.terms`). Lists are no part of a path. A field's new name stands
without its path.
"""
NAME = "s"
"""The session's name, where a projection shows one."""
INSTRUCTIONS = "Be brief."


def read(journal: Journal) -> list[tuple[int, Record]]:
    """Return the records of a journal with their epochs."""
    reader = JournalReader()
    return [(epoch, reader.read(renamed(body).encode())) for epoch, body in journal]


def outcome(journal: Journal) -> Json:
    """Fold a journal; return all results as plain JSON values.

    `steps` has one entry for each record: the event of a reader, the changed fields of the session, and the
    pending work and open questions where they change.
    """
    state, before = Session(), _state(Session())
    reading = EventReader()
    steps = []
    for (epoch, record), (_, body) in zip(read(journal), journal, strict=True):
        state = sessions.evolve(state, record, epoch=epoch)
        after = _state(state)
        step = {key: after.get(key) for key in sorted({*before, *after}) if before.get(key) != after.get(key)}
        if not isinstance(record, OutcomeDamaged) and encode(record).decode() != renamed(body):
            step["written"] = encode(record).decode()
        if not isinstance(record, JournalPruned | OutcomeDamaged):
            step["event"] = _event(reading, EventId(epoch, state.position), record)
        steps.append(step)
        before = after
    return {
        "steps": steps,
        "history": [_plain(entry) for entry in state.history.entries],
        "rendered": {name: _rendered(state, name) for name in PROFILES},
        "snapshot": _snapshot(state),
    }


def _state(session: Session) -> Json:
    shown: Json = _plain(session)
    shown["history"] = len(session.history.entries)
    shown["status"] = session.status.value
    shown["work"] = [_plain(each) for each in sessions.pending_work(session)]
    shown["questions"] = [_plain(each) for each in questions_of(NAME, session)]
    shown["is"] = {
        "live": session.is_live,
        "in need of a node": session.needs_node,
        "resting on people": session.rests_on_people,
        "prunable": sessions.is_prunable(session),
    }
    return shown


def _event(reading: EventReader, event_id: EventId, record: Record) -> Json:
    event = reading.event(str(event_id), record)
    shown: Json = {"id": event.id, "on disk first": is_durable(record)}
    if event.text or event.replaces:
        shown |= {"text": event.text, "replaces": event.replaces}
    if event.is_end or event.replaces:
        shown["transcript"] = event.transcript
    if event.path:
        shown["path"] = list(event.path)
    if event.question is not None:
        shown["question"] = event.question.call_id
    if event.upstream_call is not None:
        shown["upstream call"] = _plain(event.upstream_call)
    return shown


def _rendered(session: Session, profile: str) -> Json:
    done = render(session.model_history, INSTRUCTIONS, profile)
    return {"messages": _json(done.messages), "system": done.system, "advice": _plain(done.advice)}


def _snapshot(session: Session) -> Json:
    event_id = str(EventId(session.epoch, session.position))
    shown: Json = _with_recorded_tags(_json(snapshot_of(NAME, session, event_id)))
    del shown["history"]  # It is beside the other one.
    if shown["running"] is not None:
        shown["running"] = {
            _recorded_field("RunningTurn", field): value for field, value in shown["running"].items()
        }
    return shown


# --- names ---------------------------------------------------------------------------------------------------------


def renamed(body: str, names: Mapping[str, str] = RENAMED) -> str:
    """Return a stored body with the current names."""
    if not names:
        return body
    try:
        found = json.loads(body)
    except ValueError:
        return body  # Damaged on purpose.
    tag = str(found["type"])
    shown = _with_names(found, tag, names)
    shown[names.get(f"{tag}.type", "type")] = names.get(tag, tag)
    return json.dumps(shown, ensure_ascii=False, separators=(",", ":"))


def _with_names(value: Any, path: str, names: Mapping[str, str]) -> Any:  # noqa: ANN401 - JSON
    if isinstance(value, list):
        return [_with_names(each, path, names) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        names.get(f"{path}.{key}", key): (
            names.get(each, each)
            if key == "type" and isinstance(each, str)
            else _with_names(each, f"{path}.{key}", names)
        )
        for key, each in value.items()
    }


def _with_recorded_tags(value: Any) -> Any:  # noqa: ANN401 - JSON
    if isinstance(value, list):
        return [_with_recorded_tags(each) for each in value]
    if not isinstance(value, dict):
        return value
    shown = {key: _with_recorded_tags(each) for key, each in value.items()}
    if isinstance(shown.get("type"), str):
        shown["type"] = _recorded(shown["type"])
    return shown


def _recorded(name: str) -> str:
    """Return the name of a class in the data."""
    return next((old for old, new in RENAMED.items() if new == name and "." not in old), name)


def _recorded_field(of: str, name: str) -> str:
    """Return the name in the data of a field; `of` is the name of its class there."""
    given = (old.partition(".") for old, new in RENAMED.items() if new == name)
    return next((field for node, _, field in given if node == of and field), name)


# --- plain values --------------------------------------------------------------------------------------------------

_SHOWN: Mapping[tuple[type, str], Callable[[Any], Any]] = {
    (AwaitingModel, "deltas"): response_so_far,
    (StreamState, "digests"): lambda stream: [stream.digest_at(at) for at in range(stream.accepted)],
    (StreamState, "newest"): lambda _: (),
    (Session, "history"): lambda _: (),
}
"""Fields that are shown by their meaning instead of by their representation."""


def _plain(value: Any) -> Any:  # noqa: ANN401 - any value of a session
    """Return a value as JSON; of a struct its class and its non-default fields."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, msgspec.Raw):
        return json.loads(bytes(value))
    if isinstance(value, Struct):
        name = _recorded(type(value).__name__)
        shown = {field: _plain(each) for field, each in _fields(value)}
        if isinstance(shown.get("ref"), dict):  # The data has the members of a reference beside the others.
            reference = {key: each for key, each in shown.pop("ref").items() if key != "class"}
            shown = {**reference, **shown}
        return {"class": name, **shown}
    if isinstance(value, frozenset):
        return sorted(map(_plain, value))
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    return value


def _fields(value: Struct) -> Iterator[tuple[str, Any]]:
    for name, recorded, default, show in _described(type(value)):
        found = getattr(value, name) if show is None else show(value)
        if found not in (default, (), [], None):
            yield recorded, found


@cache
def _described(of: type[Struct]) -> list[tuple[str, str, Any, Callable[[Any], Any] | None]]:
    """Return the name of each field, its name in the data, its default, and how it is shown by its meaning."""
    return [
        (
            info.name,
            _recorded_field(_recorded(of.__name__), info.name),
            info.default_factory() if callable(info.default_factory) else info.default,
            _SHOWN.get((of, info.name)),
        )
        for info in msgspec.structs.fields(of)
    ]


def _json(value: Any) -> Any:  # noqa: ANN401 - as above
    return json.loads(msgspec.json.encode(value))


# --- kinds ---------------------------------------------------------------------------------------------------------


def possible_kinds() -> set[str]:
    """Return the names of all records, of their nested types and of the values of their enumerations."""
    names: set[str] = set()
    stack: list[Any] = [*get_args(Record)]
    seen: set[Any] = set()
    while stack:
        each = stack.pop()
        if each in seen:
            continue
        seen.add(each)
        stack += get_args(each)
        if isinstance(each, type) and issubclass(each, Enum):
            names |= {f"{each.__name__}.{member.name}" for member in each}
        elif isinstance(each, type) and issubclass(each, Struct):
            names.add(each.__name__)
            stack += [info.type for info in msgspec.structs.fields(each)]
    return names


def kinds_of(journal: Journal) -> set[str]:
    """Return those of them that a journal contains."""
    names: set[str] = set()
    stack: list[Any] = [record for _, record in read(journal)]
    while stack:
        each = stack.pop()
        if isinstance(each, Enum):
            names.add(f"{type(each).__name__}.{each.name}")
        elif isinstance(each, Struct):
            names.add(type(each).__name__)
            stack += [getattr(each, name) for name in each.__struct_fields__]
        elif isinstance(each, tuple | list):
            stack += each
    return names


def steps_of(journal: Journal) -> Iterator[tuple[str, str, str]]:
    """Yield the state of the turn before each record, the record, and the state after it."""
    state = Session()
    for epoch, record in read(journal):
        before, state = state, sessions.evolve(state, record, epoch=epoch)
        name = type(record).__name__
        name += f"({record.status.value})" if isinstance(record, TurnEnded) else ""
        yield type(before.turn).__name__, name, type(state.turn).__name__
