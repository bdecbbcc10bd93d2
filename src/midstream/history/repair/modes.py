"""Modes besides the repair of a history: refuse it, drop parts, or roll back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterator
from typing import Literal, get_args

from msgspec import Struct
from msgspec.structs import replace

from midstream.errors import HistoryRefusedError, UsageError
from midstream.history.codecs.codec_spec import (
    Format,
    MessageTurn,
    Part,
    PartKind,
    ResultPlacement,
    Role,
    Value,
    as_json,
    as_words,
)
from midstream.history.profiles import Profile
from midstream.history.repair.mixed_formats import foreign_words, read_as_foreign
from midstream.history.repair.repair_task import is_text
from midstream.history.repair.report import Edit, Finding, Repaired
from midstream.history.repair.roles import with_known_role
from midstream.history.repair.rules import REFUSALS
from midstream.history.repair.walk import Thinking, repair_messages

Mode = Literal["repair", "strict", "drop", "sanitize", "rollback"]
MODES: tuple[Mode, ...] = get_args(Mode)

PASSES_MAX = 10
"""Greatest number of passes of `sanitize`, as in the original; two are nearly always enough."""
RUN_KEYS = ("run_id",)
"""Keys with the id of a finished run (pydantic-ai)."""


class CallerKnowledge(Struct, frozen=True, kw_only=True):
    """Facts that the caller has in addition to the messages."""

    system: Value = None
    model: str | None = None
    thinking: Thinking = None
    live_tail: bool = False
    outcomes: dict[str, str] | None = None
    prefill: bool = False
    own: Container[int] = ()
    """Places of messages whose system prompts and run ids belong to the current request."""
    has_prompt: bool = False
    """Whether the list is a request whose last message is the new prompt, and stays."""


Settle = Callable[..., Repaired]


def require_mode(mode: str) -> None:
    """Check the name of a mode.

    Raises:
        UsageError: There is none with this name; the message lists all names.
    """
    if mode not in MODES:
        raise UsageError(f"unknown mode {mode!r}; known: {', '.join(MODES)}")


def repair_in_mode(
    mode: Mode, messages: list[Value], form: Format, profile: Profile, given: CallerKnowledge | None = None
) -> Repaired:
    """Process a history in one of the modes; return the same list if it is valid.

    Raises:
        InvalidHistoryError: A message is not a JSON value.
        HistoryRefusedError: In mode `strict`, the provider would refuse the history.
        UsageError: The mode is unknown.
    """
    require_mode(mode)
    given = given or CallerKnowledge()

    settle = _settling(form, profile, given)
    if mode == "sanitize":
        return _sanitize_until_stable(messages, form, profile, given)
    done = settle(messages)
    if not done.edits or mode == "repair":
        return done
    if mode == "strict":
        findings = [finding_of(edit) for edit in done.edits]
        first = findings[0]
        total = f"; {len(findings)} findings in all" if len(findings) > 1 else ""
        message = f"message {first.at}: {first.code}{total}"
        raise HistoryRefusedError(message, findings=findings)
    if mode == "drop":
        return _drop_incomplete(messages, form, settle, given)
    return _roll_back(messages, form, settle, given)


def _settling(form: Format, profile: Profile, given: CallerKnowledge) -> Settle:
    """Return the repair for a list from which parts may have been removed."""

    def settle(some: list[Value], *, is_whole: bool = True) -> Repaired:
        return repair_messages(
            some,
            form,
            profile,
            system=given.system,
            model=given.model,
            thinking=given.thinking,
            live_tail=given.live_tail and is_whole,
            outcomes=given.outcomes,
            prefill=given.prefill and is_whole,
        )

    return settle


def finding_of(edit: Edit) -> Finding:
    """Return the finding of an edit, with its rule."""
    return Finding(edit.code, edit.at, REFUSALS[edit.code].rule, edit.part, edit.call_id)


# --- roll back ------------------------------------------------------------------------------------------------


def _roll_back(messages: list[Value], form: Format, settle: Settle, given: CallerKnowledge) -> Repaired:
    """Cut a history before the first refused message, at the end of a complete step.

    The result is the longest valid beginning of this kind, as a new list of the same objects. The new prompt of a
    current request follows it.
    """
    tail = messages[-1:] if given.has_prompt and _is_prompt(messages[-1], form) else []
    last = end = len(messages) - len(tail)
    rest = settle(messages)
    while end and rest.edits:
        end = min(*(edit.at for edit in rest.edits), end - 1)
        rest = settle([*messages[:end], *tail], is_whole=False)
    edits = tuple(
        Edit("rolled-back", at, "cut off", lost=_words_in_message(messages[at], form))
        for at in range(end, last)
    )
    return Repaired(rest.messages, rest.system, edits, rest.advice)


def _is_prompt(message: Value, form: Format) -> bool:
    turn = form.parse(message, 0) if isinstance(message, dict) else None
    return turn is not None and turn.role is Role.USER and not _has_results(turn)


# --- drop -----------------------------------------------------------------------------------------------------


class _Entry(Struct, eq=False):
    """One message as far as it can be read."""

    at: int
    source: Value
    turn: MessageTurn
    """Without parts if the message is not an object, which the repair handles."""
    is_foreign: bool = False

    @property
    def role(self) -> Role:
        return self.turn.role

    def of(self, kind: PartKind) -> list[Part]:
        return [part for part in self.turn.parts if part.kind is kind]


class _Filter:
    """The messages of one history, and the removed ones."""

    def __init__(self, messages: list[Value], form: Format, code: str) -> None:
        self.messages = messages
        self.entries = list(_entries(messages, form))
        self.edits: list[Edit] = []
        self._form = form
        self._code = code

    def leave_out(self, entry: _Entry, what: str, parts: list[Part] | None = None) -> None:
        """Remove some parts of a message, or all."""
        gone = entry.turn.parts if parts is None else parts
        lost = "\n".join(filter(None, map(_words_of, gone)))
        self.edits.append(Edit(self._code, entry.at, f"left out {what}", lost=lost))
        taken = set(map(id, gone))
        entry.turn.parts = [part for part in entry.turn.parts if id(part) not in taken]
        entry.turn.is_changed = True

    def unbind(self, entry: _Entry) -> None:
        """Remove the id of a finished run."""
        if not isinstance(entry.source, dict):
            return
        bound = [str(entry.source[key]) for key in RUN_KEYS if entry.source.get(key)]
        if not bound:
            return
        self.edits.append(Edit(self._code, entry.at, "left out the run id", lost="\n".join(bound)))
        entry.source = {key: value for key, value in entry.source.items() if key not in RUN_KEYS}
        entry.turn.source = entry.source

    def finish(self, settle: Settle, *, is_whole: bool) -> Repaired:
        """Repair the rest: `at` in its edits is the place in the original list."""
        if not self.edits:
            return settle(self.messages)
        kept: list[Value] = []
        places: list[int] = []
        for entry in self.entries:
            turn = entry.turn
            if not turn.is_changed:
                kept.append(entry.source)
            elif turn.parts:
                kept.append(self._form.build(turn))
            else:
                continue
            places.append(entry.at)
            if entry.is_foreign:
                self.edits.append(Edit("foreign-message", entry.at, "rewritten in this format"))
        rest = settle(kept, is_whole=is_whole)
        moved = (replace(edit, at=places[edit.at]) if edit.at < len(places) else edit for edit in rest.edits)
        edits = sorted((*self.edits, *moved), key=lambda edit: edit.at)
        return Repaired(rest.messages, rest.system, tuple(edits), rest.advice)


def _entries(messages: list[Value], form: Format) -> Iterator[_Entry]:
    for at, message in enumerate(messages):
        if not isinstance(message, dict):
            yield _Entry(at, message, MessageTurn(Role.OTHER, [], message, at))
        elif foreign := read_as_foreign(message, at, form):
            for turn in foreign:
                yield _Entry(at, turn.source, turn, is_foreign=True)
        else:
            turn = form.parse(with_known_role(message, form.spec), at)
            turn.is_changed = False
            yield _Entry(at, message, turn)


def _drop_incomplete(messages: list[Value], form: Format, settle: Settle, given: CallerKnowledge) -> Repaired:
    """Remove incomplete steps, like rustey-shelley's `filter_complete_exchanges`.

    A response with calls is removed unless the next message has all results; the results of a removed response are
    removed, too. Everything else stays, in particular all text of users.
    """
    work = _Filter(messages, form, "dropped")
    entries, is_flat = work.entries, form.layout is ResultPlacement.FLAT
    end_of_list = len(entries)
    here = 0
    while here < end_of_list:
        start = here
        if entries[here].role is not Role.ASSISTANT:
            here += 1
            _leave_out_results(work, entries[start], set())
            continue
        here += 1
        while is_flat and here < end_of_list and entries[here].role is Role.ASSISTANT:
            here += 1  # one response is several items
        responses = entries[start:here]
        answers_from = here
        while here < end_of_list and _is_answer(entries[here]):
            here += 1
        calls = [part for entry in responses for part in entry.of(PartKind.CALL)]
        is_live = given.live_tail and here == end_of_list
        if calls and not is_live and not _are_answered(calls, entries[answers_from:here]):
            for entry in responses:
                if entry.of(PartKind.CALL) or (is_flat and entry.of(PartKind.THINKING)):
                    work.leave_out(entry, "a response whose calls are not all answered in the next message")
            calls = []
        known = {_key(part) for part in calls}
        for entry in entries[answers_from:here]:
            _leave_out_results(work, entry, known)
    return work.finish(settle, is_whole=True)


def _leave_out_results(work: _Filter, entry: _Entry, known: set[str]) -> None:
    results = [part for part in entry.of(PartKind.RESULT) if _key(part) not in known]
    if results:
        work.leave_out(entry, "a result without its call", results)


def _are_answered(calls: list[Part], answers: list[_Entry]) -> bool:
    results = Counter(_key(part) for entry in answers for part in entry.of(PartKind.RESULT))
    return Counter(map(_key, calls)) <= results


def _is_answer(entry: _Entry) -> bool:
    return entry.role is not Role.ASSISTANT and _has_results(entry.turn)


def _sanitize_until_stable(
    messages: list[Value], form: Format, profile: Profile, given: CallerKnowledge
) -> Repaired:
    """Repeat the passes until they find nothing: the repair of a stray result may add a surplus request."""
    done = _sanitize(messages, form, _settling(form, profile, given), given)
    for _ in range(PASSES_MAX - 1):
        if not done.edits:
            break
        places = _places_of(done.messages, messages)
        own = {place for place, at in enumerate(places) if at in given.own}
        later = replace(given, system=done.system, own=own)
        again = _sanitize(done.messages, form, _settling(form, profile, later), later)
        if not again.edits:
            break
        moved = (replace(edit, at=places[edit.at] if edit.at < len(places) else 0) for edit in again.edits)
        edits = sorted((*done.edits, *moved), key=lambda edit: edit.at)
        done = Repaired(again.messages, again.system, tuple(edits), again.advice)
    return done


def _places_of(messages: list[Value], origin: list[Value]) -> list[int]:
    """Return the original places of messages; a new one has that of the message before it."""
    known = {id(message): at for at, message in enumerate(origin)}
    places: list[int] = []
    for message in messages:
        places.append(known.get(id(message), places[-1] if places else 0))
    return places


def _sanitize(messages: list[Value], form: Format, settle: Settle, given: CallerKnowledge) -> Repaired:
    """Prepare the rest of an aborted run for the next run, with tunacode's passes.

    Drop calls without a result, by id, and results without a call; other content of their messages stays. Then drop
    empty responses, system prompts, ids of earlier runs, and all but the last of successive requests. A request with
    results belongs to a complete step, and stays.
    """
    work = _Filter(messages, form, "sanitized")
    requested: set[str] = set()
    answered: set[str] = set()
    for entry in work.entries:
        requested.update(map(_key, entry.of(PartKind.CALL)))
        _leave_out_results(work, entry, requested)
        answered.update(map(_key, entry.of(PartKind.RESULT)))
    last = work.entries[-1] if work.entries else None
    for entry in work.entries:
        if entry.at not in given.own:
            work.unbind(entry)
            if systems := _systems_in(entry):
                work.leave_out(entry, "a system prompt of an earlier run", systems)
                continue
        dangling = [part for part in entry.of(PartKind.CALL) if _key(part) not in answered]
        if entry.role is not Role.ASSISTANT or (given.live_tail and entry is last):
            continue
        if dangling:
            work.leave_out(entry, "a call without a result", dangling)
        if not _has_content(entry.turn) and not _has_foreign_content(entry, form):
            work.leave_out(entry, "a response without anything")
    before: _Entry | None = None
    for entry in work.entries:
        if entry.turn.is_changed and not entry.turn.parts:
            continue
        if _is_answer(entry) and all(part.kind is PartKind.RESULT for part in entry.turn.parts):
            continue  # it belongs to its call
        is_request = entry.role is Role.USER and not _has_results(entry.turn)
        if is_request and before is not None:
            work.leave_out(before, "a request before another one")
        before = entry if is_request else None
    return work.finish(settle, is_whole=True)


def _systems_in(entry: _Entry) -> list[Part]:
    return entry.turn.parts if entry.role is Role.SYSTEM else entry.of(PartKind.SYSTEM)


def _has_content(turn: MessageTurn) -> bool:
    return any(
        part.kind is not PartKind.TEXT or is_text(part.body) or part.body is None for part in turn.parts
    )


def _has_foreign_content(entry: _Entry, form: Format) -> bool:
    """Whether a message has content under keys that its format does not have."""
    source = entry.source
    return not entry.turn.is_changed and isinstance(source, dict) and bool(foreign_words(source, form))


def _key(part: Part) -> str:
    """The key shared by a call and its result: the id, or the tool's name in formats without ids."""
    return f"name {part.name}" if part.is_by_name else f"id {part.id}"


def _has_results(turn: MessageTurn) -> bool:
    return any(part.kind is PartKind.RESULT for part in turn.parts)


def _words_in_message(message: Value, form: Format) -> str:
    turn = form.parse(message, 0) if isinstance(message, dict) else None
    return "\n".join(filter(None, map(_words_of, turn.parts))) if turn else as_words(message)


def _words_of(part: Part) -> str:
    """Return the content of a part as text: text, a call with its arguments, a result's content."""
    if part.kind in (PartKind.CALL, PartKind.HOSTED_CALL):
        return f"{part.name}({as_words(part.body)})"
    if part.kind in (PartKind.TEXT, PartKind.THINKING, PartKind.SYSTEM, PartKind.RESULT):
        return as_words(part.body)
    return as_json(part.raw)
