"""Files that a command reads or changes, as its arguments."""

from __future__ import annotations

import os
from pathlib import Path

import click
from typing_extensions import override

from midstream.errors import NotFoundError


class InputFile(click.Path):
    """Path of a file that must exist. A missing file is not found; a missing file of settings is wrong use."""

    def __init__(self) -> None:
        super().__init__(exists=True, dir_okay=False, path_type=Path)

    @override
    def convert(
        self,
        value: str | os.PathLike[str],
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> str | bytes | os.PathLike[str]:
        if not Path(value).exists():
            raise NotFoundError(f"no file {os.fspath(value)!r}; check the path")
        return super().convert(value, param, ctx)
