"""Protection of an open turn from another agent, or one with other tools, on the same store (TURN-86, TURN-90)."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from msgspec.structs import replace

from midstream.engine.agent import Agent
from midstream.errors import AgentMismatchError
from midstream.session.calls import Site
from midstream.session.records import EpochStarted
from midstream.session.session import Received, Session, ToolsFound, is_same_agent
from midstream.session.turn.commands import Cancel, Command, Resume, SendTranscript
from midstream.session.turn.states import RunningCalls

_log = logging.getLogger(__name__)

Commands = Iterable[Command | Received | ToolsFound | object | None]


def is_held(state: Session, agent: Agent) -> bool:
    """Whether the open turn belongs to another agent, or needs tools that the served agent does not have."""
    return state.is_turn_of_other(agent.name, agent.version) or bool(missing_tools(state, agent))


def missing_tools(state: Session, agent: Agent) -> list[str]:
    """Return the tools of unfinished calls that the agent no longer has.

    Tools of tool servers are listed when a turn continues. Before that, none of them counts as missing.
    """
    if not isinstance(state.turn, RunningCalls) or state.driver or agent.sources:
        return []
    ours = (call for call in state.turn.calls if call.is_open and call.plan.problem is None)
    names = {call.call.name for call in ours if call.plan.site in (Site.SERVER, Site.CHILD)}
    return sorted(names - agent.tools.keys())


def with_agent_name(began: EpochStarted, agent: Agent) -> EpochStarted:
    """Return the record with the name and the version of the served agent."""
    return replace(began, agent=agent.name, agent_version=agent.version)


def adopts(commands: Commands) -> bool:
    """Whether a caller resumes the turn on request, or closes it with a transcript."""
    return any(isinstance(each, Resume | SendTranscript) for each in commands)


def only_cancels(commands: Commands) -> bool:
    """Whether all commands are cancellations, which the server of any agent may decide."""
    plain_commands = [each.command if isinstance(each, Received) else each for each in commands]
    return bool(plain_commands) and all(isinstance(each, Cancel) for each in plain_commands)


def refuse(commands: Commands, session_id: str, state: Session, agent: Agent) -> None:
    """Refuse all commands except a resumption on request and a cancellation.

    Raises:
        AgentMismatchError: There is another command. Nothing has changed.
    """
    if not (adopts(commands) or only_cancels(commands)):
        raise mismatch(session_id, state, agent)


def refuse_for_other(command: Command | Received, session_id: str, agent: Agent) -> None:
    """Refuse a transcript that another agent must answer: its node has not noticed that this one has the session.

    Raises:
        AgentMismatchError: The transcript names another agent. Nothing has changed.
    """
    sent = command.command if isinstance(command, Received) else command
    if not (isinstance(sent, SendTranscript) and sent.agent):
        return
    if not is_same_agent((sent.agent, sent.agent_version), (agent.name, agent.version)):
        raise AgentMismatchError(
            f"session {session_id!r} has a request for the agent {sent.agent!r}, and the server that runs the session "
            f"serves {agent.name!r}: send the request to another session"
        )


def warn(session_id: str, state: Session, agent: Agent) -> None:
    """Log that a turn is held."""
    _log.warning("%s", mismatch(session_id, state, agent).message, extra={"session": session_id})


def mismatch(session_id: str, state: Session, agent: Agent) -> AgentMismatchError:
    """Return the error for the refused commands."""
    if not state.is_turn_of_other(agent.name, agent.version):
        names = ", ".join(map(repr, missing_tools(state, agent)))
        return AgentMismatchError(
            f"the open turn of session {session_id!r} calls tools that {agent.name!r} no longer has "
            f"({names}): serve an agent with them, cancel the turn, or resume it (`midstream sessions resume`) without "
            "them"
        )
    theirs = f"{state.agent!r} {state.agent_version}".strip()
    served = f"{agent.name!r} {agent.version}".strip()
    return AgentMismatchError(
        f"the open turn of session {session_id!r} belongs to the agent {theirs}, and this server runs {served}: serve "
        "that agent on this store, cancel the turn, or resume it (`midstream sessions resume`) with this agent"
    )
