"""A stream of many commands stores each of them, and the cost of a command is independent of their number."""

from __future__ import annotations

from midstream.session.records import CommandAccepted, StreamOpened
from midstream.session.session import NEWEST_MAX, Session, evolve


def test_a_long_stream_stores_each_of_its_commands() -> None:
    session = evolve(Session(), StreamOpened("s", "k"), epoch=1)
    count = 2 * NEWEST_MAX + 3
    for seqno in range(count):
        assert session.streams["s"].accepted == seqno
        session = evolve(session, CommandAccepted("s", seqno, f"d{seqno}"), epoch=1)
    stream = session.streams["s"]
    assert [stream.digest_at(seqno) for seqno in range(count)] == [f"d{seqno}" for seqno in range(count)]
    assert (len(stream.digests), len(stream.newest)) == (2 * NEWEST_MAX, 3)
