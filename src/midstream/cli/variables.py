"""Variables of the environment that set options: `MIDSTREAM_<COMMAND>_<OPTION>`, by the name of the flag."""

from __future__ import annotations

import click

PREFIX = "MIDSTREAM"


def name_variables(command: click.Command, name: str, prefix: str = PREFIX) -> None:
    """Let each option of a command be set by the variable that has the name of its flag.

    click itself takes the name of the option's parameter, which is another one where the parameter has a unit or is a
    list; that variable has an effect, too.
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
