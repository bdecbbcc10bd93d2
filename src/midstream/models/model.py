"""The model protocol: a model answers stateless requests.

A model has one method. It streams typed events and raises `ModelError`s; it is stateless. A cancelled turn closes the
iterator, which stops the work upstream at once. Only a `ResumableModel` is different.
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
        """The name for users, such as `openai:gpt-5` or `local:smollm2`."""

    def stream(self, request: ModelRequest) -> AsyncIterator[ModelEvent]:
        """Answer `request` with events, the last of which is `Finished`.

        It is an async generator: it may be closed at any `yield` and must then stop the work at once.

        Raises:
            ModelUnavailableError, ModelStalledError, ModelEmptyError: A retry may succeed.
            ModelRejectedError, ModelMissingError: A retry cannot succeed.
        """


@runtime_checkable
class ResumableModel(Model, Protocol):
    """A model whose provider continues a response without a connection, and stores it for a while.

    Its stream has one `Resumable` before the first text. From then on closing the iterator does not stop the response.
    A cut response, also of a dead process, is requested again with `ModelRequest.resume`, and sent from its beginning;
    readers get only the new part. `stop` ends a response that is not needed any more.

    `stream` also raises:
    ModelCutError: The connection was lost; the provider may continue the response. ModelForgotError: The provider does
    not have the response of `resume`.
    """

    async def stop(self, token: str) -> None:
        """Stop this response at the provider. The caller limits the time; failures are ignored."""


@runtime_checkable
class StoredModel(Model, Protocol):
    """A model that stores small values in its engine's store, and is closed with the engine."""

    def begin_use(self, store: Store) -> None:
        """Use the open store of an engine."""

    async def end_use(self) -> None:
        """End the use by one engine; the last one closes the model."""


@runtime_checkable
class PassingModel(Model, Protocol):
    """A model whose server has other endpoints of OpenAI's API, such as embeddings."""

    def pass_on(self, path: str, body: bytes) -> AbstractAsyncContextManager[PassedAnswer]:
        """Send a request of a client application unchanged, and stream the answer; leaving the context closes it.

        Args:
            path: The path after the version, such as `/embeddings`.
            body: JSON.

        Raises:
            ModelNotFoundError: The server does not have this path or this model.
            ModelError: Another refusal, silence, or an incomplete answer; also during reading.
        """


@runtime_checkable
class GrantingModel(Model, Protocol):
    """A model that supports settings of a request (`ModelRequest.settings`)."""

    @property
    def grants(self) -> frozenset[str]:
        """Names of the accepted `midstream.session.model_settings.ModelSettings`; and `strict`, if that field of a tool
        is accepted.
        """


def takes_tools_of(model: Model) -> bool:
    """Whether a model can request its caller's tools; an agent may have only its own (`takes_tools`)."""
    return bool(getattr(model, "takes_tools", True))


def grants_of(model: Model) -> frozenset[str]:
    """Return the names of the settings that a model accepts."""
    # Called for each request: `isinstance` with a protocol takes twenty times as long.
    grants: frozenset[str] = getattr(model, "grants", frozenset())
    return grants
