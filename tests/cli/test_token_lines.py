"""Lines of token files: a server reads what the command writes."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from midstream.cli.token_lines import add_token, read_tokens
from midstream.errors import UsageError
from midstream.server.auth.token_file import TokenFile, TokenUse, digest_of_token, read_token_file


def test_a_new_line_is_appended_and_read_by_its_server(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    first = add_token(file, "ada", "acme", {"scope": "read", "role": ""}, comment="a #1")
    second = add_token(file, "eve", "acme", {}, days=1)
    lines = read_token_file(file)
    assert [line.digest for line in lines] == [digest_of_token(first), digest_of_token(second)]
    assert [line.settings for line in lines] == [{"scope", "added"}, {"expires", "added"}]
    assert (file.stat().st_mode & 0o777, first in read_tokens(file)) == (0o600, False)
    assert TokenFile(file).find(second) is not None


def test_an_end_after_all_dates_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    for days in (1e7, 1e9, 1e300):
        with pytest.raises(UsageError, match="beyond the year 9999"):
            add_token(file, "ada", "", {}, days=days)
    assert not file.exists()


def test_settings_of_the_other_kind_of_server_are_refused(tmp_path: Path) -> None:
    for name, settings, use in (
        ("gateway", {"tokens-per-day": "5"}, TokenUse.SERVE),
        ("serve", {"scope": "read"}, TokenUse.GATEWAY),
    ):
        file = tmp_path / name
        add_token(file, "ada", "", settings)
        with pytest.raises(UsageError, match=f"line 2 .* is for `midstream {name}` only"):
            TokenFile(file, use=use)


def test_an_invalid_setting_writes_nothing(tmp_path: Path) -> None:
    for settings in (
        {"tokens-per-day": "many"},
        {"budget-per-month": "-1"},
        {"budget-per-month": "nan"},
        {"x": "1"},
    ):
        with pytest.raises(UsageError):
            add_token(tmp_path / "tokens", "ada", "", settings)
    assert not (tmp_path / "tokens").exists()


def test_a_line_with_which_the_file_would_admit_nobody_is_not_written(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    token = add_token(file, "eve", "", {})
    with pytest.raises(UsageError, match="'eve' has no tenant and others have one"):
        add_token(file, "ada", "acme", {})
    assert TokenFile(file).find(token) is not None
    add_token(file, "bob", "*", {})  # an operator has no tenant


def test_keys_that_are_added_at_the_same_moment_are_all_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "tokens"
    have_read = threading.Barrier(2)

    def read_together(place: Path) -> str:
        text = read_tokens(place)
        with contextlib.suppress(threading.BrokenBarrierError):
            have_read.wait(0.5)  # broken where the other one waits for the lock
        return text

    monkeypatch.setattr("midstream.cli.token_lines.read_tokens", read_together)
    with ThreadPoolExecutor(2) as pool:
        tokens = [*pool.map(lambda name: add_token(file, name, "", {}), ("ada", "eve"))]
    assert sorted(line.digest for line in read_token_file(file)) == sorted(map(digest_of_token, tokens))
