"""Authenticated commands and answers between nodes: only a process with the store's key can create them.

    command = nonce (16) | time in ms (8) | seal (20) | body
    answer  = seal (20) | body

The seal of a command binds it to its session, its sender, a random number and the time. The seal of an answer binds it
to the number of its command. A command is refused if it is older than `COMMAND_AGE_MAX_S`, was received before in
another row, or was answered here.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict

from msgspec import Struct

from midstream.environment import World
from midstream.errors import StoreDamagedError, UnavailableError
from midstream.store.contract import ForwardedCommand
from midstream.store.guard.chain import SEAL_BYTES, ChainKeys

NONCE_BYTES = 16
TIME_BYTES = 8
HEAD_BYTES = NONCE_BYTES + TIME_BYTES + SEAL_BYTES
COMMAND_AGE_MAX_S = 60.0
"""Seconds for which a command is accepted: its sender waits 10 s, and the clocks of two machines may differ."""
NONCES_MAX = 65_536
"""Numbers of received commands in memory; the oldest is dropped."""


class _Received(Struct):
    """A received command: the number of its row, and whether it was answered here."""

    number: int
    is_answered: bool = False


class InboxSeals:
    """Makes and checks the seals of one node."""

    def __init__(self, keys: ChainKeys, world: World) -> None:
        self._keys = keys
        self._world = world
        self._received: OrderedDict[bytes, _Received] = OrderedDict()
        self._nonces: OrderedDict[int, bytes] = OrderedDict()
        """Nonces of the commands that wait for this node's answer, by the numbers of their rows."""

    def seal_command(self, session: str, sender: str, body: bytes) -> tuple[bytes, bytes]:
        """Return a command for storage, and its nonce."""
        nonce = hashlib.blake2b(self._world.new_secret().encode(), digest_size=NONCE_BYTES).digest()
        at = max(0, int(self._world.now() * 1000)).to_bytes(TIME_BYTES)
        seal = self._keys.newest.seal(_command_place(session, sender, nonce + at) + body)
        return nonce + at + seal + body, nonce

    def open_command(self, forwarded: ForwardedCommand) -> bytes:
        """Check the seal of a command, and return its body.

        Raises:
            StoreDamagedError: Another program inserted, changed or repeated the command.
        """
        stored = forwarded.body
        nonce, seal, body = (
            stored[:NONCE_BYTES],
            stored[HEAD_BYTES - SEAL_BYTES : HEAD_BYTES],
            stored[HEAD_BYTES:],
        )
        place = _command_place(forwarded.session, forwarded.sender, stored[: NONCE_BYTES + TIME_BYTES])
        if len(stored) < HEAD_BYTES or not self._keys.has_sealed(seal, place + body):
            raise StoreDamagedError("no node of this store sealed it")
        sent_at = int.from_bytes(stored[NONCE_BYTES : NONCE_BYTES + TIME_BYTES]) / 1000
        if abs(self._world.now() - sent_at) > COMMAND_AGE_MAX_S:
            raise StoreDamagedError(
                f"it was sealed more than {COMMAND_AGE_MAX_S:g} s ago, or the clocks of both machines differ by that"
            )
        before = self._received.get(nonce)
        if before is not None and (before.is_answered or before.number != forwarded.number):
            raise StoreDamagedError("it was received before")
        self._received[nonce] = before or _Received(forwarded.number)
        self._nonces[forwarded.number] = nonce
        _bound(self._received)
        _bound(self._nonces)
        return body

    def seal_answer(self, number: int, body: bytes) -> bytes:
        """Return the answer to a received command for storage.

        Args:
            number: The number of the command's row. Without a received command, no sender accepts the answer.
        """
        nonce = self._nonces.pop(number, b"")
        received = self._received.get(nonce)
        if received is not None:
            received.is_answered = True
        return self._keys.newest.seal(b"answer " + nonce + body) + body

    def open_answer(self, nonce: bytes, stored: bytes) -> bytes:
        """Check the answer to the command with this nonce, and return its body.

        Raises:
            UnavailableError: Another program wrote the answer, or it belongs to another command.
        """
        seal, body = stored[:SEAL_BYTES], stored[SEAL_BYTES:]
        if not self._keys.has_sealed(seal, b"answer " + nonce + body):
            raise UnavailableError(
                "the answer of another node is not authentic; try again", retry_after_s=1.0
            )
        return body


def _command_place(session: str, sender: str, head: bytes) -> bytes:
    name, node = session.encode(), sender.encode()
    return b"command %d %d %b%b%b" % (len(name), len(node), name, node, head)


def _bound(known: OrderedDict[int, bytes] | OrderedDict[bytes, _Received]) -> None:
    if len(known) > NONCES_MAX:
        known.popitem(last=False)
