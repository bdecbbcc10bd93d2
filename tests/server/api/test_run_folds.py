"""Folds of a session's runs: from the stored fold of a journal, and from its beginning."""

from __future__ import annotations

from typing import Any

from midstream.dialects.langgraph_protocol import CHANNELS, ProtocolEvents, Subscription
from midstream.dialects.run_fold import RunFold
from midstream.engine.host import Host
from midstream.server.api.langgraph_threads import GraphThreads
from midstream.server.api.run_folds import FoldedRuns
from midstream.session.journal_reading import JournalReader
from midstream.testing.scripted_model import text
from tests.server.serving import asgi_client, make_app
from tests.server.test_kept import prune

Json = dict[str, Any]
BASE = "/v1/langgraph/threads/s1/runs/wait"


async def run_turn(http: Any, words: str) -> None:  # noqa: ANN401 - a client
    body = {"assistant_id": "agent", "input": {"messages": words}, "if_not_exists": "create"}
    answered = await http.post(BASE, json=body)
    assert answered.status_code == 200, answered.text


async def read_on(host: Host, found: FoldedRuns[RunFold], wanted: Subscription) -> list[bytes]:
    stream = ProtocolEvents(found.fold, found.seq, wanted, "agent")
    reader, runner = JournalReader(), await host.session("s1")
    events: list[bytes] = []
    for stored in await runner.read(after=found.position, limit=1000):
        events += stream.take(reader.read(stored.body), epoch=stored.epoch)
    return events


async def test_a_reader_of_the_newest_turn_gets_the_same_events_as_a_reader_of_the_whole_thread() -> None:
    app = make_app([text("Hello you.")])
    async with asgi_client(app) as http:
        for words in ("one", "two", "three"):
            await run_turn(http, words)
        threads, runner = GraphThreads(app.host, app.connections), await app.host.session("s1")
        whole = await read_on(
            app.host, await threads.folds.after(runner, "s1", since=0), Subscription(CHANNELS)
        )
        for since in range(len(whole) + 1):
            found = await threads.folds.after(runner, "s1", since=since)
            assert await read_on(app.host, found, Subscription(CHANNELS, since=since)) == whole[since:]
        near = await threads.folds.after(runner, "s1", since=len(whole))
        assert near.position > 0, "it was read from the beginning"
        runs = (await threads.folds.now(runner, "s1")).runs
        places = [(await threads.folds.before(runner, "s1", run_id=run.id)).position for run in runs]
        assert places[:2] == [0, 0]
        assert 0 < places[2] <= runs[2].after


async def test_a_thread_with_a_pruned_or_deleted_journal_is_folded_again() -> None:
    app = make_app([text("Hello you.")])
    async with asgi_client(app) as http:
        await run_turn(http, "one")
        await run_turn(http, "two")
        shown = (await http.get("/v1/langgraph/threads/s1/state")).json()["values"]
        await prune(app.host)
        again = (await http.get("/v1/langgraph/threads/s1/state")).json()["values"]
        assert [each["content"] for each in again["messages"]] == [
            each["content"] for each in shown["messages"]
        ]
        await run_turn(http, "three")
        assert (await http.delete("/v1/sessions/s1")).status_code == 204
        assert (await http.get("/v1/langgraph/threads/s1/state")).status_code == 404
        await run_turn(http, "four")
        fresh = (await http.get("/v1/langgraph/threads/s1/state")).json()["values"]["messages"]
        assert [each["content"] for each in fresh] == ["four", "Hello you."]


async def test_a_reader_misses_no_event_where_the_journal_is_pruned_behind_it() -> None:
    app = make_app([text("Hello you.")])
    async with asgi_client(app) as http:
        await run_turn(http, "one")
        threads, runner = GraphThreads(app.host, app.connections), await app.host.session("s1")
        newest = await threads.folds.newest_seq(runner, "s1")
        await prune(app.host)
        await run_turn(http, "two")
        runner = await app.host.session("s1")
        for since in range(newest + 1):
            found = await GraphThreads(app.host, app.connections).folds.after(runner, "s1", since=since)
            events = await read_on(app.host, found, Subscription(CHANNELS, since=since))
            assert b'"event":"completed"' in events[-1]
            assert sum(b'"event":"running"' in each for each in events) == 1, since


async def test_a_reader_ahead_of_the_journal_gets_the_newest_turn() -> None:
    app = make_app([text("Hello you.")])
    async with asgi_client(app) as http:
        await run_turn(http, "one")
        await run_turn(http, "two")
        threads, runner = GraphThreads(app.host, app.connections), await app.host.session("s1")
        found = await threads.folds.after(runner, "s1", since=10**6)
        assert 0 < found.position <= (await threads.folds.now(runner, "s1")).runs[1].after
