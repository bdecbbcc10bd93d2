"""The Technology Compatibility Kit of A2A (TCK) with an app whose agent plays the kit's scenarios.

The kit is unmodified. It selects an agent's behaviour by the prefix of the message's id. The agent here is a
model that reads this id in its session, and turns of the session do the rest: text, tools, a question.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from msgspec import Struct

from midstream.dialects.a2a_messages import STREAM_PREFIX, A2aOptions
from midstream.engine.agent import Agent
from midstream.history.messages import Step
from midstream.models.responses import ModelEvent, ModelRequest
from midstream.server.app import App, asgi
from midstream.testing.scripted_model import Pause, Response, ScriptedModel, calls, text
from midstream.tools.function_tools import question, tool
from tests.dialects.ui_stream import START_S
from tests.ports import held_port
from tests.server.serving import served

Json = dict[str, Any]

HOME = Path(sys.prefix, "a2a")
"""The environments of the kit and of the reference SDK (`make .venv/.a2a`, `make .venv/.tck`)."""
KIT = Path(sys.prefix, "tck")
SUITE_S = 600.0
FILES = {
    "artifact-file-url": {
        "url": "https://example.com/output.txt",
        "mediaType": "text/plain",
        "filename": "output.txt",
    },
    "artifact-file": {"raw": "dGNr", "mediaType": "text/plain", "filename": "output.txt"},
    "stream-artifact-file": {"raw": "dGNr", "mediaType": "text/plain", "filename": "output.txt"},
    "artifact-data": {"key": "value", "count": 42},
}
WORDS = {
    "artifact-text": "Generated text content",
    "message-response": "Direct message response",
    "stream-001": "Stream hello from TCK",
    "stream-003": "Stream task lifecycle",
    "stream-ordering-001": "Ordered output",
    "stream-artifact-text": "Streamed text content",
    "stream-artifact-chunked": "chunk-1 chunk-2",
}
DIRECT = ("tck-message-response", "tck-stream-002")
"""Messages that the kit expects to be answered by a message."""


@tool
def make(what: str) -> Any:  # noqa: ANN401 - JSON
    """Make a file or data."""
    return FILES[what]


class SuiteModel(ScriptedModel):
    """Plays the scenario that the id of a session's newest message selects."""

    def __init__(self) -> None:
        super().__init__(())
        self.app: App | None = None

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelEvent]:
        """Answer a request."""
        assert self.app is not None
        runner = await self.app.host.session(request.session)
        names = [name for name in runner.state.streams if name.startswith(STREAM_PREFIX)]
        player = ScriptedModel(lambda _: _play(names[-1].removeprefix(f"{STREAM_PREFIX}tck-"), request))
        async for event in player.stream(request):
            yield event


def _play(name: str, request: ModelRequest) -> Response:
    last = request.history.entries[-1]
    if isinstance(last, Step) and any(call.name == "make" for call in last.response.calls):
        return text("Made.")
    if name.startswith("input-required"):
        return calls(("ask_user", '{"question": "What is missing?"}'))
    made = next((each for each in FILES if name.startswith(each)), None)
    if made is not None:
        return calls(("make", json.dumps({"what": made})))
    if name.startswith("test-resubscribe"):
        return [Pause(4.0), *text("Done")]
    return text(next((words for each, words in WORDS.items() if name.startswith(each)), "Hello from TCK"))


def make_suite_app(store: str | Path) -> App:
    """Make an app that plays the kit's scenarios."""
    model = SuiteModel()
    options = A2aOptions(
        "Plays the scenarios of the TCK.",
        artifacts=("make",),
        is_direct=lambda message: str(message["messageId"]).startswith(DIRECT),
        has_unique_ids=False,
    )
    app = asgi(Agent(model, tools=[make, question()], name="suite"), store=store, a2a=options)
    model.app = app
    return app


NOT_MET = {
    "CORE-SEND-003": "the kit's description requires an error, as the specification does. "
    "The kit's check requires that there is none",
    "CARD-CACHE-003": "an optional header, `Last-Modified`, is missing; the card has an `ETag`",
}
"""Requirements that do not pass, and the reasons."""


def lacking() -> str:
    """Return the missing requirements of the kit's environment, or nothing."""
    is_there = (KIT / "source.json").exists() and (HOME / "bin" / "python").exists()
    return "" if is_there else "the compatibility kit of A2A is not installed here (make .venv/.tck)"


class Requirement(Struct, frozen=True):
    """The result of a requirement: PASS, FAIL, SKIPPED or NOT TESTED, and the reason."""

    level: str
    status: str
    errors: tuple[str, ...] = ()


Report = dict[str, Requirement]


async def run_kit(url: str, folder: Path) -> Report:
    """Run the kit against an agent; return the result of each requirement."""
    path = folder / "compatibility"
    process = await asyncio.create_subprocess_exec(
        *(str(HOME / "bin" / "python"), "-m", "pytest", "tests/compatibility/", "-q", "--tb=short"),
        *(f"--sut-host={url}", f"--compatibility-report={path}", "-p", "no:cacheprovider"),
        cwd=KIT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={"PATH": os.environ["PATH"], "HOME": str(folder), "PYTHONDONTWRITEBYTECODE": "1"},
    )
    try:
        out, _ = await asyncio.wait_for(process.communicate(), SUITE_S)
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()
    folder.joinpath("kit.log").write_bytes(out)
    report = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    return {
        name: Requirement(each["level"], each["status"], tuple(each["errors"]))
        for name, each in report["per_requirement"].items()
    }


async def judge(folder: Path, store: str | None = None) -> Report:
    """Run the kit against the app; return its report."""
    async with served(make_suite_app(store or folder / "suite.db")) as server:
        return await run_kit(server.url, folder)


async def judge_reference(folder: Path) -> Report:
    """Run the kit against an agent of the reference SDK."""
    with held_port() as port:
        program = Path(__file__).parent / "a2a_reference.py"
        process = await asyncio.create_subprocess_exec(
            *(str(HOME / "bin" / "python"), str(program), str(port)), stderr=asyncio.subprocess.PIPE
        )
        assert process.stderr is not None
        try:
            async with asyncio.timeout(START_S):
                while b"running on" not in (line := await process.stderr.readline()):
                    assert line, "the agent of the reference SDK ended"
            return await run_kit(f"http://127.0.0.1:{port}", folder)
        finally:
            process.kill()
            await process.wait()


PAGE = """# Conformance to A2A

`make dialects` runs the [compatibility kit of A2A](https://github.com/a2aproject/a2a-tck) (TCK), unmodified, against an
app on SQLite, and writes this page. See [the guide](../guides/a2a.md). The agent implements the scenarios that
the kit names (`tests/dialects/a2a_suite.py`). For comparison the same kit runs against an agent of the reference SDK,
`a2a-sdk` 1.3.0 (`tests/dialects/a2a_reference.py`). The kit tests both bindings over HTTP. gRPC is not served; its
tests are skipped in both runs.

The kit's branch for version 1.0 is used, at commit {commit}. In one run the kit sends many messages with the
same `messageId` and text, and requires a task for each. By default midstream treats them as one message, and answers it
once. So the app sets `A2aOptions(has_unique_ids=False)`. Without it, ten more requirements fail, five of them of the
level MUST (CORE-CANCEL-001, CORE-HIST-002, CORE-MULTI-005, STREAM-SUB-001, STREAM-SUB-002): the kit gets the task of an
earlier message.

"""


def counts(report: Report) -> dict[str, dict[str, int]]:
    """Return the numbers of passed and failed requirements of each level."""
    levels = ("MUST", "SHOULD", "MAY")
    statuses = {level: [each.status for each in report.values() if each.level == level] for level in levels}
    return {
        level: {name: found.count(name) for name in ("PASS", "FAIL")} for level, found in statuses.items()
    }


def faults(report: Report) -> list[str]:
    """Return the failed requirements that are expected to pass."""
    return [name for name, each in report.items() if each.status == "FAIL" and name not in NOT_MET]


def page(ours: Report, reference: Report) -> str:
    """Return the page of documentation."""
    document = json.loads((KIT / "source.json").read_text(encoding="utf-8"))
    rows = [
        "| level | midstream: passed | failed | reference: passed | failed |",
        "| --- | --- | --- | --- | --- |",
    ]
    found, other = counts(ours), counts(reference)
    for level in found:
        figures = (found[level]["PASS"], found[level]["FAIL"], other[level]["PASS"], other[level]["FAIL"])
        rows.append(f"| {level} | {' | '.join(map(str, figures))} |")
    rows += ["", "| not passed | by | why |", "| --- | --- | --- |"]
    for name in sorted({*ours, *reference}):
        by = [
            who
            for who, report in (("midstream", ours), ("reference", reference))
            if report[name].status == "FAIL"
        ]
        if by:
            rows.append(f"| {name} ({ours[name].level}) | {', '.join(by)} | {NOT_MET.get(name, '')} |")
    return PAGE.format(commit=f"`{document['commit'][:12]}`") + "\n".join(rows) + "\n"
