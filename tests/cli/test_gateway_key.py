"""The key of a gateway's clients: created for this user only, and shown on a terminal only."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from midstream.cli import Invocation
from midstream.cli.gateway_key import GENERATED_TOKEN, GatewayKey, find_key
from midstream.errors import UsageError
from midstream.paths import Paths
from tests.spec import spec

NONE = {"token": "", "token_file": None, "is_open": False, "host": "127.0.0.1"}


def _context(folder: Path) -> click.Context:
    context = click.Context(click.Command("gateway"))
    context.obj = Invocation(Paths.find(folder), "never")
    return context


@spec("SEC-14")
def test_a_generated_key_is_kept_and_an_empty_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / GENERATED_TOKEN
    first = find_key(_context(tmp_path), NONE, tmp_path)
    assert find_key(_context(tmp_path), NONE, tmp_path) == first
    assert (first.file, path.stat().st_mode & 0o777) == (path, 0o600)
    path.write_text("")
    second = find_key(_context(tmp_path), NONE, tmp_path)
    assert second.key not in (first.key, "", None)
    path.chmod(0o644)
    with pytest.raises(UsageError, match="chmod 600"):
        find_key(_context(tmp_path), NONE, tmp_path)


@spec("SEC-14")
def test_a_link_in_place_of_the_generated_key_is_refused(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("the-key-of-somebody-else\n")
    elsewhere.chmod(0o600)
    (tmp_path / GENERATED_TOKEN).symlink_to(elsewhere)
    with pytest.raises(UsageError, match="symbolic link"):
        find_key(_context(tmp_path), NONE, tmp_path)


def test_a_key_is_not_in_its_representation() -> None:
    assert "secret" not in repr(GatewayKey("secret", None, "in a file"))
