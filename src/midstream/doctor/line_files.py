"""Examination of a file of JSON lines in two passes: the places of ids, then each stretch of conversation.

In memory are an index (some thirty bytes for each call; with a tree, some sixty more for each line), the open
stretches, and the changes. Lines are read again when they are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from midstream.doctor.conversations import Threads
from midstream.doctor.file_reading import FileLine, line_at, lines_of, value_in
from midstream.doctor.findings import LocatedFinding, finding, finding_of
from midstream.doctor.index import Index
from midstream.doctor.jsonl_formats import Facts, Ledger, MessageLine, facts_of
from midstream.doctor.rewriting import Gathered, Patch, encode, gather, mend
from midstream.doctor.rollbacks import Rollbacks
from midstream.doctor.shapes import Json
from midstream.errors import UnreadableHistoryError
from midstream.history.codecs.format_registry import find_format
from midstream.history.operations import repair_by_name as repair
from midstream.history.profiles import profile_for
from midstream.history.repair.report import Edit


class LineFile:
    """One file during its examination."""

    def __init__(self, path: Path, ledger: Ledger, profile: str | None, tick: Callable[[int], None]) -> None:
        self.findings: list[LocatedFinding] = []
        self.patch = Patch()
        self.messages = 0
        self.conversations = 0
        self._path = path
        self._ledger = ledger
        self._profile = profile
        self._tick = tick
        self._facts = facts_of(ledger.format)
        self._rollbacks = Rollbacks(ledger)
        self._folded = 0
        self._copies = 0
        self._seen: set[tuple[str, int, str | None]] = set()

    def examine(self) -> None:
        """Examine the file in two passes.

        Raises:
            InvalidHistoryError: A message is nested too deeply.
        """
        last, has_system = self._index()
        rules = profile_for(find_format(self._ledger.format), self._profile)
        is_local = not rules.signs_calls and (
            not has_system or (rules.system == "any" and rules.repeats_system)
        )
        threads = Threads(last, may_cut=is_local, read=self._again)
        for line in lines_of(self._path):
            self._tick(line.offset)
            value = self._object(line)
            if value is None or self._rollbacks.has(line.number):
                continue
            if self._ledger.is_break(value):
                self._judge(threads.break_off())
            node = self._ledger.node(value)
            entry = self._entry(line.number, value)
            if entry is not None:
                self._judge(threads.take(entry, self._facts(entry.messages), line.offset))
            elif node is not None:
                threads.pass_by(node.id, node.parent, line.number)
        self._judge(threads.finish())
        for number, parent, before in threads.loose:
            self.findings.append(finding("broken-chain", "put under the line before it", line=number))
            self.patch.parents.setdefault(parent, (0, before))
        self._copies = threads.copies
        self.conversations = max(1, threads.count)

    def pieces(self) -> Iterator[bytes]:
        """Yield the lines of the repaired copy."""
        chain = self._ledger.with_parent if self.patch.parents else None
        return self.patch.apply(lines_of(self._path), chain)

    def notes(self) -> Iterator[str]:
        """Yield notes about facts that are no defects."""
        if self.patch.cut:
            yield cut_note(self.patch.cut)
        if self._rollbacks.lines:
            yield f"lines of withdrawn turns, kept and not judged: {self._rollbacks.lines}"
        if self._folded:
            yield f"earlier states of parts, folded into the last one: {self._folded}"
        if self._copies:
            yield f"copies of lines, read once: {self._copies}"

    def _index(self) -> tuple[Index, bool]:
        """Find the last line of every id; report lines that are not JSON; count messages."""
        last = Index()
        nodes = Index()
        has_system = False
        for line in lines_of(self._path):
            self._tick(line.offset)
            value = self._check(line)
            if value is None:
                continue
            self._rollbacks.note(line.number, value)
            node = self._ledger.node(value)
            if node is not None:
                if node.id in nodes:
                    continue
                nodes[node.id] = 0
            messages = self._ledger.messages(value)
            facts = self._facts(messages)
            self.messages += len(messages)
            has_system = has_system or facts.has_system
            for each in facts.ids:
                last[each] = line.number
        return last, has_system

    def _check(self, line: FileLine) -> Json | None:
        if not line.body:
            self._leave_out("long-line", line.number)
            return None
        try:
            value, constants = value_in(line.body)
        except UnreadableHistoryError:
            if line.is_whole:
                self._leave_out("broken-line", line.number)
            else:
                self.patch.cut = line.number
            return None
        if not isinstance(value, dict):
            self._leave_out("not-a-message", line.number)
            return None
        if constants:
            lost = ", ".join(constants)
            self.findings.append(finding("not-a-number", "replaced by null", line=line.number, lost=lost))
            self.patch.replaced[line.number] = encode(value)
        return value

    def _leave_out(self, code: str, number: int) -> None:
        self.findings.append(finding(code, "left out of the copy", line=number, lost="a line"))
        self.patch.replaced[number] = None

    def _object(self, line: FileLine) -> Json | None:
        """Read a line again, whose faults were already reported."""
        try:
            value = value_in(line.body).value if line.body else None
        except UnreadableHistoryError:
            return None
        return value if isinstance(value, dict) else None

    def _entry(self, number: int, value: Json) -> MessageLine | None:
        messages = self._ledger.messages(value)
        if not messages:
            return None
        return MessageLine(number, value, messages, self._ledger.node(value), self._ledger.group(value))

    def _again(self, number: int, offset: int) -> tuple[MessageLine, Facts] | None:
        value = value_in(line_at(self._path, offset)).value
        entry = self._entry(number, value) if isinstance(value, dict) else None
        return (entry, self._facts(entry.messages)) if entry else None

    def _judge(self, stretches: Iterator[list[MessageLine]]) -> None:
        for entries in stretches:
            found = gather(entries)
            self._folded += found.folded
            done = repair(found.messages, format=self._ledger.format, profile=self._profile)
            if not done.is_changed:
                continue
            for edit in done.edits:
                self._report(edit, found)
            mend(found, entries, done.messages, self._ledger, self.patch)

    def _report(self, edit: Edit, found: Gathered) -> None:
        problem = finding_of(edit, line=_line_of(edit, found))
        key = (problem.code, problem.line, problem.call_id)
        if key not in self._seen:  # branches share lines
            self._seen.add(key)
            self.findings.append(problem)


def cut_note(line: int) -> str:
    """Return the note that a program died while it wrote the last line."""
    return f"line {line} was cut off while it was written; a repaired copy leaves it out"


def _line_of(edit: Edit, found: Gathered) -> int:
    """Return the line of an edit, by its part or call if a response has several lines."""
    if not 0 <= edit.at < len(found.sources):
        return 0
    sources = found.sources[edit.at]
    if len(sources) == 1:
        return sources[0].number
    for entry in sources:
        if edit.call_id and any(block.get("id") == edit.call_id for block in _blocks(entry.messages[0])):
            return entry.number
    blocks = _blocks(found.messages[edit.at])
    if 0 <= edit.part < len(blocks):
        for entry in sources:
            if any(block is blocks[edit.part] for block in _blocks(entry.messages[0])):
                return entry.number
    return sources[0].number


def _blocks(message: Json) -> list[Json]:
    content = message.get("content")
    return [block for block in content if isinstance(block, dict)] if isinstance(content, list) else []
