"""The upstream protocol: a stateful agent keeps its conversation, and gets only the new messages.

An `Upstream` opens agents. An `UpstreamAgent` is one conversation in it and outlives every process: it can be opened
again by its id, for as long as the upstream keeps it. `midstream.agents.pool.Pooled` turns an upstream into a model
that never continues the wrong conversation. An upstream itself makes no decisions and no retries.

Order of the events of one `send`: `MessageTaken` first, as soon as the upstream has named the conversation; then its
output; `Marked` wherever it names a point that a later conversation can start from; `ResponseRestarted` when it begins
a response again itself; `Finished` last. `MessageDropped` precedes an error after which the agent's memory is as
before. Closing the iterator stops the run upstream.

An error before `MessageTaken` that is a `ModelUnavailableError` (but no `UpstreamFailedError`) means that nothing was
taken, or that the same key takes it only once: the message is then sent again. An upstream that cannot decide this,
such as after the death of a process, raises `UpstreamFailedError`: see `doubtful`. After `MessageTaken` a
`ModelUnavailableError` comes from the provider behind the agent, and the agent is kept. A `ModelAccessError` or
`ModelRejectedError` before `MessageTaken` means that nothing was taken; an upstream that cannot decide that yields
`MessageTaken` first.

Any method may raise these errors of `midstream.errors`, which are classified by their remedy:

- `UpstreamGoneError`: The conversation does not exist. Only after this error, a fresh agent is always safe.
- `UpstreamBusyError`: The agent is in another run.
- `UpstreamFailedError`: The run failed for an unknown reason.
- `ModelUnavailableError`: Network, rate limit, overload; with `retry_after_s` if the upstream sent it.
- `ModelStalledError`: Silence past the upstream's own limit.
- `ModelAccessError`: The key, the account, the model's name.
- `ModelRejectedError`, `ContextOverflowError`, `ModelFilteredError`: The request will never be accepted.
- `ModelMissingError`: The upstream's software is not installed, or does not start.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Protocol, runtime_checkable

from msgspec import Struct

from midstream.agents.upstream_abilities import Abilities
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
    """Settings of a new or resumed conversation.

    Args:
        instructions: The client application's system prompt, or "".
        tools: The client application's tools; only for upstreams that accept tools.
        servers: The MCP servers for the agent, in the order of their names.
        is_private: Whether the upstream's own store must not receive the conversation; see
            `Abilities.stores_transcripts`.
    """

    instructions: str = ""
    tools: tuple[ToolSpec, ...] = ()
    servers: tuple[ForwardedMcpServer, ...] = ()
    is_private: bool = False


class UpstreamMessage(Struct, frozen=True):
    """A message to an agent.

    Args:
        results: Results of the calls in its last response, in the calls' order; then `message` may have no parts.
        before: For a fresh conversation of an upstream that accepts history: all entries before `message`.
        settings: Settings for the answer; those that `Abilities.grants` lacks are ignored.
        person: The receiver of permission requests while the agent answers; None if there is none.
    """

    message: UserMessage
    results: tuple[ToolResult, ...] = ()
    before: History | None = None
    settings: ModelSettings = DEFAULT_SETTINGS
    person: Person | None = None


class MessageTaken(Struct, frozen=True):
    """The upstream has taken the message.

    Args:
        agent: The id for resuming the conversation from now on. Some upstreams have a new id with each answer.
        resumed: The id of the continued conversation; "" for a new one.
        is_provisional: Whether it may remove the message if the answer is not complete.
    """

    agent: str
    resumed: str = ""
    is_provisional: bool = False


class MessageDropped(Struct, frozen=True):
    """The upstream has removed the message from the conversation again: the agent's memory is as before."""


class Marked(Struct, frozen=True):
    """A point to fork from: the conversation with all messages so far."""

    mark: str


class ResponseRestarted(Struct, frozen=True):
    """The upstream lost its provider during a response, and begins that response again itself.

    The text and thoughts since the last tool, or since the message, are no part of the answer.
    """


UpstreamEvent = MessageTaken | MessageDropped | Marked | ResponseRestarted | ModelEvent
"""Everything that `UpstreamAgent.send` may yield."""


class UpstreamAgent(Protocol):
    """One conversation, open in this process. One `send` at a time."""

    def send(
        self, outgoing: UpstreamMessage, *, key: str, is_forced: bool = False
    ) -> AsyncIterator[UpstreamEvent]:
        """Send a message and yield the answer's events; see the module's docstring for their order and the errors.

        It is an async generator: closing it stops the run.

        Args:
            key: Idempotency key: the same for every try to send the same message to the same agent.
            is_forced: End another run of this agent first, such as one that survived a crash.
        """

    async def aclose(self) -> None:
        """Close processes and connections. The upstream keeps the conversation. A second call has no effect."""


class Upstream(Protocol):
    """A kind of stateful agent, with its account, model and folder."""

    @property
    def name(self) -> str:
        """The name for users, such as `claude:opus`."""

    @property
    def identity(self) -> Mapping[str, str]:
        """Properties that distinguish conversations with equal texts: model, folder, permissions, account.

        Never a key or a secret itself. Compared as a whole; part of the fingerprint.
        """

    @property
    def abilities(self) -> Abilities:
        """Abilities of the upstream. Constant."""

    async def open(self, setup: Setup, *, resume: str = "") -> UpstreamAgent:
        """Open a fresh conversation, or the one that `resume` names. No message is sent yet.

        An upstream may notice only in `send` that the conversation does not exist.
        """

    async def verify(self) -> bool:
        """Check whether the credential is accepted, outside of any conversation."""

    async def delete(self, agent: str) -> None:
        """Delete a conversation upstream, if that is possible. Failures are ignored."""

    async def aclose(self) -> None:
        """Close all agents and connections. A second call has no effect."""


@runtime_checkable
class ForkingUpstream(Upstream, Protocol):
    """An upstream that can begin a conversation from a point of another one, which stays as it is."""

    async def fork(self, setup: Setup, *, agent: str, mark: str) -> UpstreamAgent:
        """Open a fresh conversation that begins with another one up to `mark`.

        Its first `MessageTaken` names the fork, and in `resumed` the original agent.
        """


def doubtful(error: ModelError) -> ModelError:
    """Return the error to raise before `MessageTaken` if the message may have been taken.

    It is the error itself, unless that would cause a retry with the same agent. Raise it from its cause.
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
    """Whether an error of an HTTP package proves that no connection was established."""
    return type(error).__name__ in _NEVER_SENT
