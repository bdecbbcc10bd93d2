"""Options that several commands have."""

from __future__ import annotations

import click
from click.testing import CliRunner

from midstream.cli.acp_command import acp
from midstream.cli.gateway import gateway
from midstream.cli.option_groups import FiniteRange, encryption_option, group_options, log_options
from midstream.cli.serve import serve


def test_a_group_adds_its_options_in_order() -> None:
    @click.command()
    @group_options(click.option("--one"), log_options, encryption_option("all", "file"))
    def command(**options: object) -> None:
        click.echo(sorted(options.items()))

    assert [each.name for each in command.params] == ["one", "log_level", "log_format", "key_file"]
    assert CliRunner().invoke(command, ["--one", "1"]).output == (
        "[('key_file', None), ('log_format', 'text'), ('log_level', 'warning'), ('one', '1')]\n"
    )


def test_a_finite_range_refuses_infinity_and_nan() -> None:
    @click.command()
    @click.option("--days", type=FiniteRange(min=0, min_open=True))
    def command(days: float) -> None:
        click.echo(days)

    assert CliRunner().invoke(command, ["--days", "0.5"]).output == "0.5\n"
    for value in ("nan", "inf", "0", "-1"):
        done = CliRunner().invoke(command, ["--days", value])
        assert (done.exit_code, "Invalid value for '--days'" in done.stderr) == (2, True)


def test_commands_that_open_a_store_have_the_same_options() -> None:
    def help_of(command: click.Command, name: str) -> str | None:
        return next(
            each.help for each in command.params if isinstance(each, click.Option) and each.name == name
        )

    for name in ("store", "servers", "key_file", "log_level", "log_format"):
        assert help_of(serve, name) == help_of(acp, name)
    assert "Encrypt the database" in str(help_of(gateway, "key_file"))
