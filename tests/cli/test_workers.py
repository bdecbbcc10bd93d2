"""`midstream serve --workers` and `midstream gateway --workers`: several processes on one port."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from midstream.client import connect
from midstream.environment import World
from midstream.local_keys import headers_for
from tests.cli.processes import APP, WAIT_S, Serving, run
from tests.fault.stored import use_postgres

pytestmark = pytest.mark.fault
FRESH: dict[str, Any] = {"limits": httpx2.Limits(max_keepalive_connections=0), "timeout": WAIT_S}
"""A new connection for each request: the system chooses a worker for each connection."""


def _children(pid: int) -> list[int]:
    """Return the child processes of a process."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _wait_for(condition: Any) -> None:  # noqa: ANN401 - any callable
    until = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < until
        asyncio.run(World().sleep(0.02))


def _served_by(client: httpx2.Client, url: str, times: int = 40) -> set[int]:
    """Return the numbers of the workers that answer new connections."""
    found: set[int] = set()
    for _ in range(times):
        page = client.get(f"{url}/metrics").text
        # The worker that answers has counted this connection as open; the others are idle.
        found |= {
            int(line.partition('worker="')[2].partition('"')[0])
            for line in page.splitlines()
            if "worker=" in line
        }
    return found


@contextmanager
def _http(url: str) -> Iterator[httpx2.Client]:
    with httpx2.Client(**FRESH, headers=headers_for(url)) as client:
        yield client


def _send_message(client: httpx2.Client, url: str, session: str, words: str, key: str = "k") -> None:
    keys = {"x-idempotency-key": key, "x-idempotent-encryption-key": "s" * 43}
    payload = {"type": "send", "parts": [{"type": "text", "text": words}]}
    frame = {"type": "command", "seqno": 0, "payload": payload}
    answer = client.post(f"{url}/v1/sessions/{session}/commands", json=frame, headers=keys)
    assert answer.status_code == 200, answer.text


def _text_of(client: httpx2.Client, url: str, session: str) -> str:
    """Follow the events of a session to the end of its turn, and return the answer."""
    texts: dict[int, str] = {}
    after = "0-0"
    until = time.monotonic() + WAIT_S
    while time.monotonic() < until:
        try:
            with client.stream("GET", f"{url}/v1/sessions/{session}/events?after={after}") as events:
                for line in events.iter_lines():
                    if line.startswith("id: "):
                        after = line[4:]
                    if not line.startswith("data: "):
                        continue
                    record = json.loads(line[6:])
                    if record["type"] == "attempt_started":
                        texts[record["response"]] = ""
                    if record["type"] == "delta":
                        texts[record["response"]] += record["text"]
                    if record["type"] == "turn_ended":
                        assert record["status"] == "completed"
                        return "".join(texts.values())
        except httpx2.TransportError:
            continue  # its worker was killed
    raise AssertionError("the turn did not end")


LONG = "".join(f"w{number} " for number in range(100)) + "end"


def test_one_ready_line_one_token_and_metrics_of_all_workers(tmp_path: Path) -> None:
    with Serving(tmp_path, options=["--workers", "3", "--metrics"]) as server:
        assert server.listening["workers"] == 3
        assert server.listening["pid"] == server._process.pid
        assert len(_children(server._process.pid)) == 3
        with _http(server.url) as client:  # created once, and valid at each of them
            for number in range(12):
                _send_message(client, server.url, f"s{number}", "hi")
                assert _text_of(client, server.url, f"s{number}") == "You said: hi."
            page = client.get(f"{server.url}/metrics").text
        assert [f'midstream_streams{{worker="{number}"}}' in page for number in (1, 2, 3)] == [True] * 3
        assert page.count("# TYPE midstream_streams gauge") == 1
        turns = [
            float(line.rpartition(" ")[2])
            for line in page.splitlines()
            if line.startswith("midstream_ended_total") and 'kind="turn"' in line
        ]
        assert sum(turns) == 12
        assert len(turns) > 1, "one worker had all turns"
        assert server.terminate() == 0


def test_a_killed_worker_is_replaced_and_no_connection_is_refused(tmp_path: Path) -> None:
    with Serving(tmp_path, options=["--workers", "2"]) as server, _http(server.url) as client:
        first, second = _children(server._process.pid)
        _send_message(client, server.url, "s", "long")
        for victim in (first, second):
            os.kill(victim, signal.SIGKILL)
            _wait_for(lambda victim=victim: not _is_running(victim))
            for _ in range(20):  # half of them belong to the socket of the dead worker
                answer = client.get(f"{server.url}/health")
                assert answer.status_code == 200
            _wait_for(lambda: len(_children(server._process.pid)) == 2)
            _wait_for(lambda: _is_ready_twice(server, client))
        assert _text_of(client, server.url, "s") == LONG
        assert server.terminate() == 0


def _is_ready_twice(server: Serving, client: httpx2.Client) -> bool:
    """Return whether each of two workers holds a lock in the store."""
    locks = [*Path(f"{server.store}.nodes").glob("*.lock")]
    return len(locks) >= 2 and client.get(f"{server.url}/ready").status_code == 200


def test_the_workers_end_with_the_supervisor(tmp_path: Path) -> None:
    with Serving(tmp_path, options=["--workers", "2"]) as server:
        workers = _children(server._process.pid)
        server._process.kill()
        _wait_for(lambda: not any(map(_is_running, workers)))
        server._process.communicate(timeout=WAIT_S)


def test_a_rolling_restart_replaces_all_workers_and_interrupts_no_turn(tmp_path: Path) -> None:
    with Serving(tmp_path, options=["--workers", "2"]) as server, _http(server.url) as client:
        before = set(_children(server._process.pid))
        _send_message(client, server.url, "s", "long")
        server._process.send_signal(signal.SIGHUP)
        _wait_for(lambda: not before & set(_children(server._process.pid)))
        assert _text_of(client, server.url, "s") == LONG
        _wait_for(lambda: len(_children(server._process.pid)) == 2)
        assert client.get(f"{server.url}/health").status_code == 200
        assert server.terminate() == 0


def test_a_rolling_restart_with_broken_code_leaves_the_old_workers(tmp_path: Path) -> None:
    with Serving(tmp_path, options=["--workers", "2"]) as server, _http(server.url) as client:
        before = _children(server._process.pid)
        (tmp_path / "told.py").write_text("raise RuntimeError('broken')")
        server._process.send_signal(signal.SIGHUP)
        assert server._process.stderr is not None
        line = ""
        while "the old workers stay" not in line:
            line = server._process.stderr.readline()
            assert line
        assert _children(server._process.pid) == before
        assert client.get(f"{server.url}/health").status_code == 200
        assert server.interrupt()[0] == 0


@pytest.mark.parametrize(
    ("app", "options", "expected"),
    [
        ("raise RuntimeError('broken')", [], "broken"),
        (APP, ["--store", "memory:"], "belongs to one process"),
        (APP, ["--tls-cert", "told.py", "--tls-key", "told.py"], "the key of the certificate"),
    ],
)
def test_a_server_that_cannot_start_ends_with_the_reason(
    app: str, options: list[str], expected: str, tmp_path: Path
) -> None:
    (tmp_path / "told.py").write_text(app)
    command = ("--home", "home", "serve", "told:agent", "--workers", "2", "--port", "0", *options)
    done = run(*command, cwd=tmp_path)
    assert done.returncode != 0
    assert expected in done.stderr
    assert "Traceback" not in done.stderr


def test_the_port_of_other_workers_is_reported_as_taken(tmp_path: Path) -> None:
    with Serving(tmp_path, options=["--workers", "2"]) as server:
        command = ("serve", "told:agent", "--workers", "2", "--port", str(server.port))
        done = run(*command, "--store", tmp_path / "other.db", cwd=tmp_path)
    assert done.returncode != 0
    assert "another program listens" in done.stderr


LEDGER_APP = """
import asyncio
from pathlib import Path

from midstream import Agent
from midstream.testing import Pause, ScriptedModel, calls, text
from midstream.tools.function_tools import tool


@tool
async def book(what: str) -> str:
    '''Book something, which must not happen twice.'''
    with Path("ledger").open("a") as ledger:
        ledger.write(f"{what}\\n")
    await asyncio.sleep(0.05)
    return f"booked {what}"


def response(request):
    said = request.history.entries[-1]
    if not hasattr(said, "parts"):
        return text("done")
    words = said.parts[0].text
    if words.startswith("book "):
        return calls(*[("book", '{"what": "' + f"{words}.{n}" + '"}') for n in range(3)], text="I book.")
    slowly = [step for number in range(50) for step in (Pause(0.02), *text(f"w{number} ")[:-1])]
    return [*slowly, *text(f"end of {words}")]


agent = Agent(ScriptedModel(response, delay_s=0.002), name="tested").with_tools(book)
"""
WORDS = "".join(f"w{number} " for number in range(50))
CLIENTS, KILLS = 6, 5
"""`make scale` has more of both."""


@pytest.mark.long
@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
async def test_clients_lose_and_duplicate_nothing_while_workers_are_killed(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    store = ""
    if kind == "postgresql":
        store = use_postgres(tmp_path, request.getfixturevalue("engine"))
    with Serving(tmp_path, options=["--workers", "3"], app=LEDGER_APP, store=store) as server:
        url = server.url

        async def send_questions(number: int) -> list[str]:
            async with connect(url) as client:
                return [
                    await client.ask(
                        f"c{number}", f"book {number}.{turn}" if turn % 2 else f"{number}.{turn}"
                    )
                    for turn in range(4)
                ]

        async def kill() -> None:
            world = World()
            for round_ in range(KILLS):
                await world.sleep(0.6)
                workers = _children(server._process.pid)
                if workers:
                    os.kill(workers[round_ % len(workers)], signal.SIGKILL)

        killing = asyncio.ensure_future(kill())
        async with asyncio.timeout(3 * WAIT_S):
            answers = await asyncio.gather(*map(send_questions, range(CLIENTS)))
        await killing
        for number, answer in enumerate(answers):
            assert answer[::2] == [f"{WORDS}end of {number}.{turn}" for turn in (0, 2)]
            assert answer[1::2] == ["I book.\n\ndone"] * 2
        booked = (tmp_path / "ledger").read_text().splitlines()
        assert len(booked) == len(set(booked))
        assert len(booked) <= CLIENTS * 2 * 3
        assert server.terminate() == 0
