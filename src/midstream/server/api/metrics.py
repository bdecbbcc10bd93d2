"""`/metrics`: counters of an observer, and gauges of the server."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol, runtime_checkable

from starlette.requests import Request
from starlette.responses import Response

from midstream.server.auth.caller import require_operator

_SAMPLE = re.compile(r"([^\s{]+)(?:\{(.*)\})?( .*)")
"""A line of a metrics page: name, labels and value."""


@runtime_checkable
class MetricsPage(Protocol):
    """An observer that renders a metrics page."""

    media_type: str

    def page(self, figures: Mapping[str, float]) -> bytes:
        """Return the page.

        Args:
            figures: Current gauges of the server, by name.
        """


class Metrics:
    """Serves the metrics page. With authentication, only an operator receives it."""

    def __init__(self, page: MetricsPage, figures: Callable[[], Mapping[str, float]]) -> None:
        self.worker = 0
        """Number of this worker; 0 without workers."""
        self.other_pages: Callable[[], Awaitable[Mapping[int, str]]] | None = None
        """Returns the pages of the other workers, by number."""
        self._page = page
        self._figures = figures

    def render(self) -> bytes:
        """Return the page of this process."""
        return self._page.page(self._figures())

    async def show(self, request: Request) -> Response:
        """Return counters and gauges for Prometheus."""
        require_operator(request.scope, "the page of metrics")
        body = self.render()
        if self.other_pages is not None:
            body = merge_pages({self.worker: body.decode(), **await self.other_pages()}).encode()
        return Response(body, headers={"cache-control": "no-store", "content-type": self._page.media_type})


def merge_pages(pages: Mapping[int, str]) -> str:
    """Merge the pages of several workers: each sample gets the label `worker`, each metric has one description."""
    metrics: dict[str, tuple[list[str], list[str]]] = {}
    for worker, page in sorted(pages.items()):
        described, samples = metrics.setdefault("", ([], []))
        name = ""
        for line in page.splitlines():
            if line.startswith("#"):
                if line.split()[2] != name:
                    name = line.split()[2]
                    described, samples = metrics.setdefault(name, ([], []))
                if line not in described:
                    described.append(line)
            elif sample := _SAMPLE.fullmatch(line):
                labels = f'worker="{worker}"' + (f",{sample[2]}" if sample[2] else "")
                samples.append(f"{sample[1]}{{{labels}}}{sample[3]}")
    return "".join(f"{line}\n" for parts in metrics.values() for lines in parts for line in lines)
