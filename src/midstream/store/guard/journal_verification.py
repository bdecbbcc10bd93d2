"""Verification of the journals of a store, and checkpoints of their ends that are kept outside it.

The chain shows changes by a program without the store's key. A checkpoint also shows that a journal, or the whole
store, was set back to an older state, or that a session is missing.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from enum import StrEnum

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from midstream.errors import EventsLostError, StoreDamagedError, UsageError
from midstream.store.contract import StoredRecord, StoreReader
from midstream.store.guard.chain import LINK_BYTES, ChainKeys, LinkCheck, is_fold

PAGE = 500
"""Records read in one step."""
LINE_BYTES_MAX = 4096
"""Bytes of one line of a checkpoint."""
LINES_MAX = 10_000_000
FORMAT = "midstream checkpoint 1"


class Verdict(StrEnum):
    """Results of the verification of a journal."""

    INTACT = "intact"
    """Each record has a link of the store's key."""
    PARTLY = "partly"
    """Records from `chain_begins` on have such links; earlier ones have none, or links of another key."""
    UNCHAINED = "unchained"
    """No record has a link of a known key."""
    DAMAGED = "damaged"
    """A record was changed, moved, inserted or removed."""
    SET_BACK = "set_back"
    """It differs from the checkpoint, or lacks records that the checkpoint has."""
    MISSING = "missing"
    """The checkpoint has the session, and the store has not: it was deleted or lost."""
    PRUNED = "pruned"
    """The journal is intact, but the record of the checkpoint was pruned since."""


BAD = frozenset((Verdict.DAMAGED, Verdict.SET_BACK, Verdict.MISSING))


class SessionVerdict(Struct, frozen=True):
    """The result for one session.

    Args:
        end: Position of its last record.
        epoch: Epoch of that record.
        link: Link of that record, hexadecimal; "" if it has none.
        chain_begins: Position of the first record with a link of a known key; 0 if there is none.
        pruned_to: Position up to which it was pruned, or 0.
        problem: Description of the damage; "" if there is none.
    """

    session: str
    verdict: Verdict
    end: int = 0
    epoch: int = 0
    link: str = ""
    chain_begins: int = 0
    pruned_to: int = 0
    problem: str = ""


class CheckpointLine(Struct, frozen=True):
    """The end of one journal at the time of a checkpoint."""

    session: str
    position: int
    epoch: int
    link: str


class _Header(Struct, frozen=True):
    format: str
    at: float


async def verify_session(
    store: StoreReader, session: str, keys: ChainKeys, against: CheckpointLine | None = None
) -> SessionVerdict:
    """Check the chain of one journal, and compare it with a checkpoint.

    Args:
        store: The store without decryption.
        keys: The store's keys; empty if they are missing.
        against: The end in a checkpoint.
    """
    check = LinkCheck(keys, session, None, 0)
    pruned_to, last, at_checkpoint = 0, StoredRecord(0, 0, b""), None
    try:
        async for stored in _records(store, session):
            check.take(stored)
            if last.position == 0 and (is_fold(stored.link) or stored.position > 1):
                pruned_to = stored.position
            last = stored
            if against is not None and stored.position == against.position:
                at_checkpoint = stored
        check.finish()
    except (StoreDamagedError, EventsLostError) as error:
        return _verdict(session, Verdict.DAMAGED, last, check, pruned_to, error.message)
    if not check.begins_at:
        verdict = Verdict.UNCHAINED
    else:
        is_whole = check.begins_at <= max(1, pruned_to)
        verdict = Verdict.INTACT if is_whole else Verdict.PARTLY
    found = _verdict(session, verdict, last, check, pruned_to)
    return found if against is None else _compare(found, against, at_checkpoint)


async def verify_store(
    store: StoreReader, keys: ChainKeys, against: Mapping[str, CheckpointLine] | None = None
) -> AsyncIterator[SessionVerdict]:
    """Check all sessions of a store, and those that only the checkpoint has."""
    missing = dict(against or {})
    async for line in store.list():
        yield await verify_session(store, line.session, keys, missing.pop(line.session, None))
    for session, before in missing.items():
        problem = f"the checkpoint has it up to record {before.position}; it was deleted, or is lost"
        yield SessionVerdict(session, Verdict.MISSING, problem=problem)


def checkpoint_lines(verdicts: Iterable[SessionVerdict], *, at: float) -> Iterator[bytes]:
    """Yield the lines of a checkpoint of these journals, without the damaged ones.

    Args:
        at: The time, in seconds since 1970.
    """
    yield msgspec.json.encode(_Header(FORMAT, at)) + b"\n"
    for found in verdicts:
        if found.verdict not in BAD and found.end:
            line = CheckpointLine(found.session, found.end, found.epoch, found.link)
            yield msgspec.json.encode(line) + b"\n"


def read_checkpoint(lines: Iterable[bytes]) -> dict[str, CheckpointLine]:
    """Return the ends of journals in a checkpoint, by session.

    Raises:
        UsageError: It is not a checkpoint, or a line is cut.
    """
    found: dict[str, CheckpointLine] = {}
    for number, line in enumerate(lines, start=1):
        try:
            if number == 1:
                header = msgspec.json.decode(line, type=_Header)
                is_good = header.format == FORMAT
            else:
                entry = msgspec.json.decode(line, type=CheckpointLine)
                found[entry.session] = entry
                is_good = number <= LINES_MAX
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            is_good = False
        if not is_good:
            raise UsageError(f"line {number} of the checkpoint is not one that `midstream verify` wrote")
    return found


async def _records(store: StoreReader, session: str) -> AsyncIterator[StoredRecord]:
    after = 0
    while page := await store.read(session, after=after, limit=PAGE):
        for stored in page:
            yield stored
        after = page[-1].position


def _verdict(
    session: str,
    verdict: Verdict,
    last: StoredRecord,
    check: LinkCheck,
    pruned_to: int,
    problem: str = "",
) -> SessionVerdict:
    link = check.head.link.hex()
    return SessionVerdict(
        session, verdict, last.position, last.epoch, link, check.begins_at, pruned_to, problem
    )


def _compare(
    found: SessionVerdict, before: CheckpointLine, at_checkpoint: StoredRecord | None
) -> SessionVerdict:
    if found.end < before.position:
        problem = f"it ends with record {found.end}; the checkpoint has record {before.position}"
        return replace(found, verdict=Verdict.SET_BACK, problem=problem)
    if found.pruned_to > before.position:
        problem = (
            f"it was pruned up to record {found.pruned_to}, behind record {before.position} of the checkpoint"
        )
        return replace(found, verdict=Verdict.PRUNED, problem=problem)
    is_same = (
        at_checkpoint is not None
        and at_checkpoint.epoch == before.epoch
        and at_checkpoint.link[:LINK_BYTES].hex() == before.link
    )
    if is_same:
        return found
    problem = f"record {before.position} is another one than in the checkpoint"
    return replace(found, verdict=Verdict.SET_BACK, problem=problem)
