"""Generate blocks of the documentation, and report dead references.

    python tools/docs.py            write the blocks, then report
    python tools/docs.py --check    report only; a stale block is a problem too

A generated block is between `<!-- generated: NAME -->` and `<!-- end of generated -->`; the names are the keys of
`GENERATORS`. The check includes relative links with their anchors, and all paths of this repository in backticks, also
with a test name: `tests/a/test_b.py::test_name`.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[1]

BLOCK = re.compile(
    r"(?P<head><!-- generated: (?P<name>[\w-]+) -->\n)(?P<body>.*?)(?P<end><!-- end of generated -->)",
    re.DOTALL,
)
FENCE = re.compile(r"^(?P<fence>```+|~~~+).*?^(?P=fence)$", re.DOTALL | re.MULTILINE)
INLINE_CODE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(<?([^()\s>]+)>?(?:\s+\"[^\"]*\")?\)")
HEADING = re.compile(r"^#{1,6}\s+(.+?)\s*#*$", re.MULTILINE)
ANCHOR = re.compile(r"<a\s+(?:id|name)=\"([^\"]+)\"")
REPOSITORY_PATH = re.compile(r"(?:src|tests|docs|tools|bench|examples|requirements|\.ci)/[\w./-]*(?:::\w+)?")


def make_targets() -> str:
    targets = re.findall(r"^([a-z-]+):.*?## (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    rows = "".join(f"| `make {name}` | {meaning} |\n" for name, meaning in targets)
    return f"| command | does |\n| --- | --- |\n{rows}"


def error_codes() -> str:
    from midstream import errors  # noqa: PLC0415 - links are checked without the package too
    from midstream.server.api.problems import status_of  # noqa: PLC0415

    kinds = [kind for _, kind in inspect.getmembers(errors, inspect.isclass)]
    rows = "".join(
        f"| `{kind.code}` | `{kind.__name__}` | {kind.retry} | {status_of(kind)} | {_first_line(kind)} |\n"
        for kind in sorted(kinds, key=lambda kind: str(getattr(kind, "code", "")))
        if issubclass(kind, errors.MidstreamError)
    )
    return f"| code | class | retry | HTTP | means |\n| --- | --- | --- | --- | --- |\n{rows}"


def provider_errors() -> str:
    from midstream.models import provider_errors as tables  # noqa: PLC0415 - see error_codes

    kinds = {*tables.STATUSES.values(), *tables.CODES.values()}
    rows = ""
    for kind in sorted(kinds, key=lambda kind: kind.code):
        statuses = ", ".join(str(each) for each, of in sorted(tables.STATUSES.items()) if of is kind)
        named = ", ".join(f"`{name}`" for name in sorted(tables.CODES) if tables.CODES[name] is kind)
        rows += f"| `{kind.code}` | {kind.retry} | {named} | {statuses} |\n"
    return f"| becomes | retry | code, type or status in the body | HTTP status |\n| --- | --- | --- | --- |\n{rows}"


def history_errors() -> str:
    """Return the error texts of providers, with the rule of a history that each one is about."""
    from midstream.history.repair.rules import REFUSALS  # noqa: PLC0415 - see error_codes

    rows = "".join(
        f"| {text} | `{code}` | {rule.rule} |\n" for code, rule in REFUSALS.items() for text in rule.errors
    )
    return f"| error text | code | the rule |\n| --- | --- | --- |\n{rows}"


PUBLIC_PACKAGES = ("client", "models", "tools", "history", "store", "agents", "server", "dialects", "testing")
"""Packages with public names, besides `midstream` itself."""


def public_names() -> str:
    """Return a table of the public names of `midstream`, and one of each public package."""
    import midstream  # noqa: PLC0415 - see error_codes

    pages = [f"| name | is |\n| --- | --- |\n{_rows_of(midstream)}"]
    for name in PUBLIC_PACKAGES:
        package = importlib.import_module(f"midstream.{name}")
        pages.append(
            f"\n### midstream.{name}\n\n{_first_line(package)}\n\n| name | is |\n| --- | --- |\n{_rows_of(package)}"
        )
    return "".join(pages)


def _rows_of(package: ModuleType) -> str:
    def meaning(name: str) -> str:
        value = getattr(package, name)
        is_documented = inspect.isclass(value) or inspect.isfunction(value)
        return _first_line(value) if is_documented else VALUES[name]

    return "".join(f"| `{name}` | {meaning(name)} |\n" for name in package.__all__)


VALUES = {
    "UpstreamEvent": "Everything that `UpstreamAgent.send` may yield.",
    "ASK_FIRST": "Rules that ask a person about every act, except reading.",
    "BACKENDS": "The kinds of stores by URL scheme; add your own.",
    "DIALECTS": "The dialects that the gateway serves.",
    "HARMLESS": "Kinds of acts that change nothing.",
    "ModelEvent": "Everything that a model's stream may yield.",
    "PROFILES": "What each provider accepts, by name.",
    "Verdict": "The result of a rule: allowed, refused with a reason, or `Ask`.",
}
"""Meaning of the public names that have no docstring of their own."""


def example(name: str) -> str:
    """Return a program of `examples/` without its docstring, for a copy in the folder of `hello.py`."""
    code = (ROOT / "examples" / f"{name}.py").read_text().replace("from examples.", "from ")
    return f"```python\n{code.partition(chr(10) * 2)[2].lstrip()}```\n"


MANY = "500 readers deliveries/core-s"
DELIVERY = (
    "median time from the arrival of a token to its delivery to a reader, append to the journal included"
)


def numbers() -> str:
    """Return the main results of the last `make bench` and `make fault`."""
    steps = {(row["name"], row["sessions"]): row for row in _result("steps")}
    one, hundred, loop = steps["loop", 1], steps["store", 100], steps["loop", 100]
    turns, takeover = _result("turns"), _result("takeover")
    starts = {row["command"]: row for row in _result("startup")}
    streams = {(row["what"], row["server"]): row for row in _result("streaming")}
    paced, flat, many, replay = (
        streams[what, "midstream SSE"]
        for what in ("live p50 ms", "1:1 tokens/core-s", MANY, "replay events/s")
    )
    whole, broken = (
        [row["cpu_ms"] for row in _result("histories") if row["state"] == state]
        for state in ("valid", "broken")
    )
    count = f"{_result('histories')[0]['messages']:,}"
    rows = {
        "a durable tool step with effects, 1 session, whole engine": f"{one['syncs_per_step']:.2f} syncs,"
        f" {one['bytes_per_step'] / 1000:.0f} KB written, {one['cpu_ms_per_step']:.2f} ms CPU",
        "durable steps/s, 100 sessions, appends to the journal only": f"{hundred['steps_per_s']:,.0f}"
        f" ({hundred['of_ceiling']:.2f} times raw SQLite group commit)",
        "durable steps/s, 100 sessions, whole engine in one process": f"{loop['steps_per_s']:,.0f}"
        f" ({loop['of_ceiling']:.2f} times raw)",
        "bytes written in turns 1-100 / 901-1000 of a session": f"{turns[0]['bytes_per_turn'] / 1000:.0f} KB /"
        f" {turns[-1]['bytes_per_turn'] / 1000:.0f} KB a turn",
        "first recovered record after SIGKILL": f"{takeover['from_main_ms']:.0f} ms after the new process began"
        f" ({takeover['from_exec_ms']:.0f} ms with the interpreter and imports)",
        DELIVERY: f"{paced['value']:.1f} ms"
        f" ({paced['of_raw']:.1f} times as long as raw Starlette, which only keeps a list in memory)",
        "tokens to one reader per second of CPU time, append to the journal included": f"{flat['value']:,.0f}"
        f" ({flat['of_raw']:.2f} times raw Starlette)",
        "deliveries to 500 readers per second of CPU time, many tokens in each write": f"{many['value']:,.0f}"
        f" ({many['of_raw']:.2f} times raw Starlette)",
        "replay of a turn of 100,000 events, events/s": f"{replay['value']:,.0f}",
        "CPU of `import midstream` / of `midstream --help` / of Python alone": (
            f"{starts['import midstream']['cpu_ms']:.0f} / {starts['midstream --help']['cpu_ms']:.0f}"
            f" / {starts['python -c pass']['cpu_ms']:.0f} ms"
        ),
        f"check of a valid history of {count} messages,"
        f" {len(whole)} combinations of format, provider and contents (`bench/long_histories.py`)": (
            f"{min(whole):.0f} to {max(whole):.0f} ms CPU"
        ),
        "repair of the same histories, with every fourth result lost": f"{min(broken):.0f} to {max(broken):.0f} ms CPU",
        **_quadratic_peers(),
    }
    return _table(rows)


def real_agents() -> str:
    """Return the results of the last `make agents`: a row for each situation, a column for each program."""
    table: dict[str, dict[str, dict[str, list[str]]]] = _result("agents")
    names = list(dict.fromkeys(name for cells in table.values() for name in cells))
    head = f"| situation | {' | '.join(f'`{program}`' for program in table)} |\n"
    rows = "".join(
        f"| {name} | {' | '.join(_agent_cell(cells.get(name)) for cells in table.values())} |\n"
        for name in names
    )
    return f"{head}|{' --- |' * (len(table) + 1)}\n{rows}"


def _agent_cell(cell: dict[str, list[str]] | None) -> str:
    if cell is None:
        return "not run"
    fault = "; ".join(cell["faults"]).replace("|", "/")[:160]
    return f"**fault**: {fault}" if fault else ", ".join(["held", *cell["facts"]])


def chaos_run() -> str:
    """Return the faults and the results of the last `make chaos`."""
    run = _result("chaos")
    verdict, ways = run["verdict"], run["reconnects_by_transport"]
    by_way = ", ".join(f"{way} {count:,}" for way, count in ways.items())
    cuts = ", ".join(f"{how} {count:,}" for how, count in run["cuts"].items())
    kills = {
        side: sum(n for who, n in run["kills"].items() if who.startswith(side))
        for side in ("server", "client")
    }
    repeated, overtaken = run["requests_repeated"], run["connections_overtaken"]
    rows = {
        "streams and readers that lost their connection and made it again": f"{run['reconnects']:,} ({by_way})",
        "TCP connections through the proxy": f"{run['connections']:,}",
        "of these cut": cuts,
        "of the first 800 offsets, up / down, those with a cut": f"{run['offsets_up']} / {run['offsets_down']}",
        "cuts within a frame or a head": f"{run['cuts_inside_a_write']:,}",
        "POSTs repeated / connections overtaken by later ones": f"{repeated:,} / {overtaken:,}",
        "SIGKILLs of the server / of clients": f"{kills['server']} / {kills['client']}",
        "turns (of these stopped by their client / given up after three dead servers in a row)": f"{verdict['turns']:,}"
        f" ({verdict['stopped']} / {verdict['interrupted']})",
        "events in the journals / shown to clients": f"{verdict['events']:,} / {verdict['shown']:,}",
        "executions of tools with effects": f"{verdict['executions']:,}",
        "calls that stay unknown, as the process that ran them was killed or stopped": f"{verdict['unknown']:,}",
        "**events lost / duplicated**": f"**{verdict['lost']} / {verdict['duplicated']}**",
        "**repeated executions**": f"**{verdict['repeated']}**",
    }
    return _table(rows)


def _table(rows: dict[str, str]) -> str:
    return "| what | figure |\n| --- | --- |\n" + "".join(
        f"| {what} | {figure} |\n" for what, figure in rows.items()
    )


def _crash_heads(rows: list[dict[str, Any]]) -> list[str]:
    named = {"seq": "one by one", "par": "in one response"}
    return [
        f"{named[each['scenario']]}, killed {each['dies'].replace('_', ' ')}" for each in rows[0]["crashes"]
    ]


def durable_crashes_postgresql() -> str:
    """Return the results of SIGKILL on PostgreSQL, from the last `make bench-durable ARGS="--store postgresql"`."""
    rows = _result("durable_postgresql")
    heads = _crash_heads(rows)
    lines = [f"| | {' | '.join(heads)} |", "| --- |" + " --- |" * len(heads)]
    for row in rows:
        crashes = row["crashes"]
        cells = [
            f"{each['duplicates']} / {each['results_lost']}" if each["has_answered"] else "no answer"
            for each in crashes
        ]
        lines.append(f"| {row['name']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def durable_crashes() -> str:
    """Return the results of SIGKILL for each contestant, from the last `make bench-durable`."""
    rows = _result("durable")
    heads = _crash_heads(rows)
    lines = [f"| | {' | '.join(heads)} | model calls |", "| --- |" + " --- |" * (len(heads) + 1)]
    for row in rows:
        crashes = row["crashes"]
        cells = [str(each["duplicates"]) if each["has_answered"] else "no answer" for each in crashes]
        asked = sum(each["model_calls"] for each in crashes)
        lines.append(f"| {row['name']} | {' | '.join(cells)} | {asked} |")
    return "\n".join(lines) + "\n"


def durable_costs() -> str:
    """Return the cost of a step for each contestant, from the last `make bench-durable`."""
    lines = ["| | CPU ms | ms | syncs | KB written |", "| --- | --- | --- | --- | --- |"]
    for row in _result("durable"):
        syncs, size = row["syncs_per_step"], row["bytes_per_step"]
        counted = "| | |" if syncs is None else f"| {syncs:.2f} | {size / 1000:.0f} |"
        lines.append(
            f"| {row['name']} | {row['cpu_ms_per_step']:.2f} | {row['wall_ms_per_step']:.1f} {counted}"
        )
    return "\n".join(lines) + "\n"


def stream_commands() -> str:
    """Return the cost of durable commands and of the Durable Streams reference, from the last `make bench-streams`."""
    lines = ["| | | per core-second | of the reference | per second | p50 ms | syncs each | refused |"]
    lines.append("| --- |" + " --- |" * 7)
    for row in _result("commands"):
        ours = row["who"] != "reference"
        streams = f"{row['writers']:,} streams" if row["writers"] > 1 else "1 stream"
        what = streams if row["what"] == "commands" else "deliveries to 500 readers of one"
        times = f"{row['of_reference']:.1f}" if ours else ""
        syncs = f"{row['syncs']:.2f}" if row["syncs"] >= 0 else ""
        p50 = f"{row['p50_ms']:.1f}" if row["p50_ms"] else ""
        who = f"midstream, {row['who']}" if ours else "reference, file-backed"
        lines.append(
            f"| {what} | {who} | {row['per_core_s']:,.0f} | {times} | {row['per_s']:,.0f} | {p50} | {syncs}"
            f" | {row['refused']:,} |"
        )
    return "\n".join(lines) + "\n"


def stream_costs() -> str:
    """Return the cost of an event for the whole server, in two cases each, from the last `make bench`."""
    lines = ["| microseconds of CPU, whole server | first | second | ratio |", "| --- | --- | --- | --- |"]
    lines += [
        f"| {row['what']} | {row['usual_us']:.1f} | {row['other_us']:.1f} | {row['ratio']:.2f} |"
        for row in _result("costs")
    ]
    return "\n".join(lines) + "\n"


def idle_readers() -> str:
    """Return the cost of idle readers, from the last `make bench`."""
    heads = ("readers", "sessions", "KiB each", "cores for their heartbeats", "connects per core-second")
    lines = [f"| {' | '.join(heads)} | one event to all of one session |", "| --- |" + " --- |" * 5]
    lines += [
        f"| {row['readers']:,} by {row['transport']} | {row['sessions']:,} | {row['bytes_per_reader'] / 1024:.0f}"
        f" | {row['idle_cores']:.3f} | {row['connects_per_core_s']:,.0f} | {row['reach_all_ms']:.0f} ms CPU |"
        for row in _result("idle")
    ]
    return "\n".join(lines) + "\n"


def streaming() -> str:
    """Return the cost of streaming for each server, from the last `make bench ARGS=streaming`."""
    rows = _result("streaming")
    names = list(dict.fromkeys(row["server"] for row in rows))
    by = {(row["what"], row["server"]): row for row in rows}
    lines = [f"| | {' | '.join(names)} |", "| --- |" + " --- |" * len(names)]
    for what in dict.fromkeys(row["what"] for row in rows):
        cells = [_stream_cell(by.get((what, name))) for name in names]
        lines.append(f"| {what} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _stream_cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    digits = 0 if abs(row["value"]) >= 1000 else 2  # noqa: PLR2004
    of_raw = "" if row["of_raw"] is None else f" ({row['of_raw']:.2f})"
    return f"{row['value']:,.{digits}f}{of_raw}"


@cache
def turn_machine() -> str:
    """Return the states of a turn and their transitions, from the search of the tests."""
    sys.path.append(str(ROOT))
    from tests.session.edges import diagram, explored  # noqa: PLC0415 - see error_codes

    return diagram(explored())


@cache
def stream_machines() -> str:
    """Return the states of both halves of the stream protocol, from a search of their code."""
    sys.path.append(str(ROOT))
    from tests.protocol import halves  # noqa: PLC0415 - see error_codes

    client = halves.diagram(halves.client_edges(), "waiting")
    return f"The client:\n\n{client}\nThe server:\n\n{halves.diagram(halves.server_edges(), 'opening')}"


@cache
def stream_errors() -> str:
    """Return the reaction of midstream's client to each error frame."""
    sys.path.append(str(ROOT))
    from tests.protocol import halves  # noqa: PLC0415 - see error_codes

    return halves.error_table()


def _wire(name: str) -> str:
    """Return a table of frames, payloads or records."""
    sys.path.append(str(ROOT))
    from tests.protocol import tables  # noqa: PLC0415 - see error_codes

    if name == "RECORDS":
        return tables.record_kinds()
    return tables.members(getattr(tables, name))


PEERS = {"LiteLLM to Anthropic": "LiteLLM, conversion to Anthropic's format"}
"""Names of the bench that need more words on a page."""


HARD_SHAPES = {
    "requests in a row": "user messages without answers",
    "orphans": "tool results without calls",
    "one id": "calls with one id",
}
"""Explanations of the shapes of `bench/long_histories.py`."""


def _quadratic_peers() -> dict[str, str]:
    """Return one row for each peer and each hard shape for which its time is quadratic."""
    return {
        f"{HARD_SHAPES.get(row['shape'], row['shape'])}, {row['messages']:,} messages:"
        f" {PEERS.get(row['who'], row['who'])}": (
            f"{row['cpu_ms']:,.0f} ms: {row['ahead']:,.0f} times as long as `repair` ({row['midstream_ms']:.0f} ms)"
        )
        for row in _result("peers")
        if row["is_quadratic"]
    }


def _result(name: str) -> Any:  # noqa: ANN401 - results differ between benches
    return json.loads((ROOT / "bench" / "results" / f"{name}.json").read_text())["result"]


GENERATORS: dict[str, Callable[[], str]] = {
    "chaos-run": chaos_run,
    "real-agents": real_agents,
    "durable-costs": durable_costs,
    "durable-crashes": durable_crashes,
    "durable-crashes-postgresql": durable_crashes_postgresql,
    "error-codes": error_codes,
    "history-errors": history_errors,
    "example-client": lambda: example("client"),
    "example-hello": lambda: example("hello"),
    "example-in-process": lambda: example("in_process"),
    "idle-readers": idle_readers,
    "make-targets": make_targets,
    "numbers": numbers,
    "provider-errors": provider_errors,
    "public-names": public_names,
    "stream-commands": stream_commands,
    "stream-costs": stream_costs,
    "stream-errors": stream_errors,
    "streaming": streaming,
    "stream-frames-down": lambda: _wire("SERVER"),
    "stream-frames-up": lambda: _wire("CLIENT"),
    "stream-machines": stream_machines,
    "stream-payloads": lambda: _wire("PAYLOADS"),
    "stream-records": lambda: _wire("RECORDS"),
    "stream-within": lambda: _wire("WITHIN"),
    "turn-machine": turn_machine,
}


def pages(root: Path = ROOT) -> list[Path]:
    """Return the Markdown files of the repository, without those of tools and environments."""
    found: list[Path] = []
    for folder, folders, files in os.walk(root):
        folders[:] = [each for each in folders if not each.startswith(".") and each != "node_modules"]
        found += [Path(folder, each) for each in files if each.endswith(".md") and not each.startswith(".")]
    return sorted(found)


def with_fresh_blocks(text: str) -> str:
    """Return a page's text with fresh generated blocks. A block with an unknown name is unchanged."""

    def fresh(block: re.Match[str]) -> str:
        generate = GENERATORS.get(block["name"])
        body = generate() if generate else block["body"]
        return f"{block['head']}{body}{block['end']}"

    return BLOCK.sub(fresh, text)


def problems(page: Path, root: Path = ROOT) -> list[str]:
    """Return the stale and unknown blocks of a page, and its dead references."""
    return [*wrong_blocks(page, root), *dead_references(page, root)]


def wrong_blocks(page: Path, root: Path = ROOT) -> Iterator[str]:
    """Yield the stale and unknown generated blocks of a page."""
    text = page.read_text(encoding="utf-8")
    name = page.relative_to(root).as_posix()
    for block in BLOCK.finditer(text):
        if block["name"] not in GENERATORS:
            yield f"{name}: nothing generates {block['name']!r}"
    if with_fresh_blocks(text) != text:
        yield f"{name}: a generated block is stale: run `make docs`"


def dead_references(page: Path, root: Path = ROOT) -> Iterator[str]:
    """Yield the references of a page to missing files, anchors and tests."""
    prose = FENCE.sub("", page.read_text(encoding="utf-8"))
    name = page.relative_to(root).as_posix()
    for target in LINK.findall(INLINE_CODE.sub("", prose)):
        if not _is_external(target) and not _exists(page, target):
            yield f"{name}: the link {target!r} leads nowhere"
    for code in INLINE_CODE.findall(prose):
        if REPOSITORY_PATH.fullmatch(code) and not _is_in_repository(root, code):
            yield f"{name}: there is no `{code}`"


OPENAPI = ROOT / "docs" / "reference" / "openapi.json"


def openapi() -> str:
    """Return the OpenAPI description of the HTTP interface, as stored in `docs/reference`."""
    from midstream.server.api.route_table import document  # noqa: PLC0415 - see error_codes

    return json.dumps(document(), indent=1, ensure_ascii=False) + "\n"


def main() -> int:
    if "--check" not in sys.argv[1:]:
        for page in pages():
            text = page.read_text(encoding="utf-8")
            if (fresh := with_fresh_blocks(text)) != text:
                page.write_text(fresh, encoding="utf-8")
                print(f"wrote {page.relative_to(ROOT)}")
        OPENAPI.write_text(openapi(), encoding="utf-8")
    found = [problem for page in pages() for problem in problems(page)]
    if OPENAPI.read_text(encoding="utf-8") != openapi():
        found.append(f"{OPENAPI.relative_to(ROOT)} is stale: run `make docs`")
    for problem in found:
        print(problem, file=sys.stderr)
    print(f"{len(pages())} pages, {len(found)} problems")
    return 1 if found else 0


def _first_line(documented: object) -> str:
    return (inspect.getdoc(documented) or "").partition("\n\n")[0].replace("\n", " ").replace("|", "\\|")


def _is_external(target: str) -> bool:
    return re.match(r"[a-z][a-z0-9+.-]*:", target) is not None


def _exists(page: Path, target: str) -> bool:
    path, _, anchor = target.partition("#")
    there = page.parent / path if path else page
    if not there.exists():
        return False
    return not anchor or there.suffix != ".md" or anchor in _anchors(there)


def _anchors(page: Path) -> set[str]:
    """Return the anchors of a page by the rules of GitHub: repeated headings get a number."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    anchors = set(ANCHOR.findall(text))
    for heading in HEADING.findall(text):
        slug = re.sub(r"[^\w\- ]", "", re.sub(r"\]\([^)]*\)", "", heading).lower()).replace(" ", "-")
        repeated = sum(1 for anchor in anchors if re.fullmatch(rf"{re.escape(slug)}(-\d+)?", anchor))
        anchors.add(f"{slug}-{repeated}" if repeated else slug)
    return anchors


def _is_in_repository(root: Path, code: str) -> bool:
    path, _, test = code.partition("::")
    there = root / path
    if not test:
        return there.exists()
    return there.is_file() and re.search(rf"def {test}\(", there.read_text(encoding="utf-8")) is not None


if __name__ == "__main__":
    sys.exit(main())
