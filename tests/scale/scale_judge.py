"""Judge a scale run from the outside: by the journals, the events of all clients, and the ledger of the tools."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct, field

from midstream.history.messages import Outcome, UserMessage
from midstream.protocol.frames import (
    EventId,
    Gone,
)
from midstream.session.records import (
    AttemptStarted,
    CallEnded,
    CommandAccepted,
    Delta,
    EpochStarted,
    MessageAccepted,
    Record,
    ResponseCompleted,
    TurnEnded,
    TurnStatus,
    decode,
    is_durable,
)
from midstream.session.turn.states import SUSPECTED_CODE
from midstream.store.contract import StoredRecord
from midstream.testing.history_checker import ClientLog, Evidence, Execution, ShownEvent, check_ended
from tests.chaos.chaos_judge import SentPayloads, count_repeated, expected_positions, streams_of
from tests.chaos.turns import TURNS, is_stopped, message_of
from tests.fault.fault_client_process import read_notes
from tests.fault.matrix import read_ledger
from tests.fault.turn import EffectLedger
from tests.scale.served import WORDS


class ScaleVerdict(Struct):
    """The result of a run.

    Args:
        events: Records of all journals.
        shown: Events that the clients were shown, speakers and readers.
        lost: Events that a client should have been shown and was not.
        doubled: Events shown twice in a row, and messages or commands that are in a journal twice.
        executions: Runs of tools, none of which may run twice.
        repeated: Runs of a call that had run before.
        interrupted: Turns that were abandoned, since too many servers died on them one after the other.
        unknown: Calls whose outcome is unknown, since the server that ran them was killed; without stopped turns.
        withdrawn: Events that were shown, and taken back by a typed answer: tokens and outcomes of the last moment
            before a crash of the database. None of them had to be on the disk before it was shown.
        snapshots: Readers that were given a snapshot in the place of events.
        epochs: Times that a session moved to another server, or restarted.
        handovers: Those of them arranged by an ending server.
        attempts_cut: Model responses that were requested again after some of their text.
        problems: All violations, these too, as text.
    """

    sessions: int = 0
    turns: int = 0
    completed: int = 0
    stopped: int = 0
    interrupted: int = 0
    events: int = 0
    shown: int = 0
    lost: int = 0
    doubled: int = 0
    executions: int = 0
    repeated: int = 0
    unknown: int = 0
    withdrawn: int = 0
    snapshots: int = 0
    epochs: int = 0
    handovers: int = 0
    attempts_cut: int = 0
    problems: list[str] = field(default_factory=list)


class _Shown(Struct):
    """Events of one reader of a session, without those that were withdrawn.

    Args:
        events: The remaining ones, in order.
        withdrawn: The withdrawn ones.
    """

    events: list[ShownEvent] = field(default_factory=list)
    withdrawn: list[ShownEvent] = field(default_factory=list)
    snapshots: int = 0


def _read_shown(path: Path) -> _Shown:
    shown = _Shown()
    for line in read_notes(path):
        body = bytes(line.record)
        match msgspec.json.decode(body)["type"]:
            case "gone":
                kept = EventId.parse(msgspec.json.decode(body, type=Gone).resume_from).position
                shown.withdrawn += [each for each in shown.events if _position(each) > kept]
                shown.events = [each for each in shown.events if _position(each) <= kept]
            case "snapshot":
                shown.snapshots += 1
            case _:
                shown.events.append(ShownEvent(line.id, body))
    standing = {each.event_id for each in shown.events}
    shown.withdrawn = [
        each for each in shown.withdrawn if each.event_id not in standing
    ]  # Otherwise it came again.
    return shown


def _position(shown: ShownEvent) -> int:
    return EventId.parse(shown.event_id).position


def judge(folder: Path, journals: Mapping[str, Sequence[StoredRecord]]) -> ScaleVerdict:
    """Compare everything; all turns have ended."""
    verdict = ScaleVerdict(sessions=len(journals))
    executed: dict[str, list[Execution]] = {}
    for each in read_ledger(folder):
        executed.setdefault(each.session, []).append(each)
    begun = {path.stem for path in folder.glob("*.seen")}
    for name in sorted((begun | executed.keys()) ^ journals.keys()):
        verdict.problems.append(f"session {name!r} is not known to clients, tools and store alike")
    payloads = SentPayloads(EffectLedger(folder / "ledger"))
    for name in sorted(begun & journals.keys()):
        _judge_session(folder, name, journals[name], executed.get(name, []), payloads, verdict)
    if verdict.lost or verdict.doubled or verdict.repeated:
        verdict.problems.append(
            f"{verdict.lost} lost, {verdict.doubled} doubled, {verdict.repeated} executed again"
        )
    return verdict


def _judge_session(
    folder: Path,
    name: str,
    stored: Sequence[StoredRecord],
    ledger: Sequence[Execution],
    payloads: SentPayloads,
    verdict: ScaleVerdict,
) -> None:
    both = {what: _read_shown(folder / f"{name}.{what}") for what in ("seen", "read")}
    records = [decode(each.body) for each in stored]
    logs = [
        *streams_of(name, both["seen"].events, records, payloads),
        ClientLog("reader", name, start=0, seen=both["read"].events),
    ]
    verdict.problems += map(str, check_ended(Evidence({name: stored}, logs, ledger)))
    verdict.events += len(stored)
    verdict.executions += len(ledger)
    calls = Counter((each.turn, each.response, each.call_id) for each in ledger)
    verdict.repeated += sum(calls.values()) - len(calls)
    for log in logs:
        verdict.lost += len(expected_positions(log, records, TURNS) - set(map(_position, log.seen)))
    for what, shown in both.items():
        verdict.shown += len(shown.events)
        verdict.snapshots += shown.snapshots
        verdict.withdrawn += len(shown.withdrawn)
        verdict.doubled += count_repeated(each.event_id for each in shown.events)
        for each in shown.withdrawn:
            if is_durable(decode(each.body)):
                verdict.problems.append(
                    f"{each.event_id} of {name!r} was shown to {what} and is lost: {each.body!r}"
                )
    verdict.doubled += count_repeated(
        (each.stream, each.seqno) for each in records if isinstance(each, CommandAccepted)
    )
    _judge_turns(name, records, verdict)


def _judge_turns(name: str, records: Sequence[Record], verdict: ScaleVerdict) -> None:
    messages = [each.message for each in records if isinstance(each, MessageAccepted)]
    expected = [UserMessage.of(message_of(turn)) for turn in range(TURNS)]
    verdict.doubled += max(0, len(messages) - TURNS)
    verdict.lost += max(0, TURNS - len(messages))
    if messages != expected:
        verdict.problems.append(f"in session {name!r} these messages stand: {messages}")
    ends = [each for each in records if isinstance(each, TurnEnded)]
    verdict.turns += len(ends)
    for turn, end in enumerate(ends):
        texts = tuple(
            each.body.text
            for each in records
            if isinstance(each, ResponseCompleted) and each.turn == end.turn
        )
        verdict.completed += end.status is TurnStatus.COMPLETED
        verdict.stopped += end.status is TurnStatus.CANCELLED
        verdict.interrupted += end.status is TurnStatus.INTERRUPTED
        allowed = {TurnStatus.COMPLETED}
        if is_stopped(name, turn):
            allowed.add(TurnStatus.CANCELLED)
        if end.code == SUSPECTED_CODE:
            allowed.add(TurnStatus.INTERRUPTED)
        if end.status not in allowed or (end.status is TurnStatus.COMPLETED and texts != WORDS):
            verdict.problems.append(
                f"turn {end.turn} of {name!r} ended {end.status} [{end.code}] with {texts}"
            )
    stopped = {each.turn for each in ends if each.status is TurnStatus.CANCELLED}
    ended = [each for each in records if isinstance(each, CallEnded) and each.turn not in stopped]
    verdict.unknown += sum(each.result.outcome is Outcome.UNKNOWN for each in ended)
    begun = [each for each in records if isinstance(each, EpochStarted)]
    verdict.epochs += len(begun) - 1
    verdict.handovers += sum(each.is_handover for each in begun)
    verdict.attempts_cut += _count_cut_attempts(records)


def _count_cut_attempts(records: Sequence[Record]) -> int:
    """Count responses that were requested again after their first text; a handover before any is no cut."""
    spoken: set[tuple[int, int]] = set()
    cut = 0
    for each in records:
        if isinstance(each, Delta):
            spoken.add((each.turn, each.response))
        elif isinstance(each, AttemptStarted) and (each.turn, each.response) in spoken:
            spoken.discard((each.turn, each.response))
            cut += 1
    return cut
