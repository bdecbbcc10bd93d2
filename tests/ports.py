"""A port for servers that are killed and started again at the same address."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def held_port() -> Iterator[int]:
    """Hold a free port of the loopback interface.

    Between two servers, the system may assign an unreserved port to any outgoing connection, and the next
    server would find it taken. A socket that is bound to it and does not listen reserves it against all
    connections that do not name it.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]
