"""The short chaos run: real processes, killed, behind a harmful network; `make chaos` is the long one."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from midstream.store.contract import StoredRecord
from tests.chaos.chaos_judge import judge
from tests.chaos.chaos_run import ChaosReport, run
from tests.chaos.plan import SWEPT_BYTES, ChaosPlan, ConnectionCut, Harm
from tests.chaos.proxy import Requests
from tests.chaos.turns import WAYS
from tests.fault.stored import read_all
from tests.spec import spec

SEED = 90
"""A seed that kills the server and a client within the first thirty connections, and does every harm to them."""
RECONNECTS = 40
CONNECTIONS_PER_KILL = 20
WITHIN_S = 240.0
"""An idle machine needs five."""


@pytest.mark.fault
@pytest.mark.timeout(600)
@spec("STREAM-12", "STREAM-14", "STREAM-21", "STREAM-28", "STREAM-49", "STREAM-50")
async def test_nothing_is_lost_duplicated_or_run_again_whatever_the_network_does(tmp_path: Path) -> None:
    plan = ChaosPlan(SEED, connections_per_kill=CONNECTIONS_PER_KILL)
    report = await run(plan, tmp_path, RECONNECTS, within_s=WITHIN_S, print_progress=print)
    print(f"seed {SEED}:", msgspec.json.encode(report).decode())  # noqa: T201 - shown with a failure
    verdict = report.verdict
    assert verdict.problems == []
    assert (verdict.lost, verdict.duplicated, verdict.repeated) == (0, 0, 0)
    assert report.reconnects >= RECONNECTS
    assert min(report.reconnects_by_transport[way] for way in WAYS) > 0
    _assert_every_harm(report)
    assert verdict.shown > verdict.events > 0 < verdict.executions
    _assert_missing_events_and_repeated_runs_are_found(tmp_path, read_all(tmp_path))


def _assert_every_harm(report: ChaosReport) -> None:
    assert set(report.harms) == {each.value for each in Harm}
    assert set(report.cuts) == {each.value for each in ConnectionCut}
    done = (
        report.cuts_inside_a_write,
        report.offsets_up,
        report.offsets_down,
        report.requests_repeated,
        report.connections_overtaken,
    )
    assert min(done) > 0, done
    assert {where.partition(" ")[0] for where in report.kills} == {"server", "client"}


def _assert_missing_events_and_repeated_runs_are_found(
    folder: Path, journals: dict[str, list[StoredRecord]]
) -> None:
    assert judge(folder, journals).problems == []
    notes = next(folder.glob("poll/*.read"))
    lines = notes.read_bytes().splitlines(keepends=True)
    notes.write_bytes(b"".join([*lines[:3], *lines[4:]]))
    ledger = (folder / "ledger").read_bytes().splitlines(keepends=True)
    (folder / "ledger").write_bytes(b"".join([*ledger, ledger[0]]))
    verdict = judge(folder, journals)
    assert (verdict.lost, verdict.duplicated, verdict.repeated) == (1, 0, 1)
    notes.write_bytes(b"".join([*lines, lines[-1]]))
    assert judge(folder, journals).duplicated == 1


def test_a_seed_repeats_every_decision() -> None:
    first, again, other = (ChaosPlan(seed, connections_per_kill=100) for seed in (7, 7, 8))
    numbers = range(1000)
    fates = [first.fate(number) for number in numbers]
    assert fates == [again.fate(number) for number in numbers]
    assert fates != [other.fate(number) for number in numbers]
    assert [first.kill(number, WAYS) for number in numbers] == [
        again.kill(number, WAYS) for number in numbers
    ]
    assert [first.death("sse", number) for number in numbers] == [
        again.death("sse", number) for number in numbers
    ]


def test_a_run_contains_every_harm_and_every_kind_of_cut() -> None:
    plan = ChaosPlan(SEED, connections_per_kill=100)
    fates = [plan.fate(number) for number in range(2000)]
    assert {each.harm for each in fates} == set(Harm)
    assert {(each.harm, each.cut) for each in fates} >= {
        (harm, cut) for harm in (Harm.CUT_UP, Harm.CUT_DOWN, Harm.CUT_LATE) for cut in ConnectionCut
    }
    swept = [each.down_max for each in fates if each.harm is Harm.CUT_DOWN and each.down_max is not None]
    assert (min(swept) < 10, max(swept) > SWEPT_BYTES - 10, max(swept) < SWEPT_BYTES) == (True, True, True)


def test_requests_are_found_in_pieces_of_any_size() -> None:
    data = b"POST /a HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc"
    upgrade = b"GET /b HTTP/1.1\r\nUpgrade: websocket\r\n\r\n"
    stream = data + upgrade + b"frames\r\n\r\n"
    for size in (1, 7, len(stream)):
        requests = Requests()
        pieces = [stream[at : at + size] for at in range(0, len(stream), size)]
        assert [whole for piece in pieces for whole in requests.feed(piece)] == [data, upgrade]
        assert requests.is_upgraded
