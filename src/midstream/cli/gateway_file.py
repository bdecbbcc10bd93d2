"""The configuration file of `midstream gateway`: TOML whose keys are the names of the flags.

Its values are defaults: flags and environment variables take precedence. Secrets are refused, so that the file can be
shared and committed. Tables `[models.NAME]` define several upstreams, each with its options.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from midstream.cli.agent_options import names_of_agent_options
from midstream.cli.key_option import KeyLocationType
from midstream.errors import UsageError
from midstream.file_safety import read_own
from midstream.store.store_registry import file_of

F = TypeVar("F", bound=Callable[..., Any])  # whatever click decorates

PRICES = ("input_price", "output_price", "cached_input_price")
"""Names of the options with the prices of a model."""
MODELS = "models"
"""The key of the tables."""
_MODELS_META = f"{__name__}.{MODELS}"
_NAMES_UPSTREAM = frozenset({"upstream", "model", "cwd", "key_variable", *PRICES})
_NOT_IN_FILES = frozenset({"config", "help", "token"})
_SECRET = re.compile(r"[^=]*(?:KEY|TOKEN|SECRET|PASSWORD)=.+", re.IGNORECASE | re.DOTALL)
"""A variable with a value, whose name indicates a secret."""


def file_option(command: F) -> F:
    """Add the option `--config`."""
    return click.option(
        "--config",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        is_eager=True,
        expose_value=False,
        callback=_take_defaults,
        help="A TOML file of these options, without leading dashes, and without secrets; flags take precedence.",
    )(command)


def _take_defaults(context: click.Context, _: click.Parameter, path: Path | None) -> None:
    """Use the values of a file as defaults of the command's other options."""
    if path is not None and not context.resilient_parsing:
        values = _read(path)
        models = values.pop(MODELS, None)
        defaults = _read_defaults(context, path, values, _options_of(context.command))
        context.default_map = {**(context.default_map or {}), **defaults}
        if models is not None:
            context.meta[_MODELS_META] = _read_models(context, path, models)


def models_of(context: click.Context) -> Mapping[str, Mapping[str, Any]]:
    """Return the options of each model of the file by name, converted by click; empty without tables.

    Raises:
        UsageError: There are tables, and an option of an upstream outside of them.
    """
    models: Mapping[str, Mapping[str, Any]] = context.meta.get(_MODELS_META, {})
    if models:
        for option in _options_of_upstreams(context.command).values():
            if context.get_parameter_source(str(option.name)) is not ParameterSource.DEFAULT:
                raise UsageError(
                    f"{option.opts[0]} is an option of one upstream; with [{MODELS}.NAME], set it in these tables"
                )
    return models


def _options_of_upstreams(command: click.Command) -> dict[str, click.Option]:
    names = _NAMES_UPSTREAM | names_of_agent_options()
    return {key: option for key, option in _options_of(command).items() if option.name in names}


def _read_models(context: click.Context, path: Path, models: object) -> dict[str, dict[str, Any]]:
    """Return the options of each model by name.

    Raises:
        UsageError: A value is not a table, a table has no upstream, or has an invalid key or value.
    """
    if not (isinstance(models, dict) and models and all(isinstance(each, dict) for each in models.values())):
        raise UsageError(f"{str(path)!r}, {MODELS!r}: expected tables, such as [{MODELS}.fast]")
    options = _options_of_upstreams(context.command)
    found: dict[str, dict[str, Any]] = {}
    for name, values in models.items():
        defaults = _read_defaults(context, path, values, options, within=f"{MODELS}.{name}.")
        if "upstream" not in values:
            raise UsageError(f"{str(path)!r}, '{MODELS}.{name}': `upstream` is missing")
        command = click.Command(name, params=[*options.values()])
        found[name] = command.make_context(name, [], default_map=defaults).params
    return found


def _read(path: Path) -> dict[str, Any]:
    """Return the values of a file.

    Raises:
        UsageError: The file cannot be read.
    """
    try:
        return tomllib.loads(read_own(path, "the file of options", is_named=True).decode())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageError(f"{str(path)!r} is not valid TOML: {error}") from error


def _read_defaults(
    context: click.Context,
    path: Path,
    values: Mapping[str, Any],
    options: Mapping[str, click.Option],
    *,
    within: str = "",
) -> dict[str, Any]:
    """Return the values of a file or of one of its tables, by click's names of the options.

    Args:
        options: The permitted options, by key.
        within: Prefix of the keys in messages.

    Raises:
        UsageError: A key is unknown, a value is invalid, or a value is a secret.
    """
    defaults: dict[str, Any] = {}
    for key, value in values.items():
        try:
            _refuse_secret(key, value)
            option = _find_option(options, key)
            placed = _place(option, _check_type(option, value), path.absolute().parent)
            option.type_cast_value(context, placed)
        except (click.BadParameter, UsageError) as error:
            raise UsageError(f"{str(path)!r}, {within + key!r}: {error}") from error
        defaults[str(option.name)] = placed
    return defaults


def _options_of(command: click.Command) -> dict[str, click.Option]:
    return {
        flag.removeprefix("--"): option
        for option in command.params
        if isinstance(option, click.Option)
        for flag in option.opts
        if flag.startswith("--") and flag.removeprefix("--") not in _NOT_IN_FILES
    }


def _find_option(options: Mapping[str, click.Option], key: str) -> click.Option:
    if key not in options:
        raise UsageError(f"unknown option; known: {', '.join(sorted(options))}")
    return options[key]


def _refuse_secret(key: str, value: object) -> None:
    if key == "token":
        raise UsageError(
            "this file must not contain secrets; give a file with `token-file`, or set the variable "
            "MIDSTREAM_GATEWAY_TOKEN"
        )
    if key == "agent-env" and isinstance(value, list):
        for each in value:
            if isinstance(each, str) and _SECRET.fullmatch(each):
                name = each.partition("=")[0]
                raise UsageError(
                    f"this file must not contain secrets; write {name!r} without a value, and set the variable "
                    "for the gateway"
                )


def _check_type(option: click.Option, value: Any) -> Any:  # noqa: ANN401 - a value of TOML
    """Return a value of the file.

    Raises:
        UsageError: The value does not have the type of its option.
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
        raise UsageError(f"the value has a wrong type; expected {expected}")
    return value


def _place(option: click.Option, value: Any, folder: Path) -> Any:  # noqa: ANN401 - a value of TOML
    """Resolve a path relative to the file's folder; return any other value unchanged."""
    if isinstance(option.type, click.Path):
        return str(folder / value)
    if isinstance(option.type, KeyLocationType) and not KeyLocationType.is_url(value):
        return str(folder / value)
    if option.name == "store" and (file := file_of(value)) is not None and value.endswith(str(file)):
        return value.removesuffix(str(file)) + str(folder / file)
    return value
