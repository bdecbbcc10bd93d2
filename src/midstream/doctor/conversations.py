"""Conversations in the lines of a file, and their stretches that can be examined separately.

A tree of lines (Claude Code) has one conversation for every continued branch; parallel results have branches of their
own and belong to the conversation of their call. A stretch ends before a user's prompt if everything before it is
answered and none of its ids occurs again. The repair of a stretch is independent of the others, so a file of any length
is examined stretch by stretch.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import NamedTuple

from midstream.doctor.index import Index
from midstream.doctor.jsonl_formats import Facts, MessageLine

NO_CONVERSATION = -1
"""The conversation of lines above the first message."""


class LooseLine(NamedTuple):
    """A line whose parent is not in the file: the parent, and the previous line."""

    number: int
    parent: str
    before: str


class UnjudgedConversation:
    """The part of a conversation that is not examined yet."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.entries: list[MessageLine] = []
        self.facts: list[Facts] = []
        self.tip = ""
        """The id of the last line of a tree."""
        self.turn = -1
        """Number of the node that began the open turn."""
        self.reach = 0
        """The last line that belongs to these lines."""
        self.origin: tuple[UnjudgedConversation, int] | None = None
        """The conversation from which this one branched off, and the last common node."""

    def add(self, entry: MessageLine, facts: Facts, last: Index) -> None:
        """Append an entry."""
        self.entries.append(entry)
        self.facts.append(facts)
        self.reach = max([self.reach, *(last.get(each) or 0 for each in facts.ids)])

    def is_done_before(self, entry: MessageLine) -> bool:
        """Whether this prompt begins a part that is independent of these lines."""
        return bool(self.facts) and self.facts[-1].is_response and self.reach < entry.number

    def drain(self) -> list[MessageLine]:
        """Return these lines, and start again."""
        entries, self.entries, self.facts, self.reach = self.entries, [], [], 0
        return entries


class Threads:
    """All conversations of one file, built line by line.

    It stores some sixty bytes for each line of a tree, and the open stretches.

    Args:
        last: For each id, the last line that mentions it.
        may_cut: Whether stretches may be examined separately under these rules.
        read: Reads the entry and facts at an offset again; None without a message.
    """

    def __init__(
        self, last: Index, *, may_cut: bool, read: Callable[[int, int], tuple[MessageLine, Facts] | None]
    ) -> None:
        self._last = last
        self._may_cut = may_cut
        self._read = read
        self._threads: list[UnjudgedConversation] = []
        self._nodes = Index()
        self._thread_of = array("i")
        self._turn_of = array("i")
        self._offset_of = array("q")
        self._line_of = array("i")
        self._latest: UnjudgedConversation | None = None
        self._held: list[tuple[int, list[MessageLine]]] = []
        self.loose: list[LooseLine] = []
        self.copies = 0
        """Number of repeated lines, which are skipped."""

    @property
    def count(self) -> int:
        """Number of conversations so far."""
        return len(self._threads)

    def take(self, entry: MessageLine, facts: Facts, offset: int) -> Iterator[list[MessageLine]]:
        """Add a line to its conversation; yield the stretch that it completes."""
        thread = self._thread_for(entry, facts)
        if thread is None:
            self.copies += 1
            return
        begins_turn = facts.is_prompt or thread.turn < 0
        if facts.is_prompt and self._may_cut and thread.is_done_before(entry):
            yield from self._give_out(thread)
        if entry.node is not None:
            number = self._note(entry.node.id, entry.number, thread.number, offset)
            if begins_turn:
                thread.turn = number
            self._turn_of[number] = thread.turn
            thread.tip = entry.node.id
        self._latest = thread
        thread.add(entry, facts, self._last)

    def pass_by(self, node_id: str, parent: str | None, line: int) -> None:
        """Record a line without a message, which others may follow."""
        above = self._nodes.get(parent) if parent else None
        if node_id in self._nodes:
            return
        number = self._note(node_id, line, NO_CONVERSATION if above is None else self._thread_of[above], -1)
        self._turn_of[number] = NO_CONVERSATION if above is None else self._turn_of[above]

    def break_off(self) -> Iterator[list[MessageLine]]:
        """Begin a new conversation; yield the open one."""
        yield from self.finish()
        if self._threads:
            self._latest = self._new()

    def finish(self) -> Iterator[list[MessageLine]]:
        """Yield everything that is open."""
        for thread in self._threads:
            if thread.entries:
                yield from self._give_out(thread)
        held, self._held = self._held, []
        for _, entries in sorted(held, key=itemgetter(0)):
            yield entries

    def _give_out(self, thread: UnjudgedConversation) -> Iterator[list[MessageLine]]:
        """Yield a stretch; one that shares lines with another waits until that one was examined."""
        entries = thread.drain()
        if entries[-1].is_context and all(each.is_context for each in entries):
            return  # examined with its conversation
        if entries[0].is_context:
            self._held.append((thread.number, entries))
        else:
            yield entries

    def _thread_for(self, entry: MessageLine, facts: Facts) -> UnjudgedConversation | None:
        """Return the conversation of a line; None for a repeated line."""
        if entry.node is None:
            return self._threads[-1] if self._threads else self._new()
        if entry.node.id in self._nodes:
            return None
        parent = entry.node.parent
        above = self._nodes.get(parent) if parent else None
        if above is None and parent is not None and self._latest is not None:
            self.loose.append(LooseLine(entry.number, parent, self._latest.tip))
            return self._find_answered(facts) or self._latest
        if above is None or self._thread_of[above] == NO_CONVERSATION:
            return self._find_answered(facts) or self._new()
        thread = self._threads[self._thread_of[above]]
        if _is_result(facts) or self._continues(thread, above, entry):
            return thread
        return self._branch(thread, above)

    def _find_answered(self, facts: Facts) -> UnjudgedConversation | None:
        """Return the conversation whose calls this line answers, although its parent is not in the file."""
        if not _is_result(facts):
            return None
        for thread in reversed(self._threads):
            if any(facts.ids & known.ids for known in thread.facts):
                return thread
        return None

    def _continues(self, thread: UnjudgedConversation, above: int, entry: MessageLine) -> bool:
        """Whether only results and parts of the same response came after the parent."""
        if self._turn_of[above] != thread.turn:
            return False
        line = self._line_of[above]
        group = next((each.group for each in thread.entries if each.number == line), "")
        for each, facts in zip(reversed(thread.entries), reversed(thread.facts), strict=True):
            if each.number <= line:
                return True
            if not _is_result(facts) and not (each.group and each.group in (group, entry.group)):
                return False
        return True

    def _branch(self, thread: UnjudgedConversation, above: int) -> UnjudgedConversation:
        """Begin a conversation that shares everything up to `above`; its last turn is added as context."""
        branch = self._new()
        branch.origin = (thread, above)
        for entry, facts in self._turn_until(thread, above):
            entry.is_context = True
            branch.add(entry, facts, Index())
        branch.turn = self._turn_of[above]
        return branch

    def _turn_until(self, thread: UnjudgedConversation, above: int) -> Iterator[tuple[MessageLine, Facts]]:
        """Read a turn again up to a line, and the later results of its calls."""
        turn = self._turn_of[above]
        later: set[int] = set()
        call_ids: set[str] = set()
        own = set(self._nodes_of(thread, above, turn))
        for number in sorted(own):
            for found in self._read_again(number):
                # A late result of an earlier turn is examined with that turn.
                if not _is_result(found[1]) or found[1].ids & call_ids:
                    call_ids |= found[1].ids
                    yield found
        later.update(self._last.get(each) or 0 for each in call_ids)
        family = {thread.number}
        while thread.origin is not None:
            thread = thread.origin[0]
            family.add(thread.number)
        for line in sorted(later):
            number = bisect_left(self._line_of, line)
            is_known = number < len(self._line_of) and self._line_of[number] == line
            # A result on another branch belongs to no call of this one.
            if is_known and number not in own and self._thread_of[number] in family:
                yield from (found for found in self._read_again(number) if _is_result(found[1]))

    def _nodes_of(self, thread: UnjudgedConversation, above: int, turn: int) -> Iterator[int]:
        """Yield the nodes of a turn, beginning with those shared with the original conversations."""
        shared = [(thread.number, above)]
        while thread.origin is not None and self._turn_of[thread.origin[1]] == turn:
            thread, above = thread.origin
            shared.append((thread.number, above))
        begin = max(turn, 0)
        for owner, end in reversed(shared):
            for number in range(begin, end + 1):
                if self._thread_of[number] == owner and self._turn_of[number] == turn:
                    yield number

    def _read_again(self, number: int) -> Iterator[tuple[MessageLine, Facts]]:
        offset = self._offset_of[number]
        found = self._read(self._line_of[number], offset) if offset >= 0 else None
        if found is not None:
            yield found

    def _new(self) -> UnjudgedConversation:
        self._threads.append(UnjudgedConversation(len(self._threads)))
        return self._threads[-1]

    def _note(self, node_id: str, line: int, thread: int, offset: int) -> int:
        number = len(self._thread_of)
        self._nodes[node_id] = number
        self._thread_of.append(thread)
        self._turn_of.append(-1)
        self._offset_of.append(offset)
        self._line_of.append(line)
        return number


def _is_result(facts: Facts) -> bool:
    """Whether a line has only results."""
    return not facts.is_prompt and not facts.is_response
