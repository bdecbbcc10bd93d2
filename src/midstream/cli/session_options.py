"""Shared options of the commands about sessions: the source, the output, and completion of ids."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import wraps
from itertools import islice
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from midstream.cli import Invocation
from midstream.cli.key_option import key_file_option
from midstream.cli.option_groups import group_options
from midstream.cli.output import json_option
from midstream.cli.session_sources import ServerSource, Source, StoreSource
from midstream.cli.terminal import clean
from midstream.errors import MidstreamError, UsageError
from midstream.local_keys import URL_VARIABLE
from midstream.paths import Paths
from midstream.store.key_location import KeyLocation

T = TypeVar("T")

DEFAULT_URL = "http://127.0.0.1:8000"
COMPLETIONS_MAX = 50
"""Ids that completion offers; more would not fit the screen."""


def source_options(command: Callable[..., T]) -> Callable[..., T]:
    """Add the options of a source and of the output; the command receives `source` and `output`."""

    @wraps(command)
    def with_source(
        *args: Any,  # noqa: ANN401 - click passes options so
        store: str | None,
        url: str | None,
        key_file: KeyLocation | None,
        **options: Any,  # noqa: ANN401 - see above
    ) -> T:
        invocation = click.get_current_context().find_object(Invocation)
        assert invocation is not None, "the command belongs to `midstream_command`"
        return command(*args, source=source_of(invocation, store, url, key_file), **options)

    return group_options(
        key_file_option,
        click.option(
            "--store",
            metavar="FILE|URL",
            help="Read this store (default: that of `midstream serve`).",
        ),
        click.option("--url", metavar="URL", help="Use a running server, such as http://127.0.0.1:8000."),
        json_option(),
    )(with_source)


url_argument = click.argument("url", default=DEFAULT_URL, envvar=URL_VARIABLE)


def server_options(command: Callable[..., T]) -> Callable[..., T]:
    """Add the options of a server and of the output; the command receives `source` and `output`."""

    @wraps(command)
    def with_server(*args: Any, url: str, **options: Any) -> T:  # noqa: ANN401 - click passes options so
        return command(*args, source=ServerSource(url), **options)

    return group_options(
        click.option(
            "--url",
            metavar="URL",
            default=DEFAULT_URL,
            envvar=URL_VARIABLE,
            show_default=True,
            help=f"The server; also {URL_VARIABLE}.",
        ),
        json_option(),
    )(with_server)


def source_of(
    invocation: Invocation, store: str | None, url: str | None, key_file: KeyLocation | None = None
) -> Source:
    """Return the source.

    Raises:
        UsageError: Two sources are given, or a key file for a server.
    """
    if store and url:
        raise UsageError("--store and --url exclude each other; give one of them")
    if key_file and url:
        raise UsageError("--key-file is for a store; remove it with --url")
    return ServerSource(url) if url else StoreSource(store or invocation.places.store, key_file)


def complete(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete ids from the store of the options; requests to a server would take too long."""
    if ctx.params.get("url") not in (None, DEFAULT_URL):
        return []
    with contextlib.suppress(MidstreamError):
        source = StoreSource(ctx.params.get("store") or Paths.find().store, ctx.params.get("key_file"))
        fitting = (line for line in source.list() if line.id.startswith(incomplete))
        return [
            CompletionItem(line.id, help=clean(line.title, is_one_line=True))
            for line in islice(fitting, COMPLETIONS_MAX)
        ]
    return []
