"""The subscriptions of a store, in its key-value part; any server can deliver their wakes.

Each server checks them after its own appends, and every `CHECK_S` seconds for appends of other servers. It stores a
wake before it sends or writes it. If the server dies in between, the lease of the wake expires, or the wake is not
announced yet, and another server continues.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import suppress

import msgspec
from msgspec.structs import replace

from midstream.background_loops import spawn_loop
from midstream.dialects.durable_stream_state import Appended, AppendRequest, StreamRecord
from midstream.dialects.durable_streams import JSON_TYPE, Producer
from midstream.dialects.stream_subscriptions import (
    NextAct,
    StreamSubscription,
    Tail,
    WebhookAnswer,
    decode_subscription,
    encode_subscription,
)
from midstream.engine.host import Host
from midstream.errors import (
    EntryMovedError,
    LimitReachedError,
    MidstreamError,
    NotFoundError,
    RecordUndecodableError,
    UnavailableError,
    UsageError,
)
from midstream.retries import REPLACE_ATTEMPTS_MAX
from midstream.server.api.plain_streams import KnownStream, PlainStreams
from midstream.server.api.stream_names import name_of, stored_part
from midstream.server.auth.ownership import Ownership, name_in_store
from midstream.server.webhooks import Webhooks
from midstream.store.contract import PRINCIPAL_OF, KeyValueEntry, ListPlace

SUBSCRIPTIONS = "stream-subscriptions"
"""Namespace of subscriptions, by stored name."""
SUBSCRIPTIONS_MAX = 100
"""Subscriptions of one principal: all of them are checked every `CHECK_S` seconds."""
CHECK_S = 1.0
"""Seconds between checks for changes by other servers, while there are subscriptions."""
IDLE_S = 5.0
"""Seconds between checks while there are no subscriptions."""
SCAN_PAGE = 64
"""Journals of one page of a listing."""
SKEW_S = 5.0
"""Greatest assumed difference of the servers' clocks, in seconds."""
SCANNED_S = 60.0
"""Seconds between two writes of a subscription's progress through the changes."""

_log = logging.getLogger(__name__)


class StreamSubscriptions:
    """Stores subscriptions, and delivers their wakes from `start` to `stop`.

    Args:
        streams: The plain streams; this object registers for their changes.
    """

    def __init__(self, host: Host, streams: PlainStreams, webhooks: Webhooks) -> None:
        self._host = host
        self._store = host.store
        self._world = host.world
        self._streams = streams
        self._ownership = Ownership(host.store, host.world)
        self.webhooks = webhooks
        streams.on_change = self._note
        self._changed: set[str] = set()
        self._kick = asyncio.Event()
        self._checked: dict[str, tuple[int, float | None]] = {}
        """For each subscription: its version at the last check, and the time at which its lease or retry is due."""
        self._unreadable: set[str] = set()
        self._scanned_at: float | None = None
        self._checking: asyncio.Task[None] | None = None
        self._delivering: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Start the checks, after the store was opened."""
        self._checking = spawn_loop(self._world, self._check_periodically, name="subscriptions of streams")

    async def stop(self) -> None:
        """Stop the checks and deliveries; other servers continue. Idempotent."""
        looking, self._checking = self._checking, None
        tasks = [*self._delivering, *((looking,) if looking is not None else ())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- for requests

    async def find(self, key: str) -> StreamSubscription | None:
        """Return the subscription with this stored name, or None."""
        kept = await self._store.kv_get(SUBSCRIPTIONS, key)
        return None if kept is None else _decode(kept)

    async def create(self, key: str, subscription: StreamSubscription) -> bool:
        """Store a new subscription; return False if the name is taken.

        Raises:
            LimitReachedError: The principal has `SUBSCRIPTIONS_MAX` subscriptions. Nothing was stored.
        """
        maker = subscription.tenant, subscription.principal
        entries = await self._store.kv_list(SUBSCRIPTIONS)
        count = sum((each.tenant, each.principal) == maker for _, each in self._readable(entries))
        if count >= SUBSCRIPTIONS_MAX:
            raise LimitReachedError(
                f"a principal may have at most {SUBSCRIPTIONS_MAX} subscriptions; delete one"
            )
        try:
            await self._put(key, subscription, expected=0)
        except EntryMovedError:
            return False
        return True

    async def delete(self, key: str) -> bool:
        """Delete a subscription; return whether it existed."""
        for _ in range(REPLACE_ATTEMPTS_MAX):
            kept = await self._store.kv_get(SUBSCRIPTIONS, key)
            if kept is None:
                return False
            if await self._store.kv_delete(SUBSCRIPTIONS, key, expected=kept.version):
                await self._end_ownership(key)
                self._kick.set()
                return True
        raise UnavailableError("others change this subscription: retry", retry_after_s=0.1)

    async def _end_ownership(self, key: str) -> None:
        owner = await self._store.kv_get(PRINCIPAL_OF, key)
        if owner is not None:
            await self._store.kv_delete(PRINCIPAL_OF, key, expected=owner.version)

    async def update(
        self, key: str, change: Callable[[StreamSubscription, Mapping[str, Tail]], StreamSubscription]
    ) -> tuple[StreamSubscription, Mapping[str, Tail]]:
        """Replace a subscription by the result of `change`; return it with the tails of its streams.

        Raises:
            NotFoundError: The subscription does not exist.
            UnavailableError: Other requests keep changing it.
        """
        for _ in range(REPLACE_ATTEMPTS_MAX):
            kept = await self._store.kv_get(SUBSCRIPTIONS, key)
            if kept is None:
                raise NotFoundError("there is no such subscription")
            found = _decode(kept)
            tails = await self.tails(found)
            changed = change(found, tails)
            if changed == found:
                return found, tails
            with suppress(EntryMovedError):
                await self._put(key, changed, expected=kept.version)
                return changed, tails
        raise UnavailableError("others change this subscription: retry", retry_after_s=0.1)

    async def tails(self, subscription: StreamSubscription) -> dict[str, Tail]:
        """Return the tails of its existing streams."""
        found: dict[str, Tail] = {}
        for path, link in subscription.links.items():
            journal = name_in_store(stored_part(path), subscription.tenant)
            known = await self._streams.refresh(journal)
            if known is None or known.state.is_deleted:
                continue
            if known.birth == link.birth or await self.may_follow(subscription, journal):
                found[path] = Tail(known.birth, known.state.units)
        return found

    async def discovered(self, subscription: StreamSubscription) -> StreamSubscription:
        """Return the subscription with new streams that match its pattern."""
        return await self._linked(subscription, await self._changes_since(subscription.scanned_at - SKEW_S))

    # --- checks

    def _readable(
        self, entries: Sequence[KeyValueEntry]
    ) -> Iterator[tuple[KeyValueEntry, StreamSubscription]]:
        """Yield the readable subscriptions; log an error once for each unreadable one."""
        for entry in entries:
            try:
                yield entry, _decode(entry)
            except RecordUndecodableError as error:
                if entry.key not in self._unreadable:
                    self._unreadable.add(entry.key)
                    _log.error("%s", error.message)

    def _note(self, journal: str) -> None:
        self._changed.add(journal)
        self._kick.set()

    async def _check_periodically(self) -> None:
        while True:
            pause_s = IDLE_S
            try:
                pause_s = CHECK_S if await self._check() else IDLE_S
            except MidstreamError as error:  # the store may be unavailable for a while
                _log.warning("subscriptions of streams cannot be checked: %s", error.message)
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._kick.wait()
            self._kick.clear()

    async def _check(self) -> bool:
        """Wake subscriptions that have pending work; return whether there are subscriptions."""
        changed, self._changed = self._changed, set()
        entries = await self._store.kv_list(SUBSCRIPTIONS)
        now = self._world.now()
        subscriptions = {entry.key: (entry.version, each) for entry, each in self._readable(entries)}
        self._checked = {key: each for key, each in self._checked.items() if key in subscriptions}
        if not subscriptions:
            self._scanned_at = None
            return False
        if self._scanned_at is None:
            self._scanned_at = min(each.scanned_at for _, each in subscriptions.values())
        changed |= await self._changes_since(self._scanned_at - SKEW_S)
        self._scanned_at = now
        for key, (version, found) in subscriptions.items():
            seen_version, due_at = self._checked.get(key, (0, None))
            is_due = due_at is not None and now >= due_at
            if version != seen_version or is_due or self._concerns(found, changed):
                try:
                    await self._check_subscription(key, version, found, changed)
                except MidstreamError as error:
                    _log.warning("subscription %r cannot be woken: %s", found.id, error.message)
                    self._changed |= changed  # retry with the next check
        return True

    def _concerns(self, subscription: StreamSubscription, changed: set[str]) -> bool:
        paths = (name_of(journal, subscription.tenant) for journal in changed)
        return any(
            path is not None and (path in subscription.links or subscription.matches(path)) for path in paths
        )

    async def _check_subscription(
        self, key: str, version: int, found: StreamSubscription, changed: set[str]
    ) -> None:
        now = self._world.now()
        linked = await self._linked(found, changed)
        if now - linked.scanned_at > SCANNED_S:
            linked = replace(linked, scanned_at=now)
        tails = await self.tails(linked)
        stored, act = linked.advance(tails, now=now, wake_id=self._world.new_id("wake"))
        if stored != found:
            try:
                version = await self._put(key, stored, expected=version)
            except EntryMovedError:  # another server changed it: check again
                self._changed |= changed
                self._kick.set()
                return
        self._checked[key] = (version, stored.due_at())
        if act is NextAct.DELIVER:
            task = self._world.spawn(self._deliver(key, stored, tails), name=f"webhook of {found.id}")
            self._delivering.add(task)
            task.add_done_callback(self._delivering.discard)
        elif act is NextAct.ANNOUNCE:
            await self._announce(key, stored, tails)

    async def _linked(self, found: StreamSubscription, changed: set[str]) -> StreamSubscription:
        """Link changed streams that match the pattern, with their earlier appends as pending."""
        for journal in sorted(changed):
            path = name_of(journal, found.tenant)
            if path is None or path in found.links or not found.matches(path):
                continue
            known = await self._streams.refresh(journal)
            if known is None or known.state.is_deleted or not await self.may_follow(found, journal):
                continue
            try:
                found = found.with_link(path, Tail(known.birth, 0))
            except UsageError as error:
                _log.warning("subscription %r: %s", found.id, error.message)
                return found
        return found

    async def may_follow(self, subscription: StreamSubscription, journal: str) -> bool:
        """Return whether a stream belongs to the principal of the subscription."""
        owner = await self._ownership.owner_of(journal)
        found = ("", "") if owner is None else (owner.tenant, owner.principal)
        return not subscription.principal or found == (subscription.tenant, subscription.principal)

    async def _changes_since(self, at: float) -> set[str]:
        found: set[str] = set()
        after: ListPlace | None = None
        while True:
            count = 0
            async for line in self._store.list(after=after, limit=SCAN_PAGE):
                count += 1
                if line.mark.at < at:
                    return found
                found.add(line.session)
                after = ListPlace(line.mark.at, line.session)
            if count < SCAN_PAGE:
                return found

    # --- deliveries

    async def _deliver(self, key: str, stored: StreamSubscription, tails: Mapping[str, Tail]) -> None:
        assert stored.config.webhook is not None
        body = stored.wake_body(
            tails,
            callback_url=f"{stored.base_url}/subscriptions/{stored.id}/callback",
            callback_token=f"{key}.{stored.token()}",
        )
        generation = stored.generation
        try:
            reply = await self.webhooks.send(stored.config.webhook.url, body)
            is_good, is_done = reply.is_good, _is_done(reply.body)
        except MidstreamError as error:
            _log.warning("the webhook of subscription %r is not sent: %s", stored.id, error.message)
            is_good = is_done = False

        def change(found: StreamSubscription, _: Mapping[str, Tail]) -> StreamSubscription:
            if is_good:
                return found.deliver(generation, is_done=is_done)
            return found.fail(generation, now=self._world.now(), chance=self._world.chance())

        with suppress(NotFoundError):  # the subscription was deleted
            try:
                await self.update(key, change)
            except MidstreamError as error:  # the lease expires, and the wake is repeated
                _log.warning("the delivery of subscription %r is not recorded: %s", stored.id, error.message)
        self._kick.set()

    async def _announce(self, key: str, stored: StreamSubscription, tails: Mapping[str, Tail]) -> None:
        """Append a wake to the wake stream exactly once: its generation is the producer's epoch."""
        journal = name_in_store(stored_part(stored.config.wake_stream), stored.tenant)
        event = stored.wake_event(tails, now=self._world.now())
        place = Producer(f"subscription:{stored.id}", stored.generation, 0)
        append_request = AppendRequest(JSON_TYPE, event, place)

        async def decide(known: KnownStream | None) -> list[StreamRecord]:
            if known is None or known.state.is_deleted:
                return []
            decision = known.state.decide(append_request)
            if isinstance(decision, Appended):
                return [replace(decision, at=self._world.now())]
            return []

        if await self._streams.find(journal) is None:
            _log.warning("subscription %r has no wake stream; create it", stored.id)
        else:
            await self._streams.write(journal, decide)
        with suppress(NotFoundError):
            await self.update(key, lambda found, _: found.announce(stored.generation))

    async def _put(self, key: str, subscription: StreamSubscription, *, expected: int) -> int:
        body = encode_subscription(subscription)
        version = await self._store.kv_put(SUBSCRIPTIONS, key, body, expected=expected, at=self._world.now())
        self._kick.set()
        return version

    async def all_streams(self, of: set[str] | None) -> AsyncIterator[tuple[str, Tail]]:
        """Yield the journals of plain streams with their tails; `of` limits the names."""
        async for line in self._store.list(of=of):
            if stored_part("") in line.session:
                known = await self._streams.refresh(line.session)
                if known is not None and not known.state.is_deleted:
                    yield line.session, Tail(known.birth, known.state.units)


def _decode(entry: KeyValueEntry) -> StreamSubscription:
    try:
        return decode_subscription(entry.body)
    except msgspec.DecodeError as error:
        raise RecordUndecodableError(f"subscription {entry.key!r} cannot be read: {error}") from error


def _is_done(body: bytes) -> bool:
    try:
        return msgspec.json.decode(body, type=WebhookAnswer).done is True
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return False
