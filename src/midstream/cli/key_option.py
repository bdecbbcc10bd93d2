"""The option for the operator's keys: a key file, or the URL of the application's key endpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from typing_extensions import override

from midstream.cli.env_secrets import read_secret_variable
from midstream.store.key_location import KeyEndpoint, KeyLocation

TOKEN_VARIABLE = "MIDSTREAM_KEY_TOKEN"  # noqa: S105 - the name of a variable
"""Variable with the bearer token for the key endpoint."""
FILE_VARIABLE = "MIDSTREAM_KEY_TOKEN_FILE"
"""Variable with the path of a file with that token, readable by its owner only."""


class KeyLocationType(click.ParamType[KeyLocation]):
    """A path, or the URL of a key endpoint, whose token is in the environment.

    Args:
        exists: Whether a file must exist.
    """

    name = "file|url"

    def __init__(self, *, exists: bool) -> None:
        self._path = click.Path(exists=exists, dir_okay=False, path_type=Path)

    @staticmethod
    def is_url(value: str) -> bool:
        """Return whether a value is the URL of a key endpoint."""
        return value.startswith(("http://", "https://"))

    @override
    def convert(
        self,
        value: Any,
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> KeyLocation:
        if isinstance(value, KeyEndpoint | Path):
            return value
        if self.is_url(str(value)):
            return KeyEndpoint(
                str(value), read_secret_variable(TOKEN_VARIABLE, FILE_VARIABLE, "the key token")
            )
        return Path(self._path.convert(value, param, ctx))


key_file_option = click.option(
    "--key-file",
    type=KeyLocationType(exists=True),
    help="The key file of that database, or the URL of its key endpoint, if it is encrypted.",
)
