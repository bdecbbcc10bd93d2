"""Variables of the environment set the options of all commands, by the names of their flags."""

from __future__ import annotations

from typing import Any

import click
import pytest

from midstream.cli import COMMANDS, midstream_command


def command_of(name: str) -> click.Command:
    command = midstream_command.get_command(click.Context(midstream_command), name)
    assert command is not None
    return command


def parse(name: str, *arguments: str) -> dict[str, Any]:
    """Return the options of a command with these arguments."""
    context = command_of(name).make_context(
        name, [*arguments], auto_envvar_prefix=f"MIDSTREAM_{name.upper()}"
    )
    return context.params


def test_the_variable_has_the_name_of_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {
        "ALLOW_HOST": "a.example",
        "SERVE_AS": "one",
        "NO_TOKEN": "1",
        "HIDE_TOOLS": "true",
        "GRACE": "7",
    }
    for name, value in given.items():
        monkeypatch.setenv(f"MIDSTREAM_GATEWAY_{name}", value)
    found = parse("gateway", "--upstream", "scripted")
    expected = {
        "allowed_hosts": ("a.example",),
        "names": ("one",),
        "is_open": True,
        "hides_tools": True,
        "grace_s": 7.0,
    }
    assert {name: found[name] for name in expected} == expected


def test_a_flag_takes_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIDSTREAM_GATEWAY_GRACE", "7")
    assert parse("gateway", "--upstream", "scripted", "--grace", "2")["grace_s"] == 2.0


def options_of(command: click.Command, prefix: str) -> list[tuple[str, click.Option]]:
    found = [(prefix, option) for option in command.params if isinstance(option, click.Option)]
    children = command.commands if isinstance(command, click.Group) else {}
    for name, child in children.items():
        found += options_of(child, f"{prefix}_{name.upper().replace('-', '_')}")
    return found


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_has_a_variable(name: str) -> None:
    for prefix, option in options_of(command_of(name), f"MIDSTREAM_{name.upper().replace('-', '_')}"):
        flags = [flag for flag in option.opts if flag.startswith("--")]
        named = {f"{prefix}_{flag.removeprefix('--').upper().replace('-', '_')}" for flag in flags}
        envvar = option.envvar or ()
        assert named <= {*([envvar] if isinstance(envvar, str) else envvar)} or isinstance(envvar, str)
