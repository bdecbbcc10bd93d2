"""`midstream.runtime.upstreams` as a test suite: an upstream that passes it may be pooled.

Write a scripted other end for it (a program, an HTTP server: whatever the real software talks to), give it the controls
of `Peer`, subclass `UpstreamContract` in a test file and give it a fixture `peer`:

    class TestMyUpstream(UpstreamContract):
        @pytest.fixture
        def peer(self, tmp_path: Path) -> Peer:
            return MyPeer(tmp_path)

It needs pytest and pytest-asyncio. What a kind of upstream cannot have at all is named in `Peer.lacks`; its tests are
skipped. What the suite cannot see from outside, an upstream's own tests must show: how each of the real software's
errors is understood, how servers and attachments are handed on, what becomes of instructions.
"""
# ruff: noqa: D102, PLR2004 - these are tests: a name is a promise, numbers speak for themselves

from __future__ import annotations

from enum import StrEnum
from typing import Protocol

from msgspec import Struct

from midstream.core.messages import Usage
from midstream.runtime.upstreams import Upstream

SEPARATOR = " | "
"""Between the messages in an answer of a peer."""
USAGE = Usage(input_tokens=100, output_tokens=7, cached_tokens=60)
"""What each answer of a peer costs; the cached ones are part of the input."""


class Trait(StrEnum):
    """What some kinds of upstream cannot have."""

    BUSY = "busy"
    """A conversation can be in another run."""
    ECHO = "echo"
    """It says which conversation it went on from."""
    CALLS = "calls"
    """It runs tools of its own."""
    USAGE = "usage"
    """It counts tokens."""
    KEYS = "keys"
    """It is told the idempotency key."""
    VERIFY = "verify"
    """Its credential can be refused."""


class Told(Struct, frozen=True):
    """A user's message that reached the peer.

    Args:
        agent: The conversation it was said in, as `Opened.agent` names it.
        text: Its words, all of them.
        key: The idempotency key it came with, in whatever form.
    """

    agent: str
    text: str
    key: str = ""


class Peer(Protocol):
    """The scripted other end, and its controls.

    It remembers conversations for as long as the test lasts, whoever connects. Unless it was told otherwise, it answers
    each message with all the messages that the conversation holds by then, joined by `SEPARATOR`, in more than one
    piece, and counts `USAGE`. A control that speaks of the next message, or the next resumption, holds for that one only.
    """

    @property
    def lacks(self) -> frozenset[Trait]:
        """What this kind of upstream cannot have."""

    def upstream(self) -> Upstream:
        """Return another upstream that talks to this peer: what another process would make."""

    def told(self) -> list[Told]:
        """Return all messages that arrived, in their order."""

    def runs(self) -> int:
        """Return how many answers are under way, as far as the peer knows."""

    def expire(self, agent: str) -> None:
        """Forget a conversation."""

    def be_busy(self, agent: str) -> None:
        """Refuse messages to a conversation, because of another run, until somebody ends that run by force."""

    def hang(self) -> None:
        """Take the next message, say a first word if that is how a conversation is named, and then nothing more.

        It still notices when it is stopped, or when nobody is connected any more.
        """

    def echo_wrong_id(self) -> None:
        """Open another, empty conversation at the next resumption, as if nothing were wrong."""

    def die_mid_stream(self) -> None:
        """Break off the next answer after its first words: the process dies, the connection drops."""

    def refuse_key(self) -> None:
        """Refuse the credential from now on."""

    def run_tool(self, name: str, arguments: str, content: str) -> None:
        """Before the next answer, run a tool with these arguments (JSON), whose result is `content`."""
