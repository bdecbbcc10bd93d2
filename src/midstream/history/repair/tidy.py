"""Repairs of single turns, before calls and results are matched."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from midstream.history.codecs.codec_spec import MessageTurn, Part, PartKind, Role, as_words
from midstream.history.repair.misplaced_media import take_out
from midstream.history.repair.placeholders import (
    GO_ON,
    HOSTED_CUT,
    HOSTED_ORPHAN,
    INTERRUPTED,
    NO_NAME,
    NO_OUTPUT,
    NO_REASONING,
    SENTINEL,
    UNKNOWN,
)
from midstream.history.repair.repair_task import Task, are_same, is_text, words_in
from midstream.history.repair.tool_names import nearest_name, takes_name

_HOSTED_KINDS = frozenset({PartKind.HOSTED_CALL, PartKind.HOSTED_RESULT})
_RESPONSE_KINDS = _HOSTED_KINDS | {PartKind.CALL, PartKind.THINKING}


_FOREIGN_STARTS = ("gAAAA", SENTINEL)
"""Beginnings of other providers' signatures: OpenAI's encrypted reasoning, Google's stand-in."""
_DID = {"unlisted-call": "put into the list of calls", "null-content": "made a text"}


def tidy_turns(turns: list[MessageTurn], task: Task) -> list[MessageTurn]:
    """Return the turns with every part valid by itself, and without empty ones."""
    tidied: list[MessageTurn] = []
    taken: list[Part] = []
    is_grouped, is_thinking_signed = task.is_grouped, task.profile.is_thinking_signed
    for turn in turns:
        if taken and not _answers(turn):
            taken = _show_to_user(taken, tidied)
        if is_grouped and turn.role is Role.TOOL:
            turn.role = Role.USER  # results are parts there
        for piece in _split(turn, task) if is_grouped else (turn,):
            _tidy_parts(piece, task)
            if shown := take_out(piece, task):
                taken += _place_behind_results(piece, shown, task)
            is_response = piece.role is Role.ASSISTANT
            if is_response and is_thinking_signed and piece.has(PartKind.THINKING):
                _tidy_thinking(piece, task)
            is_behind_response = (
                is_response and is_grouped and bool(tidied) and tidied[-1].role is Role.ASSISTANT
            )
            if is_behind_response and _continues(tidied[-1], piece, task):
                tidied[-1] = _merge(tidied[-1], piece, task)
            elif _is_kept(piece, task):
                tidied.append(piece)
    if taken:
        _show_to_user(taken, tidied)
    closed = tidied[:-1] if task.is_live else tidied
    for turn in closed:
        if turn.role is Role.ASSISTANT:
            if task.profile.pairs_hosted:
                _close_hosted(turn, task)
            if is_thinking_signed:
                _close_thinking(turn, task)
    return tidied


def _place_behind_results(turn: MessageTurn, taken: list[Part], task: Task) -> list[Part]:
    """Insert removed parts after the results if results are parts; return the parts to show later."""
    if not task.is_grouped or turn.role is Role.ASSISTANT:
        return taken
    end = max(place for place, part in enumerate(turn.parts) if part.kind is PartKind.RESULT) + 1
    turn.parts = [*turn.parts[:end], *taken, *turn.parts[end:]]
    return []


def _answers(turn: MessageTurn) -> bool:
    """Whether a turn only answers calls: removed parts of their response are shown after it."""
    if turn.role is Role.TOOL:
        return True
    return turn.role is Role.USER and turn.has_only(PartKind.RESULT)


def _show_to_user(taken: list[Part], tidied: list[MessageTurn]) -> list[Part]:
    """Add a user's turn with removed parts."""
    tidied.append(MessageTurn(Role.USER, taken, is_changed=True))
    return []


def _split(turn: MessageTurn, task: Task) -> list[MessageTurn]:
    """Split merged turns of two roles, or of two responses, in a format whose results are parts."""
    if turn.role is Role.USER:
        code, sides = "response-in-user-turn", list(map(_is_responses, turn.parts))
    elif turn.role is Role.ASSISTANT:
        code, sides = "user-in-response", [part.side is Role.USER for part in turn.parts]
    else:
        return [turn]
    if True in sides:
        cuts = [place for place in range(1, len(sides)) if sides[place] is not sides[place - 1]]
    elif turn.role is Role.ASSISTANT and task.profile.is_thinking_signed and turn.has(PartKind.THINKING):
        code, cuts = "spliced-thinking", _splice_cuts(turn, task)
        if not cuts:
            return [turn]
    else:
        return [turn]
    task.report.note(code, turn.at, "taken apart")
    edges = [0, *cuts, len(turn.parts)]
    pieces: list[MessageTurn] = []
    for start, end in pairwise(edges):
        parts = turn.parts[start:end]
        role = turn.role
        if pieces and code == "spliced-thinking" and not pieces[-1].has_calls:
            pieces.append(task.turn_of(Role.USER, GO_ON))  # providers join successive responses
        if role is Role.USER and _is_responses(parts[0]):
            role = Role.ASSISTANT
        elif role is Role.ASSISTANT and parts[0].side is Role.USER:
            role = Role.USER
        pieces.append(
            MessageTurn(role, parts, turn.source if role is turn.role else None, turn.at, is_changed=True)
        )
    if turn.role is Role.USER:
        return [
            part
            for piece in pieces
            for part in (_split(piece, task) if piece.role is Role.ASSISTANT else [piece])
        ]
    return pieces


def _is_responses(part: Part) -> bool:
    """Whether only a response may have this part."""
    return part.kind in _RESPONSE_KINDS or part.side is Role.ASSISTANT


def _splice_cuts(turn: MessageTurn, task: Task) -> list[int]:
    """Return the indexes at which a second response begins: thinking after a call, or after other thinking and text.

    With hosted tools, a response has thinking several times, and withheld thinking may follow other thinking.
    pydantic-ai stores each response separately, so that only a call counts there.
    """
    cuts, has_call, signature = [], False, ""
    for place, part in enumerate(turn.parts):
        if part.kind is PartKind.CALL:
            has_call = True
        if part.kind is not PartKind.THINKING:
            continue
        is_other = bool(signature) and part.signature != signature and _is_signed(part)
        if has_call or (
            is_other and not _is_redacted(turn.parts[place - 1]) and not _may_think_often(turn, task)
        ):
            cuts.append(place)
            has_call, signature = False, ""
        if _is_signed(part):
            signature = str(part.signature)
    return cuts


def _may_think_often(turn: MessageTurn, task: Task) -> bool:
    return task.form.spec.stores_responses or any(part.kind in _HOSTED_KINDS for part in turn.parts)


def _is_signed(part: Part) -> bool:
    """Whether this is signed thinking with text."""
    return part.kind is PartKind.THINKING and isinstance(part.body, str) and is_text(part.signature)


def _tidy_parts(turn: MessageTurn, task: Task) -> None:
    gone: set[int] = set()
    for place, part in enumerate(turn.parts):
        tidy = _TIDIED.get(part.kind)
        if tidy is not None and tidy(turn, place, part, task):
            gone.add(id(part))
    if gone:
        task.drop(turn, gone)


def _tidy_result(turn: MessageTurn, place: int, part: Part, task: Task) -> bool:
    found = task.form.tidy(part)
    if found is None and _is_white(part, task):
        task.form.refill(part, NO_OUTPUT)
        found = "empty-result"
    if found is not None:
        turn.is_changed = True
        task.report.note(found, turn.at, "gave the result sendable content", part=place, call_id=part.id)
    return False


def _tidy_text(turn: MessageTurn, place: int, part: Part, task: Task) -> bool:
    body = part.body
    if not isinstance(body, str) and body is not None:
        is_prompt = part.side is Role.USER and isinstance(body, list)  # pydantic-ai's may have several pieces
        if not is_prompt:
            _make_text(turn, place, part, task)
    if _is_refused_text(part, task):
        task.report.note("blank-text", turn.at, "dropped", part=place)
        return True
    return False


def _tidy_system(turn: MessageTurn, place: int, part: Part, task: Task) -> bool:
    if not isinstance(part.body, str):
        _make_text(turn, place, part, task)
    return False


def _make_text(turn: MessageTurn, place: int, part: Part, task: Task) -> None:
    task.form.refill(part, as_words(part.body))
    turn.is_changed = True
    task.report.note("content-shape", turn.at, "made a text", part=place)


def _tidy_thought(turn: MessageTurn, place: int, part: Part, task: Task) -> bool:
    if task.profile.blank == "empty" and part.body == "" and not part.signature:
        task.report.note("blank-text", turn.at, "dropped", part=place)
        return True
    return False


def _tidy_opaque(turn: MessageTurn, place: int, part: Part, task: Task) -> bool:
    if part.name == "nothing":
        task.report.note("empty-part", turn.at, "dropped", part=place)
        return True
    return False


def _tidy_hosted_call(turn: MessageTurn, place: int, part: Part, task: Task) -> bool:
    if not isinstance(part.body, dict) and "input" in part.raw:
        task.form.reargue(part, task.form.bad_arguments(part) or {})
        turn.is_changed = True
        task.report.note("broken-arguments", turn.at, "made an object", part=place, call_id=part.id)
    return False


def _is_white(part: Part, task: Task) -> bool:
    """Whether a result has only white space, for providers that count this as blank."""
    body = part.body
    return task.profile.is_white_result_refused and isinstance(body, str) and body.isspace()


def _is_refused_text(part: Part, task: Task) -> bool:
    body, blank = part.body, task.profile.blank
    if isinstance(body, str):
        if blank == "white":
            return not body or body.isspace()
        return blank == "empty" and not body and not part.signature
    return body is None or body == []  # a prompt of several pieces has some


def _tidy_call(turn: MessageTurn, _place: int, part: Part, task: Task) -> bool:
    arguments = task.form.bad_arguments(part)
    if arguments is not None:
        was_cut = "_raw" in arguments
        task.form.reargue(part, arguments)
        turn.is_changed = True
        part.failed = was_cut
        did = "kept the text as `_raw`" if was_cut else "made an object"
        task.report.note("broken-arguments", turn.at, did, call_id=part.id)
    if takes_name(part.name, task.names):
        return False
    if is_text(part.name):
        task.form.retool(part, nearest_name(part.name))
        task.report.note("bad-name", turn.at, f"named {part.name!r}", call_id=part.id)
    else:
        task.form.retool(part, NO_NAME)
        task.report.note("call-without-name", turn.at, f"named {NO_NAME!r}", call_id=part.id)
    turn.is_changed = True
    return False


_TIDIED: dict[PartKind, Callable[[MessageTurn, int, Part, Task], bool]] = {
    PartKind.TEXT: _tidy_text,
    PartKind.THINKING: _tidy_thought,
    PartKind.CALL: _tidy_call,
    PartKind.RESULT: _tidy_result,
    PartKind.HOSTED_CALL: _tidy_hosted_call,
    PartKind.SYSTEM: _tidy_system,
    PartKind.OPAQUE: _tidy_opaque,
}
"""Functions that make a part of each kind valid by itself; they return whether to drop the part."""


def _tidy_thinking(turn: MessageTurn, task: Task) -> None:
    """Drop thinking that this provider did not sign, or signed for another model, and exact copies."""
    gone: set[int] = set()
    seen: set[str] = set()
    for place, part in enumerate(turn.parts):
        if part.kind is not PartKind.THINKING:
            continue
        if part.body == NO_REASONING and task.profile.wants_reasoning == "every":
            continue  # an earlier repair added it
        signature = part.signature
        if not is_text(signature) or not (isinstance(part.body, str) or _is_redacted(part)):
            code = "unsigned-thinking"
        elif _is_foreign(str(signature), turn, task):
            code = "foreign-thinking"
        elif str(signature) in seen and signature != "redacted":
            code = "repeated-thinking"
        else:
            seen.add(str(signature))
            continue
        gone.add(id(part))
        lost = "" if code == "repeated-thinking" else words_in(part)
        task.report.note(code, turn.at, "dropped", part=place, lost=lost)
    if gone:
        task.drop(turn, gone)


def _is_redacted(part: Part) -> bool:
    """Whether this is thinking whose text is withheld."""
    return part.body is None and (part.signature == "redacted" or part.raw.get("type") == "redacted_thinking")


def _is_foreign(signature: str, turn: MessageTurn, task: Task) -> bool:
    if signature.startswith(_FOREIGN_STARTS) or signature in task.odd_signatures:
        return True
    model = turn.source.get("model") if isinstance(turn.source, dict) else None
    if not isinstance(model, str) or task.profile.signs != "anthropic":
        return False
    return "claude" not in model or (task.model is not None and model != task.model)


def _continues(before: MessageTurn, turn: MessageTurn, task: Task) -> bool:
    """Whether this response continues the previous one: one response, stored in several messages."""
    profile = task.profile
    if not before.parts or not turn.parts:
        return False
    if profile.is_thinking_signed and _ends_with_thinking(before):
        return all(part.kind is not PartKind.THINKING for part in turn.parts)
    if profile.pairs_hosted and turn.parts[0].kind is PartKind.HOSTED_RESULT:
        return any(part.kind is PartKind.HOSTED_CALL for part in before.parts)
    return False


def _ends_with_thinking(turn: MessageTurn) -> bool:
    """Whether thinking is last, not counting results, which are moved later."""
    for part in reversed(turn.parts):
        if part.kind is not PartKind.RESULT:
            return part.kind is PartKind.THINKING
    return False


def _merge(before: MessageTurn, turn: MessageTurn, task: Task) -> MessageTurn:
    task.report.note(
        "split-response", turn.at, "joined with the message before: one response, stored in pieces"
    )
    source = before.source or turn.source
    return MessageTurn(Role.ASSISTANT, [*before.parts, *turn.parts], source, before.at, is_changed=True)


def _is_kept(turn: MessageTurn, task: Task) -> bool:
    """Whether a turn has content; an empty one is reported and dropped."""
    if turn.faults:
        turn.is_changed = True
        for fault in turn.faults:
            if fault != "null-content" or turn.parts:
                task.report.note(fault, turn.at, _DID.get(fault, "left out"))
    if turn.parts:
        _fill_hollow(turn, task)
        return True
    is_refused = is_refused_empty(turn, task)
    if is_refused:
        task.report.note("empty-message", turn.at, "dropped: it is empty")
    return not is_refused


def is_refused_empty(turn: MessageTurn, task: Task) -> bool:
    """Whether a turn without parts is refused."""
    if task.is_flat and turn.role is not Role.ASSISTANT:
        content = turn.source.get("content") if turn.source else None
        return not isinstance(content, str) or task.profile.blank != "ok"
    if turn.role is Role.ASSISTANT:
        return task.profile.is_hollow_refused or task.is_grouped
    if task.is_grouped or turn.faults or task.profile.is_empty_user_refused:
        return True
    return turn.source is not None and turn.source.get("content") != ""


def _fill_hollow(turn: MessageTurn, task: Task) -> None:
    """Add a text to a response of only thinking, where it is refused, so that the thinking is kept."""
    if (
        turn.role is Role.ASSISTANT
        and turn.has_only(PartKind.THINKING)
        and not task.is_flat
        and task.profile.is_hollow_refused
        and (task.form.spec.is_thought_hollow or task.profile.alternates == "spoken")
    ):
        turn.parts = [*turn.parts, task.form.text(INTERRUPTED, Role.ASSISTANT)]
        turn.is_changed = True
        task.report.note("empty-message", turn.at, "kept its thinking and added a word")


def _close_thinking(turn: MessageTurn, task: Task) -> None:
    """Add a text after thinking at the end of a response, where it is refused."""
    if not task.profile.is_thinking_signed or not _ends_with_thinking(turn):
        return
    turn.parts = [*turn.parts, task.form.text(INTERRUPTED, Role.ASSISTANT)]
    turn.is_changed = True
    task.report.note("thinking-last", turn.at, "added a word after it")


def _close_hosted(turn: MessageTurn, task: Task) -> None:
    """Make each hosted call and its result adjacent in one response, once each."""
    if not task.profile.pairs_hosted:
        return
    if not turn.has(PartKind.HOSTED_CALL) and not turn.has(PartKind.HOSTED_RESULT):
        return
    # Anything may be an id.
    upcoming = {repr(part.id) for part in turn.parts if part.kind is PartKind.HOSTED_CALL}
    called = set(upcoming)
    answered: set[str] = set()
    early: dict[str, Part] = {}
    parts: list[Part] = []
    for place, part in enumerate(turn.parts):
        name = repr(part.id)
        if part.kind is not PartKind.HOSTED_RESULT:
            parts.append(part)
            if part.kind is PartKind.HOSTED_CALL:
                upcoming.discard(name)
                if name in early:
                    parts.append(early.pop(name))
        elif name in upcoming and name not in answered:
            answered.add(name)
            early[name] = part
            task.report.note(
                "hosted-result-first", turn.at, "put behind its call", part=place, call_id=part.id
            )
        elif name in called and name not in answered:
            answered.add(name)
            parts.append(part)
        else:
            words = f"{HOSTED_ORPHAN} {as_words(part.body)}"
            parts.append(task.form.text(words, Role.ASSISTANT))
            task.report.note(
                "hosted-result-without-call", turn.at, "kept as text", part=place, call_id=part.id
            )
    closed: list[Part] = []
    for part in parts:
        if part.kind is not PartKind.HOSTED_CALL or repr(part.id) in answered:
            closed.append(part)
            continue
        answer = task.form.spec.hosted_answer
        result = answer(part, UNKNOWN) if answer else None
        if result is None:
            closed.append(task.form.text(f"{HOSTED_CUT} {part.name} {as_words(part.body)}", Role.ASSISTANT))
        else:
            closed += [part, result]
        task.report.note("hosted-call-without-result", turn.at, "closed it", call_id=part.id)
    if not are_same(closed, turn.parts):
        turn.parts, turn.is_changed = closed, True
