"""What `midstream gateway` can stand before, by name; an upstream's software is imported only when it is named."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from midstream.core.messages import Text, UserMessage
from midstream.core.replies import ModelRequest
from midstream.errors import UsageError
from midstream.runtime.models import Model
from midstream.runtime.pool import Pooled
from midstream.store.contract import Shelf
from midstream.testing.models import Reply, ScriptedModel, text


class Wanted(Struct, frozen=True):
    """What the command line says of an upstream.

    Args:
        detail: What stands behind the colon of its name, such as an agent's command; "" for nothing.
        model: The upstream's own name of the model, or "".
        cwd: The folder an agent works in.
        api_key: The upstream's key, or None where it finds its own.
    """

    detail: str
    model: str
    cwd: Path
    api_key: str | None


class _Kind(Struct, frozen=True):
    """A kind of upstream: its module and class, the extra it needs, and how it is made.

    `takes`: what it can make something of beside its detail and a folder (`model`, `key`).
    """

    module: str
    name: str
    extra: str
    arguments: Callable[[Wanted], tuple[tuple[Any, ...], Mapping[str, Any]]]
    takes: frozenset[str] = frozenset({"model", "key"})
    is_pooled: bool = True


def _claude(wanted: Wanted) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    return (wanted.detail or wanted.model,), {"cwd": wanted.cwd}


def _cursor(wanted: Wanted) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    model = wanted.detail or wanted.model
    if not model:
        raise UsageError("name the model that Cursor is to use, such as --upstream cursor:composer-2")
    return (model,), {"cwd": wanted.cwd, "api_key": wanted.api_key}


def _codex(wanted: Wanted) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    return (wanted.detail or wanted.model or None,), {"cwd": wanted.cwd, "api_key": wanted.api_key}


def _acp(wanted: Wanted) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    if not wanted.detail:
        raise UsageError("name the agent's command, such as --upstream 'acp:gemini --acp'")
    return (wanted.detail,), {"cwd": wanted.cwd}


def _openai(wanted: Wanted) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    model = wanted.detail or wanted.model
    if not model:
        raise UsageError("name the model that OpenAI is to use, such as --upstream openai:gpt-5")
    if not (wanted.api_key or os.environ.get("OPENAI_API_KEY")):
        raise UsageError("OpenAI wants a key: set OPENAI_API_KEY, or name another variable with --key-from")
    return (model,), {"api_key": wanted.api_key}


def _compatible(wanted: Wanted) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    if not (wanted.detail and wanted.model):
        example = "--upstream openai-compatible:http://127.0.0.1:11434/v1 --model qwen3"
        raise UsageError(f"name the server and the model, such as {example}")
    return (wanted.detail, wanted.model, wanted.api_key), {}


KINDS: Mapping[str, _Kind] = {
    "acp": _Kind("midstream.integrations.acp", "AcpAgent", "acp", _acp, frozenset()),
    "claude": _Kind("midstream.integrations.claude_agent", "Claude", "claude", _claude, frozenset({"model"})),
    "codex": _Kind("midstream.integrations.codex", "Codex", "codex", _codex),
    "cursor": _Kind("midstream.integrations.cursor", "Cursor", "cursor", _cursor),
    "openai": _Kind("midstream.integrations.openai_conversation", "OpenAIChain", "openai", _openai),
    "openai-compatible": _Kind(
        "midstream.integrations.openai_compatible", "OpenAICompatible", "", _compatible, is_pooled=False
    ),
}
"""Every upstream with software of its own, by the name it has on the command line."""
SCRIPTED = "scripted"
"""Says again what it was told; for trying a host without any model."""


def find_upstream(
    named: str, shelf: Shelf, *, model: str = "", cwd: Path = Path(), key_variable: str = ""
) -> Model:
    """Return the model that `KIND` or `KIND:DETAIL` names: one that remembers behind a pool. Nothing is started yet.

    Args:
        named: Such as `claude`, `cursor:composer-2`, `acp:gemini --acp`, `openai-compatible:http://127.0.0.1:11434/v1`.
        shelf: Where the pool keeps what it knows of its agents.
        model: The upstream's own name of the model, where its kind takes one.
        cwd: The folder agents work in.
        key_variable: The environment variable that has the upstream's key; "" lets it look for its own.

    Raises:
        UsageError: There is no such kind, its extra is not installed, or something it needs is not named.
    """
    kind_name, _, detail = named.partition(":")
    kind = KINDS.get(kind_name)
    if kind is None and kind_name != SCRIPTED:
        known = ", ".join(sorted([*KINDS, SCRIPTED]))
        raise UsageError(f"there is no upstream {kind_name!r}; there are {known}")
    takes = kind.takes if kind is not None else frozenset()
    if model and "model" not in takes:
        raise UsageError(f"the upstream {kind_name!r} takes no --model")
    if key_variable and "key" not in takes:
        raise UsageError(f"the upstream {kind_name!r} finds its own key: leave out --key-from")
    if kind is None:
        return ScriptedModel(_echo, name=SCRIPTED)
    api_key = os.environ.get(key_variable) if key_variable else None
    if key_variable and not api_key:
        raise UsageError(f"the variable {key_variable} is not set: it was to have the upstream's key")
    positional, named_arguments = kind.arguments(Wanted(detail, model, cwd, api_key))
    try:
        made = getattr(importlib.import_module(kind.module), kind.name)
    except ImportError as error:
        raise UsageError(
            f"the upstream {kind_name!r} needs an extra: pip install 'midstream[{kind.extra}]'"
        ) from error
    upstream = made(*positional, **named_arguments)
    return Pooled(upstream, shelf) if kind.is_pooled else upstream


def _echo(request: ModelRequest) -> Reply:
    newest = next(
        (entry for entry in reversed(request.history.entries) if isinstance(entry, UserMessage)), None
    )
    parts = newest.parts if newest is not None else ()
    words = "".join(part.text for part in parts if isinstance(part, Text))
    return text(f"You said: {words}" if words else "You said nothing.")
