"""Programs that fail as agents: they are ended with all that they started, and the error describes the failure."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from midstream.agents.permission_rules import Decision
from midstream.environment import World
from midstream.errors import (
    ModelAccessError,
    ModelError,
    ModelMissingError,
    ModelRateLimitedError,
    ModelRejectedError,
    ModelStalledError,
    ModelUnavailableError,
    UpstreamFailedError,
)
from midstream.testing.upstream_contract import CLOSE_S, LIMIT_S

pytest.importorskip("acp", reason="the Agent Client Protocol's package is not installed")

from acp import RequestError, helpers
from acp.schema import ToolCallUpdate

from midstream.agents import acp_process
from midstream.agents.acp_process import AcpProcess

WORLD = World()


async def refuse_permission(_: str, __: ToolCallUpdate) -> Decision:
    return "nobody is there"


def process(*command: str, cwd: Path | str = ".") -> AcpProcess:
    return AcpProcess("agent", command, cwd=str(cwd), env={}, leave=refuse_permission, world=WORLD)


async def lives(pid: int) -> bool:
    """Return whether a process still runs after it has had time to end."""
    for _ in range(3000):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        await WORLD.sleep(0.02)
    return True


async def test_children_of_a_program_end_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acp_process, "EXIT_S", 0.3)
    script = "trap '' TERM; sleep 1000 & echo $! > child; cat > /dev/null"
    started = process("sh", "-c", script, cwd=tmp_path)
    starting = WORLD.spawn(started.start(), name="start")
    child = tmp_path / "child"
    async with asyncio.timeout(LIMIT_S):
        while not child.exists() or not child.read_text().strip():
            await WORLD.sleep(0.01)
    async with asyncio.timeout(CLOSE_S):
        await started.aclose()
        await started.aclose()
    (end,) = await asyncio.gather(starting, return_exceptions=True)
    assert isinstance(end, ModelError)
    assert not await lives(int(child.read_text()))


async def test_a_program_that_ignores_signals_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acp_process, "EXIT_S", 0.1)
    monkeypatch.setattr(acp_process, "GREETING_S", 2.0)  # the time in which the shell starts
    started = process("sh", "-c", "trap '' TERM; echo $$ > own; while :; do sleep 0.05; done", cwd=tmp_path)
    with pytest.raises(ModelStalledError, match="did not answer"):
        await started.start()
    async with asyncio.timeout(CLOSE_S):
        await started.aclose()
    assert not await lives(int((tmp_path / "own").read_text()))


async def test_a_program_with_another_protocol_is_not_an_agent() -> None:
    started = process("sh", "-c", "echo hello there; echo usage: x >&2; exit 2")
    with pytest.raises(UpstreamFailedError, match="usage: x"):
        await started.start()
    await started.aclose()


async def test_a_missing_program_is_a_missing_model(tmp_path: Path) -> None:
    started = process(str(tmp_path / "none"))
    with pytest.raises(ModelMissingError, match="does not start"):
        await started.start()
    await started.aclose()


async def test_a_failure_in_the_middle_is_not_explained_by_earlier_output() -> None:
    started = process("true")

    async def broken() -> None:
        raise ConnectionError("Connection closed")

    with pytest.raises(UpstreamFailedError, match="ended before its answer did"):
        await started.wait_for(broken(), limit_s=None)


async def test_unread_updates_are_limited_and_more_fail_the_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acp_process, "UPDATES_MAX", 3)
    started = process("true")
    for _ in range(5):
        await started._listener.session_update("s", helpers.update_agent_message_text("x"))
    turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    with pytest.raises(UpstreamFailedError, match="sends output faster than it can be read"):
        [update async for update in started.read_updates(turn)]
    assert len(started.take_updates()) == 4


async def test_a_permission_request_without_options_is_cancelled() -> None:
    started = process("true")
    call = ToolCallUpdate(tool_call_id="1")
    answer = await started._listener.request_permission("s", call, [])
    assert answer.outcome.model_dump(exclude_none=True) == {"outcome": "cancelled"}


def test_the_details_of_a_refusal_decide_its_class() -> None:
    started = process("true")
    error = started.classify_error(
        RequestError(-32603, "Internal error", {"details": "Overloaded", "code": "x"})
    )
    assert (type(error).__name__, str(error)) == (
        "ModelOverloadedError",
        "agent failed: Internal error: Overloaded",
    )


@pytest.mark.parametrize(
    ("code", "words", "kind"),
    [
        (400, '{"error":{"code":400,"message":"no","status":"INVALID_ARGUMENT"}}', ModelRejectedError),
        (429, "slow down", ModelRateLimitedError),
        (500, "terminated", ModelUnavailableError),
        (-32603, "terminated", UpstreamFailedError),
        (-32000, "sign in", ModelAccessError),
    ],
)
def test_a_refusal_with_a_status_of_the_provider_is_classified_by_that_status(
    code: int, words: str, kind: type[ModelError]
) -> None:
    assert type(process("agent").classify_error(RequestError(code, words))) is kind
