"""`midstream gateway`: put an upstream behind the APIs of OpenAI and Anthropic."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import click
import msgspec

from midstream.cli import Surroundings
from midstream.cli.agent_options import agent_options, read_agent_options
from midstream.cli.gateway_file import file_option
from midstream.cli.gateway_key import find_key
from midstream.cli.key_option import KeyPlaceType
from midstream.cli.listening import (
    address_options,
    log_to_stderr,
    raw_limits_of,
    report_options,
    require_safe_address,
    run_server,
)
from midstream.cli.store_option import encrypted_store
from midstream.cli.terminal import clean
from midstream.cli.upstream_options import find_upstream
from midstream.dialects.live_responses import GRACE_S
from midstream.paths import make_folder
from midstream.server.gateway_app import KEPT_S
from midstream.server.gateway_app import gateway as gateway_app
from midstream.server.uvicorn_server import serve
from midstream.store.store_registry import show_store

HOUR_S = 3600.0
COLLECT_AFTER = 5_000
"""Objects made, less those gone again, after which Python looks for what only holds itself: a hundred answers make
thousands, nearly none of them so, and all of them stand still while it looks."""


@click.command(short_help="Serve an agent under the APIs of OpenAI and Anthropic.")
@file_option
@click.option(
    "--upstream",
    required=True,
    metavar="KIND[:DETAIL]",
    help="claude, cursor:MODEL, codex, acp:COMMAND, openai:MODEL, openai-compatible:URL, or scripted.",
)
@click.option("--model", default="", help="The upstream's model, if DETAIL is something else.")
@click.option(
    "--cwd",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=Path(),
    help="The working folder of an agent (default: this one).",
)
@click.option(
    "--key-from",
    "key_variable",
    default="",
    metavar="VARIABLE",
    help="The environment variable with the upstream's key, if the upstream does not find its own.",
)
@address_options(port=8100)
@click.option(
    "--store",
    metavar="FILE|URL",
    help="The store of conversations and responses (default: in midstream's data folder).",
)
@click.option(
    "--token",
    default="",
    help="The key that clients send, 16 characters at least (default: generated once and stored). Better: "
    "MIDSTREAM_GATEWAY_TOKEN or --token-file, which other users cannot read.",
)
@click.option(
    "--token-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A file with the key that clients send, readable by you only.",
)
@click.option(
    "--no-token",
    "is_open",
    is_flag=True,
    help="Do not authenticate: every program on this machine has access.",
)
@click.option(
    "--serve-as",
    "names",
    multiple=True,
    metavar="NAME",
    help="Accept only this model name; may be repeated (default: any name).",
)
@click.option(
    "--grace",
    "grace_s",
    type=click.FloatRange(0, 3600),
    default=GRACE_S,
    show_default=True,
    help="Seconds that a response continues after its last reader left.",
)
@click.option(
    "--keep-sessions-hours",
    type=click.FloatRange(min=0, min_open=True),
    default=KEPT_S / HOUR_S,
    show_default=True,
    help="Hours after its last response until the text of a conversation is deleted.",
)
@agent_options
@click.option(
    "--key-file",
    type=KeyPlaceType(exists=False),
    help="Encrypt the database under the first key of this file; created if neither the file nor the database exists. "
    "A URL uses the key endpoint there.",
)
@click.option(
    "--hide-tools", "hides_tools", is_flag=True, help="Do not show the tools that an agent runs itself."
)
@report_options
@click.pass_context
def gateway(context: click.Context, /, **options: Any) -> None:  # noqa: ANN401 - click passes options so
    """Serve an agent or a model under the APIs of OpenAI and Anthropic.

    Set the printed base URL in a client application, with the key. A stateful agent receives only new messages, and
    an answer survives a lost connection. Ctrl-C ends the gateway within 10 s.
    """
    log_to_stderr(options["log_level"], options["log_format"])
    surroundings: Surroundings = context.obj
    key = find_key(context, options, surroundings.places.data)
    tls = require_safe_address(options)
    path = options["store"] or make_folder(surroundings.places.data) / surroundings.places.gateway_store.name
    store = encrypted_store(path, options["key_file"], is_escrowed=False)
    model = find_upstream(
        options["upstream"],
        store,
        model=options["model"],
        cwd=options["cwd"],
        key_variable=options["key_variable"],
        options=read_agent_options(options),
    )
    app = gateway_app(
        model,
        token=key.key,
        store=store,
        names=options["names"],
        grace_s=options["grace_s"],
        kept_s=options["keep_sessions_hours"] * HOUR_S,
        shows_upstream_calls=not options["hides_tools"],
    )

    def report(url: str) -> None:
        gc.freeze()  # what is loaded by now stays: the collector need not traverse it again
        gc.set_threshold(COLLECT_AFTER)
        if options["is_json"]:
            ready = {
                "url": url,
                "pid": os.getpid(),
                "store": show_store(path),
                "upstream": model.name,
                "requires_key": key.key is not None,
                "key_file": str(key.file) if key.file else None,
            }
            click.echo(msgspec.json.encode(ready))
            return
        click.echo(
            f"{clean(model.name)} on {url}. Ctrl-C stops it. Configure a client application with:", err=True
        )
        click.echo(f"  OPENAI_BASE_URL={url}/v1\n  ANTHROPIC_BASE_URL={url}", err=True)
        # A log would keep the key where others may read it.
        is_shown = key.key is not None and surroundings.talk.is_terminal
        click.echo(f"  API key: {key.key if is_shown else key.place}", err=True)

    work = serve(
        app,
        host=options["host"],
        port=options["port"],
        allowed_hosts=options["allowed_hosts"],
        tls=tls,
        allows_plain_text=options["allows_plain_text"],
        raw_limits=raw_limits_of(options),
        on_listening=report,
    )
    run_server(work)
    if surroundings.talk.is_terminal:
        click.echo(err=True)  # the shell's prompt stands on a line of its own, not behind "^C"
