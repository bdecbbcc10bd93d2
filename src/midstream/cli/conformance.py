"""`midstream conformance`: try any server of the stream protocol, clause by clause."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping, Sequence

import click
import msgspec

from midstream.cli import Surroundings
from midstream.cli.exits import VERIFICATION
from midstream.cli.terminal import Ink, clean
from midstream.client.connection_headers import ConnectionHeaders
from midstream.client.requests import delete
from midstream.client.transport_selection import RememberedTransports, TransportKind, TransportSelection
from midstream.client.transports import base_url
from midstream.environment import World
from midstream.errors import MidstreamError, UsageError
from midstream.local_keys import headers_for
from midstream.testing.conformance.scripts import Script, scripts
from midstream.testing.conformance.server_side import WAIT_S, ScriptOutcome, ServerTrial


@click.command(short_help="Test a server of the stream protocol, clause by clause.")
@click.argument("url")
@click.option(
    "--only",
    "words",
    metavar="WORDS",
    default="",
    help="Only scripts with this text in their name or clauses.",
)
@click.option(
    "--transport",
    "ways",
    type=click.Choice([way.value for way in TransportKind]),
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
    help="Seconds for each answer.",
)
@click.option("--keep", "is_kept", is_flag=True, help="Keep the sessions of the scripts.")
@click.option("--json", "is_json", is_flag=True, help="One JSON object for each script.")
@click.pass_obj
def conformance(
    surroundings: Surroundings,
    url: str,
    words: str,
    ways: tuple[str, ...],
    named: tuple[str, ...],
    wait_s: float,
    is_kept: bool,  # noqa: FBT001 - click passes options so
    is_json: bool,  # noqa: FBT001 - see above
) -> int:
    """Test a server of the stream protocol at URL, clause by clause, over each transport.

    Each script opens its own session and sends a few messages to the agent there, whose answers do not matter. The
    sessions are deleted in the end. Each difference is printed with its step and the server's frames.
    """
    headers = {**headers_for(url), **_headers(named)}
    told = [each for each in scripts("server") if words in each.name or words in each.clauses]
    chosen = [
        (TransportKind(way), each)
        for way in ways or TransportKind
        for each in told
        if each.fits(TransportKind(way))
    ]
    if not chosen:
        raise UsageError(f"no script matches {words!r}")
    return asyncio.run(
        _try(surroundings, base_url(url), headers, chosen, wait_s, is_kept=is_kept, is_json=is_json)
    )


def _headers(named: Sequence[str]) -> dict[str, str]:
    headers = {}
    for each in named:
        name, colon, value = each.partition(":")
        if not (name and colon):
            raise UsageError("a header looks like 'authorization: Bearer …'")
        headers[name.strip()] = value.strip()
    return headers


async def _try(
    surroundings: Surroundings,
    url: str,
    headers: Mapping[str, str],
    chosen: Sequence[tuple[TransportKind, Script]],
    wait_s: float,
    *,
    is_kept: bool,
    is_json: bool,
) -> int:
    world = World()
    carriers = {
        way: TransportSelection(
            url,
            transport=way,
            headers=ConnectionHeaders(url, headers),
            remembered=RememberedTransports(None),
        )
        for way, _ in chosen
    }
    trials = {
        way: ServerTrial(carrier.connect, way=way, world=world, wait_s=wait_s)
        for way, carrier in carriers.items()
    }
    different = 0
    try:
        for number, (way, script) in enumerate(chosen, start=1):
            if surroundings.talk.is_terminal:
                line = f"{number}/{len(chosen)} {way}: {script.name}"
                click.echo(f"\r\x1b[K{line[:100]}", err=True, nl=False)
            outcome = await trials[way].run(script)
            if surroundings.talk.is_terminal:
                click.echo("\r\x1b[K", err=True, nl=False)
            different += not outcome.is_kept
            _show(outcome, surroundings.out, is_json=is_json)
    finally:
        for carrier in carriers.values():
            await carrier.close()
        if not is_kept:
            for trial in trials.values():
                await _clear(url, trial.sessions, headers)
    click.echo(f"{len(chosen) - different} of {len(chosen)} scripts passed.", err=True)
    return VERIFICATION if different else 0


def _show(outcome: ScriptOutcome, ink: Ink, *, is_json: bool) -> None:
    if is_json:
        click.echo(json.dumps({**msgspec.to_builtins(outcome), "is_kept": outcome.is_kept}))
        return
    verdict = ink.green("kept") if outcome.is_kept else ink.red("BROKEN")
    click.echo(f"{verdict}  {outcome.transport}: {outcome.script} ({', '.join(outcome.clauses)})", color=True)
    if not outcome.is_kept:
        click.echo(f"        step {outcome.step}: {clean(outcome.problem, is_one_line=True)}", color=True)
        for frame in outcome.heard:
            click.echo(f"        received: {clean(frame, is_one_line=True)}", color=True)


async def _clear(url: str, sessions: Mapping[str, str], headers: Mapping[str, str]) -> None:
    """Delete what the scripts opened, where the server deletes; a foreign one need not."""
    for session, secret in sessions.items():
        with contextlib.suppress(MidstreamError):
            await delete(url, session, {**headers, "x-idempotent-encryption-key": secret})
