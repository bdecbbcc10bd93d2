"""The listening sockets of workers; `tests/cli/test_workers.py` tests the workers themselves."""

from __future__ import annotations

import socket
import sys

import pytest

from midstream.errors import PortTakenError
from midstream.server.supervisor import listen_for_workers

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere all workers have one socket")


def _close(sockets: list[socket.socket]) -> None:
    for each in sockets:
        each.close()


def test_each_worker_has_a_socket_on_the_same_port() -> None:
    sockets = listen_for_workers("127.0.0.1", 0, 3, shares_port=False)
    try:
        assert len({each.getsockname()[1] for each in sockets}) == 1
        reached: set[int] = set()
        port = sockets[0].getsockname()[1]
        clients = [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(60)]
        for number, each in enumerate(sockets):
            try:
                each.accept()[0].close()
            except BlockingIOError:
                continue
            reached.add(number)
        _close(clients)
        assert reached == {0, 1, 2}, "the system distributes connections"
    finally:
        _close(sockets)


def test_a_taken_port_is_refused_unless_it_is_shared() -> None:
    sockets = listen_for_workers("127.0.0.1", 0, 2, shares_port=False)
    port = sockets[0].getsockname()[1]
    try:
        with pytest.raises(PortTakenError, match="another program listens"):
            listen_for_workers("127.0.0.1", port, 2, shares_port=False)
        _close(listen_for_workers("127.0.0.1", port, 2, shares_port=True))
    finally:
        _close(sockets)
