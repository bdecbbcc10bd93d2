"""Notifications between nodes: gathered, bounded in size, and received by all others."""

from __future__ import annotations

import asyncio

import asyncpg
import msgspec
import pytest

from midstream.environment import World
from midstream.errors import StoreBusyError
from midstream.store.postgres import PostgresStore
from midstream.store.postgres.node_signals import (
    PAYLOAD_BYTES_MAX,
    Kind,
    Listener,
    Notifier,
    Signal,
    _Addressees,
)
from midstream.store.postgres.postgres_address import PostgresAddress
from midstream.store.postgres.postgres_connections import Postgres, ServerLink
from tests.store.postgres.postgres_places import PostgresPlace

WORLD = World()


def _postgres(place: PostgresPlace) -> Postgres:
    return Postgres(PostgresAddress.parse(place.url.partition(":")[2]))


def _notifier(place: PostgresPlace, *followed: str) -> Notifier:
    notifier = Notifier(_postgres(place), "us", WORLD)
    notifier.note_followed(followed)
    return notifier


def test_a_notification_is_within_the_size_limit_and_all_together_name_every_session(
    place: PostgresPlace,
) -> None:
    ends = {str(number) + '-"ü' * 50: number for number in range(500)}
    follows = [f"f{number}" * 20 for number in range(500)]
    payloads = [
        *_notifier(place)._payloads(
            {**ends, "x" * 8000: 1}, {Kind.INBOX}, follows, _Addressees({*range(10_000)})
        )
    ]
    assert all(len(each.encode()) < PAYLOAD_BYTES_MAX for each in payloads)
    signals = [msgspec.json.decode(each, type=Signal) for each in payloads]
    assert {name: end for signal in signals for name, end in signal.moved.items()} == ends
    assert [name for signal in signals for name in signal.follows] == follows
    assert [signal.kinds for signal in signals if signal.kinds] == [(Kind.INBOX,)]


async def test_a_command_and_an_answer_for_one_node_share_a_signal(
    store: PostgresStore, place: PostgresPlace
) -> None:
    received: list[Signal] = []
    came = asyncio.Event()

    def receive(signal: Signal) -> None:
        if signal.by == "us":
            received.append(signal)
            came.set()

    listener = Listener(_postgres(place), "other", WORLD, on_signal=receive, on_gap=lambda: None)
    await listener.start()
    notifier = _notifier(place)
    notifier.report_forwarded(7)
    notifier.report_answered(9)
    async with asyncio.timeout(20):
        await came.wait()
    assert received == [Signal("us", {}, (Kind.INBOX,), inbox_of=(7,), answered=(9,))]
    kinds = [received[0].kinds_for(node) for node in (7, 9, 8)]
    assert kinds == [{Kind.INBOX}, {Kind.ANSWERS}, set()]
    await notifier.close()
    await listener.close()


def test_a_signal_of_an_older_version_addresses_all_nodes_for_commands_and_answers() -> None:
    signal = msgspec.json.decode(b'{"by":"us","kinds":["free","inbox"]}', type=Signal)
    assert signal.kinds_for(7) == {Kind.FREE, Kind.INBOX, Kind.ANSWERS}


def test_many_addressees_fit_into_a_notification(place: PostgresPlace) -> None:
    many = _Addressees({*range(10**9, 10**9 + 500)}, {*range(10**9, 10**9 + 500)})
    (payload,) = _notifier(place)._payloads({}, set(), (), many)
    assert len(payload.encode()) < PAYLOAD_BYTES_MAX


async def test_signals_reach_all_others_and_are_gathered(store: PostgresStore, place: PostgresPlace) -> None:
    received: list[Signal] = []
    came = asyncio.Event()

    def receive(signal: Signal) -> None:
        if signal.by == "us":
            received.append(signal)
            came.set()

    listener = Listener(_postgres(place), "other", WORLD, on_signal=receive, on_gap=lambda: None)
    await listener.start()
    notifier = _notifier(place, "s", "t")
    for end in range(1, 50):
        notifier.report_moved({"s": end, "t": 1, "u": end})
    notifier.report(Kind.FREE)
    notifier.announce(["v"])
    async with asyncio.timeout(60):
        await came.wait()
    assert received == [Signal("us", {"s": 49, "t": 1}, (Kind.FREE,), ("v",))]
    await notifier.close()
    await listener.close()


async def test_ends_are_not_sent_where_no_other_node_follows(place: PostgresPlace) -> None:
    notifier = _notifier(place)
    notifier.report_moved({"s": 1})
    assert notifier._sending is None
    await notifier.close()


async def test_a_listener_reconnects_after_its_connection_was_lost(
    store: PostgresStore, place: PostgresPlace
) -> None:
    gap, came = asyncio.Event(), asyncio.Event()
    listener = Listener(_postgres(place), "other", WORLD, on_signal=lambda _: came.set(), on_gap=gap.set)
    await listener.start()
    connection = await listener._link.connection()
    connection.terminate()
    async with asyncio.timeout(60):
        await gap.wait()
    notifier = _notifier(place)
    notifier.report(Kind.NODES)
    async with asyncio.timeout(60):
        await came.wait()
    await notifier.close()
    await listener.close()


class _LostAtOnce(ServerLink):
    """A connection whose successor has ended already when it is returned."""

    is_losing = False

    async def connection(self) -> asyncpg.Connection:
        connection = await super().connection()
        if self.is_losing:
            self.is_losing = False
            connection.terminate()
        return connection


async def test_a_listener_whose_new_connection_is_lost_at_once_tries_again(
    store: PostgresStore, place: PostgresPlace
) -> None:
    gap = asyncio.Event()
    listener = Listener(_postgres(place), "other", WORLD, on_signal=lambda _: None, on_gap=gap.set)
    link = listener._link = _LostAtOnce(_postgres(place), "listener")
    await listener.start()
    connection = await link.connection()
    link.is_losing = True
    connection.terminate()
    async with asyncio.timeout(60):
        await gap.wait()
    await listener.close()


async def test_a_listener_that_cannot_start_raises_the_error_of_the_store(
    store: PostgresStore, place: PostgresPlace
) -> None:
    listener = Listener(_postgres(place), "other", WORLD, on_signal=lambda _: None, on_gap=lambda: None)
    link = listener._link = _LostAtOnce(_postgres(place), "listener")
    link.is_losing = True
    with pytest.raises(StoreBusyError):
        await listener.start()
    await listener.close()
