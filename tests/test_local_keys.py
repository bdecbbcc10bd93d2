"""The key of a user's own servers: made once, for its user alone, and shown to nobody."""

from __future__ import annotations

from pathlib import Path

import pytest

from midstream.errors import UsageError
from midstream.local_keys import (
    KEY_FILE,
    TOKEN_VARIABLE,
    headers_for,
    is_loopback,
    read_or_make_key,
    token_for,
)
from midstream.paths import Paths


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Paths:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    return Paths(tmp_path / "data", tmp_path / "state")


def test_a_key_is_made_once_and_only_its_user_can_read_it(places: Paths) -> None:
    key = read_or_make_key(places.data)
    path = places.data / KEY_FILE
    assert (read_or_make_key(places.data), path.read_text().strip()) == (key, key)
    assert (path.stat().st_mode & 0o777, places.data.stat().st_mode & 0o777) == (0o600, 0o700)
    assert [each.name for each in places.data.iterdir()] == [KEY_FILE]


def test_a_key_that_others_can_read_is_refused(places: Paths) -> None:
    read_or_make_key(places.data)
    (places.data / KEY_FILE).chmod(0o644)
    with pytest.raises(UsageError, match="readable by other users"):
        read_or_make_key(places.data)


def test_each_port_has_a_token_of_its_own_and_the_key_is_in_none(places: Paths) -> None:
    key = read_or_make_key(places.data)
    shown = [headers_for(f"http://127.0.0.1:{port}", places)["authorization"] for port in (8000, 8001)]
    assert shown == [f"Bearer {token_for(key, port)}" for port in (8000, 8001)]
    assert shown[0] != shown[1]
    assert key not in "".join(shown)


@pytest.mark.parametrize("url", ["http://192.0.2.7:8000", "https://agents.example", "nonsense"])
def test_no_other_machine_is_shown_a_token(places: Paths, url: str) -> None:
    read_or_make_key(places.data)
    assert headers_for(url, places) == {}


@pytest.mark.parametrize("url", ["http://localhost:99999", "http://localhost:x", "http://[::1"])
def test_what_has_no_port_that_there_is_is_refused(places: Paths, url: str) -> None:
    with pytest.raises(UsageError):
        headers_for(url, places)


def test_without_a_key_nothing_is_shown_and_nothing_made(places: Paths) -> None:
    assert headers_for("http://localhost:8000", places) == {}
    assert not places.data.exists()


def test_a_user_without_a_home_has_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("MIDSTREAM_HOME")
    monkeypatch.setattr(Path, "home", home)
    assert headers_for("http://localhost:8000") == {}


def test_a_token_that_was_given_is_shown_everywhere(places: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "given-token-of-mine")
    assert headers_for("https://agents.example", places) == {"authorization": "Bearer given-token-of-mine"}


def test_only_this_machine_is_reached_around_proxies() -> None:
    names = ["localhost", "a.localhost", "127.9.9.9", "::1", "example.org", "10.0.0.1", ""]
    assert [is_loopback(name) for name in names] == [True, True, True, True, False, False, False]
