"""The built-in authentication methods."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
from starlette.requests import HTTPConnection

from midstream.errors import UsageError
from midstream.server.auth.access import (
    Access,
    cookie,
    first_of,
    proxy_user,
    token_file,
    tokens,
)
from midstream.server.auth.credential_sources import Authenticate, settle
from midstream.server.auth.principals import Principal

TOKEN = "a-token-of-ada-0001"


def request_with(*headers: tuple[str, str], client: str = "127.0.0.1", port: int = 8000) -> HTTPConnection:
    named = [(name.encode(), value.encode("latin-1")) for name, value in headers]
    return HTTPConnection(
        {"type": "http", "headers": named, "client": (client, 1), "server": ("127.0.0.1", port), "path": "/"}
    )


async def principal_of(way: Authenticate, *headers: tuple[str, str], client: str = "127.0.0.1") -> str | None:
    principal = await settle(way(request_with(*headers, client=client)))
    return principal.id if principal else None


async def test_tokens_identify_their_principal_and_are_not_stored() -> None:
    way = tokens({TOKEN: Principal("ada")})
    assert await principal_of(way, ("authorization", f"Bearer {TOKEN}")) == "ada"
    assert await principal_of(way, ("authorization", f"Bearer {TOKEN}x")) is None
    assert await principal_of(way, ("authorization", "Bearer \xff\xfe")) is None
    with pytest.raises(UsageError, match="16 characters"):
        tokens({"short": Principal("ada")})


async def test_a_changed_token_file_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text(f"# people\n{TOKEN} ada acme\n\n")
    path.chmod(0o600)
    way = token_file(path)
    shown = ("authorization", f"Bearer {TOKEN}")
    principal = await settle(way(request_with(shown)))
    assert principal is not None
    assert (principal.key, principal.is_operator) == ("acme:ada", False)
    path.write_text("another-token-of-bob bob\n")
    os.utime(path, ns=(1, 1))
    assert await principal_of(way, shown) is None
    assert await principal_of(way, ("authorization", "Bearer another-token-of-bob")) == "bob"


@pytest.mark.parametrize("text", ["short ada", TOKEN, f"{TOKEN} a b c"])
def test_a_malformed_token_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tokens"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(UsageError, match="line 1"):
        token_file(path)


async def test_a_cookie_a_proxy_header_and_several_methods_in_order_authenticate() -> None:
    by_cookie = cookie("__Host-app", lambda value: Principal("ada") if value == "good" else None)
    by_proxy = proxy_user("x-user")
    way = first_of(by_cookie, by_proxy)
    assert await principal_of(way, ("cookie", "__Host-app=good")) == "ada"
    assert await principal_of(way, ("cookie", "__Host-app=bad")) is None
    assert await principal_of(way, ("x-user", "bob")) == "bob"
    assert await principal_of(way, ("x-user", "bob"), client="192.0.2.1") is None
    assert await principal_of(way, ("x-user", "bob"), ("x-user", "eve")) is None


def test_the_repr_of_access_shows_no_credentials() -> None:
    assert repr(Access(authenticate=tokens({TOKEN: Principal("ada")}), login="login-1")) == "Access(...)"


@pytest.mark.parametrize("seconds", [math.nan, math.inf, 0.0])
def test_a_pause_between_checks_that_is_no_number_of_seconds_is_refused(seconds: float) -> None:
    with pytest.raises(UsageError, match="`recheck_s`"):
        Access(authenticate=cookie("c", lambda _: None), recheck_s=seconds)
