"""Pairing of calls and results: one pass in which a call opens its id and a result closes it.

Ids are unique only while a call is open: some providers use one constant id, or start again at zero in each response.
So a result belongs to the latest response with an open call of this id, and there to the first such call.
"""

from __future__ import annotations

from collections import deque
from functools import cached_property

from midstream.history.codecs.codec_spec import MessageTurn, Part, PartKind, Role, Value
from midstream.history.repair.placeholders import ATTACHED, NO_NAME, SYSTEM_NOTE
from midstream.history.repair.repair_task import Task, stands_in, words_in
from midstream.history.repair.tool_names import nearest_name

Key = str | tuple[str, str]
"""The id of a call and its result; or the tool's name, if there is no id."""
Waiting = list[Part] | deque[Part]
"""The calls of one response that wait for one id: almost always one, for which a deque would be too expensive."""

_COPY_DISTANCE_MAX = 8
"""In messages. The copy of a retry is close to the original; the limit keeps the pass linear."""


class Pairing:
    """State of the pass: the calls that wait for each id."""

    def __init__(self, turns: list[MessageTurn], task: Task) -> None:
        self.turns = turns
        self.task = task
        self.goes_by_name = task.form.spec.matches_by_name
        self.calls: list[Part] = []
        self.waiting: dict[Key, list[Waiting]] = {}
        """By id, the responses with waiting calls, the latest last."""
        self.done: dict[Key, Part] = {}
        """By id, the call that was answered last."""
        self.by_item: dict[Value, Part] = {}
        """Calls by the provider's item id, which some programs use as the call id."""
        self.strays: list[tuple[int, bool, Part]] = []
        """Results without a waiting call: the response before them, whether text came between, the result."""
        self.copies: set[int] = set()
        self.named: dict[str, deque[Part]] = {}
        """Calls of the current response with an id, by name: Gemini's function responses may lack theirs."""
        self.named_response = -1
        self.thinking: dict[int, bool] = {}
        """By a turn's identity, whether it has thinking."""
        self.forgotten: set[int] = set()
        """Calls that were copies of a later one."""

    def run(self) -> list[MessageTurn]:
        """Set each result's call (`owner`) and each call's results (`answers`)."""
        response, is_responding, is_near, is_flat = 0, False, True, self.task.is_flat
        for number, turn in enumerate(self.turns):
            role = turn.role
            if role is Role.ASSISTANT:
                if not is_flat or not is_responding:
                    response += 1
                is_responding = is_near = True
            elif role is not Role.SYSTEM:
                is_responding = False
            turn.response = response
            for part in turn.parts:
                part.turn = number
                if part.kind is PartKind.CALL:
                    part.response = response
                    self._arm(part, turn)
                elif part.kind is PartKind.RESULT:
                    self._consume(part, response, is_near=is_near)
                elif role is Role.USER:
                    is_near = False
        if self.forgotten:
            self.calls = [call for call in self.calls if id(call) not in self.forgotten]
        self._find_early()
        self._find_replacements()
        self._relink()
        self._settle_repeats()
        return self._without_copies()

    def _has_no_id(self, result: Part) -> bool:
        """Whether a result may be matched by the tool's name; Gemini's may have an id that its call lacks."""
        return result.is_by_name or (self.goes_by_name and _key(result) not in self.borne)

    def _find_replacements(self) -> None:
        """In formats without ids, replace the latest stand-in of the same name by a stray result."""
        if not any(self._has_no_id(result) for _, _, result in self.strays):
            return
        stood: dict[str, deque[Part]] = {}
        for call in sorted(self.calls, key=lambda call: call.turn):
            if call.is_by_name and call.answers is not None and _is_open(call):
                stood.setdefault(call.name, deque()).append(call)
        waiting: dict[str, list[deque[Part]]] = {}
        left: list[tuple[int, bool, Part]] = []
        for stray in self.strays:
            response, _, result = stray
            calls = stood.get(result.name, deque())
            responses = waiting.setdefault(result.name, [])
            while calls and calls[0].response <= response:
                call = calls.popleft()
                if responses and responses[-1][0].response == call.response:
                    responses[-1].append(call)
                else:
                    responses.append(deque([call]))
            if not responses or not self._has_no_id(result):
                left.append(stray)
                continue
            self._give(responses[-1].popleft(), result)
            if not responses[-1]:
                responses.pop()
        self.strays = left

    def _arm(self, call: Part, turn: MessageTurn) -> None:
        key = _key(call)
        responses = self.waiting.get(key)
        if responses is None:
            self.waiting[key] = [[call]]
        elif not self._arm_again(call, turn, responses):
            return
        self.calls.append(call)
        if self.goes_by_name and not call.is_by_name:
            if self.named_response != call.response:
                self.named, self.named_response = {}, call.response
            self.named.setdefault(call.name, deque()).append(call)
        if isinstance(call.raw, dict) and isinstance(item := call.raw.get("id"), str) and item != call.id:
            self.by_item[item] = call

    def _arm_again(self, call: Part, turn: MessageTurn, responses: list[Waiting]) -> bool:
        """Open an id that earlier calls have used; False if the last of them waits and this is its copy."""
        if responses and not call.is_by_name and call.id and self._is_copy(call, responses[-1][-1], turn):
            if not self._has_more_thinking(turn, responses[-1][-1]):
                self.copies.add(id(call))
                return False
            self._drop_armed(responses)
        if responses and responses[-1][0].response == call.response:
            if len(responses[-1]) == 1:
                responses[-1] = deque(responses[-1])
            responses[-1].append(call)
        else:
            responses.append([call])
        return True

    def _is_copy(self, call: Part, other: Part, turn: MessageTurn) -> bool:
        """Whether a call is a copy: equal, with only responses between."""
        if call.name != other.name or call.body != other.body:
            return False
        if call.turn - other.turn > _COPY_DISTANCE_MAX:
            return False
        between = self.turns[other.turn + 1 : call.turn]
        if any(earlier.role is not Role.ASSISTANT for earlier in between):
            return False
        how = "dropped the copy"
        self.task.report.note("repeated-call", turn.at, how, call_id=call.id)
        return True

    def _has_more_thinking(self, turn: MessageTurn, other: Part) -> bool:
        """Whether this response has signed thinking that its earlier copy lost: then the earlier one is dropped."""
        if not self.task.profile.is_thinking_signed or not self._has_thinking(turn):
            return False
        before = self.turns[other.turn]
        return before is not turn and not self._has_thinking(before)

    def _has_thinking(self, turn: MessageTurn) -> bool:
        """Whether a turn has thinking; unsigned thinking was already removed. Computed once for each turn."""
        known = self.thinking.get(id(turn))
        if known is None:
            known = turn.has(PartKind.THINKING)
            self.thinking[id(turn)] = known
        return known

    def _drop_armed(self, responses: list[Waiting]) -> None:
        """Drop the last call that opened this id, as the copy."""
        other = responses[-1].pop()
        if not responses[-1]:
            responses.pop()
        self.copies.add(id(other))
        self.forgotten.add(id(other))

    def _consume(self, result: Part, response: int, *, is_near: bool) -> None:
        key = _key(result)
        call = self._waiting_for(key)
        if call is not None:
            self._give(call, result)
            return
        if self.goes_by_name:
            call = self._waiting_by_name(result)
        if call is None and isinstance(result.id, str) and not result.is_by_name:
            call = self.by_item.get(result.id)
            if call is not None:
                self._take(call)
                place = self.turns[result.turn].at
                self.task.report.note(
                    "foreign-result-id", place, "linked by the item's id", call_id=result.id
                )
        if call is None:
            earlier = self.done.get(key)
            if earlier is None or result.is_by_name:
                self.strays.append((response, is_near, result))
                return
            call = earlier
        self._give(call, result)

    def _waiting_for(self, key: Key) -> Part | None:
        responses = self.waiting.get(key)
        if not responses:
            return None
        calls = responses[-1]
        call = _first(calls)
        if not calls:
            responses.pop()
        return call

    def _waiting_by_name(self, result: Part) -> Part | None:
        """Find a call of the current response when only one of both has an id."""
        if not result.is_by_name:
            return None if _key(result) in self.borne else self._waiting_for(("name", result.name))
        calls = self.named.get(result.name)
        while calls:
            call = calls.popleft()
            if call.answers is None:
                self._take(call)
                return call
        return None

    @cached_property
    def borne(self) -> set[Value]:
        """All ids of calls: a result with one of them never belongs to a call without an id."""
        parts = (part for turn in self.turns for part in turn.parts)
        return {part.id for part in parts if part.kind is PartKind.CALL and isinstance(part.id, str)}

    def _take(self, call: Part) -> None:
        """Close a call that was answered in another way than by its id."""
        responses = self.waiting.get(_key(call), [])
        for place in range(len(responses) - 1, -1, -1):
            if call in responses[place]:
                responses[place].remove(call)
                if not responses[place]:
                    del responses[place]
                return

    def _give(self, call: Part, result: Part) -> None:
        result.owner, result.response = id(call), call.response
        if call.answers is None:
            call.answers = [result]
        else:
            call.answers.append(result)
        self.done[_key(call)] = call

    def _find_early(self) -> None:
        """Match a result that was stored before its call, such as two writes in the wrong order.

        The call is the first one with this id after the result, in the same turn: no message of the user is between
        them. It has no other result, and the same tool name if the result has a name. Some providers repeat their ids,
        so any other call may be another one, and the result is an orphan.
        """
        firsts: dict[Key, Part] = {}
        if self.strays:
            for call in self.calls:
                firsts.setdefault(_key(call), call)
        found: list[tuple[Part, Part]] = []
        for _, _, result in self.strays:
            early = firsts.get(_key(result)) if not result.is_by_name and result.id else None
            if early and early.turn > result.turn and _may_be_of(result, early):
                found.append((result, early))
        if not found:
            return
        prompts = self._prompts_before()
        for result, early in found:
            if early.answers is None and prompts[id(result)] == prompts[id(early)]:
                self._give(early, result)
        self.strays = [stray for stray in self.strays if not stray[2].owner]

    def _prompts_before(self) -> dict[int, int]:
        """Return, by the identity of each call and result, the number of the user's contents before it."""
        before: dict[int, int] = {}
        count = 0
        for turn in self.turns:
            is_prompt = True
            for part in turn.parts:
                if part.kind is PartKind.CALL or part.kind is PartKind.RESULT:
                    before[id(part)] = count
                elif turn.role is Role.USER and part.kind is not PartKind.SYSTEM:
                    if part.kind is PartKind.TEXT:
                        # Attachments that were moved out of results come after such a text.
                        is_prompt = not words_in(part).startswith((ATTACHED, SYSTEM_NOTE))
                    count += is_prompt
        return before

    def _relink(self) -> None:
        """Match a result under an unknown id with the only open call of the response before it."""
        if not self.strays:
            return
        open_calls: dict[int, list[Part]] = {}
        for call in self.calls:
            if _is_open(call):
                open_calls.setdefault(call.response, []).append(call)
        near: dict[int, list[Part]] = {}
        far: dict[int, list[Part]] = {}
        for response, is_near, result in self.strays:
            (near if is_near else far).setdefault(response, []).append(result)
        for response, results in (far | near).items():
            calls = open_calls.get(response, [])
            named = [result for result in results if result.id]
            if len(calls) == len(results) and (len(calls) == 1 or not named):
                for call, result in zip(calls, results, strict=True):
                    self._link(call, result)
            elif calls:
                self._relink_by_name(calls, results)

    def _relink_by_name(self, calls: list[Part], results: list[Part]) -> None:
        """Link the calls and results whose tool name stands once on each side."""
        by_name: dict[str, list[Part]] = {}
        for call in calls:
            by_name.setdefault(call.name, []).append(call)
        answers: dict[str, list[Part]] = {}
        for result in results:
            answers.setdefault(result.name, []).append(result)
        for name, mine in answers.items():
            if name and len(mine) == len(by_name.get(name, [])) == 1:
                self._link(by_name[name][0], mine[0])

    def _link(self, call: Part, result: Part) -> None:
        self._give(call, result)
        self.task.report.note(
            "foreign-result-id",
            self.turns[result.turn].at,
            "linked to the open call",
            call_id=result.id,
        )

    def _settle_repeats(self) -> None:
        """Keep one result of each call: drop copies, and join the others to it or keep them as text."""
        for call in self.calls:
            if call.answers is None or len(call.answers) == 1:
                continue
            first, *others = call.answers
            joined: list[Part] = []
            for other in others:
                first = self._settle_result(call, first, other, joined)
            self._join([first, *joined])
            call.answers = [first]

    def _join(self, results: list[Part]) -> None:
        """Join results to the first, pairwise: thousands of them take nearly linear time."""
        while len(results) > 1:
            for place in range(0, len(results) - 1, 2):
                self.task.form.join(results[place], results[place + 1])
            results = results[::2]

    def _settle_result(self, call: Part, first: Part, other: Part, joined: list[Part]) -> Part:
        report = self.task.report
        place = self.turns[other.turn]
        if other.turn != first.turn and not (
            stands_in(first) or stands_in(other) or first.body == other.body
        ):
            other.owner, other.is_second = 0, True  # joining would change an earlier message
            return first
        self.copies.add(id(other))
        if stands_in(other) or first.body == other.body:
            report.note("repeated-result", place.at, "dropped the copy", call_id=call.id)
            return first
        if stands_in(first):
            self.copies.add(id(first))
            self.copies.discard(id(other))
            report.note("late-result", place.at, "put in the place of its stand-in", call_id=call.id)
            return other
        joined.append(other)
        self.turns[first.turn].is_changed = True
        report.note("repeated-result", place.at, "joined with the first", call_id=call.id)
        return first

    def _without_copies(self) -> list[MessageTurn]:
        if not self.copies:
            return self.turns
        kept: list[MessageTurn] = []
        for turn in self.turns:
            size = len(turn.parts)
            parts = [part for part in turn.parts if id(part) not in self.copies]
            if len(parts) != size:
                is_copied_response = kept and not _has_calls(parts) and _is_copy_of(turn, kept[-1])
                if not parts or is_copied_response or not _has_content(parts):
                    continue
                turn.parts, turn.is_changed = parts, True
            kept.append(turn)
        return kept


def _first(calls: Waiting) -> Part:
    """Remove and return the call that has waited longest."""
    return calls.pop(0) if isinstance(calls, list) else calls.popleft()


def _has_calls(parts: list[Part]) -> bool:
    """Whether a call is left: one without an id never counts as a copy, and may have a result."""
    return any(part.kind is PartKind.CALL for part in parts)


def _is_copy_of(turn: MessageTurn, before: MessageTurn) -> bool:
    """Whether this response is a copy; two parts of one message are not."""
    is_other = turn.source is not before.source
    return turn.role is Role.ASSISTANT and is_other and turn.source == before.source


def _has_content(parts: list[Part]) -> bool:
    """Whether there is content besides thinking."""
    return any(part.kind is not PartKind.THINKING for part in parts)


def _is_open(call: Part) -> bool:
    """Whether a call has no result, or only a stand-in."""
    return call.answers is None or all(map(stands_in, call.answers))


def _may_be_of(result: Part, call: Part) -> bool:
    """Whether the tool names allow it. An invalid name of a call has already been replaced."""
    return not result.name or call.name in (result.name, nearest_name(result.name), NO_NAME)


def _key(part: Part) -> Key:
    if part.is_by_name:
        return ("name", part.name)
    call_id = part.id
    return call_id if isinstance(call_id, str) else repr(call_id)
