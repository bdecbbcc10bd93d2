"""The model protocol: what answers a stateless request.

One method. A model streams typed events and raises `ModelError`s; it keeps nothing between requests. Closing the
iterator stops the work upstream at once: a cancelled turn closes it. Only a `ResumableModel` is different.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Protocol, runtime_checkable

from midstream.models.responses import (
    Finished,
    KeepAlive,
    ModelEvent,
    ModelRequest,
    PassedAnswer,
    Resumable,
    ReuseReported,
    TextDelta,
    ThinkingDelta,
    ToolCallRequested,
    UpstreamCallEnded,
    UpstreamCallStarted,
    Working,
)
from midstream.store.contract import Store

__all__ = [
    "Finished",
    "GrantingModel",
    "KeepAlive",
    "Model",
    "ModelEvent",
    "ModelRequest",
    "PassedAnswer",
    "PassingModel",
    "Resumable",
    "ResumableModel",
    "ReuseReported",
    "StoredModel",
    "TextDelta",
    "ThinkingDelta",
    "ToolCallRequested",
    "UpstreamCallEnded",
    "UpstreamCallStarted",
    "Working",
    "grants_of",
    "takes_tools_of",
]


class Model(Protocol):
    """Contract of a model: `stream` answers a request with typed events."""

    @property
    def name(self) -> str:
        """Name shown to people, such as `openai:gpt-5` or `local:smollm2`."""

    def stream(self, request: ModelRequest) -> AsyncIterator[ModelEvent]:
        """Answer `request` with events, the last of which is `Finished`.

        It is an async generator: it may be closed at any `yield` and must then stop the work at once.

        Raises:
            ModelUnavailableError, ModelStalledError, ModelEmptyError: Asking again may help.
            ModelRejectedError, ModelMissingError: It will not.
        """


@runtime_checkable
class ResumableModel(Model, Protocol):
    """A model whose provider continues a response without a connection, and keeps it for a while.

    Its stream has one `Resumable` before the first text. From then on closing the iterator stops nothing: a response
    that was cut, here or with the process, is asked for again with `ModelRequest.resume`, and answered from its
    beginning; readers are shown only what they have not seen. A response that is not needed any more is given to
    `stop`.

    `stream` raises beyond what every model does:
        ModelCutError: The connection broke; the provider may go on with the response.
        ModelForgotError: The provider does not have the response that `resume` names.
    """

    async def stop(self, token: str) -> None:
        """Let the provider stop this response. Bounded by the caller; failures are ignored."""


@runtime_checkable
class StoredModel(Model, Protocol):
    """A model that keeps small values in the store of the engine that runs it, and is closed with that engine."""

    def begin_use(self, store: Store) -> None:
        """Keep values in the open store of an engine."""

    async def end_use(self) -> None:
        """End the use by one engine; with the last one the model is closed."""


@runtime_checkable
class PassingModel(Model, Protocol):
    """A model whose server has other addresses of OpenAI's API, such as embeddings."""

    def pass_on(self, path: str, body: bytes) -> AbstractAsyncContextManager[PassedAnswer]:
        """Send a request of a client application as it is, and give the answer as it comes; its end closes it.

        Args:
            path: Behind the version, such as `/embeddings`.
            body: JSON.

        Raises:
            ModelNotFoundError: The server has no such address or no such model.
            ModelError: Another refusal, silence, or an answer that broke off; also while it is read.
        """


@runtime_checkable
class GrantingModel(Model, Protocol):
    """A model that supports settings of a request (`ModelRequest.settings`)."""

    @property
    def grants(self) -> frozenset[str]:
        """The names of those `midstream.session.model_settings.ModelSettings` that it takes; and `strict`, where it
        takes that of a tool.
        """


def takes_tools_of(model: Model) -> bool:
    """Return whether a model can request the tools of its caller; an agent may have its own only (`takes_tools`)."""
    return bool(getattr(model, "takes_tools", True))


def grants_of(model: Model) -> frozenset[str]:
    """Return which wishes for the making of an answer a model takes."""
    # Asked for each request: `isinstance` of a protocol takes twenty times as long.
    grants: frozenset[str] = getattr(model, "grants", frozenset())
    return grants
