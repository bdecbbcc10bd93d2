"""Several models with names: the model that a request names answers it.

The name is in the request, and so in the journal: another process continues a turn with the same model.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from typing import Any, Protocol, cast, runtime_checkable

from msgspec import Struct
from msgspec.structs import replace
from typing_extensions import override

from midstream.errors import ModelNotFoundError, UsageError
from midstream.models.model import Model, ResumableModel, StoredModel, grants_of
from midstream.models.responses import ModelEvent, ModelRequest, Resumable
from midstream.store.contract import Store

_NAME_END = "\n"
"""Separator between the name of a model and its token of a response; no name contains it."""


class Route(Struct, frozen=True):
    """One model of a `RoutedModels`.

    Args:
        model: The model.
        own_name: Its name at the server, for requests that are passed on; "" keeps the name in the request.
    """

    model: Model
    own_name: str = ""


@runtime_checkable
class _Closing(Protocol):
    async def aclose(self) -> None: ...


class RoutedModels(StoredModel, ResumableModel):
    """Select one of several models by the model name of the request.

    Args:
        routes: The models by their names for client applications. The first one answers requests without a name.

    Raises:
        UsageError: There is no route, or a name is empty or has a line break.
    """

    def __init__(self, routes: Mapping[str, Route]) -> None:
        if not routes or any(not name.strip() or _NAME_END in name for name in routes):
            raise UsageError("several models need a name each, of one line")
        self._routes = dict(routes)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the models; the first one answers requests without a name."""
        return tuple(self._routes)

    @property
    def name(self) -> str:
        """The name of the whole, independent of its models, because an open turn continues only under its name."""
        return "models"

    @property
    def default(self) -> str:
        """The name of the model for requests without a name."""
        return next(iter(self._routes))

    @property
    def grants(self) -> frozenset[str]:
        """Names of the settings that at least one model accepts; for one model, see `route`."""
        return frozenset[str]().union(*(grants_of(each.model) for each in self._routes.values()))

    def route(self, name: str) -> Route:
        """Return the route of a name; the first one for "".

        Raises:
            ModelNotFoundError: There is none.
        """
        route = self._routes.get(name or self.default)
        if route is None:
            raise ModelNotFoundError(f"no such model; available: {', '.join(sorted(self.names))}")
        return route

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelEvent]:
        """Answer a request with the model that it names.

        Raises:
            ModelNotFoundError: There is no model with this name.
            ModelError: The model's error.
        """
        name = request.model or self.default
        model = self.route(name).model
        token = request.resume.partition(_NAME_END)[2]
        events = cast("AsyncGenerator[ModelEvent]", model.stream(replace(request, resume=token)))
        async with contextlib.aclosing(events):
            async for event in events:
                if isinstance(event, Resumable):
                    yield replace(event, token=f"{name}{_NAME_END}{event.token}")
                else:
                    yield event

    @override
    async def stop(self, token: str) -> None:
        name, _, own = token.partition(_NAME_END)
        if name in self._routes and isinstance(model := self._routes[name].model, ResumableModel):
            await model.stop(own)

    @override
    def begin_use(self, store: Store) -> None:
        for model in self._models(StoredModel):
            model.begin_use(store)

    @override
    async def end_use(self) -> None:
        async with contextlib.AsyncExitStack() as ending:  # a failure of one must not keep the others open
            for model in self._models(StoredModel):
                ending.push_async_callback(model.end_use)

    async def aclose(self) -> None:
        """Close all models that can be closed."""
        async with contextlib.AsyncExitStack() as closing:
            for model in self._models(_Closing):
                closing.push_async_callback(model.aclose)

    def _models(self, kind: type[Any]) -> Iterator[Any]:
        return (each.model for each in self._routes.values() if isinstance(each.model, kind))


def route_of(model: Model, name: str) -> Route:
    """Return the route of a model name; a model other than `RoutedModels` has one route for all names.

    Raises:
        ModelNotFoundError: There are several models, and none with this name.
    """
    return model.route(name) if isinstance(model, RoutedModels) else Route(model)
