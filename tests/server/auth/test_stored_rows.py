"""Rows of access that another program damaged in the database: each damages only itself, and revocations hold."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2
import pytest

from midstream.server.app import App
from midstream.server.auth.issued_credentials import NAMESPACE, key_of
from midstream.server.auth.ownership import TENANCY_NAMESPACE
from midstream.server.auth.revocations import REVOKED_NAMESPACE, Revocations
from midstream.store.contract import PRINCIPAL_OF, Store
from midstream.store.encryption.encrypted_store import encrypt_store
from midstream.store.sqlite import SQLiteStore
from tests.server.known_people import ADA, BOB, OPERATOR, TENANTS, guarded_app, post_message, status_and_code
from tests.server.serving import asgi_client
from tests.spec import spec
from tests.store.keys import keys_in

TAMPER = """
import sqlite3, sys
db = sqlite3.connect(sys.argv[1], isolation_level=None)
assert db.execute(sys.argv[2], sys.argv[3:]).rowcount > 0
db.close()
"""


def _damage(folder: Path, namespace: str, key: str = "%", what: str = "body = x'00'") -> None:
    """Change entries of a namespace in the database, as another program."""
    statement = f"UPDATE key_value SET {what} WHERE namespace = ? AND key LIKE ?"
    command = [sys.executable, "-I", "-c", TAMPER, str(folder / "x.db"), statement, namespace, key]
    subprocess.run(command, check=True, timeout=60, capture_output=True)


@pytest.fixture(params=["plain", "encrypted"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    plain = SQLiteStore(tmp_path / "x.db")
    return plain if request.param == "plain" else encrypt_store(plain, keys_in(tmp_path))


@asynccontextmanager
async def _serve(store: Store, **more: object) -> AsyncIterator[tuple[App, httpx2.AsyncClient]]:
    app = guarded_app(store=store, **more)  # type: ignore[arg-type]
    async with asgi_client(app) as client:
        yield app, client


async def _cookie_of(client: httpx2.AsyncClient, who: dict[str, str]) -> str:
    """Log in; return the cookie's value, and leave the client without it."""
    link = (await client.post("/v1/login-links", headers=who)).json()["token"]
    cookie = (await client.post("/v1/login", json={"login": link})).headers["set-cookie"]
    client.cookies.clear()
    return cookie.partition(";")[0]


async def _me(client: httpx2.AsyncClient, cookie: str) -> int:
    return (await client.get("/v1/me", headers={"cookie": cookie})).status_code


@spec("SEC-2", "SEC-42")
async def test_a_damaged_login_is_refused_and_the_others_are_listed_and_revoked(
    store: Store, tmp_path: Path
) -> None:
    async with _serve(store) as (_, client):
        ada, bob = [await _cookie_of(client, who) for who in (ADA, BOB)]
        _damage(tmp_path, NAMESPACE, key_of(ada.partition("=")[2]))
        assert [await _me(client, cookie) for cookie in (ada, bob)] == [401, 200]
        logout = await client.post("/v1/logout", headers={"cookie": ada, "x-midstream": "test"})
        assert logout.status_code == 401
        found = (await client.get("/v1/access", headers=OPERATOR)).json()["credentials"]
        assert [each["issued_by"] for each in found] == ["bob"]
        assert (await client.delete("/v1/access?principal=*", headers=OPERATOR)).json() == {"count": 1}
        assert [await _me(client, cookie) for cookie in (ada, bob)] == [401, 401]


@spec("SEC-2", "SEC-6")
async def test_a_damaged_revocation_still_holds_and_can_be_written_again(
    store: Store, tmp_path: Path
) -> None:
    async with _serve(store) as (_, client):
        before = await _cookie_of(client, ADA)
        revoked = await client.delete("/v1/access?principal=ada", headers=OPERATOR)
        assert revoked.status_code == 200
        _damage(tmp_path, REVOKED_NAMESPACE)
        link = (await client.post("/v1/login-links", headers=ADA)).json()["token"]
        assert status_and_code(await client.post("/v1/login", json={"login": link})) == (401, "unauthorized")
        assert await _me(client, before) == 401
        for name in ("ada", "*"):
            assert (await client.delete(f"/v1/access?principal={name}", headers=OPERATOR)).status_code == 200
        assert await _me(client, await _cookie_of(client, ADA)) == 200
        assert await _me(client, before) == 401


@spec("SEC-6")
async def test_a_server_starts_with_damaged_rows_and_a_changed_store_time_revokes_nothing(
    store: Store, tmp_path: Path
) -> None:
    async with _serve(store) as (_, client):
        cookie = await _cookie_of(client, ADA)
        assert (await client.delete("/v1/access?principal=ada", headers=OPERATOR)).status_code == 200
        _damage(tmp_path, REVOKED_NAMESPACE, "%ada", "at = 1")
        _damage(tmp_path, REVOKED_NAMESPACE, "#")
    async with _serve(store) as (app, client):
        assert await _me(client, cookie) == 401
        assert await Revocations(app.host.store, app.host.world).locked_out_at(":ada") > 1


@spec("SEC-2", "SEC-42")
async def test_a_damaged_owner_row_hides_only_its_session(store: Store, tmp_path: Path) -> None:
    async with _serve(store) as (_, client):
        for session in ("s1", "s2"):
            assert (await post_message(client, session, ADA)).status_code == 200
        _damage(tmp_path, PRINCIPAL_OF, "s1")
        listed = (await client.get("/v1/sessions", headers=ADA)).json()["sessions"]
        assert [each["id"] for each in listed] == ["s2"]
        everything = (await client.get("/v1/sessions", headers=OPERATOR)).json()["sessions"]
        assert {each["id"] for each in everything} == {"s1", "s2"}
        for who in (ADA, BOB):
            assert status_and_code(await client.get("/v1/sessions/s1", headers=who)) == (
                404,
                "session_not_found",
            )
            assert (await post_message(client, "s1", who)).status_code == 404
        assert status_and_code(await client.get("/v1/sessions/s1/owner", headers=OPERATOR)) == (
            500,
            "entry_damaged",
        )
        assert (await client.delete("/v1/sessions/s1", headers=OPERATOR)).status_code == 204
        assert (await post_message(client, "s1", ADA)).status_code == 200


@spec("SEC-19")
async def test_without_the_row_of_tenancy_the_owner_rows_decide_it(store: Store, tmp_path: Path) -> None:
    async with _serve(store, known=TENANTS) as (_, client):
        assert (await post_message(client, "s1", ADA)).status_code == 200
        _damage(tmp_path, TENANCY_NAMESPACE)
    async with _serve(store) as (_, client):
        assert status_and_code(await post_message(client, "s2", ADA)) == (403, "access")
    async with _serve(store, known=TENANTS) as (_, client):
        assert (await post_message(client, "s3", ADA)).status_code == 200
