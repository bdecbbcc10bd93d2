"""The file of options of `midstream gateway`: TOML whose keys are the names of the flags.

Its values are defaults: a flag of the command line wins, and so does a variable of the environment. It holds no
secrets, so that it can be shared and committed.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from midstream.cli.key_option import KeyPlaceType
from midstream.errors import UsageError
from midstream.file_safety import read_own
from midstream.store.store_registry import file_of

F = TypeVar("F", bound=Callable[..., Any])  # whatever click decorates

_NOT_IN_FILES = frozenset({"config", "help", "token"})
_SECRET = re.compile(r"(?:.*_)?(?:KEY|TOKEN|SECRET|PASSWORD)=.+", re.IGNORECASE | re.DOTALL)
"""A variable whose name is that of a secret, with its value."""


def file_option(command: F) -> F:
    """Add the option of the file."""
    return click.option(
        "--config",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        is_eager=True,
        expose_value=False,
        callback=_take_defaults,
        help="A TOML file of these options, named without dashes; flags win over it. It holds no secrets.",
    )(command)


def _take_defaults(context: click.Context, _: click.Parameter, path: Path | None) -> None:
    """Let the values of a file be the defaults of the command's other options."""
    if path is not None and not context.resilient_parsing:
        context.default_map = {**(context.default_map or {}), **_read_defaults(context, path)}


def _read_defaults(context: click.Context, path: Path) -> dict[str, Any]:
    """Return the values of a file, by the names that click has for the options.

    Raises:
        UsageError: The file cannot be read, has an unknown key, a value that is none of its option, or a secret.
    """
    try:
        values = tomllib.loads(read_own(path, "the file of options", is_named=True).decode())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageError(f"{str(path)!r} is not valid TOML: {error}") from error
    options = _options_of(context.command)
    defaults: dict[str, Any] = {}
    for key, value in values.items():
        try:
            _refuse_secret(key, value)
            option = _find_option(options, key)
            placed = _place(option, _check_type(option, value), path.absolute().parent)
            option.type_cast_value(context, placed)
        except (click.BadParameter, UsageError) as error:
            raise UsageError(f"{str(path)!r}, {key!r}: {error}") from error
        defaults[str(option.name)] = placed
    return defaults


def _options_of(command: click.Command) -> dict[str, click.Option]:
    """Return the options that a file may have, by their keys."""
    return {
        flag.removeprefix("--"): option
        for option in command.params
        if isinstance(option, click.Option)
        for flag in option.opts
        if flag.startswith("--") and flag.removeprefix("--") not in _NOT_IN_FILES
    }


def _find_option(options: Mapping[str, click.Option], key: str) -> click.Option:
    if key not in options:
        raise UsageError(f"this is no option; known: {', '.join(sorted(options))}")
    return options[key]


def _refuse_secret(key: str, value: object) -> None:
    if key == "token":
        raise UsageError(
            "this file holds no secrets; name a file with `token-file`, or set the variable MIDSTREAM_GATEWAY_TOKEN"
        )
    if key == "agent-env" and isinstance(value, list):
        for each in value:
            if isinstance(each, str) and _SECRET.fullmatch(each):
                name = each.partition("=")[0]
                raise UsageError(
                    f"this file holds no secrets; write {name!r} without a value, and set the variable for the gateway"
                )


def _check_type(option: click.Option, value: Any) -> Any:  # noqa: ANN401 - a value of TOML
    """Return a value of the file.

    Raises:
        UsageError: It has another type than its option.
    """
    if option.multiple:
        is_right, expected = (
            isinstance(value, list) and all(isinstance(each, str) for each in value),
            "a list of strings",
        )
    elif option.is_flag:
        is_right, expected = isinstance(value, bool), "true or false"
    elif isinstance(option.type, click.types.IntParamType):
        is_right, expected = type(value) is int, "a whole number"
    elif isinstance(option.type, click.types.FloatParamType):
        is_right, expected = type(value) in {int, float}, "a number"
    else:
        is_right, expected = isinstance(value, str), "a string"
    if not is_right:
        raise UsageError(f"the value has another type; expected {expected}")
    return value


def _place(option: click.Option, value: Any, folder: Path) -> Any:  # noqa: ANN401 - a value of TOML
    """Return a path of the file relative to its folder, and any other value as it is."""
    if isinstance(option.type, click.Path):
        return str(folder / value)
    if isinstance(option.type, KeyPlaceType) and not KeyPlaceType.is_url(value):
        return str(folder / value)
    if option.name == "store" and (file := file_of(value)) is not None and value.endswith(str(file)):
        return value.removesuffix(str(file)) + str(folder / file)
    return value
