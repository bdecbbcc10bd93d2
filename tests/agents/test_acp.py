"""Agents behind the Agent Client Protocol, by the real package on both sides: `tests/agents/acp_agent.py`."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from midstream.agents.permission_rules import CAUTIOUS, EVERYTHING, Asking, Permission, Rules, Verdict
from midstream.agents.upstreams import (
    MessageDropped,
    MessageTaken,
    Setup,
    Upstream,
    UpstreamAgent,
    UpstreamEvent,
    UpstreamMessage,
)
from midstream.errors import (
    ModelAccessError,
    ModelError,
    ModelFilteredError,
    ModelMissingError,
    ModelRateLimitedError,
    ModelRejectedError,
    ModelUnavailableError,
    UpstreamBusyError,
    UpstreamFailedError,
    UpstreamGoneError,
    UsageError,
)
from midstream.history.messages import File, Finish, Outcome, Text, Usage, UserMessage, UserPart
from midstream.models.responses import (
    Finished,
    TextDelta,
    ThinkingDelta,
    UpstreamCallEnded,
    UpstreamCallStarted,
)
from midstream.testing.upstream_contract import (
    CLOSE_S,
    LIMIT_S,
    LOOK_S,
    WORLD,
    PeerMessage,
    Trait,
    UpstreamContract,
)
from midstream.tools.forwarded_servers import ForwardedMcpServer
from tests.agents.ended_processes import close_cancelled, end_agents, lives
from tests.agents.part_of_pool import PartOfPoolContract
from tests.agents.permission_contract import PermissionContract
from tests.agents.scripted_peer import SEPARATOR, Orders
from tests.house.source import ROOT

pytest.importorskip("acp", reason="the Agent Client Protocol's package is not installed")

from midstream.agents import acp as acp_module
from midstream.agents.acp import AcpAgent

LAUNCHER = ROOT / "tests" / "agents" / "acp_launcher.py"
ENV = {**os.environ, "PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Serve scripted agents that start quickly, and give the address."""
    with tempfile.TemporaryDirectory() as folder:
        address = f"{folder}/agents"
        command = [sys.executable, "-m", "tests.agents.acp_agent", "--serve", address]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=ENV, text=True
        ) as server:
            assert server.stdin is not None
            assert server.stdout is not None
            assert server.stdout.readline() == "ready\n"
            yield address
            server.stdin.close()


class AcpProgram:
    """The scripted agent as a peer of the contract, in its own folder."""

    lacks: frozenset[Trait] = frozenset()

    def __init__(self, folder: Path, address: str, *can: str) -> None:
        self.orders = Orders(folder / "orders")
        self.cwd = folder / "project"
        self.cwd.mkdir()
        self.command = [sys.executable, "-E", "-S", str(LAUNCHER), address, str(self.orders.folder), *can]

    def agent(self, **more: object) -> AcpAgent:
        return AcpAgent(self.command, **{"cwd": self.cwd, **more})  # type: ignore[arg-type] # options of each test

    def upstream(self) -> Upstream:
        return self.agent()

    is_fixed = True

    def with_permissions(self, rules: Rules) -> Upstream:
        return self.agent(permissions=rules)

    def request_change(self) -> None:
        tool = {"name": "edit", "arguments": '{"a":1}', "content": "done", "is_asked": True}
        self.orders.order("tool", tool)

    def ran(self) -> list[object]:
        return [line["arguments"] for line in self.orders.recorded("ran")]

    def messages(self) -> list[PeerMessage]:
        return [
            PeerMessage(line["agent"], line["text"], line["key"]) for line in self.orders.recorded("told")
        ]

    def runs(self) -> int:
        return self.orders.runs()

    def expire(self, agent: str) -> None:
        self.orders.lift(f"talk-{agent}")

    def end_processes(self) -> None:
        end_agents()

    def be_busy(self, agent: str) -> None:
        self.orders.declare(f"busy-{agent}")

    def hang(self) -> None:
        self.orders.order("hang")

    def hang_unopened(self) -> None:
        self.orders.order("mute")

    def die_unopened(self) -> None:
        self.orders.order("lose")

    def echo_wrong_id(self) -> None:
        self.orders.order("wrong")

    def die_mid_stream(self) -> None:
        self.orders.order("die")

    def refuse_key(self) -> None:
        self.orders.declare("refused")

    def accept_key(self) -> None:
        self.orders.lift("refused")

    def run_tool(self, name: str, arguments: str, content: str) -> None:
        self.orders.order("tool", {"name": name, "arguments": arguments, "content": content})


class TestAcpThatResumes(UpstreamContract):
    @pytest.fixture
    def peer(self, tmp_path: Path, address: str) -> AcpProgram:
        return AcpProgram(tmp_path, address, "resume", "load")


class TestAcpThatLoads(UpstreamContract):
    @pytest.fixture
    def peer(self, tmp_path: Path, address: str) -> AcpProgram:
        return AcpProgram(tmp_path, address, "load")


@pytest.mark.slow
class TestAcpThatResumesPooled(PartOfPoolContract):
    """Runs each fault, and each situation."""

    @pytest.fixture
    def peer(self, tmp_path: Path, address: str) -> AcpProgram:
        return AcpProgram(tmp_path, address, "resume", "load")


@pytest.mark.slow
class TestAcpThatLoadsPooled(PartOfPoolContract):
    """Runs each fault, and each situation."""

    @pytest.fixture
    def peer(self, tmp_path: Path, address: str) -> AcpProgram:
        return AcpProgram(tmp_path, address, "load")


# --- beyond the contract

PLAIN = Setup()


@pytest.fixture
def program(tmp_path: Path, address: str) -> AcpProgram:
    return AcpProgram(tmp_path, address, "resume")


async def answer_of(agent: UpstreamAgent, *parts: UserPart | str) -> list[UpstreamEvent]:
    message = UserMessage(tuple(Text(part) if isinstance(part, str) else part for part in parts))
    async with asyncio.timeout(LIMIT_S):
        return [event async for event in agent.send(UpstreamMessage(message), key="key")]


async def open_and_send(
    upstream: AcpAgent, *parts: UserPart | str, setup: Setup = PLAIN
) -> list[UpstreamEvent]:
    try:
        return await answer_of(await upstream.open(setup), *parts)
    finally:
        await upstream.aclose()


async def resume_and_send(upstream: AcpAgent, name: str, text: str) -> list[UpstreamEvent]:
    try:
        return await answer_of(await upstream.open(PLAIN, resume=name), text)
    finally:
        await upstream.aclose()


def name_in(events: list[UpstreamEvent]) -> str:
    assert isinstance(events[0], MessageTaken)
    return events[0].agent


def text_of(events: list[UpstreamEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta))


async def test_an_agent_receives_few_environment_variables_and_none_of_ours(
    program: AcpProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_SECRET", "hidden")
    command = [sys.executable, "-m", "tests.agents.acp_agent", str(program.orders.folder)]
    upstream = AcpAgent(command, cwd=program.cwd, env={"PYTHONPATH": str(ROOT), "ITS_KEY": "s3cr3t"})
    assert text_of(await open_and_send(upstream, "one")) == "one"
    (received,) = program.orders.recorded("initialized")
    assert received["env"]["ITS_KEY"] == "s3cr3t"
    assert "SOME_SECRET" not in received["env"]
    assert received["client_info"]["name"] == "midstream"
    offered = received["client_capabilities"]
    assert (offered["fs"]["read_text_file"], offered["fs"]["write_text_file"], offered["terminal"]) == (
        False,
        False,
        False,
    )
    assert "s3cr3t" not in str(upstream.identity)


@pytest.mark.parametrize(
    ("permissions", "kind", "is_allowed"),
    [
        (CAUTIOUS, "read", True),
        (CAUTIOUS, "edit", False),
        (CAUTIOUS, "unknown", False),
        (EVERYTHING, "execute", True),
        (Rules(tools=frozenset({"edit it"})), "edit", True),
        (Rules(refused=frozenset({"read it"})), "read", False),
    ],
)
async def test_rules_decide_about_each_single_action(
    program: AcpProgram, permissions: Rules, kind: str, *, is_allowed: bool
) -> None:
    program.orders.order("tool", {"name": kind, "arguments": '{"a":1}', "content": "done", "is_asked": True})
    events = await open_and_send(program.agent(permissions=permissions), "one")
    (received,) = program.orders.recorded("permission")
    assert (received["outcome"], received["option_id"]) == ("selected", "yes" if is_allowed else "no")
    (ended,) = [event for event in events if isinstance(event, UpstreamCallEnded)]
    if is_allowed:
        assert (ended.outcome, ended.content) == (Outcome.OK, "done")
    else:
        assert ended.outcome is Outcome.DENIED
        assert "is not allowed here" in ended.content
    assert text_of(events) == "one"


async def test_a_replay_after_the_answer_to_the_load_is_not_output(tmp_path: Path, address: str) -> None:
    program = AcpProgram(tmp_path, address, "load", "late")
    name = name_in(await open_and_send(program.agent(), "one"))
    assert text_of(await resume_and_send(program.agent(), name, "two")) == SEPARATOR.join(["one", "two"])


async def test_the_end_of_a_process_is_detected_while_its_child_keeps_the_pipes_open(
    program: AcpProgram,
) -> None:
    command = [sys.executable, "-m", "tests.agents.acp_agent", str(program.orders.folder)]
    upstream = AcpAgent(command, cwd=program.cwd, env={"PYTHONPATH": str(ROOT)})
    program.orders.order("leave a child")
    with pytest.raises(UpstreamFailedError, match="ended before its answer"):
        await open_and_send(upstream, "one")


async def test_all_processes_end_even_if_the_caller_that_closes_them_is_cancelled(
    program: AcpProgram,
) -> None:
    upstream = program.agent()
    agent = await upstream.open(Setup())
    async for _ in agent.send(UpstreamMessage(UserMessage.of("one")), key="k"):
        pass
    await close_cancelled(upstream.aclose, upstream._agents)


async def test_a_callback_can_decide_about_permissions(program: AcpProgram) -> None:
    seen: list[Permission] = []

    async def ask(permission: Permission) -> Verdict:
        seen.append(permission)
        return "not on a Sunday"

    program.orders.order(
        "tool", {"name": "edit", "arguments": '{"a":1}', "content": "done", "is_asked": True}
    )
    events = await open_and_send(program.agent(permissions=ask), "one")
    assert seen == [Permission(name_in(events), "edit it", "edit", '{"a":1}', is_fixed=True)]
    shown = [event for event in events if isinstance(event, UpstreamCallStarted | UpstreamCallEnded)]
    assert shown == [
        UpstreamCallStarted("call-1", "edit", '{"a":1}'),
        UpstreamCallEnded("call-1", "not on a Sunday", Outcome.DENIED),
    ]


class TestAcpPermissions(PermissionContract):
    """Questions to people about the permissions that its agents request."""

    @pytest.fixture
    def permission_peer(self, program: AcpProgram) -> AcpProgram:
        return program


async def test_a_cancel_does_not_wait_for_a_pending_permission_callback(program: AcpProgram) -> None:
    is_asked = asyncio.Event()

    async def ask(_: Permission) -> Verdict:
        is_asked.set()
        await asyncio.Event().wait()
        return True

    asking: Asking = ask
    program.orders.order("tool", {"name": "edit", "arguments": "{}", "content": "done", "is_asked": True})
    upstream = program.agent(permissions=asking)
    reader = asyncio.get_running_loop().create_task(open_and_send(upstream, "one"))
    async with asyncio.timeout(LIMIT_S):
        await is_asked.wait()
    reader.cancel()
    async with asyncio.timeout(CLOSE_S):
        await asyncio.gather(reader, return_exceptions=True)
    assert [received["outcome"] for received in program.orders.recorded("permission")] == ["cancelled"]
    assert program.runs() == 0


async def test_an_agent_that_cannot_load_sessions_receives_no_message_on_resume(
    tmp_path: Path, address: str
) -> None:
    forgetful = AcpProgram(tmp_path, address)
    name = name_in(await open_and_send(forgetful.agent(), "one"))
    with pytest.raises(UpstreamGoneError, match="cannot resume earlier"):
        await resume_and_send(forgetful.agent(), name, "two")
    assert [received.text for received in forgetful.messages()] == ["one"]


@pytest.mark.parametrize("code", [-32001, -32002, -32601, -32602])
async def test_a_refusal_to_open_a_known_session_is_an_upstream_gone_error(
    program: AcpProgram, code: int
) -> None:
    name = name_in(await open_and_send(program.agent(), "one"))
    program.orders.order("opening", [code, "some words", None])
    with pytest.raises(UpstreamGoneError, match="some words"):
        await resume_and_send(program.agent(), name, "two")


@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        ([-32000, "Authentication required", None], ModelAccessError),
        ([-32603, "Internal error", {"details": "429 rate limit"}], ModelRateLimitedError),
        ([400, "the provider refuses it", None], ModelRejectedError),
        ([-32603, "Internal error: no", {"errorName": "APIError"}], ModelRejectedError),
        ([-32603, "Internal error: invalid api key", {"errorName": "APIError"}], ModelAccessError),
        ([-32603, "Internal error: no", {"errorName": "ProviderAuthError"}], ModelAccessError),
        ([-32603, "Internal error", {"details": "Session not found"}], UpstreamGoneError),
        ([-32603, "Internal error", {"details": "Agent is busy"}], UpstreamBusyError),
        ([-32603, "Internal error", None], UpstreamFailedError),
        ([-32002, "Resource not found", {"uri": "file:///a.txt"}], UpstreamFailedError),
    ],
)
async def test_a_refused_message_raises_the_matching_error_and_the_process_stays(
    program: AcpProgram, failure: list[object], kind: type[ModelError]
) -> None:
    upstream = program.agent()
    agent = await upstream.open(PLAIN)
    program.orders.order("failure", failure)
    with pytest.raises(ModelError) as raised:
        await answer_of(agent, "one")
    assert type(raised.value) is kind
    assert text_of(await answer_of(agent, "two")) == "two"
    assert len(program.orders.recorded("initialized")) == 1
    await upstream.aclose()


@pytest.mark.parametrize(
    ("name", "taken"),
    [
        ("gemini-cli", [MessageTaken, MessageDropped]),
        ("scripted", [MessageTaken]),
    ],
)
async def test_after_a_provider_failure_the_agent_may_have_the_message(
    program: AcpProgram, name: str, taken: list[type[UpstreamEvent]]
) -> None:
    program.orders.declare("name", name)
    upstream = program.agent()
    agent = await upstream.open(PLAIN)
    program.orders.order("provider failure", [429, "too many requests", None])
    answer = agent.send(UpstreamMessage(UserMessage.of("one")), key="k")
    events = [await anext(answer) for _ in taken]
    assert [type(event) for event in events] == taken
    with pytest.raises(ModelUnavailableError):
        await anext(answer)
    assert isinstance(events[0], MessageTaken)
    assert events[0].is_provisional
    await upstream.aclose()


async def test_the_startup_error_of_a_program_is_classified(program: AcpProgram) -> None:
    program.orders.declare("silent", "You are not logged in, my friend")
    with pytest.raises(ModelAccessError, match="not logged in") as raised:
        await open_and_send(program.agent(), "one")
    assert raised.value.__notes__ == ["You are not logged in, my friend"]


async def test_a_missing_program_a_missing_folder_and_another_protocol_are_a_missing_model(
    program: AcpProgram,
) -> None:
    with pytest.raises(ModelMissingError, match="does not start"):
        await open_and_send(AcpAgent(["no-such-program-anywhere"], cwd=program.cwd), "one")
    with pytest.raises(ModelMissingError, match="does not start"):
        await open_and_send(program.agent(cwd=program.cwd / "gone"), "one")
    program.orders.declare("version", 9)
    with pytest.raises(ModelMissingError, match="version 9"):
        await open_and_send(program.agent(), "one")
    with pytest.raises(UsageError, match="names a program"):
        AcpAgent("")


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
async def test_a_tool_that_continues_after_a_cancel_is_ended(program: AcpProgram) -> None:
    upstream = program.agent()
    agent = await upstream.open(PLAIN)
    await answer_of(agent, "one")
    program.orders.order("detached")
    answer = agent.send(UpstreamMessage(UserMessage.of("two")), key="k")
    async with asyncio.timeout(LIMIT_S):
        while not isinstance(await anext(answer), UpstreamCallStarted):
            pass
        while not program.orders.recorded("detached"):
            await WORLD.sleep(LOOK_S)
        await answer.aclose()
    (tool,) = program.orders.recorded("detached")
    assert not lives(tool["pid"])
    assert text_of(await answer_of(agent, "three")) == "one | two | three"
    await upstream.aclose()


async def test_an_agent_that_ignores_a_cancel_is_ended(
    program: AcpProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acp_module, "CANCEL_S", 0.2)
    program.orders.declare("deaf")
    upstream = program.agent()
    agent = await upstream.open(PLAIN)
    program.hang()
    answer = agent.send(UpstreamMessage(UserMessage.of("one")), key="key")
    opened = await anext(answer)
    async with asyncio.timeout(CLOSE_S):
        await answer.aclose()
    assert program.runs() == 0
    assert isinstance(opened, MessageTaken)
    assert text_of(await answer_of(agent, "two")) == "one | two"
    assert [received["how"] for received in program.orders.recorded("opened")] == ["new", "resume"]
    await upstream.aclose()


async def test_a_second_message_during_a_turn_is_refused(program: AcpProgram) -> None:
    program.hang()
    upstream = program.agent()
    agent = await upstream.open(PLAIN)
    first = agent.send(UpstreamMessage(UserMessage.of("one")), key="1")
    assert isinstance(await anext(first), MessageTaken)
    with pytest.raises(UpstreamBusyError):
        await anext(agent.send(UpstreamMessage(UserMessage.of("two")), key="2"))
    await first.aclose()
    await upstream.aclose()
    with pytest.raises(UpstreamFailedError, match="closed"):
        await answer_of(agent, "three")


async def test_the_mode_and_the_sign_in_are_set_before_the_first_message(program: AcpProgram) -> None:
    program.refuse_key()
    await open_and_send(program.agent(mode="plan", sign_in="browser"), "one")
    assert [received["method"] for received in program.orders.recorded("signed in")] == ["browser"]
    assert [received["mode"] for received in program.orders.recorded("mode")] == ["plan"]


@pytest.mark.parametrize("where", ["message", "meta", "none"])
async def test_instructions_are_sent_once_in_the_place_that_the_agent_supports(
    program: AcpProgram, where: str
) -> None:
    upstream = program.agent(instructions=where)
    agent = await upstream.open(Setup("be brief"))
    name = name_in(await answer_of(agent, "one"))
    await answer_of(agent, "two")
    await upstream.aclose()
    await resume_and_send_in(program, name, where)
    (opened,) = [received for received in program.orders.recorded("opened") if received["how"] == "new"]
    texts = [[block["text"] for block in received["blocks"]] for received in program.orders.recorded("told")]
    assert texts[1:] == [["two"], ["three"]]
    assert texts[0][-1] == "one"
    assert [("be brief" in text) for text in texts[0]] == ([True, False] if where == "message" else [False])
    assert opened["meta"] == ({"systemPrompt": {"append": "be brief"}} if where == "meta" else {})


async def resume_and_send_in(program: AcpProgram, name: str, where: str) -> None:
    upstream = program.agent(instructions=where)
    await answer_of(await upstream.open(Setup("be brief"), resume=name), "three")
    await upstream.aclose()


FILES = (
    File("image/png", data="aGk="),
    File("text/plain", data="aGk=", name="a.txt"),
    File("application/pdf", url="https://a.example/b.pdf"),
)


async def test_attachments_are_sent_in_the_form_that_the_agent_supports(tmp_path: Path, address: str) -> None:
    seeing = AcpProgram(tmp_path, address, "image")
    await open_and_send(seeing.agent(), "look", *FILES)
    (received,) = seeing.orders.recorded("told")
    assert [block["type"] for block in received["blocks"]] == ["text", "image", "resource", "resource_link"]


async def test_unsupported_attachments_are_replaced_by_a_text_with_their_names(program: AcpProgram) -> None:
    await open_and_send(program.agent(), "look", *FILES)
    (received,) = program.orders.recorded("told")
    assert [block["type"] for block in received["blocks"]] == ["text", "text", "text", "resource_link"]
    assert received["blocks"][2]["text"] == "[An attachment that cannot be shown here: a.txt, text/plain]"


async def test_the_agent_receives_the_client_applications_servers_and_omitted_ones_are_logged_once(
    tmp_path: Path, address: str, caplog: pytest.LogCaptureFixture
) -> None:
    program = AcpProgram(tmp_path, address, "http")
    upstream = program.agent()
    setup = Setup(
        servers=(
            ForwardedMcpServer("files", command="npx", args=("-y", "files"), env={"A": "b"}),
            ForwardedMcpServer(
                "mail", "http", url="https://a.example/mcp", headers={"Authorization": "Bearer t"}
            ),
            ForwardedMcpServer("old", "sse", url="https://a.example/sse"),
            ForwardedMcpServer("shop", "http", url="https://b.example", client_id="id"),
        )
    )
    for _ in range(2):
        await open_and_send(upstream, "one", setup=setup)
    files, mail = program.orders.recorded("opened")[-1]["servers"]
    assert files == {
        "name": "files",
        "command": "npx",
        "args": ["-y", "files"],
        "env": [{"name": "A", "value": "b"}],
    }
    assert (mail["type"], mail["name"], mail["headers"]) == (
        "http",
        "mail",
        [{"name": "Authorization", "value": "Bearer t"}],
    )
    warnings = [record.message for record in caplog.records if "left out" in record.message]
    assert [("'old'" in words, "'shop'" in words) for words in warnings] == [(True, False), (False, True)]


async def test_the_finish_of_a_turn_follows_the_stop_reason(program: AcpProgram) -> None:
    upstream = program.agent()
    agent = await upstream.open(PLAIN)
    program.orders.order("stop", "max_tokens")
    assert (await answer_of(agent, "one"))[-1] == Finished(Finish.LENGTH)
    program.orders.order("stop", "refusal")
    with pytest.raises(UpstreamFailedError, match="refuses to continue"):
        await answer_of(agent, "two")
    program.orders.order("stop", "cancelled")
    with pytest.raises(UpstreamFailedError, match="was stopped by another client"):
        await answer_of(agent, "three")
    await upstream.aclose()
    program.orders.order("stop", "refusal")
    with pytest.raises(ModelFilteredError):
        await open_and_send(upstream, "four")


async def test_thoughts_and_plans_are_thinking_deltas(program: AcpProgram) -> None:
    program.orders.order("plan", [["look", "completed"], ["act", "pending"]])
    events = await open_and_send(program.agent(), "one")
    thought = "".join(event.text for event in events if isinstance(event, ThinkingDelta))
    assert thought == "hmm\nPlan:\n- [x] look\n- [ ] act\n"
    assert events[-1] == Finished(usage=Usage(100, 7, 60, 10))


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("/usr/bin/gemini --acp", "acp:gemini"),
        ("env HOME=/srv/agent KEY= /usr/bin/gemini --acp", "acp:gemini"),
        ("/usr/bin/env -i -u PATH --chdir=/srv A=b gemini --acp", "acp:gemini"),
        ("env A=b", "acp:env"),
    ],
)
def test_the_upstream_has_the_name_of_its_program(command: str, name: str) -> None:
    assert AcpAgent(command).name == name
