from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from midstream.observability.debug_output import LOGGER, show_enabled_lines


@pytest.fixture
def log() -> Iterator[logging.Logger]:
    """Yield the logger, and restore it afterwards."""
    log = logging.getLogger(LOGGER)
    before, level = list(log.handlers), log.level
    yield log
    log.handlers[:] = before
    log.setLevel(level)


def test_lines_are_shown_once_on_stderr_where_it_is_enabled(
    log: logging.Logger, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MIDSTREAM_DEBUG", "1")
    show_enabled_lines()
    show_enabled_lines()
    log.debug("kind=%s", "continuation")
    assert capsys.readouterr().err.count("midstream: kind=continuation") == 1


@pytest.mark.parametrize("value", ["", "0", None])
def test_nothing_is_shown_where_it_is_not_enabled(
    log: logging.Logger, monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    monkeypatch.delenv("MIDSTREAM_DEBUG", raising=False)
    if value is not None:
        monkeypatch.setenv("MIDSTREAM_DEBUG", value)
    before = list(log.handlers)
    show_enabled_lines()
    assert log.handlers == before


def test_a_line_that_the_program_logs_itself_is_not_shown_twice(
    log: logging.Logger, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MIDSTREAM_DEBUG", "1")
    own = logging.StreamHandler()
    own.setFormatter(logging.Formatter("own: %(message)s"))
    logging.getLogger("midstream").addHandler(own)
    try:
        show_enabled_lines()
        log.debug("kind=continuation")
    finally:
        logging.getLogger("midstream").removeHandler(own)
    assert capsys.readouterr().err.splitlines() == ["own: kind=continuation"]
