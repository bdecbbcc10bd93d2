"""Several models behind one name each: a request is answered by the model that it names.

The name stands in the request, and in the journal with it, so that a turn that another process continues reaches the
same model.
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
"""Stands between the name of a model and its token of a response; no name has one."""


class Route(Struct, frozen=True):
    """One model of a `RoutedModels`.

    Args:
        model: What answers.
        own_name: What its server calls it, for requests that are passed on as they are; "" leaves them so.
    """

    model: Model
    own_name: str = ""


@runtime_checkable
class _Closing(Protocol):
    async def aclose(self) -> None: ...


class RoutedModels(StoredModel, ResumableModel):
    """Select one of several models by the model name of the request.

    Args:
        routes: By the names under which client applications request them. The first one answers requests that name
            none.

    Raises:
        UsageError: There is none, or a name is empty or has a line break.
    """

    def __init__(self, routes: Mapping[str, Route]) -> None:
        if not routes or any(not name.strip() or _NAME_END in name for name in routes):
            raise UsageError("several models need a name each, of one line")
        self._routes = dict(routes)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the models; the first one answers requests that name none."""
        return tuple(self._routes)

    @property
    def name(self) -> str:
        """Name of the whole: the same whichever models there are, since an open turn continues only under its name."""
        return "models"

    @property
    def default(self) -> str:
        """Name of the model that answers requests that name none."""
        return next(iter(self._routes))

    @property
    def grants(self) -> frozenset[str]:
        """Which wishes at least one of them takes; `route` has the model of one."""
        return frozenset[str]().union(*(grants_of(each.model) for each in self._routes.values()))

    def route(self, name: str) -> Route:
        """Return the model of a name; the first one for "".

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
            ModelNotFoundError: There is no such model.
            ModelError: The model's own.
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
        async with contextlib.AsyncExitStack() as ending:  # one that fails does not keep the others open
            for model in self._models(StoredModel):
                ending.push_async_callback(model.end_use)

    async def aclose(self) -> None:
        """Close those that can be closed. Calling it twice is harmless where it is for them."""
        async with contextlib.AsyncExitStack() as closing:
            for model in self._models(_Closing):
                closing.push_async_callback(model.aclose)

    def _models(self, kind: type[Any]) -> Iterator[Any]:
        return (each.model for each in self._routes.values() if isinstance(each.model, kind))


def route_of(model: Model, name: str) -> Route:
    """Return which model answers a request that names one; any other than `RoutedModels` answers all.

    Raises:
        ModelNotFoundError: There are several, and none of this name.
    """
    return model.route(name) if isinstance(model, RoutedModels) else Route(model)
