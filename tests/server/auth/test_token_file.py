"""The token file: lines with digests, scopes and expiry times, and invalid lines."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from midstream.errors import UnavailableError, UsageError
from midstream.server.auth.principals import Action
from midstream.server.auth.token_file import TokenFile, digest_of_token, parse_line
from midstream.testing.fake_worlds import FakeWorld
from tests.server.auth.test_access import TOKEN, principal_of, request_with
from tests.spec import spec

HASHED = f"sha256:{digest_of_token(TOKEN)}"
BEARER = ("authorization", f"Bearer {TOKEN}")


def _file(folder: Path, text: str) -> Path:
    path = folder / "tokens"
    path.write_text(text)
    path.chmod(0o600)
    return path


@spec("SEC-20", "SEC-21", "SEC-22")
def test_a_line_has_a_principal_and_the_permissions_of_its_token() -> None:
    found = parse_line(
        f"{HASHED} ada acme scope=read,approve sessions=a-* expires=2027-01-31 role=approver added=x # laptop"
    )
    assert found is not None
    principal = found.principal
    assert (principal.key, principal.is_operator, principal.is_approver) == ("acme:ada", False, True)
    assert (principal.scope.actions, principal.scope.sessions) == ((Action.READ, Action.APPROVE), "a-*")
    assert principal.expires_at == 1801353600.0
    assert [parse_line(line) for line in ("", "# only words", "   ")] == [None, None, None]


@spec("SEC-3")
def test_a_digest_or_a_comment_leaves_the_source_the_same_and_other_permissions_change_it() -> None:
    lines = [
        f"{TOKEN} ada",
        f"{HASHED} ada # words",
        f"{HASHED} ada scope=read",
        f"{HASHED} ada added=2",
        f"{HASHED} bob",
    ]
    sources = [found.principal.source for line in lines if (found := parse_line(line))]
    assert sources[0] == sources[1]
    assert len(set(sources)) == 4


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("short ada", "16 characters"),
        (TOKEN, "not of the form"),
        (f"{TOKEN} a b c", "not of the form"),
        ("sha256:12 ada", "64 hexadecimal digits"),
        (f"{TOKEN} ada scope=write", "a scope is a list of read"),
        (f"{TOKEN} ada role=king", "unknown role 'king'"),
        (f"{TOKEN} ada expires=soon", "'soon' is not a time"),
        (f"{TOKEN} ada color=red", "unknown setting 'color'"),
        (f"{TOKEN} ada ac.me", "a tenant of"),
    ],
)
def test_an_invalid_line_is_refused_without_showing_its_token(line: str, words: str) -> None:
    with pytest.raises(UsageError, match=words) as refused:
        parse_line(line)
    assert TOKEN not in refused.value.message


@spec("SEC-20")
async def test_a_plain_token_is_accepted_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert await principal_of(TokenFile(_file(tmp_path, f"{TOKEN} ada\n")), BEARER) == "ada"
        assert "midstream access hash" in caplog.text
        caplog.clear()
        assert await principal_of(TokenFile(_file(tmp_path, f"{HASHED} ada\n")), BEARER) == "ada"
    assert caplog.text == ""


@spec("SEC-7", "SEC-20")
async def test_a_token_expires_with_all_credentials_issued_for_it(tmp_path: Path) -> None:
    world = FakeWorld()
    source = TokenFile(_file(tmp_path, f"{HASHED} ada expires=2025-06-01T00:00:00Z\n"), world)
    principal = await source(request_with(BEARER))
    ends_at = 1748736000.0
    if world.now() >= ends_at:
        assert principal is None
        return
    assert principal is not None
    assert await source.is_current(principal)
    await world.advance(ends_at - world.now())
    assert not await source.is_current(principal)
    assert await source(request_with(BEARER)) is None


@spec("SEC-3")
async def test_a_file_that_is_broken_or_readable_by_others_admits_no_client(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = _file(tmp_path, f"{HASHED} ada\n")
    source = TokenFile(path)
    principal = await source(request_with(BEARER))
    assert principal is not None
    assert not source.has_changed()
    path.chmod(0o644)
    assert source.has_changed()
    for use in (source(request_with(BEARER)), source.is_current(principal)):
        with pytest.raises(UnavailableError) as refused:
            await use
        assert str(path) not in refused.value.message
    _file(tmp_path, "nonsense")
    with pytest.raises(UnavailableError):
        await source(request_with(BEARER))
    path.unlink()
    with pytest.raises(UnavailableError):
        source.find("a-token")
    _file(tmp_path, f"{HASHED} ada\n")
    assert await source(request_with(BEARER)) == principal
    reasons = [record.message for record in caplog.records if record.levelname == "ERROR"]
    assert len(reasons) == 3
    for reason, part in zip(reasons, ("chmod 600", "line 1", "cannot be read"), strict=True):
        assert part in reason
        assert str(path) in reason


@spec("SEC-19")
@pytest.mark.parametrize(
    ("second", "is_refused"),
    [("bob", True), ("bob acme", False), ("root *", False), ("root role=operator", False)],
)
def test_tokens_with_and_without_a_tenant_do_not_mix(
    tmp_path: Path, second: str, *, is_refused: bool
) -> None:
    path = _file(tmp_path, f"{TOKEN} ada acme\nanother-token-of-bob {second}\n")
    if not is_refused:
        TokenFile(path)
        return
    with pytest.raises(UsageError, match="give every principal a tenant, or none"):
        TokenFile(path)


def test_a_repeated_token_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="contains a token twice"):
        TokenFile(_file(tmp_path, f"{TOKEN} ada\n{HASHED} bob\n"))
