"""Viewer tokens: of a server with authentication, of one with clients that hold the keys, and of one with both."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2
import pytest

from midstream.server.auth.access import Access, tokens
from midstream.server.auth.principals import Principal
from midstream.testing.scripted_model import text
from tests.server.escrowing import SHOWN, escrowed_app, follow_to_end, send_message
from tests.server.serving import asgi_client, make_app
from tests.spec import spec

ANN = {"authorization": f"Bearer {'a' * 20}"}
BEN = {"authorization": f"Bearer {'b' * 20}"}


def _access() -> Access:
    return Access(authenticate=tokens({"a" * 20: Principal("ann"), "b" * 20: Principal("ben")}))


@asynccontextmanager
async def _escrowed(folder: Path) -> AsyncIterator[httpx2.AsyncClient]:
    """Make an app with authentication and a session of Ann's that is encrypted under her secret."""
    async with asgi_client(escrowed_app(folder, [text("one")], access=_access())) as http:
        http.headers.update(ANN)
        assert (await send_message(http)).status_code == 200
        await follow_to_end(http)
        yield http


@spec("STREAM-89")
async def test_one_token_gives_access_and_the_key(tmp_path: Path) -> None:
    async with _escrowed(tmp_path) as http:
        issued = await http.post("/v1/sessions/s1/viewers", json={"for_s": 60}, headers=SHOWN)
        assert (issued.status_code, issued.json()["for_s"]) == (201, 60)
        viewer = {"authorization": f"Bearer {issued.json()['token']}"}
        assert (await http.get("/v1/sessions/s1", headers=viewer)).status_code == 200
        assert (await http.post("/v1/sessions/s1/cancel", headers=viewer)).status_code == 403
        assert (await http.post("/v1/sessions/s1/viewers", headers=viewer)).status_code == 403
        gone = await http.delete("/v1/sessions/s1/viewers", headers=SHOWN)
        assert gone.status_code == 204
        assert (await http.get("/v1/sessions/s1", headers=viewer)).status_code == 401


@spec("STREAM-85", "STREAM-89")
async def test_the_key_alone_and_the_permission_alone_show_nothing(tmp_path: Path) -> None:
    async with _escrowed(tmp_path) as http:
        stolen = await http.get("/v1/sessions/s1", headers={**BEN, **SHOWN})
        missing = await http.get("/v1/sessions/none", headers={**BEN, **SHOWN})
        assert (stolen.status_code, stolen.text) == (404, missing.text.replace("none", "s1"))
        assert (await http.put("/v1/sessions/s1/readers/ben")).status_code == 200
        assert (await http.get("/v1/sessions/s1", headers=BEN)).status_code == 403
        assert (await http.get("/v1/sessions/s1", headers={**BEN, **SHOWN})).status_code == 200
        refused = await http.post("/v1/sessions/s1/viewers")
        assert (refused.status_code, refused.json()["code"]) == (403, "wrong_secret")


@pytest.mark.parametrize("for_s", [0, -1, 1e9, "long"])
async def test_an_expiry_out_of_bounds_is_refused(tmp_path: Path, for_s: object) -> None:
    async with _escrowed(tmp_path) as http:
        answer = await http.post("/v1/sessions/s1/viewers", json={"for_s": for_s}, headers=SHOWN)
        assert (answer.status_code, answer.json()["code"]) == (400, "malformed_frame")


async def test_without_authentication_and_encryption_there_are_no_viewer_tokens() -> None:
    async with asgi_client(make_app([text("one")])) as http:
        assert (await http.post("/v1/sessions/s1/viewers")).status_code == 404
