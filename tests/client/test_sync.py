"""The synchronous client behaves like the asynchronous one, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from midstream.client import ClientSettings, sync
from midstream.client import client as asynchronous
from midstream.client.sync import Portal, connect
from midstream.errors import SessionNotFoundError, UsageError
from midstream.models.responses import TextDelta
from midstream.session.records import TurnEnded, TurnStatus
from midstream.testing import Gate, calls, text
from midstream.testing.scripted_model import Script, Stall
from midstream.tools.function_tools import question
from tests.server.in_thread import in_a_thread
from tests.server.serving import make_app, served

WORDS = "one two three"
PUSH = calls(("c1", "push", '{"button":"red"}'))

WAIT_S = 60.0

Serve = Callable[[Script], str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Serve a script in its own thread, and check that no thread of a client is left at the end."""
    with contextlib.ExitStack() as stack:

        def start(script: Script) -> str:
            @contextlib.asynccontextmanager
            async def serving() -> AsyncIterator[str]:
                async with served(make_app(script, tools=[question()])) as server:
                    yield server.url

            return stack.enter_context(in_a_thread(serving))

        yield start
    assert [each.name for each in threading.enumerate() if each.name == "midstream client"] == []


def test_a_turn_is_iterated_with_a_tool_of_this_process(serve: Serve) -> None:
    done: list[str] = []

    def push(button: str) -> str:
        """Push a button."""
        done.append(button)
        return "pushed"

    with connect(serve([PUSH, text(WORDS)]), tools=[push]) as client:
        events = [*client.send("s1", "push it")]
        assert "".join(event.text for event in events) == WORDS
        assert (events[-1].is_end, done) == (True, ["red"])
        assert client.waiting_on("s1") == "nothing"
        assert (client.is_reconnecting("s1"), client.is_stalled("s1"), client.trouble("s1")) == (
            False,
            False,
            None,
        )
        followed = client.follow("s1", "0-0")
        assert [next(followed).id for _ in events][-1] == f"1-{len(events)}"
        followed.close()


def test_leaving_the_loop_detaches_and_the_next_process_receives_the_rest(
    serve: Serve, tmp_path: Path
) -> None:
    gate = asyncio.Event()
    url = serve([[*text("half a"), Gate(gate), *text(" sentence")]])
    state = tmp_path / "state.db"
    with connect(url, state=state) as client:
        for event in client.send("s1", "hi"):
            if event.text:
                break
    with connect(url, state=state) as client:
        (turn,) = client.resume_interrupted()
        assert (turn.session, client.is_reconnecting("s1")) == ("s1", False)
        events = iter(turn)
        assert next(events).text == "half a"
        client.cancel("s1")
        last = [*events][-1].record
        assert isinstance(last, TurnEnded)
        assert last.status is TurnStatus.CANCELLED
        assert client.resume_interrupted() == []


def test_ctrl_c_interrupts_the_wait_and_the_turn_continues(serve: Serve, tmp_path: Path) -> None:
    main = threading.main_thread().ident
    assert main is not None
    url, state = serve([PUSH, text(WORDS)]), tmp_path / "state.db"

    def push(button: str) -> str:
        """Push a button, which is Ctrl-C."""
        signal.pthread_kill(main, signal.SIGINT)
        return "pushed"

    def interrupted() -> None:
        with connect(url, state=state, tools=[push]) as client:
            for _ in client.send("s1", "push it"):
                pass

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    with connect(url, state=state, tools=[push]) as client:
        (turn,) = client.resume_interrupted()
        assert [event for event in turn if event.is_end]


def test_a_person_answers_and_withdraws(serve: Serve) -> None:
    asks = calls(("c1", "ask_user", '{"question": "Which one?"}'))
    with connect(serve([asks, text("ok")])) as client:
        turn = client.send("s1", "hi")
        asked = next(event.question for event in turn if event.question is not None)
        (listed,) = client.questions("s1")
        assert listed.text == "Which one?"
        client.withdraw("s1")
        client.answer("s1", asked, "respond", text="the red one")
        assert "".join(event.text for event in turn) == "ok"


def test_an_error_is_raised_as_its_type(serve: Serve) -> None:
    with connect(serve([text(WORDS)])) as client:
        with pytest.raises(SessionNotFoundError):
            next(client.follow("nobody"))
        with pytest.raises(UsageError):
            next(client.resume(""))
    with pytest.raises(UsageError):
        connect("localhost:8000")


def test_a_client_is_used_inside_its_block_and_closed_twice(serve: Serve) -> None:
    client = connect(serve([text(WORDS)]))
    with pytest.raises(UsageError, match="inside"):
        client.questions()
    with client:
        left = client.send("s1", "hi")
        next(left)
    client.close()
    with pytest.raises(UsageError):
        next(left)
    with pytest.raises(UsageError):
        client.cancel("s1")


def test_a_state_file_that_cannot_be_opened_leaves_no_thread(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError):
        connect(serve([]), state=tmp_path / "file" / "state.db").__enter__()


def test_a_client_is_closed_while_another_thread_iterates(serve: Serve) -> None:
    seen: list[str] = []
    begun = threading.Event()
    client = connect(serve([[TextDelta("half a"), Stall()]]))

    def iterate() -> None:
        for event in client.send("s1", "hi"):
            seen.append(event.text)
            if event.text:
                begun.set()

    with client:
        thread = threading.Thread(target=iterate)
        thread.start()
        assert begun.wait(WAIT_S)
    thread.join(WAIT_S)
    assert (thread.is_alive(), seen[-1]) == (False, "half a")


def test_a_wait_during_the_close_by_another_thread_raises_an_error() -> None:
    portal = Portal()
    portal.open()
    errors: list[BaseException] = []
    waits = threading.Event()

    async def wait() -> None:
        waits.set()
        await asyncio.Event().wait()

    def call() -> None:
        try:
            portal.call(wait())
        except BaseException as error:  # noqa: BLE001 - any value is examined
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    assert waits.wait(WAIT_S)
    portal.close()
    thread.join(WAIT_S)
    assert [type(error) for error in errors] == [UsageError]


def test_a_client_is_used_in_one_block_only(serve: Serve) -> None:
    client = connect(serve([text(WORDS)]))
    with client:
        pass
    with pytest.raises(UsageError, match="create another one"), client:
        pass
    client.close()


def test_a_callback_may_not_wait_for_its_own_thread() -> None:
    errors: list[UsageError] = []
    with connect(
        "http://127.0.0.1:1",
        settings=ClientSettings(patience_s=0.0),
        on_reconnecting=lambda *_: errors.append(_usage_error(client)),
    ) as client:
        portal = client._portal
        portal.call(_call_soon(lambda: errors.append(_usage_error(client))))
    assert ["callbacks" in error.message for error in errors] == [True]


def _usage_error(client: sync.SyncClient) -> UsageError:
    with pytest.raises(UsageError) as caught:
        client.waiting_on("s1")
    return caught.value


async def _call_soon(what: Callable[[], None]) -> None:
    what()


@pytest.mark.parametrize("name", [name for name in vars(asynchronous.Client) if not name.startswith("_")])
def test_it_has_every_method_with_the_same_parameters(name: str) -> None:
    ours, theirs = getattr(sync.SyncClient, name), getattr(asynchronous.Client, name)
    assert inspect.signature(ours).parameters == inspect.signature(theirs).parameters
