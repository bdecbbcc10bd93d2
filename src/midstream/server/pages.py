"""The pages that show sessions: files of this package, under headers that let nothing else in.

Everything a page shows was written by a user or a model. No inline script, no foreign source and no frame around
it: whatever gets into the text stays text.
"""

from __future__ import annotations

from pathlib import Path

from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Message, Receive, Scope, Send

FOLDER = Path(__file__).parent / "static"
HEADERS = [
    (
        b"content-security-policy",
        b"default-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
    # A file may change with the next release, and an entity tag makes asking cheap.
    (b"cache-control", b"no-cache"),
]


class Pages:
    """Serve files of `server/static/`; a folder's own address is its `index.html`."""

    def __init__(self) -> None:
        self._files = StaticFiles(directory=FOLDER, html=True, check_dir=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one file."""

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *HEADERS]}
            await send(message)

        # A file is small and sent whole: a part of one that cannot be had would be refused in words that are not ours.
        headers = [(name, value) for name, value in scope["headers"] if name != b"range"]
        await self._files({**scope, "headers": headers}, receive, send_with_headers)


def page_routes() -> list[BaseRoute]:
    """Return the routes of the pages, for a router."""
    pages = Pages()
    return [Route("/", pages, methods=["GET"]), Mount("/static", pages)]
