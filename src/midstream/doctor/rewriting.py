"""Lines for repaired messages: the changed, removed, moved and new lines of a file.

Unchanged messages keep their bytes. A changed message keeps the rest of its line.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from msgspec import Struct, field

from midstream.doctor.file_reading import FileLine, value_in
from midstream.doctor.jsonl_formats import Ledger, MessageLine, identity_of
from midstream.doctor.shapes import Json


class Patch(Struct):
    """Changes of a file of lines, by line number from 1."""

    replaced: dict[int, bytes | None] = field(default_factory=dict)
    """The new line, or None for a removed one."""
    inserted: dict[int, list[bytes]] = field(default_factory=dict)
    """New lines after this one; 0 is before the first."""
    parents: dict[str, tuple[int, str | None]] = field(default_factory=dict)
    """Changed parents: a parent, with the line after which it is replaced, and the new parent."""
    cut: int = 0
    """A truncated last line, which is removed with any other change."""

    added: set[str] = field(default_factory=set)
    """Ids of new lines of a tree."""

    @property
    def is_empty(self) -> bool:
        """Whether the file is unchanged."""
        return not (self.replaced or self.inserted or self.parents)

    def apply(
        self,
        lines: Iterable[FileLine],
        chained: Callable[[Json, str | None], Json] | None = None,
    ) -> Iterator[bytes]:
        """Yield the lines of the changed file, with their line ends.

        Args:
            chained: Sets the parent of a line in a tree.
        """
        yield from map(_end_line, self.inserted.get(0, ()))
        for line in lines:
            if line.number in self.replaced:
                new = self.replaced[line.number]
                if new is not None:
                    yield _end_line(new)
            elif line.number != self.cut:
                yield _end_line(self._under_its_parent(line, chained) if chained else line.body)
            yield from map(_end_line, self.inserted.get(line.number, ()))

    def _under_its_parent(self, line: FileLine, chained: Callable[[Json, str | None], Json]) -> bytes:
        value = value_in(line.body).value
        parent = value.get("parentUuid") if isinstance(value, dict) else None
        after, new = (
            self.parents.get(parent, (line.number, None)) if isinstance(parent, str) else (line.number, None)
        )
        return line.body if line.number <= after else encode(chained(value, new))


class Gathered(Struct):
    """The messages of a stretch, and the entries of each of them."""

    messages: list[Json] = field(default_factory=list)
    sources: list[list[MessageLine]] = field(default_factory=list)
    folded: int = 0
    """Number of parts that were earlier states of others."""


class _Emitted(Struct, eq=False):
    """One line to write: an entry's own, or a new one."""

    entry: MessageLine
    messages: list[Json]
    is_new: bool = False
    is_same: bool = False


def gather(entries: Sequence[MessageLine]) -> Gathered:
    """Join the lines of each response to one message; other lines have their own messages."""
    found = Gathered()
    group, home = "", -1
    for entry in entries:
        if entry.group and entry.group == group:
            merged, folded = _merge(found.messages[home], entry.messages[0])
            found.messages[home] = merged
            found.sources[home].append(entry)
            found.folded += folded
            continue
        if entry.group:
            group, home = entry.group, len(found.messages)
        found.messages.extend(entry.messages)
        found.sources.extend([entry] for _ in entry.messages)
    return found


def _merge(first: Json, second: Json) -> tuple[Json, int]:
    """Append the blocks of a response's next line; a longer state of a block replaces the shorter one."""
    blocks, more = first.get("content"), second.get("content")
    if not isinstance(blocks, list) or not isinstance(more, list):
        return first, 0
    kept, folded = list(blocks), 0
    for block in more:
        place = next((at for at, old in enumerate(kept) if _is_state_of(old, block)), None)
        if place is None:
            kept.append(block)
        else:
            kept[place] = block if kept[place] != block else kept[place]
            folded += 1
    return {**first, "content": kept}, folded


def _is_state_of(old: object, new: object) -> bool:
    """Whether `new` is `old`, or a later state of it in a streaming response."""
    if old == new:
        return True
    if not isinstance(old, dict) or not isinstance(new, dict) or old.get("type") != new.get("type"):
        return False
    match old.get("type"):
        case "tool_use":
            return old.get("id") == new.get("id") and not old.get("input")
        case "text" | "thinking" as key:
            old_text, new_text = old.get(key), new.get(key)
            return (
                isinstance(old_text, str)
                and isinstance(new_text, str)
                and bool(old_text)
                and new_text.startswith(old_text)
            )
        case _:
            return False


def mend(
    found: Gathered, entries: Sequence[MessageLine], messages: list[Json], ledger: Ledger, patch: Patch
) -> None:
    """Add the changes from the lines of a stretch to these messages to the patch."""
    emitted = list(_emit(found, messages, is_split=ledger.is_split))
    beside: Counter[int] = Counter()
    for number, each in enumerate(emitted):
        if each.is_same:
            continue
        if each.is_new:
            line = ledger.new_line(each.entry, each.messages[0], beside[each.entry.number])
            beside[each.entry.number] += 1
        else:
            line = ledger.line_of(each.entry, each.messages)
        emitted[number] = _Emitted(each.entry, [line], is_new=each.is_new)
    lines = [each.entry.value if each.is_same else each.messages[0] for each in emitted]
    if entries[0].node is not None:
        lines = _chain(emitted, lines, entries, ledger, patch)
    _note(emitted, lines, entries, patch)


def _emit(found: Gathered, messages: list[Json], *, is_split: bool) -> Iterator[_Emitted]:
    whole = {id(message): source for message, source in zip(found.messages, found.sources, strict=True)}
    owners = _owners(found, is_split=is_split)
    used: set[int] = set()
    nearest = found.sources[0][0]
    bundle: _Emitted | None = None
    for message in messages:
        sources = whole.get(id(message))
        if sources and len(sources[0].messages) == 1:
            for entry in sources:
                used.add(entry.number)
                yield _Emitted(entry, entry.messages, is_same=True)
            nearest = sources[-1]
            continue
        for owner, part in _runs(message, owners, is_split=is_split):
            if owner is not None and len(owner.messages) > 1 and (bundle is None or bundle.entry is owner):
                if bundle is None:
                    bundle = _Emitted(owner, [])
                    used.add(owner.number)
                    yield bundle
                bundle.messages.append(part)
                continue
            nearest = owner or nearest
            is_new = owner is None or owner.number in used or len(owner.messages) > 1
            used.add(nearest.number if not is_new else -1)
            yield _Emitted(nearest, [part], is_new=is_new)


def _owners(found: Gathered, *, is_split: bool) -> dict[int, MessageLine]:
    """Return the original line of every recognizable value."""
    owners: dict[int, MessageLine] = {}
    for source in found.sources:
        for entry in source:
            for message in entry.messages:
                content = message.get("content")
                for piece in (
                    content if is_split and isinstance(content, list) else [content if is_split else message]
                ):
                    values = [piece, *(piece.values() if isinstance(piece, dict) else ())]
                    for known in filter(None, map(identity_of, values)):
                        owners.setdefault(known, entry)
    return owners


def _owner_of(piece: object, owners: dict[int, MessageLine]) -> MessageLine | None:
    values = [piece, *(piece.values() if isinstance(piece, dict) else ())]
    return next((owners[known] for known in map(identity_of, values) if known in owners), None)


def _runs(
    message: Json, owners: dict[int, MessageLine], *, is_split: bool
) -> Iterator[tuple[MessageLine | None, Json]]:
    """Split a message into parts that come from one line each. A new result gets a line of its own."""
    content = message.get("content")
    if not is_split or not isinstance(content, list):
        yield _owner_of(content if is_split else message, owners), message
        return
    run: list[Any] = []
    owner: MessageLine | None = None
    for block in content:
        origin = _owner_of(block, owners)
        is_result = isinstance(block, dict) and block.get("type") == "tool_result"
        joins = (
            (origin is None and not is_result) or origin is owner or (owner is None and not _is_result(run))
        )
        if run and not (joins and not (origin is None and is_result)):
            yield owner, _with_content(message, owner, run)
            run, owner = [], None
        run.append(block)
        owner = owner or origin
    if run:
        yield owner, _with_content(message, owner, run)


def _is_result(run: list[Any]) -> bool:
    return bool(run) and isinstance(run[-1], dict) and run[-1].get("type") == "tool_result"


def _with_content(message: Json, owner: MessageLine | None, run: list[Any]) -> Json:
    source = owner.messages[0] if owner and len(owner.messages) == 1 else None
    if source is not None and source.get("role") == message.get("role"):
        return {**source, "content": run}
    return {"role": message.get("role"), "content": run}


def _chain(
    emitted: list[_Emitted], lines: list[Json], entries: Sequence[MessageLine], ledger: Ledger, patch: Patch
) -> list[Json]:
    """Link the changed part of a stretch as one straight chain, so that readers of one chain get everything."""
    inside = {entry.node.id for entry in entries if entry.node}
    staying = _rising(_numbers(emitted))
    touched = [number for number, each in enumerate(emitted) if not each.is_same or number not in staying]
    moved = {
        str(lines[number].get("uuid"))
        for number in touched
        if not emitted[number].is_new and number not in staying
    }
    kept = {each.entry.number for each in emitted if not each.is_new}
    gone = [entry for entry in entries if entry.number not in kept and not entry.is_context]
    removed = {entry.node.id for entry in gone if entry.node}
    first, last = (_start_of_step(touched[0], emitted), touched[-1] + 1) if touched else (0, -1)
    chained: list[Json] = []
    for number, (each, line) in enumerate(zip(emitted, lines, strict=True)):
        before = _name(chained[-1].get("uuid")) if chained else None
        parent = _name(line.get("parentUuid"))
        is_near = first <= number <= last
        if each.is_new:
            parent = _parent_of_new(number, emitted, inside, before)
        elif before is None:
            parent = _above(parent, entries)
        elif parent in removed | moved or (is_near and (emitted[number - 1].is_new or parent in inside)):
            parent = before
        is_fixed = each.entry.is_context and not each.is_new
        chained.append(line if is_fixed else ledger.with_parent(line, parent))
    _note_parents(emitted, chained, entries, gone, patch)
    return chained


def _start_of_step(number: int, emitted: list[_Emitted]) -> int:
    """Return the first line of the response of which this line is a part, or which it answers."""
    group = next((each.entry.group for each in reversed(emitted[: number + 1]) if each.entry.group), "")
    return next((at for at in range(number) if group and emitted[at].entry.group == group), number)


def _parent_of_new(number: int, emitted: list[_Emitted], inside: set[str], before: str | None) -> str | None:
    """Return the parent of a new line: the former parent of its successor."""
    following = next((each for each in emitted[number + 1 :] if not each.is_new), None)
    if following is not None and not (number and emitted[number - 1].is_new):
        parent = following.entry.node.parent if following.entry.node else None
        if parent not in inside and (before is None or parent is not None):
            return parent
    return before


def _above(parent: str | None, entries: Sequence[MessageLine]) -> str | None:
    """Return the first ancestor outside the stretch."""
    parents = {entry.node.id: entry.node.parent for entry in entries if entry.node}
    seen: set[str] = set()
    while parent in parents and parent not in seen:
        seen.add(parent)
        parent = parents[parent]
    return parent


def _note_parents(
    emitted: list[_Emitted],
    lines: list[Json],
    entries: Sequence[MessageLine],
    gone: list[MessageLine],
    patch: Patch,
) -> None:
    last = entries[-1]
    end = _name(lines[-1].get("uuid")) if lines else (_above(last.node.id, entries) if last.node else None)
    for entry in gone:
        if entry.node:
            patch.parents[entry.node.id] = (entry.number, end)
    is_end_other = bool(emitted) and (emitted[-1].is_new or emitted[-1].entry is not last)
    if is_end_other and last not in gone and last.node and not last.is_context:
        patch.parents[last.node.id] = (last.number, end)


def _note(emitted: list[_Emitted], lines: list[Json], entries: Sequence[MessageLine], patch: Patch) -> None:
    """Record moves: lines in rising order stay; the others are removed and inserted after the line before them."""
    staying = _rising(_numbers(emitted))
    kept = {emitted[number].entry.number for number in staying}
    for entry in entries:
        if entry.number not in kept and not entry.is_context:
            patch.replaced[entry.number] = None
    place = entries[0].number - 1
    for number, (each, line) in enumerate(zip(emitted, lines, strict=True)):
        if number in staying:
            place = each.entry.number
            if line is not each.entry.value and not each.entry.is_context:
                patch.replaced.setdefault(place, encode(line))
        elif each.is_new or not each.entry.is_context:
            if "uuid" in line and each.is_new:
                # Branches with a common broken turn repair it in the same way, so once is sufficient.
                if line["uuid"] in patch.added:
                    continue
                patch.added.add(line["uuid"])
            patch.inserted.setdefault(place, []).append(encode(line))


def _name(value: object) -> str | None:
    """Return an id, or None for any other value."""
    return value if isinstance(value, str) else None


def _numbers(emitted: list[_Emitted]) -> list[int]:
    return [-1 if each.is_new else each.entry.number for each in emitted]


def _end_line(line: bytes) -> bytes:
    return line if line.endswith(b"\n") else line + b"\n"


def _rising(numbers: Sequence[int]) -> set[int]:
    """Return the places of the longest rising run of numbers, without negative ones."""
    ends: list[int] = []
    places: list[int] = []
    before: dict[int, int] = {}
    for place, number in enumerate(numbers):
        if number < 0:
            continue
        at = bisect_left(ends, number)
        ends[at : at + 1] = [number]
        places[at : at + 1] = [place]
        before[place] = places[at - 1] if at else -1
    found: set[int] = set()
    place = places[-1] if places else -1
    while place >= 0:
        found.add(place)
        place = before[place]
    return found


def encode(value: object, *, indent: int | None = None) -> bytes:
    """Return a JSON value as readable text; content without a UTF-8 form stays escaped."""
    separators = (",", ": ") if indent else (",", ":")
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, allow_nan=False)
    try:
        return text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, indent=indent, separators=separators, allow_nan=False).encode()
