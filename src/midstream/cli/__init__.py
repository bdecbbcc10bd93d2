"""The command line: table of commands, common options, errors and exit codes.

Results go to stdout, messages to stderr. The module of a command is imported when the command is used, so that `--help`
imports only click and the standard library. Every error is one line on stderr (wrapped on a terminal), without a
traceback, and an exit code of `EXIT_CODES`.
"""

from __future__ import annotations

import importlib
import sys
import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from typing import Any, NoReturn

import click

from midstream.cli.exits import EXIT_CODES, INTERRUPTED, USAGE, of_bug, of_error, of_system, of_usage
from midstream.cli.terminal import COLOR_MODES, Ink, clean, columns
from midstream.cli.variables import name_variables
from midstream.errors import MidstreamError
from midstream.paths import Paths
from midstream.version import __version__

__all__ = ["Invocation", "main", "midstream_command"]

COMMANDS: dict[str, tuple[str, str]] = {
    "acp": ("midstream.cli.acp_command:acp", "Serve an agent to an editor (Agent Client Protocol)."),
    "access": (
        "midstream.cli.access_command:access",
        "List and revoke credentials of a server; write token files.",
    ),
    "backup": (
        "midstream.cli.backup_command:backup",
        "Copy the sessions into one file, also while a server uses them.",
    ),
    "cache": (
        "midstream.cli.cache:cache",
        "Show the cached share of each turn, and the reason for the rest.",
    ),
    "chat": (
        "midstream.cli.chat:chat",
        "Chat with an agent; survives Ctrl-C, lost connections and restarts.",
    ),
    "conformance": (
        "midstream.cli.conformance:conformance",
        "Test a server or a client of the stream protocol, clause by clause.",
    ),
    "demo": ("midstream.cli.demo_command:demo", "Watch a session survive a cut connection and a SIGKILL."),
    "doctor": (
        "midstream.cli.doctor:doctor",
        "Find and repair broken histories; check the connection to a server.",
    ),
    "gateway": ("midstream.cli.gateway:gateway", "Serve an agent through the APIs of OpenAI and Anthropic."),
    "login": ("midstream.cli.login:login", "Print a one-time login link for a browser."),
    "nodes": (
        "midstream.cli.nodes_command:nodes",
        "List the servers that share a store, with their sessions and their lag.",
    ),
    "pool": (
        "midstream.cli.pool_command:pool",
        "List or remove the upstream agents that are kept for reuse.",
    ),
    "resume": ("midstream.cli.resume:resume", "Resume a turn that was interrupted or failed."),
    "serve": ("midstream.cli.serve:serve", "Serve an agent."),
    "restore": (
        "midstream.cli.backup_command:restore",
        "Replace the database by a copy of the sessions that `backup` made.",
    ),
    "sessions": (
        "midstream.cli.sessions:sessions",
        "List, show, answer, resume, stop, export and delete sessions.",
    ),
    "store": (
        "midstream.cli.store_command:store",
        "Prepare a store in a database; copy a store into another one.",
    ),
    "token": ("midstream.cli.login:token", "Print your token for a server on this machine."),
    "verify": (
        "midstream.cli.verify_command:verify",
        "Check that no other program changed the journals of a store.",
    ),
}
"""Module and short help of each command; a test compares the latter with the command's own."""


class Invocation:
    """Common settings of the commands of one invocation.

    Args:
        color: "auto", "always" or "never".
    """

    def __init__(self, places: Paths, color: str) -> None:
        self.places = places
        self.out = Ink.on(sys.stdout, color)
        """Markup of stdout."""
        self.talk = Ink.on(sys.stderr, color)
        """Markup of stderr."""


class _Commands(click.Group):
    """Command group with lazy imports and one-line errors."""

    home: Path | None = None
    """The value of --home in this invocation."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            import difflib  # noqa: PLC0415 - only for a mistyped command

            if close := difflib.get_close_matches(cmd_name, COMMANDS, n=1):
                ctx.fail(f"No such command {cmd_name!r}. Did you mean {close[0]!r}?")
            return None
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        name_variables(command, cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 - see above
        with formatter.section("Commands"):
            formatter.write_dl([(name, purpose) for name, (_, purpose) in sorted(COMMANDS.items())])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[Any]:  # click's completion items
        item = importlib.import_module("click.shell_completion").CompletionItem
        options = super(click.Group, self).shell_complete(ctx, incomplete)
        named = [(name, purpose) for name, (_, purpose) in COMMANDS.items() if name.startswith(incomplete)]
        return [*(item(name, help=purpose) for name, purpose in named), *options]

    def invoke(self, ctx: click.Context) -> object:
        self.home = ctx.params["home"]
        return super().invoke(ctx)

    def main(  # type: ignore[override]  # click writes it as overloads
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,  # noqa: FBT001, FBT002 - click's signature
        **extra: object,
    ) -> object:
        self.home = None
        run = partial(super().main, args, prog_name, complete_var, standalone_mode=False, **extra)
        return sys.exit(_exit_code(run, self)) if standalone_mode else run()


def _exit_code(command: Callable[[], object], group: _Commands) -> int:
    """Run a command of a group; print an error in one line; return the exit code."""
    try:
        code = command()
        return code if isinstance(code, int) else 0
    except MidstreamError as error:
        return _refuse(*of_error(error))
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return USAGE
    except click.UsageError as error:
        return _refuse(*of_usage(error))
    except click.ClickException as error:
        return _refuse(error.format_message(), 1)
    except (KeyboardInterrupt, click.Abort):
        return INTERRUPTED
    except OSError as error:
        return _refuse(*of_system(error, Paths.find(group.home).state))
    except Exception as error:  # noqa: BLE001 - the top of the process
        return _refuse(*of_bug(error, Paths.find(group.home).state))


def _refuse(line: str, code: int) -> int:
    message = f"midstream: {clean(line, is_one_line=True)}"
    if sys.stderr.isatty():
        message = textwrap.fill(message, columns(), break_long_words=False, break_on_hyphens=False)
    click.echo(message, err=True)
    return code


_EPILOG = "\b\nExit codes:\n" + "\n".join(f"  {code:>3}  {meaning}" for code, meaning in EXIT_CODES.items())


@click.command(
    "midstream",
    cls=_Commands,
    epilog=_EPILOG,
    context_settings={"auto_envvar_prefix": "MIDSTREAM", "help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, prog_name="midstream", message="%(prog)s %(version)s")
@click.option(
    "--home",
    type=click.Path(file_okay=False, path_type=Path),
    envvar="MIDSTREAM_HOME",
    help="Folder for all files of midstream (default: the XDG folders).",
)
@click.option(
    "--color",
    type=click.Choice(COLOR_MODES),
    default="auto",
    show_default=True,
    help="auto: on a terminal, unless NO_COLOR or TERM=dumb is set.",
)
@click.pass_context
def midstream_command(ctx: click.Context, home: Path | None, color: str) -> None:
    """Durable AI-agent sessions.

    Results go to stdout, messages to stderr; a variable MIDSTREAM_<COMMAND>_<OPTION> sets an option.
    """
    ctx.obj = Invocation(Paths.find(home), color)


def main() -> NoReturn:
    """Run the command line of this process, and exit with its code."""
    for output in (sys.stdout, sys.stderr):
        if isinstance(output, TextIOWrapper):
            output.reconfigure(errors="backslashreplace")  # old terminals cannot encode every character
    midstream_command.main(prog_name="midstream")
    raise AssertionError("click has returned")
