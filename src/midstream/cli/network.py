"""`midstream doctor URL`: the network between this machine and a server, as text or JSON."""

from __future__ import annotations

import asyncio
import json
import textwrap
from collections.abc import Iterator

import click
import msgspec

from midstream.cli import Invocation
from midstream.cli.exits import FAILURE, VERIFICATION
from midstream.cli.terminal import COLUMNS, Ink, clean, columns
from midstream.client.network_probe import DISTURBED, NetworkProbe, NetworkReport, Probed, ProbeOutcome
from midstream.local_keys import headers_for

NAMES = {"websocket": "WebSocket", "sse": "events (SSE)", "poll": "long poll", "post": "POST"}


def is_address(place: str) -> bool:
    """Return whether an argument is a server's URL instead of a file."""
    return place.startswith(("http://", "https://", "ws://", "wss://"))


def check_network(invocation: Invocation, url: str, *, is_json: bool) -> int:
    """Probe the network to a server, print the findings, and return the exit code.

    Raises:
        MidstreamError: No server, or not a midstream server, answers.
    """
    report = asyncio.run(NetworkProbe(url, headers=headers_for(url)).run())
    if is_json:
        click.echo(json.dumps({"is_clear": report.is_clear, **msgspec.to_builtins(report)}))
    else:
        width = columns() if invocation.out.is_terminal else COLUMNS
        for line in network_lines(report, invocation.out, width):
            click.echo(line, color=True)
    return exit_code_of(report)


def exit_code_of(report: NetworkReport) -> int:
    """Return the exit code of a report."""
    if report.transport is None:
        return FAILURE
    return 0 if report.is_clear else VERIFICATION


def network_lines(report: NetworkReport, ink: Ink, width: int) -> Iterator[str]:
    """Yield lines about the network to a server."""
    for probed in report.probed:
        head = f"{NAMES[probed.what]:<12} "
        first, *rest = textwrap.wrap(_words(probed), width - len(head) - 2)
        yield f"{_sign(probed.finding, ink)} {ink.bold(head)}{first}"
        for line in rest:
            yield f"{' ' * (len(head) + 2)}{line}"
    if report.via:
        yield from textwrap.wrap(f"It identifies itself as: {clean(report.via, is_one_line=True)}.", width)
    if report.transport is None:
        words = "No transport works undisturbed. Contact the operator of the proxy."
    elif report.lures:
        lures = " or ".join(NAMES[lure] for lure in report.lures)
        condition = f"unless it is given --transport {report.transport}."
        words = f"Works: {NAMES[report.transport]}. A client may stay with {lures} {condition}"
    else:
        words = f"A client takes {NAMES[report.transport]}."
    yield from textwrap.wrap(words, width, break_on_hyphens=False)


def _sign(finding: ProbeOutcome, ink: Ink) -> str:
    if finding is ProbeOutcome.WORKS:
        return ink.green("✓")
    return ink.yellow("!") if finding in DISTURBED else ink.red("✗")


def _words(probed: Probed) -> str:
    if probed.finding is not ProbeOutcome.WORKS:
        return f"{probed.finding}: {probed.detail}"
    if probed.what == "post":
        return f"works: answered after {probed.first_s:.2f} s"
    return f"works: {probed.chunks} chunks, the first after {probed.first_s:.2f} s"
