"""The checkpoints that chats store between processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from midstream.cli.chats import Chats
from midstream.errors import SessionNotFoundError


def test_the_last_session_is_stored_for_each_address(tmp_path: Path) -> None:
    chats = Chats(tmp_path / "chats")
    with pytest.raises(SessionNotFoundError):
        chats.last("http://a")
    chats.set_last("http://a", "one")
    chats.set_last("http://b", "two")
    chats.set_last("http://a", "three")
    assert (Chats(tmp_path / "chats").last("http://a"), chats.last("http://b")) == ("three", "two")


def test_a_damaged_file_is_treated_as_absent(tmp_path: Path) -> None:
    chats = Chats(tmp_path)
    (tmp_path / "last.json").write_text("{")
    with pytest.raises(SessionNotFoundError):
        chats.last("http://a")
    chats.set_last("http://a", "one")
    assert chats.last("http://a") == "one"


def test_each_session_has_its_own_checkpoint(tmp_path: Path) -> None:
    chats = Chats(tmp_path / "chats")
    places = [("http://a", "s"), ("http://a", "s:t"), ("http://a", "s_t"), ("http://b", "s")]
    assert len({chats.state(url, session) for url, session in places}) == len(places)


def test_the_shown_position_survives_the_process(tmp_path: Path) -> None:
    chats = Chats(tmp_path)
    with chats.find_last_shown("http://a", "one") as shown:
        assert not shown.has("1-1")
        shown.end("1-12")
    with chats.find_last_shown("http://a", "one") as shown:
        assert (shown.has("1-12"), shown.has("1-3"), shown.has("2-13")) == (True, True, False)
        shown.end("2-9")  # the server lost the later events, and reported it
        assert not shown.has("2-10")
    for url, session in (("http://a", "two"), ("http://b", "one")):
        with chats.find_last_shown(url, session) as shown:
            assert not shown.has("1-1")


def test_an_event_that_was_being_shown_is_in_doubt_for_the_next_process(tmp_path: Path) -> None:
    with Chats(tmp_path).find_last_shown("http://a", "one") as shown:
        shown.begin("1-3")
        shown.end("1-3")
        shown.begin("1-4")
    with Chats(tmp_path).find_last_shown("http://a", "one") as shown:
        assert (shown.has("1-3"), shown.has("1-4")) == (True, False)
        assert (shown.may_have("1-4"), shown.may_have("1-5")) == (True, False)
        shown.end("1-4")
    with Chats(tmp_path).find_last_shown("http://a", "one") as shown:
        assert (shown.has("1-4"), shown.may_have("1-4")) == (True, False)


def test_a_damaged_checkpoint_is_treated_as_absent(tmp_path: Path) -> None:
    with Chats(tmp_path).find_last_shown("http://a", "one") as shown:
        shown.end("1-12")
    [file] = tmp_path.glob("one-*.shown")
    file.write_bytes(b"\xff\x00 nonsense")
    with Chats(tmp_path).find_last_shown("http://a", "one") as shown:
        assert not shown.has("1-1")
