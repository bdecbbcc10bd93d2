"""`midstream gateway`: put an upstream behind the APIs of OpenAI and Anthropic."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from pathlib import Path
from typing import Any

import click
import msgspec
from click.core import ParameterSource

from midstream.cli import Surroundings
from midstream.cli.agent_options import agent_options, read_agent_options
from midstream.cli.gateway_file import file_option
from midstream.cli.listening import LOCAL_HOSTS, address_options, log_to_stderr, report_options, run_server
from midstream.cli.store_option import encrypted_store
from midstream.cli.terminal import clean
from midstream.cli.upstream_options import find_upstream
from midstream.dialects.live_responses import GRACE_S
from midstream.environment import World
from midstream.errors import UsageError
from midstream.paths import make_folder
from midstream.server.gateway_app import KEPT_S
from midstream.server.gateway_app import gateway as gateway_app
from midstream.server.uvicorn_server import serve
from midstream.store.store_registry import show_store

GENERATED_TOKEN = "gateway-token"  # noqa: S105 - the name of a file
AUTHENTICATION = {"token": "--token", "token_file": "--token-file", "is_open": "--no-token"}
"""Options that decide how clients authenticate, with their flags. They exclude each other."""
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
@click.option("--token", default="", help="The key that clients send (default: generated once and stored).")
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
    type=click.Path(dir_okay=False, path_type=Path),
    help="Encrypt the database under the first key of this file; created if neither the file nor the database exists.",
)
@click.option(
    "--hide-tools", "hides_tools", is_flag=True, help="Do not show the tools that an agent runs itself."
)
@report_options
@click.pass_context
def gateway(context: click.Context, /, **options: Any) -> None:  # noqa: ANN401 - click passes options so
    """Serve an agent or a model under the APIs of OpenAI and Anthropic.

    Set the printed base URL in a client application. A stateful agent receives only new messages, and an answer
    survives a lost connection. Ctrl-C ends the gateway within 10 s.
    """
    log_to_stderr(options["log_level"], options["log_format"])
    surroundings: Surroundings = context.obj
    token = _token_of(context, options)
    if options["host"] not in LOCAL_HOSTS:
        _check_names(surroundings, options)
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
        token=token,
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
                "token": token,
            }
            click.echo(msgspec.json.encode(ready))
            return
        click.echo(
            f"{clean(model.name)} on {url}. Ctrl-C stops it. Configure a client application with:", err=True
        )
        click.echo(f"  OPENAI_BASE_URL={url}/v1\n  ANTHROPIC_BASE_URL={url}", err=True)
        shown = "any value; no key is required" if token is None else token
        click.echo(f"  API key: {shown}", err=True)

    work = serve(
        app,
        host=options["host"],
        port=options["port"],
        allowed_hosts=options["allowed_hosts"],
        on_listening=report,
    )
    run_server(work)
    if surroundings.talk.is_terminal:
        click.echo(err=True)  # the shell's prompt stands on a line of its own, not behind "^C"


def _check_names(surroundings: Surroundings, options: dict[str, Any]) -> None:
    """Require host names for access from the network, and warn what can be read.

    Raises:
        UsageError: There are no names.
    """
    if not options["allowed_hosts"]:
        message = f"--host {options['host']} opens the server to the network"
        raise UsageError(f"{message}; list the permitted host names with --allow-host")
    warning = "Warning: keys and text are sent unencrypted; use a proxy with TLS."
    click.echo(surroundings.talk.yellow(warning), err=True, color=True)


def _token_of(context: click.Context, options: dict[str, Any]) -> str | None:
    """Return the token of clients: the given one, or the one that an earlier start has made, or a new one."""
    flag = _authentication_of(context, options)
    if flag == "is_open":
        if options["host"] not in LOCAL_HOSTS:
            raise UsageError("--no-token serves this machine only; leave out --host")
        return None
    if flag == "token":
        return str(options["token"])
    if flag == "token_file":
        return _read_given_token(options["token_file"])
    path = make_folder(context.obj.places.data) / GENERATED_TOKEN
    with contextlib.suppress(FileNotFoundError):
        if stored := _read_token(path, "remove it, and a new key is generated"):
            return stored
    token = World().new_secret()
    # Nobody else may read it, not even for the instant between making and writing.
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(token + "\n")
    return token


def _authentication_of(context: click.Context, options: dict[str, Any]) -> str:
    """Return which option decides how clients authenticate, or "": a flag, else a variable, else the file of options.

    Raises:
        UsageError: Two of one source are given.
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


def _read_given_token(path: Path) -> str:
    """Return the token of a file that the operator wrote.

    Raises:
        UsageError: It holds none, or users other than its owner may read it.
    """
    if sys.platform != "win32" and path.stat().st_mode & 0o077:
        raise UsageError(f"the key in {str(path)!r} is readable by other users; restrict it with chmod 600")
    advice = "write the key into it, on one line"
    token = _read_token(path, advice)
    if not token:
        raise UsageError(f"{str(path)!r} is empty; {advice}")
    return token


def _read_token(path: Path, advice: str) -> str:
    """Return the token that a file holds; "" where it is empty.

    Raises:
        UsageError: It holds something else.
    """
    try:
        token = path.read_text(encoding="ascii").strip()
    except UnicodeDecodeError as error:
        raise UsageError(f"{str(path)!r} holds no key; {advice}") from error
    if len(token.split()) > 1:
        raise UsageError(f"{str(path)!r} holds more than a key; {advice}")
    return token
