"""The options of the gateway's agents, as values."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from midstream.agents.permission_rules import HARMLESS, Rules
from midstream.agents.pool import PoolLimits
from midstream.agents.prior_transcript import TranscriptBudget
from midstream.cli.agent_options import agent_options, read_agent_options
from midstream.cli.upstream_options import UpstreamOptions
from midstream.errors import UsageError


@agent_options
@click.command
def command() -> None: ...


def read(*arguments: str | Path) -> UpstreamOptions:
    return read_agent_options(command.make_context("command", [str(each) for each in arguments]).params)


def test_without_flags_the_agents_defaults_apply() -> None:
    assert read() == UpstreamOptions()


def test_every_flag_sets_its_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SOME_KEY", "s3cr3t")
    (tmp_path / "program").touch()
    found = read(
        *("--permission-mode", "plan", "--sandbox", "read-only", "--codex-review", "--rules-file"),
        *("--allow-kind", "edit", "--allow-kind", "fetch", "--allow-tool", "Bash", "--refuse-tool", "Write"),
        *("--agent-env", "SOME_KEY", "--agent-env", "A=b=c", "--agent-env", "EMPTY="),
        *("--agent-path", "program", "--agent-sessions", "store"),
        *("--sign-in", "oauth", "--instructions", "message"),
        *("--live-agents", "2", "--agent-rest", "9", "--silence", "7", "--pool-days", "1"),
        *("--pool-records", "3", "--agent-memory", "900", "--turn-wait", "4"),
        *("--transcript-chars", "5000", "--transcript-result-chars", "60"),
    )
    assert found == UpstreamOptions(
        permission_mode="plan",
        sandbox="read-only",
        is_reviewing=True,
        has_rules_file=True,
        rules=Rules(HARMLESS | {"edit", "fetch"}, frozenset({"Bash"}), frozenset({"Write"})),
        env={"SOME_KEY": "s3cr3t", "A": "b=c", "EMPTY": ""},
        path=tmp_path / "program",
        instructions="message",
        sign_in="oauth",
        sessions="store",
        silence_s=7,
        limits=PoolLimits(
            live_max=2,
            rest_s=9,
            record_age_max_s=24 * 3600.0,
            records_max=3,
            memory_mib_max=900,
            wait_s=4,
            budget=TranscriptBudget(total_chars=5000, result_chars=60),
        ),
    )


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--allow-kind", "execute"), Rules(HARMLESS | {"execute"})),
        (("--allow-tool", "Bash"), Rules(tools=frozenset({"Bash"}))),
        (("--refuse-tool", "Read"), Rules(refused=frozenset({"Read"}))),
    ],
)
def test_one_permission_flag_makes_rules(flags: tuple[str, ...], expected: Rules) -> None:
    assert read(*flags).rules == expected


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            "NO_SUCH_VARIABLE",
            "the variable NO_SUCH_VARIABLE is not set; --agent-env NO_SUCH_VARIABLE copies it to the agent",
        ),
        ("=value", "has no name; expected NAME=VALUE or NAME"),
    ],
)
def test_a_variable_that_must_not_be_set_is_refused(given: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        read("--agent-env", given)
