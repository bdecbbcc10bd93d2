"""`midstream gateway usage`: requests, tokens and cost of the gateway's users."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import click
from msgspec import Struct

from midstream.cli import Invocation
from midstream.cli.output import Output, json_option
from midstream.cli.terminal import clean
from midstream.dialects.usage_ledger import ENTRIES, read_usage
from midstream.dialects.usage_totals import By, UsageLine, group_lines
from midstream.errors import UsageError
from midstream.store.blocking_reads import ENTRY_MARK
from midstream.store.contract import StoreReader
from midstream.store.store_registry import read_store

COLUMNS: tuple[By, ...] = ("day", "user", "model")
HEADINGS = ("REQUESTS", "INPUT", "CACHED", "OUTPUT", "REASONING", "COST")
GATEWAY = "(gateway's key)"
"""User column for requests with the gateway's own key."""


class UsageReport(Struct, frozen=True, omit_defaults=True):
    """One line of the report, without columns that it is not grouped by.

    Args:
        user: "" for the gateway's own key.
        cached_tokens: Input tokens from a cache.
        reasoning_tokens: Output tokens of thinking, if the provider counts them.
        cost: Cost of the requests with a price; None without one.
        unpriced_requests: Requests without a price.
    """

    day: str | None
    user: str | None
    model: str | None
    requests: int
    input_tokens: int
    output_tokens: int
    cached_tokens: int
    reasoning_tokens: int
    cost: float | None
    unpriced_requests: int


@click.command()
@click.option(
    "--since",
    type=click.DateTime(["%Y-%m-%d", "%Y-%m"]),
    metavar="DAY|MONTH",
    help="From this day (2026-11-27) or month (2026-11) on, in UTC (default: all, at most 400 days).",
)
@click.option(
    "--by",
    "groups",
    multiple=True,
    type=click.Choice(COLUMNS),
    help="Sum by this column; may be repeated (default: day, user and model).",
)
@json_option("Print JSON, one object per line.")
@click.pass_context
def usage(context: click.Context, since: object, groups: tuple[By, ...], output: Output) -> None:
    """Show the usage of users: requests, tokens that the models counted, and cost.

    The store is that of the gateway: `midstream gateway --store FILE|URL usage`, or `--config FILE usage`. A gateway
    may run meanwhile. An answer counts once, for the day of its request.
    """
    invocation: Invocation = context.obj
    options = context.parent.params if context.parent else {}
    store = options.get("store") or invocation.places.gateway_store
    from_day = f"{since:%Y-%m-%d}" if since else ""
    with read_store(store, key_file=options.get("key_file")) as found:
        if options.get("key_file") is None and found.ask(_is_encrypted):
            raise UsageError("the usage in this store is encrypted; give --key-file before `usage`")
        lines = found.ask(lambda reader: read_usage(reader, since=from_day)).lines()
    by = groups or COLUMNS
    rows = [_report(line, by) for line in group_lines((each for each in lines if each.day >= from_day), by)]
    shown = [column for column in COLUMNS if column in by]
    output.print_list(
        rows, lambda row: _cells(row, shown), table=lambda: _table(rows, shown), none="There is no usage."
    )


def _table(rows: Sequence[UsageReport], shown: Sequence[str]) -> Iterator[str]:
    table = [[*(column.upper() for column in shown), *HEADINGS], *(_cells(row, shown) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for cells in table:
        texts = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)][: len(shown)]
        numbers = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)][len(shown) :]
        yield "  ".join([*texts, *numbers])


async def _is_encrypted(store: StoreReader) -> bool:
    for namespace in await store.kv_namespaces():
        if namespace.startswith(ENTRIES):  # also the prefix of the months' namespaces
            for row in await store.kv_list(namespace):
                return row.body.startswith(ENTRY_MARK)
    return False


def _report(line: UsageLine, by: Sequence[str]) -> UsageReport:
    totals, tokens = line.totals, line.totals.usage
    return UsageReport(
        line.day if "day" in by else None,
        line.principal if "user" in by else None,
        line.model if "model" in by else None,
        totals.requests,
        tokens.input_tokens,
        tokens.output_tokens,
        tokens.cached_tokens,
        tokens.reasoning_tokens,
        round(totals.cost, 6) if totals.priced else None,
        totals.requests - totals.priced,
    )


def _cells(row: UsageReport, shown: Sequence[str]) -> list[str]:
    names = [str(getattr(row, column)) or GATEWAY for column in shown]
    cost = "-" if row.cost is None else f"{row.cost:.4f}"
    counts = (row.requests, row.input_tokens, row.cached_tokens, row.output_tokens, row.reasoning_tokens)
    return [*(clean(name, is_one_line=True) for name in names), *map(str, counts), cost]
