"""Options of `midstream gateway` about its agents: permissions, environment, conversations, and limits of the pool."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args

import click

from midstream.agents.agent_runs import SILENCE_MAX_S
from midstream.agents.permission_rules import HARMLESS, Kind, Rules
from midstream.agents.pool import PoolLimits
from midstream.agents.pool_records import RECORD_AGE_MAX_S, RECORDS_MAX
from midstream.agents.prior_transcript import TranscriptBudget
from midstream.cli.mcp_servers import read_servers
from midstream.cli.option_groups import FiniteRange, group_options
from midstream.cli.upstream_options import CLI, SILENCE_S, STORE, UpstreamOptions
from midstream.errors import UsageError

F = TypeVar("F", bound=Callable[..., Any])  # whatever click decorates

DAY_S = 24 * 3600.0
_ON_PERMISSIONS = (
    click.option(
        "--permission-mode",
        default="",
        metavar="MODE",
        help="The agent's own permission mode: that of Claude Code, or a session mode of an ACP agent.",
    ),
    click.option(
        "--allow-kind",
        multiple=True,
        type=click.Choice(get_args(Kind)),
        help="Allow requests of the agent for this kind of act, besides read, search and think; may be repeated.",
    ),
    click.option(
        "--allow-tool",
        multiple=True,
        metavar="NAME",
        help="Allow requests of the agent for this tool, whatever its kind; may be repeated.",
    ),
    click.option(
        "--refuse-tool",
        multiple=True,
        metavar="NAME",
        help="Refuse requests of the agent for this tool, whatever its kind; may be repeated.",
    ),
    click.option(
        "--sandbox",
        default="",
        metavar="KIND",
        help="What Codex may change: read-only, workspace-write or full-access.",
    ),
    click.option(
        "--codex-review",
        "is_reviewing",
        is_flag=True,
        help="Let Codex's own review decide about commands that the sandbox does not allow.",
    ),
)
_ON_AGENTS = (
    click.option(
        "--agent-env",
        multiple=True,
        metavar="NAME[=VALUE]",
        help="Set a variable in the agent's environment; NAME alone copies the gateway's value, for secrets; "
        "may be repeated.",
    ),
    click.option(
        "--agent-path",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="The program of Claude Code or Codex (default: that of its package).",
    ),
    click.option(
        "--agent-sessions",
        type=click.Choice([CLI, STORE]),
        help="Where Claude Code's conversations are kept: cli: in its files on this machine (default); "
        "store: also in the gateway's store, from which any machine can resume them.",
    ),
    click.option(
        "--sign-in",
        default="",
        metavar="ID",
        help="The id of an ACP agent's authentication method.",
    ),
    click.option(
        "--instructions",
        type=click.Choice(["meta", "message", "none"]),
        help="Place of the client application's instructions for an ACP agent: in _meta.systemPrompt (default), "
        "before the first message, or nowhere.",
    ),
    click.option(
        "--rules-file",
        "has_rules_file",
        is_flag=True,
        help="Write the client application's instructions to .cursor/rules/midstream.mdc, where Cursor reads them.",
    ),
    click.option(
        "--mcp-servers",
        "servers_path",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help='MCP servers for the agent, as JSON: {"mcpServers": {…}}; ${NAME} is a variable of the environment.',
    ),
)
_ON_POOL = (
    click.option(
        "--pool-records",
        type=click.IntRange(min=1),
        default=RECORDS_MAX,
        show_default=True,
        help="Number of conversations whose agents are kept; the least recently used are removed first.",
    ),
    click.option(
        "--pool-days",
        type=FiniteRange(min=0, min_open=True),
        default=RECORD_AGE_MAX_S / DAY_S,
        show_default=True,
        help="Days after its last use until an agent's record is deleted.",
    ),
    click.option(
        "--live-agents",
        type=click.IntRange(min=1),
        default=PoolLimits().live_max,
        show_default=True,
        help="Number of agents that stay open.",
    ),
    click.option(
        "--agent-rest",
        type=FiniteRange(min=0, min_open=True),
        metavar="SECONDS",
        help="Seconds without a message after which an open agent is closed; the next message resumes it. "
        "300 by default, 60 for Claude Code.",
    ),
    click.option(
        "--agent-memory",
        type=FiniteRange(min=0, min_open=True),
        metavar="MIB",
        help="Memory limit in MiB of all agents' processes; beyond it, idle agents of Claude Code and ACP are closed, "
        "longest idle first, and resumed by their next message (default: no limit; Linux only).",
    ),
    click.option(
        "--turn-wait",
        type=FiniteRange(min=0, min_open=True),
        metavar="SECONDS",
        default=PoolLimits().wait_s,
        show_default=True,
        help="Seconds for which a message waits for the running turn of its conversation; then a fresh agent answers.",
    ),
    click.option(
        "--transcript-chars",
        type=click.IntRange(min=1),
        default=TranscriptBudget().total_chars,
        show_default=True,
        help="Characters of the conversation that a fresh agent receives; the newest are kept.",
    ),
    click.option(
        "--transcript-result-chars",
        type=click.IntRange(min=1),
        default=TranscriptBudget().result_chars,
        show_default=True,
        help="Characters of each tool result in that transcript.",
    ),
    click.option(
        "--silence",
        "silence_s",
        type=FiniteRange(min=0, max=SILENCE_MAX_S, min_open=True),
        metavar="SECONDS",
        default=SILENCE_S,
        show_default=True,
        help="Seconds without an event after which an answer of the upstream is cut, also before its first token.",
    ),
)


agent_options: Callable[[F], F] = group_options(*_ON_PERMISSIONS, *_ON_AGENTS, *_ON_POOL)
"""The options of agents and of their pool."""
OF_STORE = frozenset({"pool_records", "pool_days"})
"""Options that apply to all pools of a store together; each pool enforces them."""


def names_of_agent_options() -> frozenset[str]:
    """Return the names of the options of one agent and its pool, without `OF_STORE`."""
    command = click.command(agent_options(lambda: None))
    return frozenset(str(option.name) for option in command.params) - OF_STORE


def read_agent_options(options: Mapping[str, Any]) -> UpstreamOptions:
    """Return the settings of agents and their pool, from the options of a command line.

    Raises:
        UsageError: The file of MCP servers cannot be read, or a variable is not set.
    """
    servers_path, agent_path = options["servers_path"], options["agent_path"]
    return UpstreamOptions(
        permission_mode=options["permission_mode"],
        sandbox=options["sandbox"],
        is_reviewing=options["is_reviewing"],
        has_rules_file=options["has_rules_file"],
        servers=read_servers(servers_path) if servers_path else (),
        rules=_rules(options["allow_kind"], options["allow_tool"], options["refuse_tool"]),
        env=dict(_variable(each) for each in options["agent_env"]),
        path=agent_path.absolute() if agent_path else None,  # the agent runs in another folder
        instructions=options["instructions"] or "",
        sign_in=options["sign_in"],
        sessions=options["agent_sessions"] or "",
        silence_s=options["silence_s"],
        limits=PoolLimits(
            live_max=options["live_agents"],
            rest_s=options["agent_rest"],
            memory_mib_max=options["agent_memory"],
            wait_s=options["turn_wait"],
            budget=TranscriptBudget(
                total_chars=options["transcript_chars"], result_chars=options["transcript_result_chars"]
            ),
            record_age_max_s=options.get("pool_days", RECORD_AGE_MAX_S / DAY_S) * DAY_S,
            records_max=options.get("pool_records", RECORDS_MAX),
        ),
    )


def _rules(kinds: Iterable[Kind], tools: Iterable[str], refused: Iterable[str]) -> Rules | None:
    rules = Rules(HARMLESS.union(kinds), frozenset(tools), frozenset(refused))
    return rules if kinds or tools or refused else None


def _variable(given: str) -> tuple[str, str]:
    """Return the name and the value of a variable; without a value, that of this process."""
    name, sign, value = given.partition("=")
    if not name:
        raise UsageError(f"--agent-env {given} has no name; expected NAME=VALUE or NAME")
    if sign:
        return name, value
    if name not in os.environ:
        raise UsageError(f"the variable {name} is not set; --agent-env {name} copies it to the agent")
    return name, os.environ[name]
