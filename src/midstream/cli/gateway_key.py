"""The key of a gateway's clients, and its source."""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from msgspec import Struct

from midstream.cli.listening import LOCAL_HOSTS
from midstream.environment import World
from midstream.errors import UsageError
from midstream.file_safety import create_own_once, read_secret_text
from midstream.paths import make_folder
from midstream.server.client_keys import KEY_CHARS_MIN

GENERATED_TOKEN = "gateway-token"  # noqa: S105 - the name of a file
AUTHENTICATION = {"token": "--token", "token_file": "--token-file", "is_open": "--no-token"}
"""The mutually exclusive options of authentication, with their flags."""
TOKEN_VARIABLE = "MIDSTREAM_GATEWAY_TOKEN"  # noqa: S105 - the name of a variable
_INSTEAD = f"write it into a file of mode 600 and give --token-file, or set the variable {TOKEN_VARIABLE}"


class GatewayKey(Struct, frozen=True):
    """A key, and its place.

    Args:
        key: The key; None if every program of this machine has access.
        file: The file with the key, if any.
        place: Description of the place.
    """

    key: str | None
    file: Path | None
    place: str

    def __repr__(self) -> str:
        return f"GatewayKey(place={self.place!r})"


def find_key(context: click.Context, options: dict[str, Any], data: Path) -> GatewayKey:
    """Return the key of clients: the given one, else the generated one, which the first start creates.

    Args:
        data: Folder of the generated key.

    Raises:
        UsageError: The options contradict each other, the key is too short, or its file is not private.
    """
    flag = _authentication_of(context, options)
    if flag == "is_open":
        if options["host"] not in LOCAL_HOSTS:
            raise UsageError("--no-token serves this machine only; remove --host")
        return GatewayKey(None, None, "any value; no key is required")
    if flag == "token":
        return _given_key(context, options)
    if flag == "token_file":
        path: Path = options["token_file"]
        key = _read_key(path, "write the key into it, on one line", follows_links=True)
        if not key:
            raise UsageError(f"{str(path)!r} is empty; write the key into it, on one line")
        return _checked(GatewayKey(key, path, f"in {path}"))
    return _generated_key(make_folder(data) / GENERATED_TOKEN)


def _given_key(context: click.Context, options: dict[str, Any]) -> GatewayKey:
    if context.get_parameter_source("token") is not ParameterSource.COMMANDLINE:
        return _checked(GatewayKey(options["token"], None, f"in the variable {TOKEN_VARIABLE}"))
    if options["host"] not in LOCAL_HOSTS:
        raise UsageError(f"other users of this machine can read the key of --token; {_INSTEAD}")
    found = _checked(GatewayKey(options["token"], None, "the value of --token"))
    warning = f"Warning: other users of this machine can read the key of --token; {_INSTEAD}."
    click.echo(context.obj.talk.yellow(warning), err=True, color=True)
    return found


def _generated_key(path: Path) -> GatewayKey:
    read = functools.partial(_read_key, path, "remove it, and a new key is generated", follows_links=False)
    with contextlib.suppress(FileNotFoundError):
        if stored := read():
            return _checked(GatewayKey(stored, path, f"in {path}"))
        path.unlink()  # an empty file has no key
    create_own_once(path, f"{World().new_secret()}\n".encode())  # of two gateways, the first one creates it
    return _checked(GatewayKey(read(), path, f"in {path}"))


def _authentication_of(context: click.Context, options: dict[str, Any]) -> str:
    """Return the option of authentication, or "", from the flags, else the variables, else the configuration file.

    Raises:
        UsageError: One source has two of these options.
    """
    for source in (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT, ParameterSource.DEFAULT_MAP):
        given = [
            name for name in AUTHENTICATION if options[name] and context.get_parameter_source(name) is source
        ]
        if len(given) > 1:
            named = " and ".join(AUTHENTICATION[name] for name in given)
            raise UsageError(f"{named} exclude each other; give only one of them")
        if given:
            return given[0]
    return ""


def _read_key(path: Path, advice: str, *, follows_links: bool) -> str:
    """Return the key in a file; "" if it is empty.

    Raises:
        UsageError: The file contains something else, or other users may read it.
    """
    key = read_secret_text(path, "the key", is_named=follows_links).strip()
    if len(key.split()) > 1:
        raise UsageError(f"{str(path)!r} contains more than a key; {advice}")
    if not (key.isascii() and key.isprintable()):
        raise UsageError(f"{str(path)!r} does not contain a key; {advice}")
    return key


def _checked(found: GatewayKey) -> GatewayKey:
    if found.key is not None and len(found.key) < KEY_CHARS_MIN:
        raise UsageError(
            f"the key ({found.place}) has fewer than {KEY_CHARS_MIN} characters and can be guessed; remove "
            "it, and a key is generated"
        )
    return found
