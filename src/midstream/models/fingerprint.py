"""Fingerprints: by what a conversation is known again, and what a host has sent of it.

Taken in: the system prompt, the tools, the MCP servers, the upstream's identity, and every user message with its
attachments by content. Not included: output of models and tools, because client applications rewrite it; of results
only the ids of their calls count, which are ours.

Users are a chain: link i is a hash over link i - 1 and message i. Equal links mean equal beginnings, so the longest
common beginning of two conversations is found by halving.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from midstream.history.messages import Entry, File, History, Step, Text, ToolSpec, UserMessage
from midstream.tools.forwarded_servers import ForwardedMcpServer

LINK_BYTES = 16
"""Bytes of a link and of a digest: two different conversations meet in one after about 2^64 tries."""

_START = b"midstream-users\0"
"""What the first link follows: as long as a link."""
_BLANKS = b" \t\r\n"
_URL_SAFE = bytes.maketrans(b"-_", b"+/")


class Fingerprint(Struct, frozen=True, array_like=True):
    """A conversation, as far as it matters for who can go on from it. Each field is compared byte for byte.

    Args:
        system, tools, servers, identity: Digests of `LINK_BYTES`. Nothing and empty have the same one.
        users: The links of the user messages, `LINK_BYTES` each.
    """

    system: bytes
    tools: bytes
    servers: bytes
    identity: bytes
    users: bytes

    @property
    def count(self) -> int:
        """How many user messages there are."""
        return len(self.users) // LINK_BYTES


class Outline(Struct, frozen=True):
    """A host's conversation, as far as it matters for who can continue it.

    The *tail* are the user messages at the end with nothing between them; before it stand responses, back to the user
    message they answer.

    Args:
        tail_users: How many user messages the tail has; 0 where a response or a result is the end.
        tail_results: The call ids of the results that are the end, or stand directly before the tail.
        answered: The call ids of all results between the last user message before the tail and the tail, in order.
    """

    fingerprint: Fingerprint
    tail_users: int = 0
    tail_results: tuple[str, ...] = ()
    answered: tuple[str, ...] = ()


class ConversationDigest(Struct, frozen=True):
    """Messages of a conversation, as far as they matter for who can continue it, without their words.

    Args:
        users: See `Fingerprint`.
        tail_users, tail_results, answered: See `Outline`.
    """

    users: bytes = b""
    tail_users: int = 0
    tail_results: tuple[str, ...] = ()
    answered: tuple[str, ...] = ()

    def then(self, entries: Sequence[Entry]) -> ConversationDigest:
        """Return what matters once these came behind; only they are looked at."""
        if not entries:
            return self
        at = len(entries)
        while at and isinstance(entries[at - 1], UserMessage):
            at -= 1
        users = _link_messages(self.users, entries)
        tail_users = len(entries) - at
        if not at:  # nothing but users: the tail is longer, and what stands before it is the same
            return ConversationDigest(users, self.tail_users + tail_users, self.tail_results, self.answered)
        steps: list[tuple[str, ...]] = []  # last first
        while at and isinstance(entry := entries[at - 1], Step):
            steps.append(tuple(result.call_id for result in entry.results))
            at -= 1
        before = self.answered if not (at or self.tail_users) else ()
        answered = tuple(call for calls in reversed(steps) for call in calls)
        return ConversationDigest(users, tail_users, steps[0], before + answered)

    def outline(
        self,
        instructions: str,
        tools: Sequence[ToolSpec],
        servers: Sequence[ForwardedMcpServer],
        identity: Mapping[str, str],
    ) -> Outline:
        """Return what matters of a request with these messages; see `outline`."""
        fingerprint = Fingerprint(
            system_digest(instructions),
            tools_digest(tools),
            servers_digest(servers),
            identity_digest(identity),
            self.users,
        )
        return Outline(fingerprint, self.tail_users, self.tail_results, self.answered)


class Chain(Struct, frozen=True):
    """Facts that matter of one conversation's messages, with these: a longer one costs only its new messages.

    What is known is recognised by the identity of its entries, or else by their equality; a history that does not
    begin with it is read whole. Has the entries that were digested.
    """

    entries: tuple[Entry, ...] = ()
    heard: ConversationDigest = ConversationDigest()

    def then(self, history: History) -> Chain:
        """Return that of `history`."""
        entries, count = history.entries, len(self.entries)
        # Comparing tuples looks at identities first: equal objects cost a pointer each.
        if entries is not self.entries and entries[:count] != self.entries:
            return Chain(entries, ConversationDigest().then(entries))
        return Chain(entries, self.heard.then(entries[count:]))


def outline(
    instructions: str,
    tools: Sequence[ToolSpec],
    servers: Sequence[ForwardedMcpServer],
    identity: Mapping[str, str],
    history: History,
) -> Outline:
    """Return what matters of a request.

    Args:
        tools: The tools that the upstream receives; () for one that takes none, so that they never force a fresh
            conversation.
        servers: Likewise.
        identity: The upstream's own.
    """
    return ConversationDigest().then(history.entries).outline(instructions, tools, servers, identity)


def common_users(a: bytes, b: bytes) -> int:
    """Return how many user messages two chains of links have in common at their beginning, in O(log n) steps."""
    low, high = 0, min(len(a), len(b)) // LINK_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        end = middle * LINK_BYTES
        if a[end - LINK_BYTES : end] == b[end - LINK_BYTES : end]:
            low = middle
        else:
            high = middle - 1
    return low


def system_digest(instructions: str) -> bytes:
    """Return the digest of a system prompt. Every character counts."""
    return _digest(_bytes(instructions))


def tools_digest(tools: Iterable[ToolSpec]) -> bytes:
    """Return the digest of a set of tools: neither their order nor the order of keys at any depth counts."""
    return _set_digest((tool.name, tool) for tool in tools)


def servers_digest(servers: Iterable[ForwardedMcpServer]) -> bytes:
    """Return the digest of a set of servers: neither their order nor the order of keys at any depth counts."""
    return _set_digest((server.name, server) for server in servers)


def identity_digest(identity: Mapping[str, str]) -> bytes:
    """Return the digest of an identity. An empty value is the same as none."""
    told = {key: value for key, value in identity.items() if value}
    return _digest(canonical(told) if told else b"")


def canonical(value: Any) -> bytes:  # noqa: ANN401 - any JSON value
    """Return JSON with the keys sorted at every depth and without blanks."""
    try:
        return msgspec.json.encode(value, order="sorted")
    except UnicodeEncodeError:  # half a character (a lone surrogate), which msgspec does not write
        return json.dumps(msgspec.to_builtins(value), sort_keys=True, separators=(",", ":")).encode()


def _set_digest(members: Iterable[tuple[str, Struct]]) -> bytes:
    written = sorted((name, canonical(member)) for name, member in members)
    return _digest(_frame(body for _, body in written))


def _link_messages(before: bytes, entries: Iterable[Entry]) -> bytes:
    """Return these links with one more for every user message among `entries`."""
    blake2b = hashlib.blake2b
    links = bytearray(before)
    last = before[-LINK_BYTES:] or _START
    for entry in entries:
        if not isinstance(entry, UserMessage):
            continue
        parts = entry.parts
        if len(parts) == 1 and isinstance(parts[0], Text):  # nearly all
            body = b"t" + parts[0].text.encode("utf-8", "surrogatepass")
        else:
            body = _body(entry)
        last = blake2b(last + body, digest_size=LINK_BYTES).digest()
        links += last
    return bytes(links)


def _body(message: UserMessage) -> bytes:
    """Return the bytes of a message: its words, however they were cut into parts, and its files by content."""
    tokens: list[bytes] = []
    words: list[str] = []
    for part in message.parts:
        if isinstance(part, Text):
            words.append(part.text)
            continue
        if text := "".join(words):
            tokens.append(b"t" + _bytes(text))
        words.clear()
        tokens.append(b"f" + file_digest(part))
    text = "".join(words)
    if not tokens:
        return b"t" + _bytes(text)
    if text:
        tokens.append(b"t" + _bytes(text))
    return b"m" + _frame(tokens)


def file_digest(file: File) -> bytes:
    """Return the digest of an attachment: its media type and its content.

    Base64 is compared by its content: blanks, padding and the URL-safe alphabet make no difference, and a `data:` URL
    is the same as its data. Another URL is compared as it is, since it is not fetched here. The name counts only where
    there is nothing else.
    """
    media_type, kind, content = file.media_type, b"data", file.data
    if content is None and file.url is not None:
        head, comma, inline = file.url.partition(",")
        if comma and head[:5].lower() == "data:" and head[-7:].lower() == ";base64":
            media_type, content = head[5:-7] or media_type, inline
        else:
            kind, content = b"url", file.url
    if content is None:
        kind, content = b"name", file.name or ""
    body = _bytes(content)
    if kind == b"data":
        body = body.translate(_URL_SAFE, _BLANKS).rstrip(b"=")
    return _digest(_frame((_bytes(media_type.strip().lower()), kind, body)))


def _frame(bodies: Iterable[bytes]) -> bytes:
    """Join bodies so that no two lists of them give the same bytes."""
    return b"".join(b"%d:%b" % (len(body), body) for body in bodies)


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=LINK_BYTES).digest()
