"""Codex's threads, with the real package and a scripted app server."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("openai_codex", reason="the package is not installed here: `make test` installs it")

from openai_codex import Sandbox
from openai_codex.generated.notification_registry import NOTIFICATION_MODELS

from midstream.agents import codex
from midstream.agents.codex import Codex, CodexTurn
from midstream.agents.permission_rules import CAUTIOUS, Asking, Permission, Rules, Verdict
from midstream.agents.upstreams import MessageTaken, Setup, UpstreamAgent, UpstreamEvent, UpstreamMessage
from midstream.environment import World
from midstream.errors import (
    ContextOverflowError,
    ModelAccessError,
    ModelError,
    ModelFilteredError,
    ModelMissingError,
    ModelRateLimitedError,
    ModelUnavailableError,
    UpstreamFailedError,
    UsageError,
)
from midstream.history.messages import Outcome, UserMessage
from midstream.models.responses import TextDelta, UpstreamCallEnded, UpstreamCallStarted, Working
from midstream.testing.upstream_contract import PeerMessage, Trait, UpstreamContract
from midstream.tools.forwarded_servers import ForwardedMcpServer
from tests.agents import codex_server
from tests.agents.ended_processes import end_agents
from tests.agents.part_of_pool import PartOfPoolContract
from tests.agents.permission_contract import PermissionContract
from tests.spec import spec

# The package leaves the pipes of a process it has ended to the garbage collector.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Exception ignored in.*FileIO:pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
]


@pytest.fixture(autouse=True)
def _collected() -> Iterator[None]:
    """Collect them in the test that left them; otherwise another test fails."""
    yield
    gc.collect()


class CodexPeer:
    """The controls of the scripted app server: files in the folder that it reads."""

    lacks = frozenset({Trait.BUSY, Trait.KEYS, Trait.CACHE_WRITES})

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        for name in ("threads", "running"):
            (folder / name).mkdir()

    def upstream(self) -> Codex:
        command = [sys.executable, codex_server.__file__, str(self._folder)]
        return Codex("gpt-5", cwd=self._folder, command=command)

    is_fixed = True

    def with_permissions(self, rules: Rules | Asking) -> Codex:
        command = [sys.executable, codex_server.__file__, str(self._folder)]
        return Codex("gpt-5", cwd=self._folder, command=command, permissions=rules)

    def request_change(self, what: str = "want") -> None:
        (self._folder / what).touch()

    def ran(self) -> list[object]:
        return self._lines("ran")

    def decided(self) -> list[object]:
        return self._lines("decided")

    def terminated(self) -> list[object]:
        return self._lines("terminated")

    def _lines(self, name: str) -> list[object]:
        path = self._folder / f"{name}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def messages(self) -> list[PeerMessage]:
        path = self._folder / "told.jsonl"
        return (
            [PeerMessage(*json.loads(line)) for line in path.read_text().splitlines()]
            if path.exists()
            else []
        )

    def started(self) -> list[object]:
        """Return the configuration of each started thread."""
        lines = (self._folder / "started.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def runs(self) -> int:
        pids = [int(path.name.rpartition(".")[2]) for path in (self._folder / "running").iterdir()]
        return sum(_is_alive(pid) for pid in pids)

    def expire(self, agent: str) -> None:
        (self._folder / "threads" / agent).unlink()

    def end_processes(self) -> None:
        end_agents()

    def be_busy(self, agent: str) -> None:
        raise AssertionError(f"{agent} cannot be busy here")

    def hang(self) -> None:
        (self._folder / "hang").touch()

    def hang_unopened(self) -> None:
        (self._folder / "mute").touch()

    def die_unopened(self) -> None:
        (self._folder / "lose").touch()

    def echo_wrong_id(self) -> None:
        (self._folder / "wrong").touch()

    def die_mid_stream(self) -> None:
        (self._folder / "die").touch()

    def refuse_key(self) -> None:
        (self._folder / "refuse").touch()

    def accept_key(self) -> None:
        (self._folder / "refuse").unlink()

    def run_tool(self, name: str, arguments: str, content: str) -> None:
        (self._folder / "tools").write_text(json.dumps([[name, arguments, content]]))


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


class TestCodexThreads(UpstreamContract):
    """Runs the suite that every upstream passes."""

    @pytest.fixture
    def peer(self, tmp_path: Path) -> CodexPeer:
        return CodexPeer(tmp_path)


class TestCodexPermissions(PermissionContract):
    """Questions to people about the permissions that its agents request."""

    @pytest.fixture
    def permission_peer(self, tmp_path: Path) -> CodexPeer:
        folder = tmp_path / "codex"
        folder.mkdir()
        return CodexPeer(folder)


async def _open_and_send(upstream: Codex, words: str = "one") -> list[object]:
    agent = await upstream.open(Setup())
    return [event async for event in agent.send(UpstreamMessage(UserMessage.of(words)), key="k")]


@spec("REUSE-84")
async def test_a_lost_app_server_costs_one_start_and_resumes_each_thread(tmp_path: Path) -> None:
    peer = CodexPeer(tmp_path)
    async with contextlib.aclosing(peer.upstream()) as upstream, asyncio.timeout(60):
        threads = [await upstream.open(Setup()) for _ in range(3)]
        for thread in threads:
            await _send(thread, "one")
        peer.end_processes()
        texts = await asyncio.gather(*(_send(thread, "two") for thread in threads))
    assert texts == ["one | two"] * 3
    assert len(peer.started()) == 3  # the threads; none was started again
    assert len(peer.messages()) == 6


async def _send(thread: UpstreamAgent, words: str) -> str:
    message = UpstreamMessage(UserMessage.of(words))
    events = [event async for event in thread.send(message, key=words)]
    return "".join(event.text for event in events if isinstance(event, TextDelta))


async def test_a_cancelled_turn_ends_its_commands(tmp_path: Path) -> None:
    peer = CodexPeer(tmp_path)
    peer.request_change("run")
    async with contextlib.aclosing(peer.upstream()) as upstream:
        agent = await upstream.open(Setup())
        answer = agent.send(UpstreamMessage(UserMessage.of("one")), key="k")
        name = ""
        async with contextlib.aclosing(answer) as events, asyncio.timeout(60):
            async for event in events:
                name = event.agent if isinstance(event, MessageTaken) else name
                if isinstance(event, UpstreamCallStarted):
                    break
    assert peer.terminated() == [[name, "7"]]


async def test_a_turn_that_is_cancelled_twice_ends(tmp_path: Path) -> None:
    """A second cancellation, before a thread is free for the request, does not drop the interruption."""
    loop, release = asyncio.get_running_loop(), threading.Event()
    loop.set_default_executor(ThreadPoolExecutor(2))  # one thread waits for the next event
    peer = CodexPeer(tmp_path)
    peer.hang()
    async with contextlib.aclosing(peer.upstream()) as upstream, asyncio.timeout(60):
        answer = (await upstream.open(Setup())).send(UpstreamMessage(UserMessage.of("one")), key="k")
        while not isinstance(await anext(answer), Working):
            pass
        reader = asyncio.ensure_future(anext(answer))
        occupied = loop.run_in_executor(None, release.wait)
        for _ in range(2):
            for _ in range(10):  # until it waits for a thread
                await asyncio.sleep(0)
            reader.cancel()
        release.set()
        await asyncio.gather(reader, occupied, return_exceptions=True)
        while peer.runs():
            await World().sleep(0.01)


async def test_an_app_server_ends_even_if_the_caller_that_closes_it_is_cancelled(tmp_path: Path) -> None:
    loop, release = asyncio.get_running_loop(), threading.Event()
    loop.set_default_executor(ThreadPoolExecutor(1))
    upstream = CodexPeer(tmp_path).upstream()
    async with asyncio.timeout(60):
        thread = await upstream.open(Setup())
        process = thread._codex._client._sync._proc
        assert process is not None
        occupied = loop.run_in_executor(None, release.wait)
        closing = asyncio.ensure_future(upstream.aclose())
        for _ in range(10):  # until it waits for a thread
            await asyncio.sleep(0)
        closing.cancel()
        release.set()
        await asyncio.gather(closing, occupied, return_exceptions=True)
        while _is_alive(process.pid):
            await World().sleep(0.01)


async def test_rules_decide_about_whole_commands_and_changes(tmp_path: Path) -> None:
    peer = CodexPeer(tmp_path)
    seen: list[Permission] = []

    async def decide(permission: Permission) -> Verdict:
        seen.append(permission)
        return True if permission.kind == "edit" else "not here"

    async with contextlib.aclosing(peer.with_permissions(decide)) as upstream:
        peer.request_change()
        peer.request_change("want-change")
        events = await _open_and_send(upstream)
    assert peer.decided() == [["commandExecution", "decline"], ["fileChange", "accept"]]
    assert [(each.tool, each.kind, each.arguments, each.is_fixed) for each in seen] == [
        ("shell", "execute", '{"command":"make"}', True),
        ("apply_patch", "edit", '{"changes":[{"diff":"+a","path":"a.txt"}]}', True),
    ]
    ended = [event for event in events if isinstance(event, UpstreamCallEnded)]
    assert ended[0] == UpstreamCallEnded("w", "not here", Outcome.DENIED)
    assert ended[1].outcome is Outcome.OK


async def test_other_threads_continue_while_one_waits_for_a_decision(tmp_path: Path) -> None:
    peer = CodexPeer(tmp_path)
    is_asked, is_decided = asyncio.Event(), asyncio.Event()

    async def decide(_: Permission) -> Verdict:
        is_asked.set()
        await is_decided.wait()
        return True

    async with contextlib.aclosing(peer.with_permissions(decide)) as upstream, asyncio.timeout(60):
        peer.request_change()
        waiting = asyncio.ensure_future(_open_and_send(upstream))
        await is_asked.wait()
        other = await _open_and_send(upstream, "two")
        assert "".join(event.text for event in other if isinstance(event, TextDelta)) == "two"
        assert not waiting.done()
        is_decided.set()
        await waiting
    assert peer.decided() == [["commandExecution", "accept"]]


async def test_a_failing_decision_refuses_the_action(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    peer = CodexPeer(tmp_path)

    async def decide(_: Permission) -> Verdict:
        raise LookupError

    async with contextlib.aclosing(peer.with_permissions(decide)) as upstream:
        peer.request_change()
        await _open_and_send(upstream)
    assert peer.decided() == [["commandExecution", "decline"]]
    assert "a decision failed" in caplog.text


def test_codex_review_and_permissions_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="either"):
        Codex(cwd=tmp_path, is_reviewing=True, permissions=CAUTIOUS)


class _ShortInterrupts(CodexPeer):
    """Interrupts an unconfirmed turn for a short time only; no test here depends on that time."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        super().__init__(folder)
        self._patch = patch

    def hang_unopened(self) -> None:
        super().hang_unopened()
        self._patch.setattr(codex, "STOP_S", 0.1)


@pytest.mark.slow
class TestCodexPooled(PartOfPoolContract):
    """Runs each fault, and each situation."""

    @pytest.fixture
    def peer(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CodexPeer:
        return _ShortInterrupts(tmp_path, monkeypatch)


def _read(*notifications: tuple[str, dict[str, object]]) -> tuple[list[UpstreamEvent], ModelError | None]:
    """Read a turn as the app server reports it."""
    reading = CodexTurn()
    events: list[UpstreamEvent] = []
    for method, params in notifications:
        payload = NOTIFICATION_MODELS[method].model_validate({"threadId": "t", "turnId": "u", **params})
        events += reading.read(payload, method)
    return events, reading.failure


def _completed(status: str, error: dict[str, object] | None = None) -> tuple[str, dict[str, object]]:
    return "turn/completed", {"turn": {"id": "u", "items": [], "status": status, "error": error}}


def test_items_that_codex_runs_itself_are_reported_with_their_end() -> None:
    command: dict[str, object] = {"type": "commandExecution", "id": "c", "command": "ls", "cwd": "/w"}
    command |= {"commandActions": [], "status": "inProgress"}
    done = {**command, "status": "failed", "aggregatedOutput": "no such folder", "exitCode": 2}
    events, failure = _read(
        ("item/started", {"startedAtMs": 1, "item": command}),
        ("item/completed", {"completedAtMs": 2, "item": done}),
        _completed("completed"),
    )
    assert events == [
        UpstreamCallStarted("c", "shell", '{"command":"ls","cwd":"/w"}'),
        UpstreamCallEnded("c", "no such folder", Outcome.ERROR),
    ]
    assert failure is None


def test_a_message_that_arrived_whole_is_sent_once() -> None:
    item = {"type": "agentMessage", "id": "m", "text": "hello"}
    whole = ("item/completed", {"completedAtMs": 2, "item": item})
    content: dict[str, object] = {"itemId": "m", "delta": "hello"}
    delta = ("item/agentMessage/delta", content)
    assert _read(whole, _completed("completed"))[0] == [TextDelta("hello")]
    assert _read(delta, whole, _completed("completed"))[0] == [TextDelta("hello")]


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        ("contextWindowExceeded", ContextOverflowError),
        ("unauthorized", ModelAccessError),
        ("rateLimitExceeded", ModelRateLimitedError),
        ("cyberPolicy", ModelFilteredError),
        ({"responseStreamDisconnected": {"httpStatusCode": 502}}, ModelUnavailableError),
        ("other", UpstreamFailedError),
        ("somethingNew", UpstreamFailedError),
        (None, UpstreamFailedError),
    ],
)
def test_a_failed_turn_raises_the_matching_error(info: object, expected: type[ModelError]) -> None:
    _, failure = _read(_completed("failed", {"message": "no", "codexErrorInfo": info}))
    assert type(failure) is expected


async def test_a_started_turn_has_taken_the_message(tmp_path: Path) -> None:
    peer = CodexPeer(tmp_path)
    async with contextlib.aclosing(peer.upstream()) as upstream:
        agent = await upstream.open(Setup())
        peer.refuse_key()
        answer = agent.send(UpstreamMessage(UserMessage.of("one")), key="k")
        assert isinstance(await anext(answer), MessageTaken)
        with pytest.raises(ModelAccessError):
            await anext(answer)


async def test_an_app_server_that_dies_with_a_message_may_have_stored_it(tmp_path: Path) -> None:
    peer = CodexPeer(tmp_path)
    async with contextlib.aclosing(peer.upstream()) as upstream:
        agent = await upstream.open(Setup())
        peer.die_unopened()
        with pytest.raises(UpstreamFailedError):
            await anext(agent.send(UpstreamMessage(UserMessage.of("one")), key="k"))
        with pytest.raises(ModelUnavailableError) as raised:  # now its end is known
            await anext(agent.send(UpstreamMessage(UserMessage.of("one")), key="k"))
        assert type(raised.value) is ModelUnavailableError


async def test_each_thread_has_its_servers_without_those_that_need_a_sign_in(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    servers = (
        ForwardedMcpServer("files", command="files-server", args=("--root", "."), env={"A": "b"}),
        ForwardedMcpServer("open", "http", url="http://127.0.0.1/mcp", headers={"Authorization": "Bearer t"}),
        ForwardedMcpServer("shop", "http", url="http://127.0.0.1/shop", client_id="c", scope="read"),
        ForwardedMcpServer("old", "sse", url="http://127.0.0.1/sse"),
    )
    peer = CodexPeer(tmp_path)
    async with contextlib.aclosing(peer.upstream()) as upstream:
        for _ in range(2):
            await upstream.open(Setup(servers=servers))
    assert peer.started() == 2 * [
        {
            "mcp_servers": {
                "files": {"command": "files-server", "args": ["--root", "."], "env": {"A": "b"}},
                "open": {"url": "http://127.0.0.1/mcp", "http_headers": {"Authorization": "Bearer t"}},
            }
        }
    ]
    left_out = [record.message for record in caplog.records if "left out" in record.message]
    assert ["'old'" in words or "'shop'" in words for words in left_out] == [True, True]


async def test_an_app_server_that_does_not_start_is_missing_software(tmp_path: Path) -> None:
    upstream = Codex(cwd=tmp_path, command=["/nowhere/codex"])
    with pytest.raises(ModelMissingError, match="does not start"):
        await upstream.open(Setup())


def test_another_folder_model_or_sandbox_is_another_identity(tmp_path: Path) -> None:
    identities = [
        Codex("m", cwd=tmp_path).identity,
        Codex("n", cwd=tmp_path).identity,
        Codex("m", cwd=tmp_path.parent).identity,
        Codex("m", cwd=tmp_path, sandbox=Sandbox.read_only).identity,
    ]
    assert len({tuple(sorted(identity.items())) for identity in identities}) == len(identities)


def test_threads_belong_to_the_home_folder_of_the_app_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def home(**env: str) -> str:
        return Codex(cwd=tmp_path, env=env).identity["home"]

    monkeypatch.delenv("CODEX_HOME", raising=False)
    assert (home(), home(A="b"), home(HOME="/other")) == ("", "", "/other/.codex")
    monkeypatch.setenv("CODEX_HOME", "/own")
    assert (home(A="b"), home(HOME="/other"), home(CODEX_HOME="/new")) == ("/own", "/own", "/new")
