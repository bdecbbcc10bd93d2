"""Authentication methods, and rechecks of the credentials they accepted."""

from __future__ import annotations

from pathlib import Path

from midstream.server.auth.access import bearer, first_of, this_user, tokens
from midstream.server.auth.credential_sources import source_of
from midstream.server.auth.local_user import LocalUser
from midstream.server.auth.principals import Principal
from midstream.server.auth.token_file import TokenFile
from tests.server.auth.test_access import TOKEN, principal_of, request_with
from tests.server.auth.test_token_file import HASHED, _file
from tests.spec import spec

BEARER = ("authorization", f"Bearer {TOKEN}")


@spec("SEC-9")
async def test_an_application_decides_whether_its_issued_credentials_are_current() -> None:
    valid = {"ada"}
    source = source_of(bearer(lambda _: Principal("ada")), lambda principal: principal.id in valid)
    assert await source.is_current(Principal("ada"))
    valid.clear()
    assert not await source.is_current(Principal("ada"))
    assert await source_of(bearer(lambda _: Principal("ada"))).is_current(Principal("ada"))


@spec("SEC-2")
async def test_a_credential_of_another_source_is_not_current() -> None:
    known = source_of(tokens({TOKEN: Principal("ada")}))
    ada = await known(request_with(BEARER))
    assert ada is not None
    assert await known.is_current(ada)
    for other in (
        source_of(bearer(lambda _: Principal("ada"))),
        source_of(tokens({f"{TOKEN}-2": Principal("ada")})),
        source_of(tokens({TOKEN: Principal("ada", is_operator=True)})),
        source_of(this_user("key")),
    ):
        assert not await other.is_current(ada)
    assert not await known.is_current(Principal("ada"))


async def test_each_of_several_sources_recognises_its_own_credentials(tmp_path: Path) -> None:
    path = _file(tmp_path, f"{HASHED} ada\n")
    local = LocalUser("key")
    source = source_of(first_of(TokenFile(path), local, bearer(lambda _: Principal("eve"))), lambda _: False)
    assert await principal_of(source, BEARER) == "ada"
    assert await principal_of(source, ("authorization", "Bearer other")) == "eve"
    assert await source.is_current(local.principal)
    assert not await source.is_current(Principal("eve"))
    assert source.prove("nonce", request_with()) == local.prove("nonce", request_with())
    assert not source.has_changed()
    path.write_text("")
    assert [source.has_changed() for _ in range(2)] == [True, False]
