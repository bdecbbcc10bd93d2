"""The upstream protocol: a stateful agent that remembers its conversation, so that it is sent only what is new.

An `Upstream` opens agents; an `UpstreamAgent` is one conversation in it and outlives every process: it can be opened
again by its id, for as long as the upstream keeps it. `midstream.agents.pool.Pooled` makes a model of it, which
never continues the wrong conversation; an upstream itself decides nothing and repeats nothing.

Order of the events of one `send`: `MessageTaken` first, as soon as the upstream has named the conversation; then its
output; `Marked` wherever it names a point that a later conversation can start from; `ResponseRestarted` where it begins
a response again by itself; `Finished` last. `MessageDropped` stands before an error after which the agent has no more
than before. Closing the iterator stops the run upstream.

An error before `MessageTaken` that is a `ModelUnavailableError` (but no `UpstreamFailedError`) means that nothing
was taken, or that the same key takes it only once: the message is then sent again. Where an upstream cannot decide
    that, as when a process died with the message, it raises `UpstreamFailedError`: see `doubtful`. After
    `MessageTaken` a `ModelUnavailableError` is of the provider behind the agent, and the agent is kept. A
    `ModelAccessError` or `ModelRejectedError` before `MessageTaken` means that nothing was taken; an upstream that
    cannot decide that yields `MessageTaken` first.

Errors are those of `midstream.errors`, by what helps, from any method:
    UpstreamGoneError: This agent is not remembered. Only this may be answered by a fresh one without a doubt.
    UpstreamBusyError: The agent is in another run.
    UpstreamFailedError: The run failed for an unknown reason.
    ModelUnavailableError: Network, rate limit, overload; `retry_after_s` where the upstream gave it.
    ModelStalledError: Silence past the upstream's own limit.
    ModelAccessError: The key, the account, the model's name.
    ModelRejectedError, ContextOverflowError, ModelFilteredError: What was sent will never be accepted.
    ModelMissingError: The upstream's software is not installed, or does not start.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Protocol, runtime_checkable

from msgspec import Struct

from midstream.agents.abilities import Abilities
from midstream.errors import ModelError, ModelUnavailableError, UpstreamBusyError, UpstreamFailedError
from midstream.history.messages import History, ToolResult, ToolSpec, UserMessage
from midstream.models.responses import ModelEvent
from midstream.session.model_settings import DEFAULT_SETTINGS, ModelSettings
from midstream.session.permissions import Person
from midstream.tools.forwarded_servers import ForwardedMcpServer

__all__ = [
    "Abilities",
    "ForkingUpstream",
    "Marked",
    "MessageDropped",
    "MessageTaken",
    "ResponseRestarted",
    "Setup",
    "Upstream",
    "UpstreamAgent",
    "UpstreamEvent",
    "UpstreamMessage",
    "doubtful",
    "is_never_sent",
]

_NEVER_SENT = {"ConnectError", "ConnectTimeout", "PoolTimeout"}


class Setup(Struct, frozen=True):
    """Settings that a conversation is opened with.

    Args:
        instructions: The client application's system prompt, or "".
        tools: What the client application will run for the agent; only for upstreams that take tools.
        servers: The MCP servers the agent is to have, in the order of their names.
    """

    instructions: str = ""
    tools: tuple[ToolSpec, ...] = ()
    servers: tuple[ForwardedMcpServer, ...] = ()


class UpstreamMessage(Struct, frozen=True):
    """Message to an agent.

    Args:
        results: Answers to the calls its last response asked for, in the calls' order; then `message` may have no
        parts. before: For a fresh conversation of an upstream that takes history: all entries before `message`.
        settings: How the answer is to be made; those that `Abilities.grants` does not name are ignored.
        person: The receiver of permission requests while the agent answers; None where there is none.
    """

    message: UserMessage
    results: tuple[ToolResult, ...] = ()
    before: History | None = None
    settings: ModelSettings = DEFAULT_SETTINGS
    person: Person | None = None


class MessageTaken(Struct, frozen=True):
    """The upstream has taken what was sent.

    Args:
        agent: What to resume the conversation by from now on. Some upstreams give a new id with each answer.
        resumed: The id of the conversation that it continued; "" where it began a new one.
        is_provisional: It may remove the message again if the answer does not come to its end.
    """

    agent: str
    resumed: str = ""
    is_provisional: bool = False


class MessageDropped(Struct, frozen=True):
    """The upstream has removed the message from the conversation again: it has what it had before."""


class Marked(Struct, frozen=True):
    """A point to fork from: the conversation with all messages so far."""

    mark: str


class ResponseRestarted(Struct, frozen=True):
    """The upstream lost its provider in the middle of a response, and begins that response again by itself.

    The text and thoughts since the last tool, or since the message, are no part of the answer.
    """


UpstreamEvent = MessageTaken | MessageDropped | Marked | ResponseRestarted | ModelEvent


class UpstreamAgent(Protocol):
    """One conversation, open in this process. One `send` at a time."""

    def send(
        self, said: UpstreamMessage, *, key: str, is_forced: bool = False
    ) -> AsyncIterator[UpstreamEvent]:
        """Send a message and yield the answer's events; see the module's text for their order and the errors.

        It is an async generator: closing it stops the run.

        Args:
            key: Idempotency key: the same for every try to send the same message to the same agent.
            is_forced: End another run of this agent first, such as one that a crash left behind.
        """

    async def aclose(self) -> None:
        """Let go of processes and connections. The upstream goes on remembering. Calling it twice is harmless."""


class Upstream(Protocol):
    """A kind of stateful agent, with the account, the model and the folder it works in."""

    @property
    def name(self) -> str:
        """Name shown to people, such as `claude:opus`."""

    @property
    def identity(self) -> Mapping[str, str]:
        """Properties that distinguish conversations of the same words: model, folder, permissions, account.

        Never a key or a secret itself. Compared whole; part of the fingerprint.
        """

    @property
    def abilities(self) -> Abilities:
        """Abilities of the upstream. Constant."""

    async def open(self, setup: Setup, *, resume: str = "") -> UpstreamAgent:
        """Open a fresh conversation, or the one that `resume` names. No message is sent yet.

        An upstream may find out only in `send` that it remembers nothing.
        """

    async def verify(self) -> bool:
        """Ask whether the credential is accepted, apart from any conversation."""

    async def delete(self, agent: str) -> None:
        """Delete a conversation upstream, where that can be done. Failures are ignored."""

    async def aclose(self) -> None:
        """Close everything that is open. Calling it twice is harmless."""


@runtime_checkable
class ForkingUpstream(Upstream, Protocol):
    """An upstream that can begin a conversation from a point of another one, which stays as it is."""

    async def fork(self, setup: Setup, *, agent: str, mark: str) -> UpstreamAgent:
        """Open a fresh conversation that remembers another one up to `mark`.

        Its first `MessageTaken` names the fork, and in `resumed` the agent it came from.
        """


def doubtful(error: ModelError) -> ModelError:
    """Return what to raise before `MessageTaken` for an error after which it is unknown whether the message was taken.

    It is the error itself, unless that would send the message again to the same agent. Raise it from its cause.
    """
    if not isinstance(error, ModelUnavailableError) or isinstance(
        error, UpstreamBusyError | UpstreamFailedError
    ):
        return error
    failed = UpstreamFailedError(error.message, retry_after_s=error.retry_after_s)
    for note in getattr(error, "__notes__", ()):
        failed.add_note(note)
    return failed


def is_never_sent(error: BaseException | None) -> bool:
    """Return whether an error of an HTTP package proves that there never was a connection."""
    return type(error).__name__ in _NEVER_SENT
