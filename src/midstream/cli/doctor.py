"""`midstream doctor`: checks of histories, of this installation, and of the network to a server."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path

import click
import msgspec
from msgspec.structs import replace

from midstream.cli import Invocation
from midstream.cli.exits import NOT_FOUND, UNREADABLE, VERIFICATION
from midstream.cli.findings_screen import ProgressLine, check_lines, report_lines, summary
from midstream.cli.kept_secrets import check_secrets
from midstream.cli.key_option import key_file_option
from midstream.cli.network import check_network, is_address
from midstream.cli.terminal import COLUMNS, columns
from midstream.doctor.examination import Examined, examine, examine_url, without_remedy
from midstream.doctor.findings import HistoryReport, Status
from midstream.doctor.history_places import places_in
from midstream.doctor.installation import CheckResult, checks
from midstream.doctor.shapes import resolve_format
from midstream.environment import World
from midstream.errors import MidstreamError, UsageError
from midstream.history.profiles import find_profile
from midstream.store.key_location import KeyLocation
from midstream.store.store_registry import is_store_url, show_store

STDIN = Path("-")
SHOWN_MAX = 5
"""Findings of one history that are printed; --json has all of them."""

EPILOG = """\b
Exit codes:
    0  clean
    3  no such file
    6  findings that a repair fixes without loss
    7  a file cannot be read, or cannot be repaired without loss
With --fix the code is that of the original; examine the copy to get 0.
\b
For a URL:
    0  all transports work undisturbed
    1  no transport works undisturbed, no answer, or authentication is required
    3  the server is not a midstream server
    6  a proxy disturbs a transport, and another transport works"""


@click.command(
    short_help="Find and repair broken histories; check the connection to a server.", epilog=EPILOG
)
@click.argument("named_places", metavar="[PATH | URL]...", nargs=-1)
@click.option(
    "--for",
    "profile",
    metavar="PROFILE",
    help="Apply the rules of this provider (default: those of the format).",
)
@click.option("--format", "named", metavar="FORMAT", help="The format of the files (default: detected).")
@key_file_option
@click.option(
    "--fix", is_flag=True, help="Write a repaired copy, NAME.repaired.EXT, beside each broken file."
)
@click.option("--in-place", is_flag=True, help="With --fix: replace the file, and keep it as NAME.EXT.bak.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8000,
    show_default=True,
    help="Without PATH: the port to check.",
)
@click.option(
    "--json", "is_json", is_flag=True, help="Print one JSON object for each history, with all findings."
)
@click.pass_obj
def doctor(
    invocation: Invocation,
    named_places: tuple[str, ...],
    profile: str | None,
    named: str | None,
    key_file: KeyLocation | None,
    fix: bool,  # noqa: FBT001 - click passes options so
    in_place: bool,  # noqa: FBT001 - see above
    port: int,
    is_json: bool,  # noqa: FBT001 - see above
) -> int:
    """Find and repair histories that a provider would refuse.

    PATH is a file, a folder, or - for standard input: sessions of Claude Code, Codex, opencode, tunacode and midstream,
    and messages of any provider or framework as JSON or JSON lines; or the URL of a store, such as
    postgresql://host/db. Without PATH, this installation is checked. For a server's URL, it prints the effect of
    proxies on each transport, and a transport that works.
    """
    if any(is_address(place) for place in named_places):
        if len(named_places) > 1 or fix or profile or named or key_file:
            raise UsageError("a server's URL takes no other argument or option than --json")
        return check_network(invocation, named_places[0], is_json=is_json)
    stores = [place for place in named_places if is_store_url(place)]
    if stores and fix:
        raise UsageError(
            f"--fix writes files, and {show_store(stores[0])!r} is not a file; copy it with "
            "`midstream store copy`, and examine the copy"
        )
    paths = tuple(Path(place) for place in named_places if place not in stores)
    if in_place and not fix:
        raise UsageError("--in-place needs --fix; give both")
    if fix and STDIN in paths:
        raise UsageError("--fix cannot write for standard input; give a file")
    rules = find_profile(profile).name if profile else None
    look = partial(examine, named=resolve_format(named) if named else None, profile=rules, key_file=key_file)
    if not named_places:
        return _check_installation(invocation, port, is_json=is_json)
    statuses: Counter[Status] = Counter()
    width = columns() if invocation.out.is_terminal else COLUMNS
    with ProgressLine(is_terminal=invocation.talk.is_terminal, world=World()) as progress:
        found = (examine_url(store, profile=rules, key_file=key_file) for store in stores)
        for examined in chain(found, _examine(paths, look, progress) if paths else ()):
            report = _fix(examined, in_place=in_place) if fix else examined.report
            progress.clear()
            statuses[report.status] += 1
            if is_json:
                click.echo(json.dumps(msgspec.to_builtins(report)))
                continue
            for line in report_lines(report, invocation.out, width, limit=SHOWN_MAX):
                click.echo(line, color=True)
    click.echo(summary(statuses), err=True)
    if statuses[Status.FINDINGS] + statuses[Status.LOSSY] and not fix and paths != (STDIN,):
        click.echo("--fix writes repaired copies beside the files.", err=True)
    return _exit_code(statuses)


def _examine(
    paths: tuple[Path, ...], look: Callable[..., Examined], progress: ProgressLine
) -> Iterator[Examined]:
    found = 0
    if STDIN in paths:
        found += 1
        progress.next(str(STDIN))
        yield _of_stdin(look, progress)
    for place in places_in(path for path in paths if path != STDIN):
        progress.next(place.path.name)
        examined = look(place.path, tick=progress.tick)
        if examined.report.reason == "no-history" and not place.is_named:
            continue  # folders may contain other files
        found += 1
        yield without_remedy(examined) if place.is_outside else examined
    if not found:
        problem = "it contains no history"
        for path in paths:
            yield Examined(HistoryReport(str(path), Status.MISSING, reason="no-history", problem=problem))


def _of_stdin(look: Callable[..., Examined], progress: ProgressLine) -> Examined:
    """Copy standard input into a file, because a history is read twice."""
    with tempfile.TemporaryDirectory(prefix="midstream-") as folder:
        file = Path(folder) / "stdin"
        with file.open("wb") as copy:
            shutil.copyfileobj(sys.stdin.buffer, copy)
        examined = look(file, tick=progress.tick)
    return Examined(replace(examined.report, path=str(STDIN)))


def _fix(examined: Examined, *, in_place: bool) -> HistoryReport:
    report, remedy = examined.report, examined.remedy
    if remedy is None:
        return report
    try:
        written = remedy.in_place() if in_place else remedy.beside()
    except MidstreamError as error:
        return replace(report, status=Status.UNREADABLE, reason=error.code, problem=error.message)
    return replace(report, written=str(written.path), backup=str(written.backup or ""))


def _exit_code(statuses: Counter[Status]) -> int:
    if statuses[Status.LOSSY] or statuses[Status.UNREADABLE]:
        return UNREADABLE
    if statuses[Status.MISSING]:
        return NOT_FOUND
    return VERIFICATION if statuses[Status.FINDINGS] else 0


def _check_installation(invocation: Invocation, port: int, *, is_json: bool) -> int:
    done = []
    width = columns() if invocation.out.is_terminal else COLUMNS
    secrets = check_secrets(invocation.places.secrets)
    for check in chain(checks(invocation.places.data, port=port), (secrets,)):
        done.append(check)
        for line in [] if is_json else check_lines(check, invocation.out, width):
            click.echo(line, color=True)
    has_problem = any(check.verdict is CheckResult.PROBLEM for check in done)
    if is_json:
        click.echo(json.dumps({"is_healthy": not has_problem, "checks": msgspec.to_builtins(done)}))
    return VERIFICATION if has_problem else 0
