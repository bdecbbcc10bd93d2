"""The conformance suite of MCP with an app whose agent implements the tools that the suite calls.

The suite is npm's, unmodified. Its tools are declared as those of any app (`McpOptions.tools`), and turns of
the agent implement them: text of a scripted model, its tools, approvals and questions.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from midstream.dialects.mcp_messages import McpOptions, McpTool, TaskSupport
from midstream.engine.agent import Agent
from midstream.errors import ModelError, ModelRejectedError
from midstream.history.messages import Step, Text, UserMessage
from midstream.models.responses import ModelRequest, TextDelta
from midstream.server.app import App, asgi
from midstream.testing.scripted_model import (
    Pause,
    Response,
    ScriptedModel,
    ScriptedStep,
    calls,
    steps_since_user,
    text,
)
from midstream.tools.function_tools import question, tool
from tests.dialects.ui_stream import node
from tests.server.serving import served

Json = dict[str, Any]

HOME = Path(sys.prefix, "mcp")
"""The folder in which npm has installed the packages of tests/dialects/mcp (tools/judges.py)."""
SUITE_S = 300.0
SCHEMA: Json = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "$defs": {
        "address": {
            "$anchor": "addressDef",
            "type": "object",
            "properties": {"street": {"type": "string"}, "city": {"type": "string"}},
        }
    },
    "properties": {
        "name": {"type": "string"},
        "address": {"$ref": "#/$defs/address"},
        "contactMethod": {"type": "string", "enum": ["phone", "email"]},
        "phone": {"type": "string"},
        "email": {"type": "string"},
    },
    "allOf": [{"anyOf": [{"required": ["phone"]}, {"required": ["email"]}]}],
    "if": {"properties": {"contactMethod": {"const": "phone"}}, "required": ["contactMethod"]},
    "then": {"required": ["phone"]},
    "else": {"required": ["email"]},
    "additionalProperties": False,
}
ASK_NAME = ("ask_user", '{"question": "What is your name?"}')


@tool(needs_approval=True)
def delete(filename: str) -> str:
    """Delete a file."""
    return f"{filename} is deleted"


def _play(*does: ScriptedStep) -> Callable[[Json, Sequence[Step]], Response]:
    return lambda _, __: does


def _ask_first(*asked: tuple[str, str], slowly: float = 0.0) -> Callable[[Json, Sequence[Step]], Response]:
    """Ask first, then return the answer."""

    def play(_: Json, steps: Sequence[Step]) -> Response:
        if not steps:
            return calls(*asked)
        answers = " ".join(result.content for result in steps[-1].results)
        return [Pause(slowly), *text(f"Answered: {answers}")]

    return play


def _ask_twice(_: Json, steps: Sequence[Step]) -> Response:
    return text("Both answered") if len(steps) > 1 else calls(ASK_NAME)


def _greet(arguments: Json, _: Sequence[Step]) -> Response:
    return text(f"Hello, {arguments['name']}!")


def _compute(arguments: Json, _: Sequence[Step]) -> Response:
    return [Pause(float(arguments["seconds"])), *text("Computed")]


FAILS = ModelRejectedError("This tool intentionally returns an error for testing")
_Play = Callable[[Json, Sequence[Step]], Response]
TOOLS: dict[str, tuple[TaskSupport, _Play]] = {
    "test_simple_text": ("optional", _play(*text("This is a simple text response for testing."))),
    "test_error_handling": ("optional", _play(FAILS)),
    "test_tool_with_progress": (
        "optional",
        _play(TextDelta("one "), Pause(0.05), TextDelta("two "), Pause(0.05), *text("three")),
    ),
    "test_reconnection": ("optional", _play(Pause(2.0), *text("Reconnected"))),
    "json_schema_2020_12_tool": ("optional", _play(*text("ok"))),
    "test_elicitation": ("optional", _ask_first(ASK_NAME)),
    "test_input_required_result_elicitation": ("optional", _ask_first(ASK_NAME)),
    "test_input_required_result_request_state": ("optional", _ask_first(ASK_NAME)),
    "test_input_required_result_multi_round": ("optional", _ask_twice),
    "test_input_required_result_tampered_state": ("optional", _ask_first(ASK_NAME)),
    "test_input_required_result_capabilities": ("optional", _ask_first(ASK_NAME)),
    "test_missing_capability": ("required", _play(*text("ok"))),
    "test_streaming_elicitation": ("optional", _ask_first(ASK_NAME)),
    "test_logging_tool": ("optional", _play(*text("Nothing is logged"))),
    "greet": ("optional", _greet),
    "slow_compute": ("optional", _compute),
    "failing_job": ("required", _play(Pause(0.2), FAILS)),
    "protocol_error_job": ("required", _play(Pause(0.2), ModelError("a defect"))),
    "confirm_delete": ("required", _ask_first(("delete", '{"filename": "a.txt"}'))),
    "multi_input": ("required", _ask_first(ASK_NAME, ASK_NAME)),
    "test_tool_with_task": ("optional", _ask_first(ASK_NAME, slowly=2.0)),
}


def _answer(request: ModelRequest) -> Response:
    entries = request.history.entries
    asked = next(each for each in reversed(entries) if isinstance(each, UserMessage))
    words = json.loads("".join(part.text for part in asked.parts if isinstance(part, Text)))
    count = steps_since_user(request.history)
    steps = [each for each in entries[len(entries) - count :] if isinstance(each, Step)]
    return TOOLS[words["tool"]][1](words["arguments"], steps)


def make_suite_app(store: str | Path) -> App:
    """Make an app with the tools of the suite."""
    tools = tuple(
        McpTool(name, f"Test {name}.", SCHEMA if name.startswith("json") else {"type": "object"}, task)
        for name, (task, _) in TOOLS.items()
    )
    options = McpOptions(tools, stream_s=1.0, retry_s=0.5)
    return asgi(Agent(ScriptedModel(_answer), tools=[delete, question()]), store=store, mcp=options)


FORMS = "the server derives the forms from the agent's questions, not from the suite's schema"
NOT_SERVED = {
    "logging-set-level": "no log is sent",
    "tools-call-with-logging": "no log is sent",
    "completion-complete": "no completions",
    "tools-call-image": "an answer is text",
    "tools-call-audio": "an answer is text",
    "tools-call-embedded-resource": "an answer is text",
    "tools-call-mixed-content": "an answer is text",
    "tools-call-sampling": "no sampling",
    "server-stateless": "no sampling: one check requires an error that names this capability",
    "input-required-result-basic-sampling": "no sampling",
    "input-required-result-basic-list-roots": "no roots",
    "input-required-result-multiple-input-requests": "no sampling and no roots",
    "input-required-result-capability-check": "no sampling",
    "elicitation-sep1034-defaults": FORMS,
    "elicitation-sep1330-enums": FORMS,
    "input-required-result-basic-elicitation": "the server derives the ids of questions from the journal; "
    "the suite requires the id `user_name`",
    "resources-list": "no resources",
    "resources-read-text": "no resources",
    "resources-read-binary": "no resources",
    "resources-templates-read": "no resources",
    "resources-subscribe": "no resources",
    "resources-unsubscribe": "no resources",
    "prompts-list": "no prompts",
    "prompts-get-simple": "no prompts",
    "prompts-get-with-args": "no prompts",
    "prompts-get-embedded-resource": "no prompts",
    "prompts-get-with-image": "no prompts",
    "input-required-result-non-tool-request": "no prompts",
    "caching": "no resources and no prompts: their three lists are missing",
    "http-custom-header-server-validation": "no tool with `x-mcp-header`",
}
"""Scenarios that do not pass, and the reasons."""
TASKS = (
    "tasks-lifecycle",
    "tasks-capability-negotiation",
    "tasks-wire-fields",
    "tasks-request-state-removal",
    "tasks-mrtr-input",
    "tasks-request-headers",
    "tasks-dispatch-and-envelope",
    "tasks-status-notifications",
    "tasks-required-task-error",
    "tasks-mrtr-composition",
)
HANDSHAKE, MODERN = "2025-11-25", "2026-07-28"
RUNS: Sequence[tuple[str, Sequence[str]]] = (
    (HANDSHAKE, ("--suite", "all", "--spec-version", HANDSHAKE)),
    (MODERN, ("--suite", "all", "--spec-version", MODERN)),
    *(("extension", ("--scenario", each)) for each in TASKS),
)
"""The arguments of the runs, each of which is a process; those of both versions first."""


class SuiteScenario(Struct, frozen=True):
    """The result of a scenario: the numbers of its checks."""

    version: str
    name: str
    passed: int
    failed: int
    other: int


def lacking() -> str:
    """Return the missing requirements of the suite, or nothing."""
    installed = HOME / "node_modules" / "@modelcontextprotocol" / "conformance"
    return (
        "" if installed.exists() else "npm did not install the conformance suite of MCP here (make dialects)"
    )


async def judge(
    folder: Path, store: str | None = None, runs: Sequence[tuple[str, Sequence[str]]] = RUNS
) -> list[SuiteScenario]:
    """Run the suite, or some of its runs; return its report."""
    found: list[SuiteScenario] = []
    async with served(make_suite_app(store or folder / "suite.db")) as server:
        for number, (version, arguments) in enumerate(runs):
            path = folder / f"run-{number}"
            program = "node_modules/@modelcontextprotocol/conformance/dist/index.js"
            process = await asyncio.create_subprocess_exec(
                *(node(), program, "server", "--url", f"{server.url}/v1/mcp", "-o", str(path), *arguments),
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.STDOUT,
                cwd=HOME,
            )
            try:
                await asyncio.wait_for(process.wait(), SUITE_S)
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
            found += [_scenario(version, each) for each in sorted(path.iterdir())]
    return found


def _scenario(version: str, folder: Path) -> SuiteScenario:
    checks = json.loads((folder / "checks.json").read_text(encoding="utf-8"))
    states = [each["status"] for each in checks if each["status"] != "INFO"]
    passed, failed = states.count("SUCCESS"), states.count("FAILURE")
    name = re.sub(r"^server-|-\d{4}-\d\d-\d\dT.*$", "", folder.name)
    return SuiteScenario(version, name, passed, failed, len(states) - passed - failed)


PAGE = """# Conformance to MCP

`make dialects` runs `@modelcontextprotocol/conformance` 0.2.0-alpha.12, unmodified, against an app on SQLite. The
agent of the app implements the tools that the suite calls. The command writes this page. See
[the guide](../guides/mcp-server.md).

The suite covers the whole protocol. For a feature that is not served, the last column has the reason. A scenario
without a reason has no failed check; the suite skips some checks, or reports a warning for them. `extension` is the
extension of tasks, with version 2026-07-28.

"""


def table_of(found: Sequence[SuiteScenario]) -> str:
    """Return the result as a table."""
    rows = [
        "| version | scenario | passed | failed | skipped or warned | not served |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for each in found:
        reason = NOT_SERVED.get(each.name, "") if each.failed else ""
        rows.append(
            f"| {each.version} | {each.name} | {each.passed} | {each.failed} | {each.other} | {reason} |"
        )
    sums = [sum(getattr(each, name) for each in found) for name in ("passed", "failed", "other")]
    rows.append(f"| **all** | | {sums[0]} | {sums[1]} | {sums[2]} | |")
    return "\n".join(rows)


def faults(found: Sequence[SuiteScenario]) -> list[str]:
    """Return the failed scenarios that are expected to pass."""
    return [f"{each.version} {each.name}" for each in found if each.failed and each.name not in NOT_SERVED]
