"""The sessions that one process has in memory."""

from __future__ import annotations

from collections.abc import Mapping

from midstream.engine.runner import Runner
from midstream.engine.sub_agents import children_at_work
from midstream.protocol.frames import EventId
from midstream.protocol.server_stream import waiting_on
from midstream.session.child_names import PART_MARK


class AwakeSessions:
    """The awake sessions of a host, which alone adds and removes them."""

    def __init__(self) -> None:
        self.runners: dict[str, Runner] = {}
        """The runners by the ids of their sessions, the longest unused first."""

    def __len__(self) -> int:
        return len(self.runners)

    def get(self, session_id: str) -> Runner | None:
        """Return a session, or None if it is not awake."""
        return self.runners.get(session_id)

    def family_of(self, session_id: str) -> list[Runner]:
        """Return the runners of a session and its sub-agents, of those that are awake."""
        mark = f"{session_id}{PART_MARK}"
        own = [self.runners[session_id]] if session_id in self.runners else []
        return own + [runner for name, runner in self.runners.items() if name.startswith(mark)]

    def is_live(self, session_id: str) -> bool:
        """Whether this process runs an open turn of a session. The state of a followed session may be old."""
        runner = self.runners.get(session_id)
        return runner is not None and runner.has_lease and runner.state.is_live

    def waits_for(self, runner: Runner) -> str:
        """Return what an awake session waits for, see `waiting_on`; `agent` if its turn is held (TURN-90)."""
        if runner.waits_for_agent:
            return "agent"
        return waiting_on(runner.state, self.children_wait_for(runner.session_id))

    def children_wait_for(self, session_id: str) -> list[str]:
        """Return what each active sub-agent of a session's turn waits for, see `waiting_on`; `tool` if unknown."""
        parent = self.runners.get(session_id)
        names = [] if parent is None else children_at_work(session_id, parent.state)
        return [self._child_waits_for(name) for name in names]

    def _child_waits_for(self, session_id: str) -> str:
        runner = self.runners.get(session_id)
        return "tool" if runner is None else self.waits_for(runner)

    def followed_ends(self) -> Mapping[str, int]:
        """Return the sessions that have readers here and may grow on another node, with their last positions here."""
        return {
            session_id: runner.newest.position
            for session_id, runner in self.runners.items()
            if runner.readers and runner.may_grow_elsewhere
        }

    def note_pruned(self, session_id: str, last: EventId) -> None:
        """Notify the readers of an awake session of the new beginning of its events (STREAM-62)."""
        runner = self.runners.get(session_id)
        if runner is not None and runner.events.pruned_to.position < last.position:
            runner.events.pruned_to = last

    @property
    def followed(self) -> int:
        """Number of sessions of other nodes that are followed for readers."""
        return sum(bool(runner.readers) and runner.is_stale for runner in self.runners.values())

    @property
    def leases(self) -> int:
        """Number of sessions whose leases this process has."""
        return sum(runner.has_lease for runner in self.runners.values())

    @property
    def turns_running(self) -> int:
        """Number of sessions with an open turn, on this node or another."""
        return sum(runner.state.is_live for runner in self.runners.values())
