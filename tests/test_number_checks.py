"""Checks of durations and counts, and the public arguments that they protect."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from midstream import (
    Agent,
    ClientSettings,
    Host,
    MemoryLimits,
    Retention,
    StallBudgets,
    StreamSettings,
    asgi,
    question,
    sub_agent,
    tool,
)
from midstream.agents import Abilities, Ask, KeyValueSessions, PoolLimits
from midstream.agents.agent_runs import SilenceLimits
from midstream.client.client import connect
from midstream.client.requests import create_viewer_token
from midstream.dialects import Prices
from midstream.errors import UsageError
from midstream.models import AnthropicMessages, HttpLimits
from midstream.number_checks import WAIT_S_MAX, require_count, require_number, require_seconds
from midstream.server import Access, Limits, McpOptions, Principal, gateway
from midstream.server.uvicorn_server import serve
from midstream.store import JetStreamStore, MemoryStore, PostgresStore, SQLiteStore
from midstream.testing import ScriptedModel, text

NO_NUMBERS = [math.nan, -1, True, "5", None]


@pytest.mark.parametrize("value", [0, 1.5, WAIT_S_MAX])
def test_a_number_in_its_range_is_accepted(value: float) -> None:
    require_seconds("x_s", value)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (math.nan, "`x_s` is nan; expected 0 to 31622400 seconds"),
        (True, "`x_s` is True; expected 0 to 31622400 seconds"),
        ("5", "`x_s` is '5'; expected 0 to 31622400 seconds"),
        (-1, "`x_s` is -1; expected 0 to 31622400 seconds"),
        (math.inf, "`x_s` is inf; expected 0 to 31622400 seconds"),
        pytest.param(10**5000, "`x_s` is a very large int; expected 0 to 31622400 seconds", id="large"),
    ],
)
def test_another_value_is_refused_with_the_range(value: object, words: str) -> None:
    with pytest.raises(UsageError) as refused:
        require_seconds("x_s", value)
    assert refused.value.message == words


def test_the_range_is_described() -> None:
    checks: Sequence[tuple[Callable[[], None], str]] = (
        (lambda: require_count("n", 1.5), "`n` is 1.5; expected an integer, 0 or more"),
        (lambda: require_count("n", 9, least=1, most=8), "`n` is 9; expected an integer, 1 to 8"),
        (
            lambda: require_seconds("s", 0, most=math.inf, is_positive=True),
            "`s` is 0; expected more than 0 seconds",
        ),
        (lambda: require_number("m", "x" * 99, "MiB"), f"`m` is '{'x' * 39}…; expected 0 or more MiB"),
    )
    for check, words in checks:
        with pytest.raises(UsageError) as refused:
            check()
        assert refused.value.message == words


def _agent() -> Agent:
    return Agent(ScriptedModel([text("hi")]))


def look(where: str) -> str:
    return where


CONSTRUCTORS: Mapping[str, tuple[Callable[..., object], str]] = {
    "Agent": (lambda **given: Agent(ScriptedModel([]), **given), "turn_s"),
    "sub_agent": (lambda **given: sub_agent(_agent(), description="d", **given), "responses_max timeout_s"),
    "ClientSettings": (ClientSettings, "look_back_s patience_s stall_after_s"),
    "Host": (lambda **given: Host(_agent(), "memory:", **given), "look_back_s tail_bytes_max"),
    "asgi": (lambda **given: asgi(_agent(), store="memory:", **given), "look_back_s"),
    "MemoryLimits": (MemoryLimits, "bytes_max idle_s"),
    "StallBudgets": (StallBudgets, " ".join(StallBudgets.__struct_fields__)),
    "StreamSettings": (StreamSettings, "look_back_s heartbeat_s in_flight_max coalesce_s tail_bytes_max"),
    "tool": (lambda **given: tool(needs_approval=True, **given)(look), "timeout_s answer_s approvers"),
    "question": (question, "answer_s"),
    "Abilities": (Abilities, "rest_s"),
    "Ask": (Ask, "answer_s approvers"),
    "PoolLimits": (PoolLimits, "live_max wait_s record_age_max_s records_max"),
    "SilenceLimits": (SilenceLimits, " ".join(SilenceLimits.__struct_fields__)),
    "Prices": (lambda **given: Prices(**{"input": 1.0, "output": 1.0, **given}), "input output"),
    "AnthropicMessages": (lambda **given: AnthropicMessages("http://h", "m", **given), "tokens_max"),
    "HttpLimits": (HttpLimits, "connect_s acquire_s"),
    "Access": (lambda **given: Access(authenticate=lambda _: None, **given), "recheck_s"),
    "Limits": (Limits, " ".join(Limits.__struct_fields__)),
    "McpOptions": (McpOptions, "stream_s retry_s task_after_s"),
    "gateway": (lambda **given: gateway(ScriptedModel([]), token=None, **given), "grace_s kept_s"),
    "SQLiteStore": (lambda **given: SQLiteStore("none.db", **given), "lease_s"),
    "PostgresStore": (lambda **given: PostgresStore("postgres://u@h/d", **given), "lease_s"),
    "JetStreamStore": (lambda **given: JetStreamStore("nats://h:4222", **given), "lease_s"),
}
OPTIONAL: Mapping[str, tuple[Callable[..., object], str]] = {
    "Retention": (Retention, " ".join(Retention.__struct_fields__)),
    "PoolLimits": (PoolLimits, "rest_s memory_mib_max"),
    "Prices": (lambda **given: Prices(1.0, 1.0, **given), "cached_input"),
    "HttpLimits": (HttpLimits, "first_byte_s between_bytes_s"),
    "KeyValueSessions": (lambda **given: KeyValueSessions(MemoryStore(), **given), "kept_days"),
}


@pytest.mark.parametrize(
    ("construct", "name", "values"),
    [
        pytest.param(construct, name, NO_NUMBERS[: len(NO_NUMBERS) - is_optional], id=f"{kind}.{name}")
        for is_optional, kinds in enumerate((CONSTRUCTORS, OPTIONAL))
        for kind, (construct, names) in kinds.items()
        for name in names.split()
    ],
)
def test_a_value_that_is_no_duration_or_count_is_refused_by_its_name(
    construct: Callable[..., object], name: str, values: list[object]
) -> None:
    for value in values:
        with pytest.raises(UsageError, match=f"`{name}` is "):
            construct(**{name: value})


def test_the_end_of_a_credential_is_a_number() -> None:
    for value in (math.nan, True, "5"):
        with pytest.raises(UsageError, match="`expires_at` is "):
            Principal("alice", expires_at=value)  # type: ignore[arg-type]


async def test_a_stop_with_no_duration_changes_nothing() -> None:
    app = asgi(_agent(), store="memory:", allow_unauthenticated=True)
    with pytest.raises(UsageError, match="`stop_within_s` is nan"):
        await serve(app, port=0, stop_within_s=math.nan)
    served = gateway(ScriptedModel([]), token=None)
    for stopped in (app, served):
        with pytest.raises(UsageError, match="`grace_s` is nan"):
            await stopped.stop(grace_s=math.nan)
    assert not app.host.is_draining
    host = Host(_agent(), "memory:")
    async with host:
        with pytest.raises(UsageError, match="`grace_s` is -1"):
            await host.stop(grace_s=-1)
        assert not host.is_draining
        assert (await host.ask("s", "hello")) == "hi"


async def test_a_client_refuses_values_that_are_no_durations(tmp_path: Path) -> None:
    async with connect("http://127.0.0.1:9", state=tmp_path / "state.db") as client:
        with pytest.raises(UsageError, match="`look_back_s` is -1"):
            await client.resume_interrupted(-1)
        with pytest.raises(UsageError, match="`cancel_after_s` is nan"):
            await anext(client.send("s", "hello", cancel_after_s=math.nan))
        assert await client.resume_interrupted() == []
    with pytest.raises(UsageError, match="`for_s` is True"):
        await create_viewer_token("http://127.0.0.1:9", "s", for_s=True, headers={})
