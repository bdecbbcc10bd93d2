"""`midstream conformance`: test any server or client of the stream protocol, clause by clause."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import click
import msgspec

from midstream.cli import Invocation
from midstream.cli.exits import VERIFICATION
from midstream.cli.terminal import Ink, clean
from midstream.client.connection_headers import ConnectionHeaders
from midstream.client.requests import delete
from midstream.client.transport_selection import RememberedTransports, TransportKind, TransportSelection
from midstream.client.transports import base_url
from midstream.environment import World
from midstream.errors import MidstreamError, UsageError
from midstream.local_keys import headers_for
from midstream.testing.conformance.client_program import ClientProgram
from midstream.testing.conformance.client_wire import WireTrial
from midstream.testing.conformance.scripted_server import ScriptedServer
from midstream.testing.conformance.scripts import Script, Side, scripts
from midstream.testing.conformance.server_side import WAIT_S, ScriptOutcome, ServerTrial


@click.command(short_help="Test a server or a client of the stream protocol, clause by clause.")
@click.argument("url", required=False)
@click.option(
    "--client",
    "command",
    metavar="COMMAND",
    help="Test this client program instead of a server; it is controlled by JSON lines on stdin and stdout.",
)
@click.option(
    "--only",
    "words",
    metavar="WORDS",
    default="",
    help="Run only scripts with this text in their name or clauses.",
)
@click.option(
    "--transport",
    "transports",
    type=click.Choice([transport.value for transport in TransportKind]),
    multiple=True,
    help="The transport; may be repeated (default: each one in turn).",
)
@click.option(
    "--header",
    "named",
    metavar="NAME:VALUE",
    multiple=True,
    help="Header of each request, such as an authorization; may be repeated.",
)
@click.option(
    "--wait",
    "wait_s",
    metavar="S",
    type=float,
    default=WAIT_S,
    show_default=True,
    help="Time limit of each answer in seconds.",
)
@click.option("--keep", "is_kept", is_flag=True, help="Keep the sessions of the scripts.")
@click.option("--json", "is_json", is_flag=True, help="Print one JSON object for each script.")
@click.pass_obj
def conformance(
    invocation: Invocation,
    url: str | None,
    command: str | None,
    words: str,
    transports: tuple[str, ...],
    named: tuple[str, ...],
    wait_s: float,
    is_kept: bool,  # noqa: FBT001 - click passes options so
    is_json: bool,  # noqa: FBT001 - see above
) -> int:
    """Test a server or a client of the stream protocol, clause by clause.

    The server is at URL, and is tested over each transport. Each script opens its own session and sends a few messages
    to the agent, whose answers do not matter. The sessions are deleted at the end. Differences are printed with their
    step and the server's frames.

    With --client, a scripted server tests a client program: `docs/spec/minimal-client.md` describes the JSON lines.
    Differences are printed with their step and the client's frames. The exit code is 6 if there is a difference.
    """
    report = _Report(invocation, is_json=is_json)
    if command is not None:
        if url is not None or named or is_kept:
            raise UsageError("--client takes no URL, --header or --keep: its server is a scripted one")
        asyncio.run(_try_client(report, _program(command), _chosen("client", transports, words), wait_s))
    elif url is None:
        raise UsageError("give the URL of a server, or a client program with --client")
    else:
        headers = {**headers_for(url), **_headers(named)}
        chosen = _chosen("server", transports, words)
        asyncio.run(_try(report, base_url(url), headers, chosen, wait_s, is_kept=is_kept))
    return report.finish()


def _chosen(side: Side, transports: Sequence[str], words: str) -> list[tuple[TransportKind, Script]]:
    matches = [each for each in scripts(side) if words in each.name or words in each.clauses]
    kinds = [TransportKind(transport) for transport in transports or TransportKind]
    chosen = [
        (transport, each)
        for transport in kinds
        for each in matches
        if side == "client" or each.fits(transport)
    ]
    if not chosen:
        raise UsageError(f"no script matches {words!r}")
    return chosen


def _program(command: str) -> list[str]:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UsageError(f"--client {command!r} is not a command: {error}") from error
    if not words or shutil.which(words[0]) is None:
        raise UsageError(f"--client {command!r}: there is no program {words[0] if words else ''!r}")
    return words


def _headers(named: Sequence[str]) -> dict[str, str]:
    headers = {}
    for each in named:
        name, colon, value = each.partition(":")
        if not (name and colon):
            raise UsageError("a header must have the form 'authorization: Bearer …'")
        headers[name.strip()] = value.strip()
    return headers


class _Report:
    """Prints the outcome of each script after its run, and a count at the end."""

    def __init__(self, invocation: Invocation, *, is_json: bool) -> None:
        self._ink = invocation.out
        self._is_terminal = invocation.talk.is_terminal
        self._is_json = is_json
        self._count = self._different = 0

    def announce(self, number: int, total: int, transport: TransportKind, script: Script) -> None:
        """Show on a terminal which script runs."""
        if self._is_terminal:
            line = f"{number}/{total} {transport}: {script.name}"
            click.echo(f"\r\x1b[K{line[:100]}", err=True, nl=False)

    def show(self, outcome: ScriptOutcome) -> None:
        """Print the outcome of a script."""
        if self._is_terminal:
            click.echo("\r\x1b[K", err=True, nl=False)
        self._count += 1
        self._different += not outcome.has_passed
        _show(outcome, self._ink, is_json=self._is_json)

    def finish(self) -> int:
        """Print the count; return the exit code."""
        click.echo(f"{self._count - self._different} of {self._count} scripts passed.", err=True)
        return VERIFICATION if self._different else 0


async def _try(
    report: _Report,
    url: str,
    headers: Mapping[str, str],
    chosen: Sequence[tuple[TransportKind, Script]],
    wait_s: float,
    *,
    is_kept: bool,
) -> None:
    world = World()
    carriers = {
        transport: TransportSelection(
            url,
            transport=transport,
            headers=ConnectionHeaders(url, headers),
            remembered=RememberedTransports(None),
        )
        for transport, _ in chosen
    }
    trials = {
        transport: ServerTrial(carrier.connect, transport=transport, world=world, wait_s=wait_s)
        for transport, carrier in carriers.items()
    }
    try:
        for number, (transport, script) in enumerate(chosen, start=1):
            report.announce(number, len(chosen), transport, script)
            report.show(await trials[transport].run(script))
    finally:
        for carrier in carriers.values():
            await carrier.close()
        if not is_kept:
            for trial in trials.values():
                await _clear(url, trial.sessions, headers)


async def _try_client(
    report: _Report, program: Sequence[str], chosen: Sequence[tuple[TransportKind, Script]], wait_s: float
) -> None:
    world = World()
    async with ScriptedServer(world=world).listening() as server:
        with tempfile.TemporaryDirectory(prefix="midstream-conformance-") as folder:
            client = ClientProgram(program, server.url, Path(folder), wait_s=wait_s, world=world)
            trial = WireTrial(server, client, wait_s=wait_s, world=world)
            for number, (transport, script) in enumerate(chosen, start=1):
                report.announce(number, len(chosen), transport, script)
                report.show(await trial.run(script, transport))


def _show(outcome: ScriptOutcome, ink: Ink, *, is_json: bool) -> None:
    if is_json:
        click.echo(json.dumps({**msgspec.to_builtins(outcome), "has_passed": outcome.has_passed}))
        return
    verdict = ink.green("passed") if outcome.has_passed else ink.red("FAILED")
    click.echo(f"{verdict}  {outcome.transport}: {outcome.script} ({', '.join(outcome.clauses)})", color=True)
    if not outcome.has_passed:
        click.echo(f"        step {outcome.step}: {clean(outcome.problem, is_one_line=True)}", color=True)
        for frame in outcome.last_frames:
            click.echo(f"        received: {clean(frame, is_one_line=True)}", color=True)


async def _clear(url: str, sessions: Mapping[str, str], headers: Mapping[str, str]) -> None:
    """Delete the sessions of the scripts; other implementations may not support deletion."""
    for session, secret in sessions.items():
        with contextlib.suppress(MidstreamError):
            await delete(url, session, {**headers, "x-idempotent-encryption-key": secret})
