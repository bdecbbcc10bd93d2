"""Rules of all commands: fast help, errors in one line, exit codes, no traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from midstream.cli import COMMANDS, midstream_command
from tests.cli.conftest import Run
from tests.house.source import ROOT

SERVE_HELP = "`midstream serve --help` shows how. [usage]\n"


def test_help_lists_every_command_with_its_purpose(run: Run) -> None:
    done = run("--help")
    assert done.exit_code == 0
    context = click.Context(midstream_command)
    for name, (_, purpose) in COMMANDS.items():
        assert f"{name} " in done.stdout
        command = midstream_command.get_command(context, name)
        assert command is not None
        assert purpose.split(";")[0].rstrip(".") in command.get_short_help_str(100).rstrip(".")


def test_help_documents_the_exit_codes(run: Run) -> None:
    lines = [line.split() for line in run("--help").stdout.splitlines()]
    codes = [line[0] for line in lines if line and line[0].isdigit()]
    assert codes == ["0", "1", "2", "3", "4", "5", "6", "7", "130"]


def test_help_loads_click_and_nothing_else() -> None:
    program = (
        "import sys, json\n"
        "from midstream.cli import midstream_command\n"
        "try: midstream_command.main(['--help'])\n"
        "except SystemExit: pass\n"
        "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    loaded = set(json.loads(done.stderr))
    foreign = {name for name in loaded if name not in sys.stdlib_module_names and not name.startswith("_")}
    assert foreign <= {"click", "midstream", "sitecustomize", "a1_coverage"}
    assert "asyncio" not in loaded


def test_no_command_shows_the_help_and_is_a_usage_error(run: Run) -> None:
    done = run()
    assert (done.exit_code, done.stdout) == (2, "")
    assert "Commands:" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["xyzzy"], "midstream: No such command 'xyzzy'. `midstream --help` shows how. [usage]\n"),
        (
            ["serv"],
            "midstream: No such command 'serv'. Did you mean 'serve'? `midstream --help` shows how. [usage]\n",
        ),
        (
            ["serve"],
            f"midstream: Missing argument 'MODULE:AGENT'. {SERVE_HELP}",
        ),
        (
            ["serve", "a:b", "--port", "x"],
            f"midstream: Invalid value for '--port': 'x' is not a valid integer range. {SERVE_HELP}",
        ),
    ],
)
def test_wrong_use_is_one_line_and_exit_code_2(run: Run, arguments: list[str], line: str) -> None:
    done = run(*arguments)
    assert (done.exit_code, done.stdout, done.stderr) == (2, "", line)


def test_a_bug_is_one_line_and_no_traceback(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(COMMANDS, "sessions", ("midstream.cli:no_such_name", "Broken."))
    done = run("sessions", "list")
    assert done.exit_code == 1
    assert done.stderr.count("\n") == 1
    assert "this is a bug in midstream: AttributeError" in done.stderr
    assert "Traceback" in (tmp_path / "crash.log").read_text()


def test_the_traceback_of_a_bug_is_stored_below_the_chosen_home(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(COMMANDS, "sessions", ("midstream.cli:no_such_name", "Broken."))
    chosen = tmp_path / "chosen"
    done = run("--home", chosen, "sessions", "list")
    assert (done.exit_code, str(chosen / "crash.log") in done.stderr) == (1, True)
    assert "Traceback" in (chosen / "crash.log").read_text()
    assert not (tmp_path / "crash.log").exists()


def test_a_home_folder_that_cannot_be_created_is_not_a_bug(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = run("--home", str(tmp_path / "file" / "home"), "serve", "examples.hello:agent", "--port", "0")
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "cannot be used: Not a directory." in done.stderr


def test_options_can_come_from_the_environment(
    run: Run, monkeypatch: pytest.MonkeyPatch, store: Path, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere.db"
    store.rename(elsewhere)
    monkeypatch.setenv("MIDSTREAM_SESSIONS_LIST_STORE", str(elsewhere))
    monkeypatch.setenv("MIDSTREAM_SESSIONS_LIST_LIMIT", "1")
    assert len(run("sessions", "list").stdout.splitlines()) == 1
    assert len(run("sessions", "list", "--limit", "2").stdout.splitlines()) == 2


def test_a_closed_output_ends_it_without_a_message(store: Path) -> None:
    command = [sys.executable, "-m", "midstream", "sessions", "export", "harbour-1", "--store", str(store)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 1


def test_characters_that_a_terminal_cannot_encode_are_escaped(store: Path) -> None:
    command = [sys.executable, "-m", "midstream", "sessions", "show", "harbour-1", "--store", str(store)]
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    done = subprocess.run(command, capture_output=True, env=environment, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"\\u2500" in done.stdout


def test_completion_of_a_command_loads_no_command() -> None:
    items = midstream_command.shell_complete(click.Context(midstream_command), "se")
    assert [item.value for item in items] == ["serve", "sessions"]


def test_the_version_is_that_of_the_package(run: Run) -> None:
    import midstream

    assert run("--version").stdout == f"midstream {midstream.__version__}\n"


def test_the_reference_has_every_command_and_every_option() -> None:
    page = (ROOT / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")
    unknown = [
        f"{path} {option}"
        for path, command in _commands(midstream_command, "midstream")
        for parameter in command.params
        for option in parameter.opts
        if option.startswith("--") and option != "--help" and f"`{option}`" not in page
    ]
    assert unknown == []
    assert [
        path for path, _ in _commands(midstream_command, "midstream") if path.split()[-1] not in page
    ] == []


def _commands(command: click.Command, path: str) -> Iterator[tuple[str, click.Command]]:
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from _commands(below, f"{path} {name}")
