"""Environment variables that set options: `MIDSTREAM_<COMMAND>_<OPTION>`, after the flag."""

from __future__ import annotations

import click

PREFIX = "MIDSTREAM"


def name_variables(command: click.Command, name: str, prefix: str = PREFIX) -> None:
    """Let the variable with the name of its flag set each option of a command.

    click itself uses the name of the parameter, which may differ from the flag; that variable also works.
    """
    prefix = f"{prefix}_{_upper(name)}"
    for option in command.params:
        if isinstance(option, click.Option) and option.envvar is None:
            flags = [flag.removeprefix("--") for flag in option.opts if flag.startswith("--")]
            option.envvar = [f"{prefix}_{_upper(flag)}" for flag in flags]
    if isinstance(command, click.Group):
        for each, child in command.commands.items():
            name_variables(child, each, prefix)


def _upper(name: str) -> str:
    return name.upper().replace("-", "_")
