"""Invariants of every state of the small world, and the conditions of its end."""

from __future__ import annotations

from midstream.errors import StreamFencedError
from midstream.protocol import frames
from midstream.session import records
from midstream.session.records import CommandAccepted, StreamOpened, StreamTaken, TurnEnded
from tests.protocol.simulated_client import ClientProcess
from tests.protocol.world import SmallWorld

_decoded: dict[bytes, records.Record] = {}


def check(world: SmallWorld) -> None:
    """Raise `AssertionError` with the violated condition."""
    kept = [_decode(body) for _, body in world.line]
    accepted = [record for record in kept if isinstance(record, CommandAccepted)]
    numbers = [record.seqno for record in accepted]
    assert numbers == list(range(len(numbers))), f"commands were accepted as {numbers}"
    synced = sum(isinstance(record, CommandAccepted) for record in kept[: world.synced])
    for process in world.processes:
        _check_commands(process, accepted, synced)
        _check_events(process, world)
        assert all(count <= 1 for count in process.disk.runs.values()), (
            f"a tool ran twice: {process.disk.runs}"
        )
    _check_fences(world, kept)
    ended = [record.turn for record in kept if isinstance(record, TurnEnded)]
    assert len(ended) <= 1, f"turns ended: {ended}"


def _check_fences(world: SmallWorld, kept: list[records.Record]) -> None:
    """Assert that after the takeover record of a newer connection, older ones receive and send nothing."""
    taken = [(place, each.connection) for place, each in enumerate(kept, 1) if isinstance(each, StreamTaken)]
    for place, number in taken:
        late = [by for accepted_at, by in world.brought if accepted_at > place and 0 < by < number]
        assert not late, (
            f"a command of connection {late} was accepted after connection {number} had the stream"
        )
        for connection in world.connections:
            server = connection.server
            if server is not None and 0 < server.connection < number:
                assert server.cursor < place, f"an older connection received event {server.cursor}"


def _check_commands(process: ClientProcess, accepted: list[CommandAccepted], synced: int) -> None:
    numbered = process.disk.numbered
    for record in accepted[: len(numbered)]:
        is_reported = record.digest == frames.digest_of(numbered[record.seqno])
        assert is_reported, f"command {record.seqno} was accepted with a payload that no client sent"
    state = process.disk.state
    if state is not None:
        acked = state.next_seqno - len(state.unacked)
        assert acked <= synced, f"{acked} commands were acknowledged, {synced} are kept"


def _check_events(process: ClientProcess, world: SmallWorld) -> None:
    """Assert that the application received the journal from the stream's first record on, each event once."""
    log = process.disk.log
    positions = [event_id.position for event_id, _ in log]
    assert positions == list(range(positions[0], positions[0] + len(positions))) if positions else True, (
        f"the application has {positions}"
    )
    if log and not world.may_lose_tail:
        assert isinstance(_decode(log[0][1]), StreamOpened), (
            "the application's log does not begin with the stream"
        )
        begin = positions[0] - 1
        assert log == world.line[begin : begin + len(log)], "the application has what the journal has not"
    state = process.disk.state
    if state is not None and state.event_id is not None and not world.may_lose_tail:
        assert log, "the cursor stands at an event that was lost"
        assert log[-1][0] >= state.event_id, (
            f"the cursor {state.event_id} is past the log, which ends at {log[-1][0]}"
        )


def is_at_end(world: SmallWorld) -> bool:
    """Return whether the world has come to its end: the turn has ended, and every client has the end."""
    if world.session.is_live or not world.session.turns:
        return False
    found = [
        process for process in world.processes if not isinstance(process.stream.error, StreamFencedError)
    ]
    return bool(found) and all(_has_all_events(process, world) for process in found)


def _has_all_events(process: ClientProcess, world: SmallWorld) -> bool:
    kinds = [type(_decode(body)) for _, body in world.line]
    first, last = kinds.index(StreamOpened), kinds.index(TurnEnded)
    is_over = process.stream.is_ended and process.stream.error is None and process.disk.state is None
    return is_over and not process.has_unread and process.disk.log == world.line[first : last + 1]


def _decode(body: bytes) -> records.Record:
    if body not in _decoded:
        _decoded[body] = records.decode(body)
    return _decoded[body]
