"""Every error has an exit code, and is one line: what happened, what to do, its code."""

from __future__ import annotations

from pathlib import Path

import pytest

from midstream import errors
from midstream.cli.exits import ADVICE, exit_code_of, of_bug, of_error, of_system
from midstream.errors import MidstreamError


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.MidstreamError("x"), 1),
        (errors.PortTakenError("x"), 1),
        (errors.ConnectionLostError("x"), 1),
        (errors.StoreDamagedError("x"), 1),
        (errors.UsageError("x"), 2),
        (errors.AgentNotFoundError("x"), 2),
        (errors.SessionNotFoundError("x"), 3),
        (errors.LeaseHeldError("x"), 4),
        (errors.StoreBusyError("x"), 4),
        (errors.ModelRejectedError("x"), 5),
    ],
)
def test_the_exit_code_depends_on_the_remedy_of_the_caller(error: MidstreamError, code: int) -> None:
    assert exit_code_of(error) == code


def test_an_error_line_has_the_event_the_remedy_and_the_code() -> None:
    line, code = of_error(errors.SessionNotFoundError("no session 'a'"))
    assert line == ("no session 'a'. `midstream sessions list` lists the sessions. [session_not_found]")
    assert code == 3


def test_advice_exists_only_for_existing_codes() -> None:
    codes = {
        each.code
        for each in vars(errors).values()
        if isinstance(each, type) and issubclass(each, MidstreamError)
    }
    assert ADVICE.keys() - codes == set()


def test_a_bug_leaves_its_traceback_in_a_file(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError) as raised:
        raise RuntimeError("oh")
    line, code = of_bug(raised.value, tmp_path / "state")
    assert code == 1
    assert str(tmp_path / "state" / "crash.log") in line
    assert "RuntimeError: oh" in (tmp_path / "state" / "crash.log").read_text()


def test_a_bug_on_a_full_disk_is_still_one_line(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file where the folder should be")
    line, _ = of_bug(RuntimeError("oh"), tmp_path / "state")
    assert line.endswith("could not be stored) [bug]")


def test_an_error_of_the_operating_system_has_its_path_and_is_not_a_bug(tmp_path: Path) -> None:
    line, code = of_system(PermissionError(13, "Permission denied", "/nowhere/x"), tmp_path)
    advice = "Choose another location with --home or --store, or make this one usable."
    assert (line, code) == (f"'/nowhere/x' cannot be used: Permission denied. {advice} [usage]", 2)
    assert of_system(OSError("odd"), tmp_path)[0].endswith("[bug]")
