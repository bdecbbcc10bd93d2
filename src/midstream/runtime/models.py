"""The model protocol: what answers a stateless request.

One method. A model streams typed events and raises `ModelError`s; it keeps nothing between requests. Closing the
iterator stops the work upstream at once: a cancelled turn closes it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from midstream.core.replies import (
    CallRequested,
    Finished,
    ModelEvent,
    ModelRequest,
    TextDelta,
    ThinkingDelta,
)

__all__ = ["CallRequested", "Finished", "Model", "ModelEvent", "ModelRequest", "TextDelta", "ThinkingDelta"]


class Model(Protocol):
    """Anything that can answer."""

    @property
    def name(self) -> str:
        """What to show people, such as `openai:gpt-5` or `local:smollm2`."""

    def stream(self, request: ModelRequest) -> AsyncIterator[ModelEvent]:
        """Answer `request` with events, the last of which is `Finished`.

        It is an async generator: it may be closed at any `yield` and must then stop the work at once.

        Raises:
            ModelUnavailableError, ModelStalledError, ModelEmptyError: Asking again may help.
            ModelRejectedError, ModelMissingError: It will not.
        """
