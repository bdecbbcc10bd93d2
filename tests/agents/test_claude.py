"""Claude Code through the real SDK, which starts a scripted CLI: `tests/agents/claude_cli.py`."""

from __future__ import annotations

import asyncio
import gc
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from midstream.agents.permission_rules import CAUTIOUS, Permission, Rules, Verdict
from midstream.agents.upstreams import (
    Marked,
    MessageTaken,
    ResponseRestarted,
    Setup,
    Upstream,
    UpstreamAgent,
    UpstreamEvent,
    UpstreamMessage,
)
from midstream.errors import (
    ContextOverflowError,
    ModelAccessError,
    ModelError,
    ModelMissingError,
    ModelOverloadedError,
    ModelQuotaError,
    ModelRejectedError,
    UpstreamBusyError,
    UpstreamFailedError,
    UpstreamGoneError,
    UsageError,
)
from midstream.history.messages import File, History, Outcome, Text, UserMessage, UserPart
from midstream.models.responses import Finished, ModelRequest, TextDelta, ThinkingDelta, UpstreamCallEnded
from midstream.store.memory import Memory, MemoryStore
from midstream.testing.upstream_contract import CLOSE_S, LIMIT_S, PeerMessage, Trait, UpstreamContract
from midstream.tools.forwarded_servers import ForwardedMcpServer
from tests.agents.ended_processes import close_cancelled, end_agents
from tests.agents.part_of_pool import PartOfPoolContract
from tests.agents.permission_contract import PermissionContract
from tests.agents.scripted_peer import Orders
from tests.house.source import ROOT

pytest.importorskip("claude_agent_sdk", reason="the Claude Agent SDK is not installed")

from claude_agent_sdk import ClaudeAgentOptions, ProcessError

from midstream.agents import claude
from midstream.agents.claude import Claude
from midstream.agents.claude_sessions import KeyValueSessions
from midstream.agents.pool import Pooled


class ClaudeCli:
    """The scripted CLI as a peer of the contract, in its own folder."""

    lacks = frozenset({Trait.KEYS})

    def __init__(self, folder: Path) -> None:
        self.orders = Orders(folder / "orders")
        self.cwd = folder / "project"
        self.cwd.mkdir()
        self.home = folder / "home"
        self.program = folder / "claude"
        self.program.write_text(
            f'#!/bin/sh\nPYTHONPATH="{ROOT}" exec "{sys.executable}" -m tests.agents.claude_cli "$@"\n'
        )
        self.program.chmod(0o755)

    def options(self, **more: Any) -> ClaudeAgentOptions:  # noqa: ANN401 - the SDK's options
        env = {"SCRIPTED_CLAUDE": str(self.orders.folder), "CLAUDE_CONFIG_DIR": str(self.home)}
        return ClaudeAgentOptions(cli_path=self.program, env=env, **more)

    def upstream(self) -> Upstream:
        return Claude("opus", cwd=self.cwd, options=self.options())

    is_fixed = False

    def with_permissions(self, rules: Rules) -> Upstream:
        return Claude("opus", cwd=self.cwd, options=self.options(), permissions=rules)

    def request_change(self) -> None:
        tool = {"name": "Bash", "arguments": '{"a":1}', "content": "done", "is_asked": True}
        self.orders.order("tool", tool)

    def ran(self) -> list[object]:
        return [line["arguments"] for line in self.orders.recorded("ran")]

    def messages(self) -> list[PeerMessage]:
        return [PeerMessage(line["agent"], line["text"]) for line in self.orders.recorded("told")]

    def runs(self) -> int:
        return self.orders.runs()

    def expire(self, agent: str) -> None:
        for transcript in self.home.glob(f"projects/*/{agent}.jsonl"):
            transcript.unlink()

    def end_processes(self) -> None:
        end_agents()

    def be_busy(self, agent: str) -> None:
        self.orders.declare(f"busy-{agent}")

    def hang(self) -> None:
        self.orders.order("hang")

    def hang_unopened(self) -> None:
        self.orders.order("mute")

    def die_unopened(self) -> None:
        self.orders.order("lose", "lose")

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


@pytest.fixture
def cli(tmp_path: Path) -> ClaudeCli:
    return ClaudeCli(tmp_path)


class TestClaude(UpstreamContract):
    @pytest.fixture
    def peer(self, cli: ClaudeCli) -> ClaudeCli:
        return cli


@pytest.mark.slow
class TestClaudePooled(PartOfPoolContract):
    """Runs each fault, and each situation."""

    @pytest.fixture
    def peer(self, cli: ClaudeCli) -> ClaudeCli:
        return cli


# --- beyond the contract


PLAIN = Setup()


async def answer_of(agent: UpstreamAgent, *parts: UserPart | str) -> list[UpstreamEvent]:
    message = UserMessage(tuple(Text(part) if isinstance(part, str) else part for part in parts))
    async with asyncio.timeout(LIMIT_S):
        return [event async for event in agent.send(UpstreamMessage(message), key="key")]


async def open_and_send(
    upstream: Claude, *parts: UserPart | str, setup: Setup = PLAIN
) -> list[UpstreamEvent]:
    try:
        return await answer_of(await upstream.open(setup), *parts)
    finally:
        await upstream.aclose()


def text_of(events: list[UpstreamEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta))


def name_of(events: list[UpstreamEvent]) -> str:
    return next(event.agent for event in events if isinstance(event, MessageTaken))


def flag(argv: list[str], name: str) -> str:
    return argv[argv.index(name) + 1]


async def test_a_process_that_died_with_a_message_may_have_stored_it(cli: ClaudeCli) -> None:
    cli.die_unopened()  # with a message that would otherwise mean a lost connection
    with pytest.raises(ModelError) as raised:
        await open_and_send(Claude(cwd=cli.cwd, options=cli.options()), "one")
    assert type(raised.value) is UpstreamFailedError


async def test_all_processes_end_even_if_the_caller_that_closes_them_is_cancelled(cli: ClaudeCli) -> None:
    upstream = Claude(cwd=cli.cwd, options=cli.options())
    agent = await upstream.open(Setup())
    async for _ in agent.send(UpstreamMessage(UserMessage.of("one")), key="k"):
        pass
    await close_cancelled(upstream.aclose, upstream._agents)


async def test_a_private_conversation_is_not_written_into_a_store_of_ours(cli: ClaudeCli) -> None:
    store = MemoryStore(Memory())
    await store.open()
    upstream = Claude(cwd=cli.cwd, options=cli.options(), sessions=KeyValueSessions(store))
    pool = Pooled(upstream, store)
    history = History().then(UserMessage.of("a secret"))
    for is_private in (True, False):
        request = ModelRequest("", history, session="s", is_private=is_private)
        assert [event async for event in pool.stream(request)]
        kept = [name for name in await store.kv_namespaces() if name.startswith("claude-transcript:")]
        assert bool(kept) is not is_private
    await pool.aclose()
    await store.close()


async def test_a_conversation_continues_elsewhere_from_a_store_of_ours(
    cli: ClaudeCli, tmp_path: Path
) -> None:
    store = MemoryStore(Memory())
    await store.open()
    first = Claude(cwd=cli.cwd, options=cli.options(), sessions=KeyValueSessions(store))
    opened = (await open_and_send(first, "one"))[0]
    assert isinstance(opened, MessageTaken)
    cli.home = tmp_path / "another machine"
    second = Claude(cwd=cli.cwd, options=cli.options(), sessions=KeyValueSessions(store))
    agent = await second.open(Setup(), resume=opened.agent)
    assert text_of(await answer_of(agent, "two")) == "one | two"
    await second.aclose()
    assert not [*cli.home.glob("projects/*/*")], "it was resumed from where it was not"
    await second.delete(opened.agent)
    with pytest.raises(UpstreamGoneError):
        await answer_of(await second.open(Setup(), resume=opened.agent), "three")
    await second.aclose()
    await store.close()


async def test_errors_that_older_versions_report_on_stderr_only_are_classified(cli: ClaudeCli) -> None:
    cli.orders.declare("prose")
    upstream = Claude(cwd=cli.cwd, options=cli.options())
    agent = await upstream.open(Setup(), resume="979cab47-a5b0-45fa-9cfa-13a3a4678ae1")
    with pytest.raises(UpstreamGoneError, match="No conversation found") as raised:
        await answer_of(agent, "one")
    assert raised.value.__notes__ == [
        "No conversation found with session ID: 979cab47-a5b0-45fa-9cfa-13a3a4678ae1"
    ]
    assert isinstance(raised.value.__cause__, ProcessError)
    await upstream.aclose()


async def test_a_fork_from_a_missing_mark_is_an_upstream_gone_error(cli: ClaudeCli) -> None:
    upstream = Claude(cwd=cli.cwd, options=cli.options())
    opened = (await open_and_send(upstream, "one"))[0]
    assert isinstance(opened, MessageTaken)
    agent = await upstream.fork(Setup(), agent=opened.agent, mark="979cab47-a5b0-45fa-9cfa-13a3a4678ae1")
    with pytest.raises(UpstreamGoneError, match="lost a part"):
        await answer_of(agent, "two")
    await upstream.aclose()


async def test_a_transcript_without_its_beginning_is_not_continued(cli: ClaudeCli) -> None:
    upstream = Claude(cwd=cli.cwd, options=cli.options())
    agent = await upstream.open(Setup())
    name = name_of(await answer_of(agent, "one"))
    cli.expire(name)
    assert (
        text_of(await answer_of(agent, "two")) == "one | two"
    )  # the process has the file open, and creates a new one
    cli.end_processes()
    for resumed in (agent, await upstream.open(Setup(), resume=name)):
        with pytest.raises(UpstreamGoneError, match="lost a part"):
            await answer_of(resumed, "three")
    assert [received.text for received in cli.messages()] == ["one", "two"]
    await upstream.aclose()


async def test_a_killed_process_that_had_not_stored_its_last_answer_is_not_continued(cli: ClaudeCli) -> None:
    upstream = Claude(cwd=cli.cwd, options=cli.options())
    agent = await upstream.open(Setup())
    name = name_of(await answer_of(agent, "one"))
    (transcript,) = cli.home.glob(f"projects/*/{name}.jsonl")
    transcript.write_text(transcript.read_text().rsplit("\n", 2)[0] + "\n")
    cli.end_processes()
    with pytest.raises(UpstreamGoneError, match="lost a part"):
        await answer_of(agent, "two")
    await upstream.aclose()


async def test_a_cli_that_ignores_interrupts_is_ended(
    cli: ClaudeCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claude, "INTERRUPT_S", 0.2)
    cli.orders.declare("deaf")
    cli.hang()
    upstream = Claude(cwd=cli.cwd, options=cli.options())
    agent = await upstream.open(Setup())
    answer = agent.send(UpstreamMessage(UserMessage.of("one")), key="key")
    assert isinstance(await anext(answer), MessageTaken)
    async with asyncio.timeout(CLOSE_S):
        await answer.aclose()
        await upstream.aclose()
    assert cli.runs() == 0
    assert cli.orders.recorded("interrupted") == []


async def test_a_missing_cli_and_a_missing_folder_are_a_missing_model(cli: ClaudeCli) -> None:
    nowhere = replace(cli.options(), cli_path=cli.cwd / "no such program")
    with pytest.raises(ModelMissingError, match="no such program"):
        await open_and_send(Claude(cwd=cli.cwd, options=nowhere), "one")
    with pytest.raises(ModelMissingError, match="does not exist"):
        await open_and_send(Claude(cwd=cli.cwd / "gone", options=cli.options()), "one")


@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        ({"subtype": "success", "result": "API Error: 529", "api_error_status": 529}, ModelOverloadedError),
        ({"subtype": "success", "result": "Prompt is too long"}, ContextOverflowError),
        ({"subtype": "error_during_execution", "errors": []}, UpstreamFailedError),
        ({"subtype": "error_during_execution", "terminal_reason": "aborted_tools"}, UpstreamFailedError),
        ({"subtype": "error_max_budget_usd"}, ModelQuotaError),
        (
            {"subtype": "success", "result": "API Error: 400", "api_error_status": 400, "terminal_reason": "api_error"},
            ModelRejectedError,
        ),
    ],
)  # fmt: skip
async def test_a_failed_result_raises_the_matching_error(
    cli: ClaudeCli, failure: dict[str, object], kind: type[ModelError]
) -> None:
    cli.orders.order("failure", {"is_error": True, **failure})
    upstream = Claude(cwd=cli.cwd, options=cli.options())
    agent = await upstream.open(Setup())
    with pytest.raises(ModelError) as raised:
        await answer_of(agent, "one")
    assert type(raised.value) is kind
    assert text_of(await answer_of(agent, "two")).endswith("two")
    await upstream.aclose()


async def test_the_end_of_a_turn_that_the_cli_started_does_not_end_ours(cli: ClaudeCli) -> None:
    other = {
        "subtype": "success",
        "is_error": False,
        "result": "a background task has ended",
        "user_message_uuids": [],
        "origin": {"kind": "task-notification"},
    }
    cli.orders.order("other", [other])
    events = await open_and_send(Claude(cwd=cli.cwd, options=cli.options()), "one")
    assert text_of(events) == "one"
    assert [type(event) for event in events[-2:]] == [Marked, Finished]


async def test_thinking_and_text_arrive_once(cli: ClaudeCli) -> None:
    events = await open_and_send(Claude("opus", cwd=cli.cwd, options=cli.options()), "one")
    assert "".join(event.text for event in events if isinstance(event, ThinkingDelta)) == "hmm"
    assert text_of(events) == "one"
    assert isinstance(events[-1], Finished)
    assert events[-1].model == "claude-test"


async def test_a_response_that_the_cli_restarts_is_marked(cli: ClaudeCli) -> None:
    cli.orders.order("retry", 529)
    events = await open_and_send(Claude(cwd=cli.cwd, options=cli.options()), "one")
    at = events.index(ResponseRestarted())
    assert text_of(events[:at]) == "a cut text"
    assert text_of(events[at:]) == "one"


async def test_a_refused_key_is_reported_at_the_first_attempt_of_the_cli(cli: ClaudeCli) -> None:
    cli.orders.order("retry", 401)
    with pytest.raises(ModelAccessError, match="its key is refused"):
        await open_and_send(Claude(cwd=cli.cwd, options=cli.options()), "one")


async def test_a_second_message_during_a_turn_is_refused(cli: ClaudeCli) -> None:
    cli.hang()
    upstream = Claude(cwd=cli.cwd, options=cli.options())
    agent = await upstream.open(Setup())
    first = agent.send(UpstreamMessage(UserMessage.of("one")), key="1")
    assert isinstance(await anext(first), MessageTaken)
    with pytest.raises(UpstreamBusyError):
        await anext(agent.send(UpstreamMessage(UserMessage.of("two")), key="2"))
    await first.aclose()
    await upstream.aclose()
    with pytest.raises(UpstreamFailedError, match="closed"):
        await answer_of(agent, "three")


async def test_supported_attachments_are_sent_and_others_are_replaced_by_their_names(cli: ClaudeCli) -> None:
    await open_and_send(
        Claude(cwd=cli.cwd, options=cli.options()),
        "look",
        File("image/png", data="aGk="),
        File("application/pdf", url="https://a.example/b.pdf"),
        File("application/zip", data="aGk=", name="all.zip"),
    )
    (received,) = cli.orders.recorded("told")
    assert received["text"] == "look[An attachment that cannot be shown here: all.zip, application/zip]"
    assert received["files"] == [
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}},
        {"type": "document", "source": {"type": "url", "url": "https://a.example/b.pdf"}},
    ]
    assert received["line"]["client_composed"] is True


async def test_the_client_applications_servers_are_added_to_the_options_and_omitted_ones_are_logged(
    cli: ClaudeCli, caplog: pytest.LogCaptureFixture
) -> None:
    own = {"own": {"type": "stdio", "command": "own"}}
    upstream = Claude(cwd=cli.cwd, options=cli.options(mcp_servers=own))
    setup = Setup(
        servers=(
            ForwardedMcpServer("files", command="npx", args=("-y", "files"), env={"A": "b"}),
            ForwardedMcpServer(
                "mail", "http", url="https://a.example/mcp", client_id="id", scope="read mail"
            ),
            ForwardedMcpServer(
                "old", "sse", url="https://a.example/sse", headers={"Authorization": "Bearer t"}
            ),
            ForwardedMcpServer(
                "shop", "http", url="https://b.example", client_id="id", client_secret="kept back"
            ),
        )
    )
    for _ in range(2):
        await open_and_send(upstream, "one", setup=setup)
    started = cli.orders.recorded("started")[-1]["argv"]
    assert json.loads(flag(started, "--mcp-config"))["mcpServers"] == {
        **own,
        "files": {"type": "stdio", "command": "npx", "args": ["-y", "files"], "env": {"A": "b"}},
        "mail": {
            "type": "http",
            "url": "https://a.example/mcp",
            "oauth": {"clientId": "id", "scopes": "read mail"},
        },
        "old": {"type": "sse", "url": "https://a.example/sse", "headers": {"Authorization": "Bearer t"}},
    }
    (warning,) = [record.message for record in caplog.records if "left out" in record.message]
    assert warning.startswith(
        "claude: the MCP server 'shop' is left out: its client secret cannot be handed on"
    )


@pytest.mark.parametrize(
    ("prompt", "flags"),
    [
        (None, {"--append-system-prompt": "be brief"}),
        ({"type": "preset", "preset": "claude_code", "append": "own"}, {"--append-system-prompt": "own\n\nbe brief"}),
        ("own", {"--system-prompt": "own\n\nbe brief"}),
        ({"type": "custom", "prompt": "own"}, {"--system-prompt": "own\n\nbe brief"}),
    ],
)  # fmt: skip
async def test_instructions_are_at_the_end_of_the_system_prompt(
    cli: ClaudeCli,
    prompt: Any,  # noqa: ANN401 - the SDK's union
    flags: dict[str, str],
) -> None:
    upstream = Claude(cwd=cli.cwd, options=cli.options(system_prompt=prompt))
    await open_and_send(upstream, "one", setup=Setup("be brief"))
    argv = cli.orders.recorded("started")[-1]["argv"]
    assert {name: flag(argv, name) for name in flags} == flags
    await open_and_send(upstream, "one")
    assert "be brief" not in " ".join(cli.orders.recorded("started")[-1]["argv"])


async def test_the_cli_starts_in_its_folder_with_its_model_and_its_mode(cli: ClaudeCli) -> None:
    upstream = Claude("opus", cwd=cli.cwd, permission_mode="plan", options=cli.options())
    await open_and_send(upstream, "one")
    (started,) = cli.orders.recorded("started")
    assert started["cwd"] == str(cli.cwd)
    assert flag(started["argv"], "--model") == "opus"
    assert flag(started["argv"], "--permission-mode") == "plan"
    assert upstream.name == "claude:opus"
    assert upstream.identity["permissions"] == "plan"
    assert upstream.identity["cwd"] == str(cli.cwd)


async def test_conversations_belong_to_the_home_folder_of_the_cli(
    cli: ClaudeCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def upstream(**env: str) -> Claude:
        options = replace(cli.options(), env={"SCRIPTED_CLAUDE": str(cli.orders.folder), **env})
        return Claude(cwd=cli.cwd, options=options)

    own, other = tmp_path / "own", tmp_path / "other"
    monkeypatch.setenv("HOME", str(own))
    monkeypatch.delenv("CLAUDE_CONFIG_DIR", raising=False)
    homes = [upstream(), upstream(HOME=str(own)), upstream(HOME=str(other)), upstream(CLAUDE_CONFIG_DIR="c")]
    assert [each.identity["home"] for each in homes] == ["", "", str(other / ".claude"), str(cli.cwd / "c")]
    for claude_of, home in ((upstream(), own), (upstream(HOME=str(other)), other)):
        opened = (await open_and_send(claude_of, "one"))[0]
        assert isinstance(opened, MessageTaken)
        (transcript,) = home.glob(f".claude/projects/*/{opened.agent}.jsonl")
        (transcript.with_suffix("") / "subagents").mkdir(parents=True)
        await claude_of.delete("../" + opened.agent)
        assert transcript.exists()
        await claude_of.delete(opened.agent)
        assert not [*home.glob(".claude/projects/*/*")]
    monkeypatch.setenv("CLAUDE_CONFIG_DIR", str(own))
    assert upstream(HOME=str(other)).identity["home"] == "", (
        "the CLI inherits the variable, which comes first"
    )


async def test_rules_decide_where_the_mode_does_not(cli: ClaudeCli) -> None:
    for name, is_allowed in (("Read", True), ("Bash", False)):
        cli.orders.order("tool", {"name": name, "arguments": '{"a":1}', "content": "done", "is_asked": True})
        events = await open_and_send(Claude(cwd=cli.cwd, options=cli.options(), permissions=CAUTIOUS), "one")
        (ended,) = [event for event in events if isinstance(event, UpstreamCallEnded)]
        assert (ended.outcome, ended.content == "done") == (
            Outcome.OK if is_allowed else Outcome.ERROR,
            is_allowed,
        )


async def test_a_callback_can_decide_about_permissions(cli: ClaudeCli) -> None:
    seen: list[Permission] = []

    async def ask(permission: Permission) -> Verdict:
        seen.append(permission)
        return "not today"

    cli.orders.order("tool", {"name": "Bash", "arguments": '{"a":1}', "content": "done", "is_asked": True})
    events = await open_and_send(Claude(cwd=cli.cwd, options=cli.options(), permissions=ask), "one")
    (ended,) = [event for event in events if isinstance(event, UpstreamCallEnded)]
    assert ended.content == "not today"
    assert isinstance(events[0], MessageTaken)
    assert seen == [Permission(events[0].agent, "Bash", "execute", '{"a":1}')]


@pytest.mark.filterwarnings(
    "ignore:Exception ignored in.*MemoryObject:pytest.PytestUnraisableExceptionWarning"
)
@pytest.mark.filterwarnings("ignore:Unclosed <MemoryObject:ResourceWarning")
class TestClaudePermissions(PermissionContract):
    """Questions to people about the permissions that its agents request."""

    @pytest.fixture
    def permission_peer(self, cli: ClaudeCli) -> Iterator[ClaudeCli]:
        yield cli
        gc.collect()  # the SDK leaves streams open if a process ends during a request: collect them in this test


def test_options_that_exclude_each_other_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="as a dict"):
        Claude(options=ClaudeAgentOptions(mcp_servers="servers.json"))

    async def ask(*_: object) -> Any:  # noqa: ANN401 - never called
        raise AssertionError

    with pytest.raises(UsageError, match="either"):
        Claude(options=ClaudeAgentOptions(can_use_tool=ask), permissions=CAUTIOUS)


async def test_a_system_prompt_in_a_file_accepts_no_instructions(cli: ClaudeCli) -> None:
    upstream = Claude(options=cli.options(system_prompt={"type": "file", "path": "p.md"}))
    with pytest.raises(UsageError, match="in a file"):
        await upstream.open(Setup("be brief"))
