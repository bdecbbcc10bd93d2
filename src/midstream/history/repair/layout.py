"""Layout: every call has its result, and every result directly follows its call."""

from __future__ import annotations

from midstream.history.codecs.codec_spec import MessageTurn, Part, PartKind, Role
from midstream.history.repair.placeholders import ATTACHED, NOT_STARTED, ORPHAN, OUTCOMES, SECOND, UNKNOWN
from midstream.history.repair.repair_task import Task, are_same, stands_in


class LayoutWriter:
    """Writes the turns in one pass: each response, its results, the rest."""

    def __init__(self, turns: list[MessageTurn], read: list[MessageTurn], task: Task) -> None:
        self.turns = turns
        self.read = read
        """The turns by the numbers in their parts."""
        self.task = task
        self.out: list[MessageTurn] = []
        self.settled: set[int] = set()
        """Results at their correct place."""
        self.splits = False
        """Whether an earlier response has its results in several user messages."""
        self.taken: list[Part] = []
        """Attachments of orphans in a response."""

    def run(self) -> list[MessageTurn]:
        """Return the turns in order."""
        here, count = 0, len(self.turns)
        while here < count:
            turn = self.turns[here]
            if turn.role is Role.ASSISTANT and turn.has_calls:
                here = self._response(here)
            else:
                self._other(turn)
                here += 1
            if self.taken:
                shown = [self.task.form.text(ATTACHED, Role.USER), *self.taken]
                self.out.append(MessageTurn(Role.USER, shown, is_changed=True))
                self.taken = []
        return self.out

    def _response(self, here: int) -> int:
        """Write the response at `here` and its results; return the number of the next turn."""
        end, start = self._end_of_response(here), len(self.out)
        for turn in self.turns[here:end]:
            if turn.role is Role.ASSISTANT and turn.has(PartKind.RESULT):
                turn.parts, turn.is_changed = self._without_results(turn.parts, turn), True
            self.out.append(turn)
        calls = [part for turn in self.turns[here:end] for part in turn.parts if part.kind is PartKind.CALL]
        mine = set(map(id, calls))
        if self.task.is_grouped:
            after, last = self._write_grouped(end, mine)
        else:
            after, last = self._separate(end, mine)
        added = self._missing(calls, is_tail=self._is_tail(end, after))
        if added and any(map(_is_moved, added)):
            added, last = self._with_stand_ins(calls, added, last, start + end - here)
        if added:
            self._add(added, last)
        if not self.task.is_grouped:
            for turn in self.turns[end:after]:
                if id(turn.parts[0]) not in self.settled:
                    self._other(turn)
        return after

    def _is_tail(self, end: int, after: int) -> bool:
        """Whether nothing follows the response and its results; orphans among them become a user's text."""
        if after < len(self.turns):
            return False
        answers = self.turns[end:after]
        return self.task.is_grouped or all(turn.parts[0].owner for turn in answers)

    def _end_of_response(self, here: int) -> int:
        """Return the end of a response: in a flat list, successive calls are one response."""
        end = here + 1
        if self.task.is_flat:
            look = end
            while look < len(self.turns) and _is_item_of_response(self.turns[look]):
                look += 1
                if self.turns[look - 1].has_calls:
                    end = look
        return end

    def _write_grouped(self, start: int, mine: set[int]) -> tuple[int, MessageTurn | None]:
        """Write the user turns that answer; return their end, and the last of them."""
        here, last = start, None
        while here < len(self.turns) and (last is None or self.task.profile.joins_users):
            turn = self.turns[here]
            answers = [part for part in turn.parts if _answers(part, mine)] if turn.role is Role.USER else []
            if not answers:
                break
            self.settled.update(map(id, answers))
            others: list[Part] = []
            if len(answers) < len(turn.parts):
                others = self._without_results(
                    [part for part in turn.parts if not _answers(part, mine)], turn
                )
                parts = [*answers, *others]
                if not are_same(parts, turn.parts):
                    if not are_same(answers, turn.parts[: len(answers)]):
                        self._note_moved(turn, answers[0])
                    turn.parts, turn.is_changed = parts, True
            self.out.append(turn)
            last = turn
            here += 1
            if others:
                break
        self.splits = self.splits or here - start > 1
        return here, last

    def _note_moved(self, turn: MessageTurn, answer: Part) -> None:
        self.task.report.note(
            "result-not-first", turn.at, "moved the results to the front", call_id=answer.id
        )

    def _separate(self, start: int, mine: set[int]) -> tuple[int, MessageTurn | None]:
        """Write the results that follow; turns between them are written after all results."""
        here, last, turns = start, None, self.turns
        count = len(turns)
        while here < count and (turn := turns[here]).role is Role.TOOL:
            result = turn.parts[0]
            if _answers(result, mine):
                self.settled.add(id(result))
                self.out.append(turn)
                last = turn
            here += 1
        return here, last

    def _missing(self, calls: list[Part], *, is_tail: bool) -> list[Part]:
        """Return the results from elsewhere, and new ones for the calls without a result, in the calls' order."""
        added: list[Part] = []
        settled, read, tell = self.settled, self.read, self.task.report.note
        answer, is_open = self.task.form.answer, is_tail and self.task.is_live
        for call in calls:
            if call.answers:
                result = call.answers[0]
                if id(result) not in settled:
                    settled.add(id(result))
                    added.append(result)
                    tell("misplaced-result", read[result.turn].at, "moved to its call", call_id=call.id)
            elif not is_open:
                added.append(answer(call, self._outcome(call), is_failed=True))
                tell(
                    "dangling-call",
                    read[call.turn].at,
                    "added a result that states the outcome",
                    call_id=call.id,
                )
        return added

    def _with_stand_ins(
        self, calls: list[Part], added: list[Part], last: MessageTurn | None, start: int
    ) -> tuple[list[Part], MessageTurn | None]:
        """Move stand-ins among the late results, in the calls' order.

        An earlier repair wrote them: now they are where they would be without late results.
        """
        here = {id(part) for part in added}
        late = [call.answers[0] for call in calls if call.answers and id(call.answers[0]) not in here]
        gone = {id(part) for part in late if stands_in(part)}
        if not gone:
            return added, last
        kept = self.out[:start]
        for turn in self.out[start:]:
            parts = [part for part in turn.parts if id(part) not in gone]
            if len(parts) == len(turn.parts):
                kept.append(turn)
            elif parts:
                turn.parts, turn.is_changed = parts, True
                kept.append(turn)
        last = kept[-1] if len(kept) > start else None
        self.out = kept
        made = iter([part for part in added if not _is_moved(part)])
        ordered = [call.answers[0] if call.answers else next(made, None) for call in calls]
        wanted = here | gone
        return [part for part in ordered if part is not None and id(part) in wanted], last

    def _outcome(self, call: Part) -> str:
        """Return the text of an outcome: from the caller, else derived from the call."""
        outcome = self.task.outcomes.get(call.id or "")
        if outcome is not None:
            return OUTCOMES[outcome]
        was_cut = call.failed or (isinstance(call.raw, dict) and call.raw.get("status") == "incomplete")
        return NOT_STARTED if was_cut else UNKNOWN

    def _add(self, added: list[Part], last: MessageTurn | None) -> None:
        """Write results that were missing, after the existing ones."""
        if not self.task.is_grouped:
            for result in added:
                turn = self.read[result.turn] if _is_moved(result) else None
                is_whole = turn is not None and turn.role is Role.TOOL
                self.out.append(
                    turn if turn and is_whole else MessageTurn(Role.TOOL, [result], is_changed=True)
                )
            return
        whole = self._whole_turn(added) if all(map(_is_moved, added)) else None
        if last is not None and self._is_split(last):
            self.out.append(whole or MessageTurn(Role.USER, added, is_changed=True))
            return
        if last is not None:
            count = sum(1 for part in last.parts if part.kind is PartKind.RESULT and id(part) in self.settled)
            last.parts = [*last.parts[:count], *added, *last.parts[count:]]
            last.is_changed = True
            return
        self.out.append(whole or MessageTurn(Role.USER, added, is_changed=True))

    def _is_of_results(self, last: MessageTurn) -> bool:
        """Whether another user message of results may follow this one, because both are one turn."""
        return self.task.profile.joins_users and last.has_only(PartKind.RESULT)

    def _is_split(self, last: MessageTurn) -> bool:
        """Whether this response's results are in several user messages: a new one changes none of them."""
        if not self._is_of_results(last):
            return False
        before = self.out[-2]
        if before.role is not Role.USER:
            return self.splits
        return before.has_only(PartKind.RESULT)

    def _whole_turn(self, moved: list[Part]) -> MessageTurn | None:
        """Return the turn that has exactly these results, which is moved unchanged."""
        turn = self.read[moved[0].turn]
        if not are_same(turn.parts, moved):
            return None
        # A response cannot contain results.
        is_changed = turn.is_changed or turn.role is not Role.USER
        return MessageTurn(Role.USER, turn.parts, turn.source, turn.at, is_changed=is_changed)

    def _other(self, turn: MessageTurn) -> None:
        """Write a turn that answers nothing: its results are moved elsewhere, or are orphans."""
        if not turn.has(PartKind.RESULT):
            self.out.append(turn)
            return
        parts = self._without_results(turn.parts, turn)
        if not parts:
            return
        if turn.role is Role.TOOL:
            self.out.append(MessageTurn(Role.USER, parts, at=turn.at, is_changed=True))
            return
        turn.parts, turn.is_changed = parts, True
        self.out.append(turn)

    def _without_results(self, parts: list[Part], turn: MessageTurn) -> list[Part]:
        """Remove the results that belong elsewhere; replace orphans by text."""
        kept: list[Part] = []
        for part in parts:
            if part.kind is not PartKind.RESULT:
                kept.append(part)
            elif not part.owner:
                words, others = self.task.form.pieces(part)
                note = f"{SECOND if part.is_second else ORPHAN} {words}".rstrip()
                code = "repeated-result" if part.is_second else "orphan-result"
                role = Role.ASSISTANT if turn.role is Role.ASSISTANT else Role.USER
                kept.append(self.task.form.text(note, role))
                if role is Role.ASSISTANT and not self.task.profile.responses_show_files:
                    self.taken += others
                else:
                    kept += others
                self.task.report.note(code, turn.at, "kept as a user's words", call_id=part.id)
        return kept


def _is_moved(result: Part) -> bool:
    """Whether a result was in the input."""
    return result.turn >= 0


def _answers(part: Part, mine: set[int]) -> bool:
    return part.kind is PartKind.RESULT and part.owner in mine


def _is_item_of_response(turn: MessageTurn) -> bool:
    if turn.role is not Role.ASSISTANT:
        return False
    return all(part.kind in (PartKind.CALL, PartKind.THINKING) for part in turn.parts)
