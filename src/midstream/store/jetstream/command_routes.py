"""Commands for sessions that other nodes run.

A command is in the memory of its sender until it is answered, and is not stored. If the sender dies, its client sends
the command to another node. The sender sends it to the node of the session, or to all nodes if no living node has it.
It sends the command again when the session moves, and each second, because messages may be lost. Receivers report each
command once under each epoch.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from msgspec import Struct

from midstream.environment import World
from midstream.errors import MidstreamError
from midstream.extras import extra
from midstream.store.contract import ForwardedCommand
from midstream.store.jetstream.jetstream_errors import UnknownOutcomeError
from midstream.store.jetstream.jetstream_link import JetStreamLink
from midstream.store.jetstream.node_presence import NodePresence
from midstream.store.jetstream.session_reader import SessionReader
from midstream.store.jetstream.stream_subjects import StreamSubjects

with extra("nats"):
    from nats.aio.msg import Msg

COMMAND = "command"
ANSWER = "answer"
CANCEL = "cancel"
AGAIN_S = 1.0
"""Seconds after which an unanswered command is sent again."""
ANSWERED_MAX = 10_000
"""Answers in memory, for senders that did not receive them."""
NUMBER_BITS = 32

_log = logging.getLogger(__name__)


class RoutedCommand(Struct, frozen=True, array_like=True):
    """A command under way. `epoch` is that of its session at the addressed node."""

    number: int
    session: str
    body: bytes
    sender: str
    epoch: int


class RoutedAnswer(Struct, frozen=True, array_like=True):
    """The answer to a command."""

    number: int
    body: bytes


class _Outbox(Struct, eq=False):
    """Commands of this node for one session, in order."""

    commands: dict[int, bytes]
    changed: asyncio.Event
    task: asyncio.Task[None] | None = None


class CommandRoutes:
    """Both halves: the commands that this node has forwarded, and those that it received.

    Args:
        on_received: Called when a command was received.
    """

    def __init__(
        self,
        link: JetStreamLink,
        subjects: StreamSubjects,
        reader: SessionReader,
        presence: NodePresence,
        world: World,
        *,
        on_received: Callable[[], None],
    ) -> None:
        self._link = link
        self._subjects = subjects
        self._reader = reader
        self._presence = presence
        self._world = world
        self._on_received = on_received
        self._numbers = itertools.count(1)
        self._outboxes: dict[str, _Outbox] = {}
        self._awaited: dict[int, asyncio.Future[bytes]] = {}
        self.received: OrderedDict[int, RoutedCommand] = OrderedDict()
        """Commands to decide here, oldest first."""
        self._answered: OrderedDict[int, RoutedAnswer] = OrderedDict()
        self._sending: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Begin to receive.

        Raises:
            MidstreamError: The store cannot be reached.
        """
        node = self._presence.node
        await self._link.listen(self._subjects.inbox(node, COMMAND), self._receive)
        await self._link.listen(self._subjects.all_nodes(COMMAND), self._receive)
        await self._link.listen(self._subjects.inbox(node, ANSWER), self._receive_answer)
        await self._link.listen(self._subjects.all_nodes(CANCEL), self._receive_cancel)

    async def close(self) -> None:
        """Cancel the callers that wait for answers."""
        for answer in self._awaited.values():
            answer.cancel()
        tasks = {outbox.task for outbox in self._outboxes.values() if outbox.task is not None}
        tasks |= self._sending
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    # --- the sender

    async def forward(self, session: str, body: bytes) -> bytes:
        """See `Store.forward`."""
        number = (self._presence.number << NUMBER_BITS) + next(self._numbers)
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._awaited[number] = answer
        outbox = self._outboxes.get(session)
        if outbox is None:
            outbox = self._outboxes[session] = _Outbox({}, asyncio.Event())
        outbox.commands[number] = body
        outbox.changed.set()
        if outbox.task is None:
            outbox.task = self._world.spawn(self._deliver(session, outbox), name="forward commands")
        try:
            return await answer
        finally:
            del self._awaited[number]
            outbox.commands.pop(number, None)
            self.received.pop(number, None)
            outbox.changed.set()
            await self._link.signal(self._subjects.all_nodes(CANCEL), msgspec.msgpack.encode(number))

    def note(self, session: str | None = None) -> None:
        """Look up the nodes of a session's commands again, or of all commands."""
        outboxes = [*self._outboxes.values()] if session is None else [self._outboxes.get(session)]
        for outbox in outboxes:
            if outbox is not None:
                outbox.changed.set()

    async def _deliver(self, session: str, outbox: _Outbox) -> None:
        """Send the commands of a session to its node, until each one is answered."""
        moved = None
        birth = 0
        try:

            async def note(_: Msg) -> None:
                outbox.changed.set()

            with contextlib.suppress(MidstreamError):
                moved = await self._link.listen(self._subjects.moved(session), note)
                await self._link.flush()
            while outbox.commands:
                outbox.changed.clear()
                try:
                    birth = await self._send(session, outbox, birth)
                except MidstreamError as error:
                    _log.debug("commands were not forwarded: %s", error)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(AGAIN_S):
                        await outbox.changed.wait()
        finally:
            if self._outboxes.get(session) is outbox:
                del self._outboxes[session]
            if moved is not None:
                with contextlib.suppress(Exception):
                    await moved.unsubscribe()

    async def _send(self, session: str, outbox: _Outbox, birth: int) -> int:
        """Send the commands to the session's current node; return the birth of the session."""
        newest = await self._reader.present(session)
        if birth and (newest is None or newest.head.birth != birth):
            return birth  # the session was deleted, with its commands
        epoch, node = (0, "") if newest is None else (newest.head.epoch, newest.head.node)
        if node and node != self._presence.node and await self._presence.is_dead(node):
            node = ""
        for number, body in [*outbox.commands.items()]:
            command = RoutedCommand(number, session, body, self._presence.node, epoch)
            if not node or node == self._presence.node:
                self._take(command)
            if not node:
                await self._link.signal(self._subjects.all_nodes(COMMAND), msgspec.msgpack.encode(command))
            elif node != self._presence.node:
                await self._send_to(node, command)
        return 0 if newest is None else newest.head.birth

    async def _send_to(self, node: str, command: RoutedCommand) -> None:
        with contextlib.suppress(UnknownOutcomeError):
            await self._link.ask(self._subjects.inbox(node, COMMAND), msgspec.msgpack.encode(command))

    async def _receive_answer(self, message: Msg) -> None:
        answer = msgspec.msgpack.decode(message.data, type=RoutedAnswer)
        await self._link.signal(message.reply)
        self._settle(answer)

    def _settle(self, answer: RoutedAnswer) -> None:
        awaited = self._awaited.get(answer.number)
        if awaited is not None and not awaited.done():
            awaited.set_result(answer.body)

    # --- the receiver

    async def _receive(self, message: Msg) -> None:
        command = msgspec.msgpack.decode(message.data, type=RoutedCommand)
        if message.reply:
            await self._link.signal(message.reply)
        if command.sender != self._presence.node:
            self._take(command)

    def _take(self, command: RoutedCommand) -> None:
        answered = self._answered.get(command.number)
        if answered is not None:
            self._spawn(self._send_answer(command.sender, answered))
            return
        old = self.received.get(command.number)
        if old is None or old.epoch < command.epoch:
            self.received[command.number] = command
            self._on_received()

    async def _receive_cancel(self, message: Msg) -> None:
        number = msgspec.msgpack.decode(message.data, type=int)
        self.received.pop(number, None)
        self._answered.pop(number, None)

    def has_unknown_sender(self) -> bool:
        """Whether a command's sender is unknown to this node: it has just joined, or died."""
        living = self._presence.others | {self._presence.node}
        return any(each.sender not in living for each in self.received.values())

    def waiting(self) -> list[tuple[int, ForwardedCommand]]:
        """Return the commands to decide here, oldest first, with the epochs of their sessions."""
        living = self._presence.others | {self._presence.node}
        for number in [number for number, each in self.received.items() if each.sender not in living]:
            del self.received[number]  # the client sends it to another node
        return [
            (each.epoch, ForwardedCommand(each.number, each.session, each.body, each.sender))
            for each in sorted(self.received.values(), key=lambda each: each.number)
        ]

    async def answer(self, forwarded: int, body: bytes) -> None:
        """See `Store.answer`."""
        command = self.received.get(forwarded)
        if command is None:
            return
        newest = await self._reader.present(command.session)
        if newest is not None and newest.head.node not in {"", self._presence.node}:
            if not await self._presence.is_dead(newest.head.node):
                return
        answer = RoutedAnswer(forwarded, body)
        self.received.pop(forwarded, None)
        if command.sender == self._presence.node:
            self._settle(answer)
            return
        self._answered[forwarded] = answer
        if len(self._answered) > ANSWERED_MAX:
            self._answered.popitem(last=False)
        await self._send_answer(command.sender, answer)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._world.spawn(work, name="answer again")
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def _send_answer(self, sender: str, answer: RoutedAnswer) -> None:
        with contextlib.suppress(MidstreamError, UnknownOutcomeError):
            await self._link.ask(self._subjects.inbox(sender, ANSWER), msgspec.msgpack.encode(answer))
