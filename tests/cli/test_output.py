"""The forms in which a command prints its results."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from midstream.cli import Invocation
from midstream.cli.output import Output, json_option
from midstream.cli.terminal import Ink
from midstream.paths import Paths

FOUND = [("a", "one\ttwo\x1b[2J"), ("b", "")]


def _print_list(output: Output) -> None:
    output.print_list(FOUND, lambda pair: pair, table=lambda: ["HEAD", "row"], none="Nothing.")


@pytest.mark.parametrize(
    ("is_json", "is_terminal", "lines"),
    [
        (True, True, ['["a","one\\ttwo\\u001b[2J"]', '["b",""]']),
        (False, True, ["HEAD", "row"]),
        (False, False, ["a\tone two", "b\t"]),
    ],
)
def test_a_list_is_json_a_table_or_cells_with_tabs(
    capsys: pytest.CaptureFixture[str],
    is_json: bool,  # noqa: FBT001 - a parameter of the test
    is_terminal: bool,  # noqa: FBT001 - see above
    lines: list[str],
) -> None:
    _print_list(Output(Ink(is_colored=False, is_terminal=is_terminal), is_json=is_json))
    printed = capsys.readouterr()
    assert (printed.out.splitlines(), printed.err) == (lines, "")


def test_an_empty_list_is_a_message(capsys: pytest.CaptureFixture[str]) -> None:
    output = Output(Ink(is_colored=False, is_terminal=False), is_json=False)
    output.print_list([], lambda pair: pair, none="Nothing.")
    assert capsys.readouterr() == ("", "Nothing.\n")


@pytest.mark.parametrize(
    ("arguments", "out", "err"),
    [([], "data\n", "done\n"), (["--json"], '{"a":1}\n{"a":2}\n{"b":3}\n', "")],
)
def test_one_result_is_json_or_text(arguments: list[str], out: str, err: str) -> None:
    @click.command()
    @json_option()
    def command(output: Output) -> None:
        output.print_one({"a": 1}, "done")
        output.print_one({"a": 2}, "data", err=False)
        output.print_json({"b": 3})

    ran = CliRunner().invoke(command, arguments, obj=Invocation(Paths.find(), "never"))
    assert (ran.exit_code, ran.stdout, ran.stderr) == (0, out, err)
