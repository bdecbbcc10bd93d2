"""Fingerprints of conversations, and their comparison with a request.

Included are the system prompt, the tools, the MCP servers, the upstream's identity, and every user message with the
content of its attachments. Output of models and tools is not included, because client applications rewrite it. Of
results only the call ids count, which midstream makes.

Users are a chain: link i is a hash over link i - 1 and message i. Equal links mean equal beginnings, so a binary search
finds the longest common beginning of two conversations.
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
"""Bytes of a link and of a digest: a collision is expected after about 2^64 tries."""

_START = b"midstream-users\0"
"""The predecessor of the first link, of the same length."""
_BLANKS = b" \t\r\n"
_URL_SAFE = bytes.maketrans(b"-_", b"+/")


class Fingerprint(Struct, frozen=True, array_like=True):
    """The properties of a conversation that decide who can continue it. Each field is compared byte for byte.

    Args:
        system, tools, servers, identity: Digests of `LINK_BYTES`. A missing and an empty value have the same digest.
        users: The links of the user messages, `LINK_BYTES` each.
    """

    system: bytes
    tools: bytes
    servers: bytes
    identity: bytes
    users: bytes

    @property
    def count(self) -> int:
        """Number of user messages."""
        return len(self.users) // LINK_BYTES


class Outline(Struct, frozen=True):
    """The properties of a client application's conversation that decide who can continue it.

    The *tail* are the successive user messages at the end. Before it are responses, back to the answered user message.

    Args:
        tail_users: Number of user messages in the tail; 0 if a response or a result is the end.
        tail_results: The call ids of the results at the end, or directly before the tail.
        answered: The call ids of all results between the last user message before the tail and the tail, in order.
    """

    fingerprint: Fingerprint
    tail_users: int = 0
    tail_results: tuple[str, ...] = ()
    answered: tuple[str, ...] = ()


class ConversationDigest(Struct, frozen=True):
    """The properties of a conversation's messages that decide who can continue it, without content.

    Args:
        users: See `Fingerprint`.
        tail_users, tail_results, answered: See `Outline`.
    """

    users: bytes = b""
    tail_users: int = 0
    tail_results: tuple[str, ...] = ()
    answered: tuple[str, ...] = ()

    def then(self, entries: Sequence[Entry]) -> ConversationDigest:
        """Return the digest extended by these entries; only they are read."""
        if not entries:
            return self
        at = len(entries)
        while at and isinstance(entries[at - 1], UserMessage):
            at -= 1
        users = _link_messages(self.users, entries)
        tail_users = len(entries) - at
        if not at:  # only users: the tail is longer, and the content before it is the same
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
        """Return the outline of a request with these messages; see `outline`."""
        fingerprint = Fingerprint(
            system_digest(instructions),
            tools_digest(tools),
            servers_digest(servers),
            identity_digest(identity),
            self.users,
        )
        return Outline(fingerprint, self.tail_users, self.tail_results, self.answered)


class Chain(Struct, frozen=True):
    """A digested history and its digest, which a longer history extends at the cost of its new messages.

    Known entries are recognized by identity, or else by equality. A history with another beginning is read as a whole.
    """

    entries: tuple[Entry, ...] = ()
    digest: ConversationDigest = ConversationDigest()

    def then(self, history: History) -> Chain:
        """Return the chain of `history`."""
        entries, count = history.entries, len(self.entries)
        # Comparing tuples compares identities first: equal objects cost a pointer each.
        if entries is not self.entries and entries[:count] != self.entries:
            return Chain(entries, ConversationDigest().then(entries))
        return Chain(entries, self.digest.then(entries[count:]))


def outline(
    instructions: str,
    tools: Sequence[ToolSpec],
    servers: Sequence[ForwardedMcpServer],
    identity: Mapping[str, str],
    history: History,
) -> Outline:
    """Return the outline of a request.

    Args:
        tools: The tools for the upstream; () for one that accepts none, so that they never force a fresh conversation.
        servers: Likewise.
        identity: The upstream's identity.
    """
    return ConversationDigest().then(history.entries).outline(instructions, tools, servers, identity)


def common_users(a: bytes, b: bytes) -> int:
    """Return the number of common user messages at the beginning of two chains of links, in O(log n) steps."""
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
    """Return the digest of a set of tools. The orders of tools and of keys do not count."""
    return _set_digest((tool.name, tool) for tool in tools)


def servers_digest(servers: Iterable[ForwardedMcpServer]) -> bytes:
    """Return the digest of a set of servers. The orders of servers and of keys do not count."""
    return _set_digest((server.name, server) for server in servers)


def identity_digest(identity: Mapping[str, str]) -> bytes:
    """Return the digest of an identity. An empty value counts as missing."""
    fields = {key: value for key, value in identity.items() if value}
    return _digest(canonical(fields) if fields else b"")


def canonical(value: Any) -> bytes:  # noqa: ANN401 - any JSON value
    """Return JSON with sorted keys at every depth, without white space."""
    try:
        return msgspec.json.encode(value, order="sorted")
    except UnicodeEncodeError:  # a lone surrogate, which msgspec cannot encode
        return json.dumps(msgspec.to_builtins(value), sort_keys=True, separators=(",", ":")).encode()


def _set_digest(members: Iterable[tuple[str, Struct]]) -> bytes:
    written = sorted((name, canonical(member)) for name, member in members)
    return _digest(_frame(body for _, body in written))


def _link_messages(before: bytes, entries: Iterable[Entry]) -> bytes:
    """Return these links, extended by one for every user message among `entries`."""
    blake2b = hashlib.blake2b
    links = bytearray(before)
    last = before[-LINK_BYTES:] or _START
    for entry in entries:
        if not isinstance(entry, UserMessage):
            continue
        parts = entry.parts
        if len(parts) == 1 and isinstance(parts[0], Text):  # most messages
            body = b"t" + parts[0].text.encode("utf-8", "surrogatepass")
        else:
            body = _body(entry)
        last = blake2b(last + body, digest_size=LINK_BYTES).digest()
        links += last
    return bytes(links)


def _body(message: UserMessage) -> bytes:
    """Return the bytes of a message: its text, independent of its parts, and the content of its files."""
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
    """Return the digest of an attachment's media type and content.

    Base64 is compared by its content: white space, padding and the URL-safe alphabet make no difference, and a `data:`
    URL equals its data. Other URLs are compared literally. The name counts only if there is neither data nor URL.
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
    """Join bodies unambiguously."""
    return b"".join(b"%d:%b" % (len(body), body) for body in bodies)


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=LINK_BYTES).digest()
