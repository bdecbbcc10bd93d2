"""`midstream gateway`: serve an upstream through the APIs of OpenAI and Anthropic."""

from __future__ import annotations

import gc
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import click
import msgspec

from midstream.cli import Invocation
from midstream.cli.agent_options import OF_STORE, agent_options, read_agent_options
from midstream.cli.gateway_file import PRICES, file_option, models_of
from midstream.cli.gateway_key import GatewayKey, find_key
from midstream.cli.gateway_keys_command import keys, users_file
from midstream.cli.gateway_usage_command import usage
from midstream.cli.listening import (
    address_options,
    log_to_stderr,
    raw_limits_of,
    report_options,
    require_safe_address,
    run_server,
)
from midstream.cli.option_groups import FiniteRange, encryption_option
from midstream.cli.store_option import encrypted_store
from midstream.cli.terminal import clean
from midstream.cli.upstream_options import find_upstream, is_pooled
from midstream.cli.workers import run_workers, workers_option
from midstream.dialects.gateway_bodies import BODY_BYTES_MAX
from midstream.dialects.live_responses import GRACE_S
from midstream.dialects.usage_totals import Prices
from midstream.errors import UsageError
from midstream.models.model import Model
from midstream.models.routed_models import Route, RoutedModels
from midstream.paths import make_folder
from midstream.server.gateway_app import KEPT_S
from midstream.server.gateway_app import gateway as gateway_app
from midstream.server.uvicorn_server import serve
from midstream.server.worker_link import find_link
from midstream.store.contract import Store
from midstream.store.store_registry import show_store

HOUR_S = 3600.0
_PRICE = FiniteRange(min=0)
COLLECT_AFTER = (1_000, 50)
"""Thresholds of Python's garbage collector. Answers allocate many objects, but few cycles, and a collection stops all
answers. With 100 streams on a busy machine, a collection took 1.4 ms. With 5,000 and 10 it took 6.7 ms once a second,
and half the time in total. The bar is 15 ms at the 99th percentile of the first token."""


@click.group(
    invoke_without_command=True,
    subcommand_metavar="[keys|usage ...]",
    short_help="Serve an agent through the APIs of OpenAI and Anthropic.",
)
@file_option
@click.option(
    "--upstream",
    default="",
    metavar="KIND[:DETAIL]",
    help="claude, cursor:MODEL, codex, acp:COMMAND, openai:MODEL, anthropic:MODEL, openai-compatible:URL, or scripted. "
    "Required, except with tables [models.NAME] in the file of --config.",
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
    help="The environment variable with the upstream's key (default: the upstream's own variable).",
)
@click.option(
    "--input-price",
    type=_PRICE,
    metavar="COST",
    help="Price of a million input tokens, for the cost of usage, in any currency. Needs --output-price.",
)
@click.option("--output-price", type=_PRICE, metavar="COST", help="Price of a million output tokens.")
@click.option(
    "--cached-input-price",
    type=_PRICE,
    metavar="COST",
    help="Price of a million cached input tokens (default: that of other input).",
)
@address_options(port=8100)
@workers_option
@click.option(
    "--store",
    metavar="FILE|URL",
    help="The store of conversations and responses (default: in midstream's data folder).",
)
@click.option(
    "--token",
    default="",
    help="The key that clients send, at least 16 characters (default: generated once and stored). Better: "
    "MIDSTREAM_GATEWAY_TOKEN or --token-file, which other users cannot read.",
)
@click.option(
    "--token-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A file with the key that clients send, readable by you only.",
)
@click.option(
    "--users-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The file with the users' keys and limits (default: gateway-users in midstream's data folder). "
    "`midstream gateway keys` writes it; it is read again when it changes.",
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
    type=FiniteRange(0, 3600),
    default=GRACE_S,
    show_default=True,
    help="Seconds for which a response continues without a reader.",
)
@click.option(
    "--keep-sessions-hours",
    type=click.FloatRange(min=0, min_open=True),
    default=KEPT_S / HOUR_S,
    show_default=True,
    help="Hours from the last response to the deletion of a conversation's text.",
)
@agent_options
@encryption_option("the database", "database")
@click.option(
    "--hide-tools", "hides_tools", is_flag=True, help="Do not show the tools that an agent runs itself."
)
@report_options
@click.pass_context
def gateway(context: click.Context, /, **options: Any) -> None:  # noqa: ANN401 - click passes options so
    """Serve an agent or a model through the APIs of OpenAI and Anthropic.

    Configure a client application with the printed base URL and the key. A stateful agent receives only new messages,
    and an answer survives a lost connection. Ctrl-C ends the gateway within 10 s.

    `keys` manages keys of users, and `usage` shows their usage. Options of the gateway precede these commands.
    """
    if context.invoked_subcommand is not None:
        return
    link = find_link()
    log_to_stderr(options["log_level"], options["log_format"], worker=link.setup.number if link else 0)
    invocation: Invocation = context.obj
    models = _models_of(context, options)
    key = find_key(context, options, invocation.places.data)
    users, prices = _users_of(options, invocation, is_open=key.key is None), _prices_of(models, options)
    tls = require_safe_address(options)
    path = options["store"] or make_folder(invocation.places.data) / invocation.places.gateway_store.name
    report = partial(_report, invocation, key=key, is_json=options["is_json"])
    if link is None and options["workers"] > 1:
        run_workers(options, path, login="", on_ready=report)
        return
    store = encrypted_store(path, options["key_file"], is_escrowed=False)
    model = RoutedModels(_routes_of(models, store)) if models else _upstream_of(options, store)
    app = gateway_app(
        model,
        token=key.key,
        users=users,
        prices=prices,
        store=store,
        names=options["names"],
        grace_s=options["grace_s"],
        kept_s=options["keep_sessions_hours"] * HOUR_S,
        shows_upstream_calls=not options["hides_tools"],
    )
    if link is not None:
        app.reports.worker = link.setup.number

    def report_url(url: str) -> None:
        gc.freeze()  # loaded modules stay in memory: exclude them from collections
        gc.set_threshold(*COLLECT_AFTER)
        ready = {
            "url": url,
            "pid": os.getpid(),
            "store": show_store(path),
            "upstream": ", ".join(models) or model.name,
        }
        if link is None:
            report(ready)
        else:
            link.report = ready

    work = serve(
        app,
        host=options["host"],
        port=options["port"],
        allowed_hosts=options["allowed_hosts"],
        tls=tls,
        allows_plain_text=options["allows_plain_text"],
        on_listening=report_url,
        link=link,
        raw_limits=raw_limits_of(options),
        message_bytes_max=BODY_BYTES_MAX,
    )
    run_server(work)
    if invocation.talk.is_terminal and link is None:
        click.echo(err=True)  # puts the shell's prompt on a new line after "^C"


def _models_of(context: click.Context, options: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the options of each model by name, from the tables; options of the store are outside of the tables.

    Raises:
        click.MissingParameter: Neither a table nor an upstream is given.
        UsageError: Both are given.
    """
    of_store = {name: options[name] for name in OF_STORE}
    models = {
        name: {**(of_store if is_pooled(own["upstream"]) else {}), **own}
        for name, own in models_of(context).items()
    }
    if not (models or options["upstream"]):
        raise click.MissingParameter(ctx=context, param_hint="'--upstream'", param_type="option")
    return models


def _users_of(options: Mapping[str, Any], invocation: Invocation, *, is_open: bool) -> Path | None:
    """Return the file with the users' keys; None if no key is required.

    Raises:
        UsageError: No key is required, but a file is given.
    """
    if not is_open:
        return users_file(invocation.places, options["users_file"])
    if options["users_file"] is not None:
        raise UsageError("--no-token requires no key, so --users-file has no effect; remove one of them")
    return None


def _prices_of(models: Mapping[str, Mapping[str, Any]], options: Mapping[str, Any]) -> dict[str, Prices]:
    """Return the prices of the models by name; those of a single model under "".

    Raises:
        UsageError: One of the two required prices is missing.
    """
    prices = {}
    for name, each in (models or {"": options}).items():
        paid, answered, cached = (each[price] for price in PRICES)
        if (paid, answered, cached) == (None, None, None):
            continue
        if paid is None or answered is None:
            whose = f"model {name!r}: " if name else ""
            raise UsageError(f"{whose}a cost needs both --input-price and --output-price")
        prices[name] = Prices(paid, answered, cached)
    return prices


def _upstream_of(options: Mapping[str, Any], store: Store) -> Model:
    return find_upstream(
        options["upstream"],
        store,
        model=options["model"],
        cwd=options["cwd"],
        key_variable=options["key_variable"],
        options=read_agent_options(options),
    )


def _routes_of(models: Mapping[str, Mapping[str, Any]], store: Store) -> dict[str, Route]:
    """Return the models by name.

    Raises:
        UsageError: A model cannot be created; the message contains its name.
    """
    routes = {}
    for name, options in models.items():
        try:
            routes[name] = Route(_upstream_of(options, store), options["model"])
        except UsageError as error:
            raise UsageError(f"model {name!r}: {error.message}") from error
    return routes


def _report(invocation: Invocation, ready: dict[str, Any], *, key: GatewayKey, is_json: bool) -> None:
    """Print the address of the gateway, and the settings for client applications.

    Args:
        ready: The members `url`, `pid`, `store`, `upstream`, and `workers` if there are several.
    """
    if is_json:
        file = str(key.file) if key.file else None
        click.echo(msgspec.json.encode({**ready, "requires_key": key.key is not None, "key_file": file}))
        return
    url = ready["url"]
    workers = f", {ready['workers']} workers" if "workers" in ready else ""
    click.echo(
        f"{clean(ready['upstream'])} on {url}{workers}. Ctrl-C stops it. Configure a client application with:",
        err=True,
    )
    click.echo(f"  OPENAI_BASE_URL={url}/v1\n  ANTHROPIC_BASE_URL={url}", err=True)
    # Not in a log, which others may read.
    is_shown = key.key is not None and invocation.talk.is_terminal
    click.echo(f"  API key: {key.key if is_shown else key.place}", err=True)


gateway.add_command(keys)
gateway.add_command(usage)
