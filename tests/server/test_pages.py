"""The pages have headers that admit no foreign content, and files only from their folder."""

from __future__ import annotations

import json

import pytest
from starlette.types import Message

from midstream.server.pages import FOLDER
from tests.server.serving import asgi_client, make_app
from tests.spec import spec


@spec("SEC-85")
async def test_the_first_page_is_served_under_a_strict_policy() -> None:
    async with asgi_client(make_app()) as client:
        answer = await client.get("/")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    policy = answer.headers["content-security-policy"].split("; ")
    assert policy[:2] == ["default-src 'self'", "connect-src 'self'"]
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in answer.headers["content-security-policy"]
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert answer.headers["cross-origin-opener-policy"] == "same-origin"
    assert answer.headers["cross-origin-resource-policy"] == "same-origin"


async def test_every_file_is_served_and_revalidated_by_its_etag() -> None:
    async with asgi_client(make_app()) as client:
        for path in (path for path in FOLDER.rglob("*") if path.is_file()):
            address = f"/static/{path.relative_to(FOLDER)}"
            answer = await client.get(address)
            assert answer.content == path.read_bytes()
            again = await client.get(address, headers={"if-none-match": answer.headers["etag"]})
            assert again.status_code == 304


@pytest.mark.parametrize("part", ["bytes=0-9", "bytes=9-1,foo", "bytes=99999999999-", "lines=1-2"])
async def test_a_range_request_gets_the_whole_file(part: str) -> None:
    async with asgi_client(make_app()) as client:
        whole = await client.get("/")
        answer = await client.get("/", headers={"range": part})
    assert (answer.status_code, answer.content) == (200, whole.content)


@pytest.mark.parametrize("path", ["nothing.js", "../pages.py", "..", "//etc/passwd", "./../../__init__.py"])
async def test_a_path_outside_the_folder_is_not_found(path: str) -> None:
    """Sent below an HTTP client, which would normalise the address."""
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "http.request"}

    app = make_app()
    scope = {"type": "http", "method": "GET", "path": f"/static/{path}", "headers": [], "query_string": b""}
    await app(scope, receive, send)
    await app.stop()
    assert sent[0]["status"] == 404
    assert json.loads(sent[1]["body"])["code"] == "not_found"
