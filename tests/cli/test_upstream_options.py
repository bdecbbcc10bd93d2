"""Upstreams by the names they have on the command line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from midstream.agents.pool import Pooled
from midstream.cli.upstream_options import KINDS, UpstreamOptions, find_upstream
from midstream.errors import UsageError
from midstream.history.messages import History, UserMessage
from midstream.models.openai_compatible import OpenAICompatible
from midstream.models.responses import ModelRequest, TextDelta
from midstream.store.memory import MemoryStore

NAMESPACE = MemoryStore()


@pytest.mark.parametrize(
    ("named", "words"),
    [
        ("nobody", "known: acp, claude"),
        ("acp", "command"),
        ("cursor", "needs a model"),
        ("openai", "needs a model"),
        ("openai-compatible:http://127.0.0.1/v1", "--model"),
    ],
)
def test_what_is_missing_is_said(named: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        find_upstream(named, NAMESPACE)


@pytest.mark.parametrize(
    ("kind", "extra"), [(name, kind.extra) for name, kind in KINDS.items() if kind.extra]
)
def test_an_extra_that_is_not_installed_is_named(
    kind: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, KINDS[kind].module, None)
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with pytest.raises(UsageError, match=rf"pip install 'midstream\[{extra}\]'"):
        find_upstream(f"{kind}:detail", NAMESPACE)


@pytest.mark.parametrize("named", ["acp:agent", "scripted"])
def test_what_an_upstream_can_make_nothing_of_is_refused(named: str) -> None:
    with pytest.raises(UsageError, match="takes no --model"):
        find_upstream(named, NAMESPACE, model="m")
    for each in (named, "claude"):
        with pytest.raises(UsageError, match="leave out --key-from"):
            find_upstream(each, NAMESPACE, key_variable="PATH")


def test_a_key_is_taken_from_the_variable_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    named = "openai-compatible:http://127.0.0.1/v1"
    monkeypatch.delenv("SOME_KEY", raising=False)
    with pytest.raises(UsageError, match="SOME_KEY is not set"):
        find_upstream(named, NAMESPACE, model="m", key_variable="SOME_KEY")
    monkeypatch.setenv("SOME_KEY", "secret")
    assert isinstance(find_upstream(named, NAMESPACE, model="m", key_variable="SOME_KEY"), OpenAICompatible)


def test_what_remembers_is_pooled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_a_word_that_an_upstream_does_not_know_is_refused_with_those_it_knows(
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
    """A conversation belongs to what its agent may do: another permission is another identity, or ability."""
    pytest.importorskip(package)
    made = [
        find_upstream(named, NAMESPACE, cwd=tmp_path, options=each) for each in (options, UpstreamOptions())
    ]
    upstreams = [each._upstream for each in made if isinstance(each, Pooled)]
    assert len({(str(each.identity), str(each.abilities)) for each in upstreams}) == 2


async def test_the_scripted_one_says_again_what_it_hears() -> None:
    model = find_upstream("scripted", NAMESPACE)
    request = ModelRequest("", History((UserMessage.of("hi there"),)))
    said = [event.text async for event in model.stream(request) if isinstance(event, TextDelta)]
    assert "".join(said) == "You said: hi there"
