"""Upstreams by their names on the command line."""

from __future__ import annotations

import gc
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest

from midstream.agents.permission_rules import CAUTIOUS, HARMLESS, Rules
from midstream.agents.pool import Pooled
from midstream.cli.upstream_options import KINDS, UpstreamOptions, find_upstream
from midstream.errors import ModelOverloadedError, ModelStalledError, UsageError
from midstream.history.messages import History, Text, UserMessage
from midstream.models.model import Model
from midstream.models.openai_compatible import OpenAICompatible
from midstream.models.responses import ModelRequest, TextDelta
from midstream.store.memory import Memory, MemoryStore
from tests.agents import codex_server
from tests.agents.scripted_peer import Orders
from tests.house.source import ROOT
from tests.models.chat_server import chat_server, refusal, silence

pytestmark = pytest.mark.slow

NAMESPACE = MemoryStore()


@pytest.mark.parametrize(
    ("named", "words"),
    [
        ("anthropic", "Anthropic needs a model"),
        ("nobody", "known: acp, anthropic, claude"),
        ("acp", "command"),
        ("cursor", "needs a model"),
        ("openai", "needs a model"),
        ("openai-compatible:http://127.0.0.1/v1", "--model"),
    ],
)
def test_missing_options_are_reported(named: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        find_upstream(named, NAMESPACE)


@pytest.mark.parametrize(
    ("kind", "extra"), [(name, kind.extra) for name, kind in KINDS.items() if kind.extra]
)
def test_the_name_of_a_missing_extra_is_reported(
    kind: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, KINDS[kind].module, None)
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with pytest.raises(UsageError, match=rf"pip install 'midstream\[{extra}\]'"):
        find_upstream(f"{kind}:detail", NAMESPACE)


@pytest.mark.parametrize("named", ["acp:agent", "scripted"])
def test_options_that_an_upstream_does_not_support_are_refused(named: str) -> None:
    with pytest.raises(UsageError, match="does not support --model"):
        find_upstream(named, NAMESPACE, model="m")
    for each in (named, "claude"):
        with pytest.raises(UsageError, match="does not support --key-from"):
            find_upstream(each, NAMESPACE, key_variable="PATH")


def test_a_key_is_read_from_the_given_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    named = "openai-compatible:http://127.0.0.1/v1"
    monkeypatch.delenv("SOME_KEY", raising=False)
    with pytest.raises(UsageError, match="SOME_KEY of --key-from is not set"):
        find_upstream(named, NAMESPACE, model="m", key_variable="SOME_KEY")
    monkeypatch.setenv("SOME_KEY", "secret")
    assert isinstance(find_upstream(named, NAMESPACE, model="m", key_variable="SOME_KEY"), OpenAICompatible)


def test_upstreams_with_a_memory_are_pooled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("openai")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(UsageError, match="needs a key"):
        find_upstream("openai:gpt-5", NAMESPACE)
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    found = find_upstream("openai:gpt-5", NAMESPACE, cwd=tmp_path)
    assert isinstance(found, Pooled)
    assert found.name == "openai:gpt-5"


@pytest.mark.parametrize(
    ("named", "package", "options", "words"),
    [
        (
            "claude",
            "claude_agent_sdk",
            UpstreamOptions(permission_mode="polite"),
            "it supports default, acceptEdits",
        ),
        ("codex", "openai_codex", UpstreamOptions(sandbox="beach"), "it supports read-only, workspace-write"),
    ],
)
def test_a_value_that_an_upstream_does_not_support_is_refused_with_the_supported_ones(
    named: str, package: str, options: UpstreamOptions, words: str
) -> None:
    pytest.importorskip(package)
    with pytest.raises(UsageError, match=words):
        find_upstream(named, NAMESPACE, options=options)


@pytest.mark.parametrize(
    ("named", "package", "options"),
    [
        ("claude", "claude_agent_sdk", UpstreamOptions(permission_mode="plan")),
        ("codex", "openai_codex", UpstreamOptions(sandbox="read-only")),
        ("cursor:composer-2", "cursor_sdk", UpstreamOptions(has_rules_file=True)),
    ],
)
def test_an_option_reaches_its_upstream(
    named: str, package: str, options: UpstreamOptions, tmp_path: Path
) -> None:
    """A conversation belongs to its agent's permissions: another permission is another identity, or ability."""
    pytest.importorskip(package)
    made = [
        find_upstream(named, NAMESPACE, cwd=tmp_path, options=each) for each in (options, UpstreamOptions())
    ]
    upstreams = [each._upstream for each in made if isinstance(each, Pooled)]
    assert len({(str(each.identity), str(each.abilities)) for each in upstreams}) == 2


@pytest.fixture
async def kv() -> AsyncIterator[MemoryStore]:
    store = MemoryStore(Memory())
    await store.open()
    yield store
    await store.close()


async def answer(model: Model, words: str) -> str:
    request = ModelRequest("", History((UserMessage.of(words),)))
    return "".join([event.text async for event in model.stream(request) if isinstance(event, TextDelta)])


def program(folder: Path, command: str) -> Path:
    path = folder / "program"
    path.write_text(f"#!/bin/sh\n{command}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(("rules", "ran"), [(None, 0), (Rules(HARMLESS | {"execute"}), 1)])
async def test_claude_uses_its_program_variables_and_rules(
    tmp_path: Path, kv: MemoryStore, rules: Rules | None, ran: int
) -> None:
    pytest.importorskip("claude_agent_sdk")
    orders = Orders(tmp_path / "orders")
    orders.order("tool", {"name": "Bash", "arguments": "{}", "content": "done", "is_asked": True})
    options = UpstreamOptions(
        rules=rules,
        env={"SCRIPTED_CLAUDE": str(orders.folder), "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)},
        path=program(tmp_path, f'exec {sys.executable} -m tests.agents.claude_cli "$@"'),
    )
    model = find_upstream("claude", kv, cwd=tmp_path, options=options)
    assert isinstance(model, Pooled)
    async with aclosing(model):
        assert "one" in await answer(model, "one")
    assert len(orders.recorded("ran")) == ran


@pytest.mark.parametrize("sessions", ["", "cli", "store"])
async def test_conversations_of_claude_are_stored_in_the_store_on_request(
    tmp_path: Path, kv: MemoryStore, sessions: str
) -> None:
    pytest.importorskip("claude_agent_sdk")
    orders = Orders(tmp_path / "orders")
    options = UpstreamOptions(
        env={"SCRIPTED_CLAUDE": str(orders.folder), "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)},
        path=program(tmp_path, f'exec {sys.executable} -m tests.agents.claude_cli "$@"'),
        sessions=sessions,
    )
    model = find_upstream("claude", kv, cwd=tmp_path, options=options)
    assert isinstance(model, Pooled)
    async with aclosing(model):
        await answer(model, "one")
    (started,) = orders.recorded("started")
    assert ("--session-mirror" in started["argv"]) == (sessions == "store")


@pytest.mark.filterwarnings("ignore:Exception ignored in.*FileIO:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
@pytest.mark.parametrize(("rules", "ran"), [(Rules(), False), (Rules(HARMLESS | {"execute"}), True)])
async def test_codex_uses_its_program_variables_and_rules(
    tmp_path: Path, kv: MemoryStore, rules: Rules, *, ran: bool
) -> None:
    pytest.importorskip("openai_codex")
    for name in ("threads", "running"):
        (tmp_path / name).mkdir()
    (tmp_path / "want").touch()
    options = UpstreamOptions(
        rules=rules,
        env={"SOME": "thing"},
        path=program(
            tmp_path,
            f'echo "$SOME $*" > started; exec {sys.executable} {codex_server.__file__} {tmp_path}',
        ),
    )
    model = find_upstream("codex", kv, cwd=tmp_path, options=options)
    assert isinstance(model, Pooled)
    async with aclosing(model):
        assert "one" in await answer(model, "one")
    del model
    gc.collect()  # the package leaves the pipes of an ended process open: collect them in this test
    assert (tmp_path / "started").read_text() == "thing app-server --listen stdio://\n"
    assert (tmp_path / "ran.jsonl").exists() is ran


def test_an_acp_agent_has_its_own_defaults(tmp_path: Path) -> None:
    pytest.importorskip("acp")
    model = find_upstream("acp:env A=b /usr/bin/agent --acp", NAMESPACE, cwd=tmp_path)
    assert isinstance(model, Pooled)
    assert model.name == "acp:agent"
    terms = model._upstream._terms  # type: ignore[attr-defined]
    assert (terms.permissions, terms.instructions, terms.sign_in, terms.env) == (CAUTIOUS, "meta", "", {})


async def test_the_scripted_upstream_repeats_its_message() -> None:
    model = find_upstream("scripted", NAMESPACE)
    request = ModelRequest("", History((UserMessage.of("hi there"),)))
    texts = [event.text async for event in model.stream(request) if isinstance(event, TextDelta)]
    assert "".join(texts) == "You said: hi there"


@pytest.mark.parametrize(
    ("named", "model", "path"),
    [("openai-compatible:{url}", "m", "/v1/chat/completions"), ("anthropic:m", "", "/v1/messages")],
)
async def test_the_silence_limit_applies_to_a_model_over_http(
    named: str, model: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with chat_server(refusal(503), silence(), path=path) as server:
        monkeypatch.setenv("ANTHROPIC_API_KEY", "key")
        monkeypatch.setenv("ANTHROPIC_BASE_URL", server.url)
        request = ModelRequest("", History((UserMessage((Text("hi"),)),)))
        for silence_s, expected in ((60.0, ModelOverloadedError), (0.01, ModelStalledError)):
            options = UpstreamOptions(silence_s=silence_s)
            upstream = find_upstream(named.format(url=server.url), NAMESPACE, model=model, options=options)
            with pytest.raises(expected):
                [each async for each in upstream.stream(request)]
            await upstream.aclose()  # type: ignore[attr-defined]


def test_the_slowest_models_may_be_silent_for_half_an_hour() -> None:
    assert UpstreamOptions().silence_s == 1800
