"""Upstreams of `midstream gateway` by name. The module of an upstream is imported only when it is used."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, cast, get_args

from msgspec import Struct
from msgspec.structs import replace

from midstream.agents.agent_runs import SilenceLimits
from midstream.agents.permission_rules import CAUTIOUS, Rules
from midstream.agents.pool import Pooled, PoolLimits
from midstream.cli.trial_model import TrialModel
from midstream.errors import UsageError
from midstream.models.http_limits import HttpLimits
from midstream.models.model import Model
from midstream.store.contract import KeyValue
from midstream.tools.forwarded_servers import ForwardedMcpServer

CLI, STORE = "cli", "store"
"""Places of an agent's conversations: files of its CLI on this machine, or also the gateway's store."""
SILENCE_S = 1800.0
"""Default limit of an upstream's silence, in seconds: slow reasoning models are silent for many minutes."""
CODEX_SERVER = ("app-server", "--listen", "stdio://")
"""Arguments with which the package starts Codex."""


class UpstreamOptions(Struct, frozen=True):
    """Permissions and settings of an agent. Each kind of upstream supports some of them.

    Args:
        permission_mode: The agent's own permission mode; "" for its default.
        sandbox: The agent's own sandbox mode; "" for its default.
        is_reviewing: Whether the agent's own review decides about acts beyond the sandbox.
        has_rules_file: Whether the instructions of a client application are written to a rules file.
        servers: The MCP servers of the agent.
        rules: Rules for its permission requests; None for its default.
        env: Variables that are added to its environment.
        path: The program of its CLI; None for that of its package.
        instructions: Place of a client application's instructions; "" for its default.
        sign_in: Id of its authentication method; "" for none.
        sessions: Place of its conversations: `CLI`, `STORE`, or "" for its default.
        silence_s: Seconds without an event after which an answer is interrupted, also before its first token.
    """

    permission_mode: str = ""
    sandbox: str = ""
    is_reviewing: bool = False
    has_rules_file: bool = False
    servers: tuple[ForwardedMcpServer, ...] = ()
    rules: Rules | None = None
    env: Mapping[str, str] = {}
    path: Path | None = None
    instructions: str = ""
    sign_in: str = ""
    sessions: str = ""
    limits: PoolLimits = PoolLimits()
    silence_s: float = SILENCE_S


class UpstreamRequest(Struct, frozen=True):
    """Upstream of the command line.

    Args:
        detail: Text after the colon of its name, such as an agent's command, or "".
        model: The upstream's own name of the model, or "".
        cwd: Working folder of an agent.
        api_key: The upstream's key, or None for its own variable.
        options: Further settings.
    """

    detail: str
    model: str
    cwd: Path
    api_key: str | None
    options: UpstreamOptions
    kv: KeyValue


class _Kind(Struct, frozen=True):
    """A kind of upstream: module, class, extra, and constructor arguments.

    `takes`: the options that it supports besides its detail and a folder.
    """

    module: str
    name: str
    extra: str
    arguments: Callable[[UpstreamRequest], tuple[tuple[Any, ...], Mapping[str, Any]]]
    takes: frozenset[str] = frozenset({"model", "key"})
    is_pooled: bool = True


def _claude(wanted: UpstreamRequest) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    sdk, options = importlib.import_module("claude_agent_sdk"), wanted.options
    mode = _one_of("--permission-mode", options.permission_mode, get_args(sdk.PermissionMode))
    store = None
    if options.sessions == STORE:
        store = importlib.import_module("midstream.agents.claude_sessions").KeyValueSessions(wanted.kv)
    named = {
        "cwd": wanted.cwd,
        "permission_mode": mode,
        "permissions": options.rules,
        "options": sdk.ClaudeAgentOptions(env=dict(options.env), cli_path=options.path),
        "sessions": store,
    }
    return (wanted.detail or wanted.model,), named


def _cursor(wanted: UpstreamRequest) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    model = wanted.detail or wanted.model
    if not model:
        raise UsageError("Cursor needs a model, such as --upstream cursor:composer-2")
    named = {"cwd": wanted.cwd, "api_key": wanted.api_key, "is_instructing": wanted.options.has_rules_file}
    return (model,), named


def _codex(wanted: UpstreamRequest) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    kinds, options = importlib.import_module("midstream.agents.codex").sdk.Sandbox, wanted.options
    sandbox = _one_of("--sandbox", options.sandbox, [each.value for each in kinds])
    named = {
        "cwd": wanted.cwd,
        "api_key": wanted.api_key,
        "permissions": options.rules,
        "is_reviewing": options.is_reviewing,
        "command": None if options.path is None else (str(options.path), *CODEX_SERVER),
        "env": options.env,
        **({} if sandbox is None else {"sandbox": kinds(sandbox)}),
    }
    return (wanted.detail or wanted.model or None,), named


def _acp(wanted: UpstreamRequest) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    if not wanted.detail:
        raise UsageError("an ACP agent needs a command, such as --upstream 'acp:gemini --acp'")
    options = wanted.options
    named = {
        "cwd": wanted.cwd,
        "env": options.env,
        "permissions": options.rules or CAUTIOUS,
        "mode": options.permission_mode,
        "sign_in": options.sign_in,
        **({"instructions": options.instructions} if options.instructions else {}),
    }
    return (wanted.detail,), named


def _openai(wanted: UpstreamRequest) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    model = wanted.detail or wanted.model
    if not model:
        raise UsageError("OpenAI needs a model, such as --upstream openai:gpt-5")
    if not (wanted.api_key or os.environ.get("OPENAI_API_KEY")):
        raise UsageError("OpenAI needs a key; set OPENAI_API_KEY, or name another variable with --key-from")
    return (model,), {"api_key": wanted.api_key, "limits": _http_limits(wanted)}


def _compatible(wanted: UpstreamRequest) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    if not (wanted.detail and wanted.model):
        example = "--upstream openai-compatible:http://127.0.0.1:11434/v1 --model qwen3"
        raise UsageError(f"an OpenAI-compatible server needs a URL and a model, such as {example}")
    return (wanted.detail, wanted.model, wanted.api_key), {"limits": _http_limits(wanted)}


def _anthropic(wanted: UpstreamRequest) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    model = wanted.detail or wanted.model
    if not model:
        raise UsageError("Anthropic needs a model, such as --upstream anthropic:claude-sonnet-4-5")
    key = wanted.api_key or os.environ.get("ANTHROPIC_API_KEY")
    if not key:
        raise UsageError(
            "Anthropic needs a key; set ANTHROPIC_API_KEY, or name another variable with --key-from"
        )
    base_url = os.environ.get("ANTHROPIC_BASE_URL", "https://api.anthropic.com").rstrip("/")
    base_url = base_url if base_url.endswith("/v1") else f"{base_url}/v1"
    return (base_url, model, key), {"limits": _http_limits(wanted)}


def _http_limits(wanted: UpstreamRequest) -> HttpLimits:
    silence_s = wanted.options.silence_s
    return HttpLimits(first_byte_s=silence_s, between_bytes_s=silence_s)


def _one_of(option: str, value: str, known: Collection[str]) -> str | None:
    if value and value not in known:
        raise UsageError(
            f"{option} {value} is not supported by this upstream; it supports {', '.join(known)}"
        )
    return value or None


_ACP_TAKES = frozenset({"permission_mode", "servers", "rules", "env", "instructions", "sign_in"})
_CLAUDE_TAKES = frozenset({"model", "permission_mode", "servers", "rules", "env", "path", "sessions"})
_CODEX_TAKES = frozenset({"model", "key", "sandbox", "is_reviewing", "servers", "rules", "env", "path"})
_CURSOR_TAKES = frozenset({"model", "key", "has_rules_file", "servers"})
_OPTIONS = {
    "permission_mode": "--permission-mode",
    "sandbox": "--sandbox",
    "is_reviewing": "--codex-review",
    "has_rules_file": "--rules-file",
    "servers": "--mcp-servers",
    "rules": "--allow-kind, --allow-tool or --refuse-tool",
    "env": "--agent-env",
    "path": "--agent-path",
    "instructions": "--instructions",
    "sign_in": "--sign-in",
    "sessions": "--agent-sessions",
}

KINDS: Mapping[str, _Kind] = {
    "acp": _Kind("midstream.agents.acp", "AcpAgent", "acp", _acp, _ACP_TAKES),
    "anthropic": _Kind(
        "midstream.models.anthropic_messages", "AnthropicMessages", "", _anthropic, is_pooled=False
    ),
    "claude": _Kind("midstream.agents.claude", "Claude", "claude", _claude, _CLAUDE_TAKES),
    "codex": _Kind("midstream.agents.codex", "Codex", "codex", _codex, _CODEX_TAKES),
    "cursor": _Kind("midstream.agents.cursor", "Cursor", "cursor", _cursor, _CURSOR_TAKES),
    "openai": _Kind("midstream.agents.openai_conversation", "OpenAIChain", "openai", _openai),
    "openai-compatible": _Kind(
        "midstream.models.openai_compatible", "OpenAICompatible", "", _compatible, is_pooled=False
    ),
}
"""All kinds of upstreams by their names on the command line, except `SCRIPTED`."""
SCRIPTED = "scripted"
"""Name of the upstream without a model; see `TrialModel`."""


def is_pooled(named: str) -> bool:
    """Return whether `KIND` or `KIND:DETAIL` is an agent with a pool."""
    kind = KINDS.get(named.partition(":")[0])
    return kind is not None and kind.is_pooled


def find_upstream(
    named: str,
    kv: KeyValue,
    *,
    model: str = "",
    cwd: Path = Path(),
    key_variable: str = "",
    options: UpstreamOptions | None = None,
) -> Model:
    """Return the model for `KIND` or `KIND:DETAIL`; a stateful agent is behind a pool. Nothing is started yet.

    Args:
        named: Name of the upstream, such as `claude`, `cursor:composer-2`, `acp:gemini --acp`,
            `openai-compatible:http://127.0.0.1:11434/v1`.
        kv: Key-value store of the pool's records, and of an agent's conversations if `options` choose the store.
        model: The upstream's own name of the model, if its kind supports one.
        cwd: Working folder of agents.
        key_variable: Environment variable with the upstream's key; "" for the upstream's own variable.
        options: Permissions and settings of an agent.

    Raises:
        UsageError: The kind is unknown, its extra is not installed, or a required value is missing.
    """
    kind_name, _, detail = named.partition(":")
    kind = KINDS.get(kind_name)
    if kind is None and kind_name != SCRIPTED:
        known = ", ".join(sorted([*KINDS, SCRIPTED]))
        raise UsageError(f"unknown upstream {kind_name!r}; known: {known}")
    takes = kind.takes if kind is not None else frozenset()
    if model and "model" not in takes:
        raise UsageError(f"the upstream {kind_name!r} does not support --model")
    if key_variable and "key" not in takes:
        raise UsageError(f"the upstream {kind_name!r} does not support --key-from; remove it")
    options = options or UpstreamOptions()
    for field, option in _OPTIONS.items():
        if getattr(options, field) and field not in takes:
            raise UsageError(f"the upstream {kind_name!r} does not support {option}")
    if options.limits != PoolLimits() and (kind is None or not kind.is_pooled):
        raise UsageError(f"the upstream {kind_name!r} has no pool; remove the options of the pool")
    if kind is None:
        return TrialModel(SCRIPTED, prefix=f"{detail}: " if detail else "")
    api_key = os.environ.get(key_variable) if key_variable else None
    if key_variable and not api_key:
        raise UsageError(
            f"the variable {key_variable} of --key-from is not set; set it to the upstream's key"
        )
    try:
        positional, named_arguments = kind.arguments(
            UpstreamRequest(detail, model, cwd, api_key, options, kv)
        )
        made = getattr(importlib.import_module(kind.module), kind.name)
    except ImportError as error:
        raise UsageError(
            f"the upstream {kind_name!r} needs an extra: pip install 'midstream[{kind.extra}]'"
        ) from error
    upstream = made(*positional, **named_arguments)
    if not kind.is_pooled:
        return cast("Model", upstream)
    servers, idle_s = options.servers, options.silence_s
    silence = SilenceLimits(idle_s=idle_s, tool_s=max(SilenceLimits().tool_s, idle_s))
    return Pooled(
        upstream,
        kv,
        limits=replace(options.limits, silence=silence),
        servers=(lambda: servers) if servers else None,
    )
