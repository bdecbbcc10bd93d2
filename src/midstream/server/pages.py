"""The pages that show sessions: files of this package, with a strict content security policy.

Pages show text of users and models. Inline scripts, foreign sources and framing are forbidden, so that no such text is
executed.
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
    # A release may change a file; revalidation with an entity tag is cheap.
    (b"cache-control", b"no-cache"),
]


class Pages:
    """Serves files of `server/static/`; the path of a folder is its `index.html`."""

    def __init__(self) -> None:
        self._files = StaticFiles(directory=FOLDER, html=True, check_dir=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one file."""

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *HEADERS]}
            await send(message)

        # Files are small and sent whole. An invalid range would be refused with an error of Starlette's form.
        headers = [(name, value) for name, value in scope["headers"] if name != b"range"]
        await self._files({**scope, "headers": headers}, receive, send_with_headers)


def page_routes() -> list[BaseRoute]:
    """Return the routes of the pages, for a router."""
    pages = Pages()
    return [Route("/", pages, methods=["GET"]), Mount("/static", pages)]
