"""Which event loop a server runs on."""

from __future__ import annotations

import sys

import pytest

from midstream.cli.loops import loop_factory


def test_it_is_the_faster_one_where_that_is_installed() -> None:
    uvloop = pytest.importorskip("uvloop")
    assert loop_factory() is uvloop.new_event_loop


def test_it_is_pythons_own_where_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", None)
    assert loop_factory() is None
