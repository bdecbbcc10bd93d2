"""Subscriptions of the Durable Streams protocol: durable cursors over plain streams that wake a worker.

A subscription is one value, replaced under the version that was read. So each wake, ack and lease takes effect once, on
any server. Each wake has a higher generation; requests of older generations are fenced.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from enum import Enum
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType, field
from msgspec.structs import replace

from midstream.dialects.durable_streams import offset_at, units_at
from midstream.dialects.request_fields import BadFieldError
from midstream.errors import UsageError
from midstream.retries import WEBHOOK_BACKOFF

LEASE_MS = 30_000
"""Default lease in milliseconds."""
LEASE_MS_MIN, LEASE_MS_MAX = 1_000, 600_000
LINKS_MAX = 1_000
"""Streams of one subscription."""
TEXT_MAX = 2_048
"""Characters of a pattern, an address or a description."""

_Path = Annotated[str, Meta(max_length=128, pattern="^/?[A-Za-z0-9._:-]+(/[A-Za-z0-9._:-]+)*/?$")]
_Text = Annotated[str, Meta(max_length=TEXT_MAX)]


class Webhook(Struct, frozen=True):
    """The address to which wakes are sent."""

    url: _Text


class SubscriptionConfig(Struct, frozen=True, omit_defaults=True):
    """The body of a request to create a subscription, which a repeated request must match.

    Args:
        type: Whether wakes are sent to `webhook`, or appended to `wake_stream`.
        pattern: Pattern of stream paths: `*` is one segment, `**` any number of segments; "" for none.
        streams: Paths of further streams.
        lease_ttl_ms: Milliseconds without a report after which a worker counts as dead.
    """

    type: Literal["webhook", "pull-wake"]
    pattern: _Text = ""
    streams: Annotated[tuple[_Path, ...], Meta(max_length=LINKS_MAX)] = ()
    webhook: Webhook | None = None
    wake_stream: _Path = ""
    lease_ttl_ms: Annotated[int, Meta(ge=LEASE_MS_MIN, le=LEASE_MS_MAX)] = LEASE_MS
    description: _Text = ""

    def normalized(self) -> SubscriptionConfig:
        """Return the config in its stored form.

        Raises:
            UsageError: A field that the type needs is missing.
        """
        if not self.pattern and not self.streams:
            raise UsageError("a subscription needs a `pattern` or `streams`")
        if self.type == "webhook" and self.webhook is None:
            raise UsageError("a subscription of type `webhook` needs `webhook.url`")
        if self.type == "pull-wake" and not self.wake_stream:
            raise UsageError("a subscription of type `pull-wake` needs `wake_stream`")
        return replace(
            self,
            streams=tuple(sorted({each.strip("/") for each in self.streams})),
            wake_stream=self.wake_stream.strip("/") if self.type == "pull-wake" else "",
            webhook=self.webhook if self.type == "webhook" else None,
        )


class StreamAck(Struct, frozen=True):
    """The last processed offset of a stream."""

    offset: str
    stream: str = ""
    path: str = ""


class WakeReport(Struct, frozen=True):
    """The body of a callback, an ack or a release: the wake, processed offsets, and whether the work is done."""

    wake_id: str
    generation: int
    acks: Annotated[tuple[StreamAck, ...], Meta(max_length=LINKS_MAX)] = ()
    done: bool = False


class Tail(Struct, frozen=True):
    """The end of a stream: the epoch of its first record, and the units before its end."""

    birth: int
    units: int


class SubscriptionLink(Struct, frozen=True, omit_defaults=True):
    """One stream of a subscription.

    Args:
        birth: Epoch of the stream's first record; 0 without a stream. A stream that was created again is read from its
            beginning.
        acked: Number of processed units.
        is_explicit: Whether a request added it.
        is_matched: Whether it matches the pattern.
    """

    birth: int = 0
    acked: int = 0
    is_explicit: bool = False
    is_matched: bool = False


class NextAct(Enum):
    """Next action of a server after it has stored a subscription."""

    NOTHING = "nothing"
    DELIVER = "deliver"
    ANNOUNCE = "announce"


class StreamSubscription(Struct, frozen=True, omit_defaults=True):
    """A stored subscription. Times are in seconds since 1970; 0 means none.

    Args:
        id: The client's id of the subscription.
        base_url: Base URL of its server, for callbacks.
        secret: Key of the signatures of its wakes' tokens.
        tenant, principal: The owner; "" without authentication.
        generation: Generation of the newest wake.
        wake_id: Id of the wake in flight; "" while it is idle.
        snapshot: Units of each stream in the newest request or message of that wake.
        holder: The worker that has claimed the wake.
        lease_until: End of its lease.
        is_announced: Whether the wake is in the wake stream, or claimed.
        failures: Failed deliveries since the last successful one.
        next_attempt_at: Earliest time of the next delivery after a failure.
        scanned_at: Time up to which all changes of streams are known.
    """

    id: str
    config: SubscriptionConfig
    base_url: str
    secret: str
    created_at: float
    tenant: str = ""
    principal: str = ""
    links: dict[str, SubscriptionLink] = field(default_factory=dict)
    generation: int = 0
    wake_id: str = ""
    snapshot: dict[str, int] = field(default_factory=dict)
    holder: str = ""
    lease_until: float = 0.0
    is_announced: bool = False
    failures: int = 0
    next_attempt_at: float = 0.0
    scanned_at: float = 0.0

    # --- streams

    def matches(self, path: str) -> bool:
        """Return whether the pattern matches a path. The wake stream never does: each wake would cause the next one."""
        return (
            bool(self.config.pattern)
            and path != self.config.wake_stream
            and glob_matches(self.config.pattern, path)
        )

    def with_link(self, path: str, tail: Tail | None, *, is_explicit: bool = False) -> StreamSubscription:
        """Link a stream from `tail` on, or from its beginning; a linked stream keeps its place.

        Raises:
            UsageError: The subscription has `LINKS_MAX` streams.
        """
        known = self.links.get(path)
        if known is None and len(self.links) >= LINKS_MAX:
            raise UsageError(f"a subscription may have at most {LINKS_MAX} streams; create another one")
        link = known or (SubscriptionLink() if tail is None else SubscriptionLink(tail.birth, tail.units))
        link = replace(
            link,
            is_explicit=link.is_explicit or is_explicit,
            is_matched=link.is_matched or not is_explicit or self.matches(path),
        )
        return replace(self, links={**self.links, path: link})

    def without_link(self, path: str) -> StreamSubscription:
        """Remove an explicit link; a stream that matches the pattern stays."""
        links = dict(self.links)
        link = links.pop(path, None)
        if link is not None and link.is_matched:
            links[path] = replace(link, is_explicit=False)
        return replace(self, links=links)

    def settle(self, tails: Mapping[str, Tail]) -> StreamSubscription:
        """Update the links to the existing streams; a deleted stream stays only if it is explicit."""
        links: dict[str, SubscriptionLink] = {}
        for path, link in self.links.items():
            tail = tails.get(path)
            if tail is None and not link.is_explicit:
                continue
            birth = 0 if tail is None else tail.birth
            links[path] = link if birth == link.birth else replace(link, birth=birth, acked=0)
        return self if links == self.links else replace(self, links=links)

    def pending(self, tails: Mapping[str, Tail]) -> list[str]:
        """Return the streams with unprocessed units."""
        return [path for path, link in self.links.items() if path in tails and tails[path].units > link.acked]

    def units_of(self, tails: Mapping[str, Tail]) -> dict[str, int]:
        """Return the units of each existing stream of this subscription."""
        return {path: tails[path].units for path in self.links if path in tails}

    # --- wakes

    @property
    def is_webhook(self) -> bool:
        """Whether wakes are sent to a webhook."""
        return self.config.webhook is not None

    @property
    def lease_s(self) -> float:
        """Duration of a lease in seconds."""
        return self.config.lease_ttl_ms / 1000

    def due_at(self) -> float | None:
        """Return the time of the next lease expiry or retry; None while it is idle."""
        if not self.wake_id:
            return self.next_attempt_at or None
        if not self.is_webhook and not self.is_announced:
            return 0.0
        times = [each for each in (self.lease_until, self.next_attempt_at) if each]
        return min(times) if times else None

    def advance(
        self, tails: Mapping[str, Tail], *, now: float, wake_id: str
    ) -> tuple[StreamSubscription, NextAct]:
        """Return the subscription to store now, and the action after that.

        Args:
            wake_id: An unused id.
        """
        found = self.settle(tails)
        if found.wake_id and found.lease_until and now >= found.lease_until:
            found = found.release()
        if found.wake_id:
            if not found.is_webhook:
                return found, NextAct.NOTHING if found.is_announced else NextAct.ANNOUNCE
            if found.next_attempt_at and now >= found.next_attempt_at:
                # The body of the repeated request has the current tails, and `done` acks these.
                found = replace(found, snapshot=found.units_of(tails), next_attempt_at=0.0)
                return replace(found, lease_until=now + found.lease_s), NextAct.DELIVER
            return found, NextAct.NOTHING
        if now < found.next_attempt_at or not found.pending(tails):
            return found, NextAct.NOTHING
        found = found.wake(tails, now=now, wake_id=wake_id)
        return found, NextAct.DELIVER if found.is_webhook else NextAct.ANNOUNCE

    def wake(self, tails: Mapping[str, Tail], *, now: float, wake_id: str) -> StreamSubscription:
        """Return the subscription with the next wake in flight."""
        return replace(
            self,
            generation=self.generation + 1,
            wake_id=wake_id,
            snapshot=self.units_of(tails),
            lease_until=now + self.lease_s if self.is_webhook else 0.0,
            next_attempt_at=0.0,
            is_announced=False,
        )

    def release(self) -> StreamSubscription:
        """Return the subscription without a wake in flight."""
        return replace(self, wake_id="", snapshot={}, holder="", lease_until=0.0, is_announced=False)

    def announce(self, generation: int) -> StreamSubscription:
        """Return the subscription after a wake was appended to the wake stream."""
        return replace(self, is_announced=True) if self.generation == generation and self.wake_id else self

    def fail(self, generation: int, *, now: float, chance: float) -> StreamSubscription:
        """Return the subscription after a failed delivery; the wake is delivered again during its lease."""
        if self.generation != generation or not self.wake_id:
            return self
        failures = self.failures + 1
        wait_s = WEBHOOK_BACKOFF.wait_s(failures, chance=chance)
        return replace(self, failures=failures, next_attempt_at=now + wait_s)

    def deliver(self, generation: int, *, is_done: bool) -> StreamSubscription:
        """Return the subscription after an answered delivery; `is_done` acks its snapshot."""
        if self.generation != generation or not self.wake_id:
            return self
        found = replace(self, failures=0, next_attempt_at=0.0)
        if not is_done:
            return found
        links = {
            path: replace(link, acked=max(link.acked, self.snapshot.get(path, 0)))
            for path, link in self.links.items()
        }
        return replace(found, links=links).release()

    # --- requests of workers

    def token(self) -> str:
        """Return the token of the newest wake."""
        return f"{self.generation}.{self._signature(self.generation)}"

    def generation_of(self, token: str) -> int | None:
        """Return the generation of a token; None if it is not a token of this subscription."""
        number, _, signature = token.partition(".")
        if not re.fullmatch("[0-9]{1,15}", number):
            return None
        expected = self._signature(int(number))
        return int(number) if hmac.compare_digest(expected.encode(), signature.encode()) else None

    def is_current(self, generation: int, report: WakeReport) -> bool:
        """Return whether a token and a report belong to the wake in flight."""
        newest = (self.generation, self.generation, self.wake_id)
        return bool(self.wake_id) and (generation, report.generation, report.wake_id) == newest

    def claim(
        self, worker: str, tails: Mapping[str, Tail], *, now: float, wake_id: str
    ) -> StreamSubscription | None:
        """Return the subscription with a worker's lease; None without pending work. No other worker may hold it."""
        found = self.settle(tails)
        if found.lease_until and now >= found.lease_until:
            found = found.release()
        if not found.pending(tails):
            return None
        if not found.wake_id:
            found = found.wake(tails, now=now, wake_id=wake_id)
        return replace(found, holder=worker, lease_until=now + found.lease_s, is_announced=True)

    def is_held(self, *, now: float) -> bool:
        """Return whether a worker holds an unexpired claim."""
        return bool(self.holder) and now < self.lease_until

    def ack(self, report: WakeReport, tails: Mapping[str, Tail], *, now: float) -> StreamSubscription:
        """Return the subscription with a worker's acks, and its lease extended or ended.

        Raises:
            AckError: An offset is not of a linked stream, after its end, or before the last acked one.
        """
        found = self.settle(tails)
        links = dict(found.links)
        for ack in report.acks:
            path = (ack.stream or ack.path).strip("/")
            link, tail = links.get(path), tails.get(path)
            if link is None or tail is None:
                raise AckError(f"{path[:128]!r} is not a stream of this subscription")
            try:
                units = units_at(ack.offset)
            except BadFieldError as error:
                raise AckError(f"{ack.offset[:40]!r} is not an offset of this server") from error
            if ack.offset == "-1" or not link.acked <= units <= tail.units:
                raise AckError(
                    f"{ack.offset[:40]!r} is before the last acked offset of {path!r}, or after its end"
                )
            links[path] = replace(link, acked=units)
        found = replace(found, links=links, failures=0, next_attempt_at=0.0)
        return found.release() if report.done else replace(found, lease_until=now + found.lease_s)

    def _signature(self, generation: int) -> str:
        message = f"{self.id}\n{generation}".encode()
        return hmac.new(self.secret.encode(), message, hashlib.sha256).hexdigest()

    # --- answers

    def streams(self, tails: Mapping[str, Tail] | None = None) -> list[LinkAnswer]:
        """Return the streams for an answer, with their tails if given."""
        return [_answer_of(path, link, tails) for path, link in self.links.items()]

    def wake_body(self, tails: Mapping[str, Tail], *, callback_url: str, callback_token: str) -> bytes:
        """Return the body of a delivery."""
        return msgspec.json.encode(
            {
                "subscription_id": self.id,
                "wake_id": self.wake_id,
                "generation": self.generation,
                "streams": self.streams(tails),
                "callback_url": callback_url,
                "callback_token": callback_token,
            }
        )

    def wake_event(self, tails: Mapping[str, Tail], *, now: float) -> bytes:
        """Return the message of a wake in the wake stream."""
        return msgspec.json.encode(
            {
                "type": "wake",
                "subscription_id": self.id,
                "stream": next(iter(self.pending(tails)), ""),
                "generation": self.generation,
                "ts": int(now * 1000),
            }
        )

    def claim_answer(self, tails: Mapping[str, Tail], token: str) -> ClaimAnswer:
        """Return the answer to a successful claim."""
        return ClaimAnswer(
            self.wake_id, self.generation, token, self.streams(tails), self.config.lease_ttl_ms
        )

    def answer(self, signing: Mapping[str, str]) -> SubscriptionAnswer:
        """Return the description for its owner; `signing` describes the key of a webhook."""
        config = self.config
        made_at = datetime.fromtimestamp(self.created_at, UTC).isoformat(timespec="milliseconds")
        return SubscriptionAnswer(
            self.id,
            self.id,
            config.type,
            self.streams(),
            config.lease_ttl_ms,
            made_at.replace("+00:00", "Z"),
            "failed" if self.failures else "active",
            config.pattern or None,
            WebhookDescription(config.webhook.url, dict(signing)) if config.webhook is not None else None,
            config.wake_stream or None,
            config.description or None,
        )


class LinkAnswer(Struct, frozen=True):
    """One stream of a subscription, in an answer or a wake."""

    path: str
    link_type: Literal["explicit", "glob"]
    acked_offset: str
    tail_offset: str | UnsetType = UNSET
    has_pending: bool | UnsetType = UNSET


class WebhookDescription(Struct, frozen=True):
    """A webhook, and the key that signs its requests."""

    url: str
    signing: dict[str, str]


class SubscriptionAnswer(Struct, frozen=True):
    """Description of a subscription for its owner."""

    id: str
    subscription_id: str
    type: Literal["webhook", "pull-wake"]
    streams: list[LinkAnswer]
    lease_ttl_ms: int
    created_at: str
    status: Literal["active", "failed"]
    pattern: str | None = None
    webhook: WebhookDescription | None = None
    wake_stream: str | None = None
    description: str | None = None


class ClaimAnswer(Struct, frozen=True):
    """A claimed wake, with the token for its acks."""

    wake_id: str
    generation: int
    token: str
    streams: list[LinkAnswer]
    lease_ttl_ms: int


class ReportAnswer(Struct, frozen=True):
    """Answer to an accepted report; `next_wake` is true if more work is pending."""

    ok: bool
    next_wake: bool


class AckError(ValueError):
    """An offset that cannot be acked."""


class StreamsBody(Struct, frozen=True):
    """The body of a request to link further streams."""

    streams: Annotated[tuple[_Path, ...], Meta(max_length=LINKS_MAX)]


class ClaimBody(Struct, frozen=True):
    """The body of a claim, with the name of the worker, which other workers can see."""

    worker: Annotated[str, Meta(min_length=1, max_length=256)]


class WebhookAnswer(Struct, frozen=True):
    """The relevant part of an answer to a delivery."""

    done: bool | UnsetType = UNSET


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(StreamSubscription).decode


def encode_subscription(subscription: StreamSubscription) -> bytes:
    """Encode a subscription for the store."""
    return _encode(subscription)


def decode_subscription(body: bytes) -> StreamSubscription:
    """Decode a stored subscription.

    Raises:
        msgspec.DecodeError: The value is damaged, or of a newer version.
    """
    found: StreamSubscription = _decode(body)
    return found


def glob_matches(pattern: str, path: str) -> bool:
    """Return whether a pattern matches a path: `*` is a segment or a part of one, `**` any number of segments.

    The time is bounded by the product of both lengths.
    """
    return _segments_match(pattern.strip("/").split("/"), path.split("/"))


def _segments_match(pattern: Collection[str], path: Collection[str]) -> bool:
    """Match from left to right; `reached` has the numbers of path segments that are matched so far."""
    names = [*path]
    reached = {0}
    for each in pattern:
        if each == "**":
            reached = set(range(min(reached), len(names) + 1))
        else:
            reached = {at + 1 for at in reached if at < len(names) and _segment_matches(each, names[at])}
        if not reached:
            return False
    return len(names) in reached


def _segment_matches(pattern: str, name: str) -> bool:
    first, *rest = pattern.split("*")
    if not rest:
        return pattern == name
    *middle, last = rest
    if not name.startswith(first) or not name.endswith(last) or len(name) < len(first) + len(last):
        return False
    at, end = len(first), len(name) - len(last)
    for each in middle:
        at = name.find(each, at, end)
        if at < 0:
            return False
        at += len(each)
    return True


def _answer_of(path: str, link: SubscriptionLink, tails: Mapping[str, Tail] | None) -> LinkAnswer:
    found = LinkAnswer(path, "explicit" if link.is_explicit else "glob", offset_at(link.acked))
    if tails is None:
        return found
    units = tails[path].units if path in tails else 0
    return replace(found, tail_offset=offset_at(units), has_pending=units > link.acked)
