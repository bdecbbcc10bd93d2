"""Protection of an open turn from another agent that serves the same store (TURN-86)."""

from __future__ import annotations

from collections.abc import Iterable

from midstream.core.session import Received, Session, ToolsFound
from midstream.core.turn import Cancel, Command, Resume
from midstream.errors import AgentMismatchError
from midstream.runtime.agent import Agent

Commands = Iterable[Command | Received | ToolsFound | object | None]


def is_of_other(state: Session, agent: Agent) -> bool:
    """Whether the open turn belongs to another agent than the one served here."""
    return state.is_turn_of_other(agent.name, agent.version)


def adopts(commands: Commands) -> bool:
    """Whether a caller resumes the turn on purpose: it goes on with the agent served here."""
    return any(isinstance(each, Resume) for each in commands)


def only_cancels(commands: Commands) -> bool:
    """Whether nothing but a stop is requested, which any agent's server may do."""
    said = [each.command if isinstance(each, Received) else each for each in commands]
    return bool(said) and all(isinstance(each, Cancel) for each in said)


def mismatch(session_id: str, state: Session, agent: Agent) -> AgentMismatchError:
    """Return the refusal of everything else."""
    theirs = f"{state.agent!r} {state.agent_version}".strip()
    served = f"{agent.name!r} {agent.version}".strip()
    return AgentMismatchError(
        f"the open turn of session {session_id!r} belongs to the agent {theirs}, and this server runs {served}: serve "
        "that agent on this store, cancel the turn, or resume it (`midstream sessions resume`) with this agent"
    )
