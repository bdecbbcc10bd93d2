"""`/metrics`: what an observer has counted, and how the server stands."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

from starlette.requests import Request
from starlette.responses import Response

from midstream.errors import AccessError
from midstream.server.auth.caller import VISIT, KnownCaller


@runtime_checkable
class MetricsPage(Protocol):
    """An observer whose counts have a page."""

    media_type: str

    def page(self, figures: Mapping[str, float]) -> bytes:
        """Return the page.

        Args:
            figures: How the server stands now, by name.
        """


class Metrics:
    """Serve the page: to an operator, where this server asks who comes."""

    def __init__(self, page: MetricsPage, figures: Callable[[], Mapping[str, float]]) -> None:
        self._page = page
        self._figures = figures

    async def show(self, request: Request) -> Response:
        """Return counters and gauges for Prometheus."""
        visit = request.scope.get(VISIT)
        if isinstance(visit, KnownCaller) and not visit.principal.is_operator:
            raise AccessError("the metrics of this server are for its operator only")
        body = self._page.page(self._figures())
        return Response(body, headers={"cache-control": "no-store", "content-type": self._page.media_type})
