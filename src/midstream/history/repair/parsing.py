"""Parsing of any list into turns; content that can never be sent (lone surrogates) is replaced."""

from __future__ import annotations

import msgspec

from midstream.errors import InvalidHistoryError
from midstream.history.codecs.codec_spec import Json, MessageTurn, Role, Value, as_json
from midstream.history.messages import storable
from midstream.history.repair.mixed_formats import foreign_words, read_as_foreign
from midstream.history.repair.repair_task import Task
from midstream.history.repair.roles import with_known_role
from midstream.json_depth import DEPTH_MAX, TOO_DEEP, is_text_too_deep, is_too_deep


def sendable(messages: list[Value], task: Task, *, first: int = 0) -> list[Value]:
    """Return the list with every lone surrogate replaced; the same list if there is none.

    Args:
        messages: All messages, or a part of the list.
        task: Receives the findings.
        first: The number of the first of them.

    Raises:
        InvalidHistoryError: A message is not JSON: cyclic, too deep, or with other objects.
    """
    if all(_is_sendable(message) for message in messages):
        return messages
    clean: list[Value] = []
    for at, message in enumerate(messages, first):
        if _is_json(message):
            if is_too_deep(message):
                raise InvalidHistoryError(f"message {at} is {TOO_DEEP}")
            clean.append(message)
            continue
        try:
            clean.append(_mend(message, DEPTH_MAX))
            msgspec.json.encode(clean[-1])
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidHistoryError(f"message {at} is not a JSON value: {type(error).__name__}") from error
        task.report.note("lone-surrogate", at, "replaced by U+FFFD")
    return clean


def turns_of(messages: list[Value], task: Task) -> list[MessageTurn]:
    """Read every message; a value that is no message becomes a user's text."""
    turns: list[MessageTurn] = []
    if messages and isinstance(messages[-1], dict) and messages[-1]:
        # LangChain's codec writes new messages in the form of the first one.
        task.form.parse(messages[-1], len(messages) - 1)
    for at, message in enumerate(messages):
        if isinstance(message, dict) and message:
            turns += _read(message, at, task)
        elif message in (None, "", [], {}):
            task.report.note("not-a-message", at, "dropped: it is empty")
        else:
            words = message if isinstance(message, str) else as_json(message)
            turn = task.turn_of(Role.USER, words)
            turn.at = at
            turns.append(turn)
            task.report.note("not-a-message", at, "kept as a user's words")
    return turns


def _read(message: Json, at: int, task: Task) -> list[MessageTurn]:
    """Read one message of this format, of another one, or of none."""
    foreign = read_as_foreign(message, at, task.form)
    if foreign:
        task.report.note("foreign-message", at, "rewritten in this format")
        return foreign
    named = with_known_role(message, task.form.spec)
    turn = task.form.parse(named, at)
    if turn.is_changed or _has_new(turn):
        turn.is_changed = True
        task.report.note("content-shape", at, "wrapped the content in a list")
    if named is not message:
        turn.is_changed = True
        task.report.note("unknown-role", at, "read as the one it resembles")
    if turn.role is Role.TOOL:
        result = turn.parts[0]
        if result.body is None and not task.is_flat and (words := foreign_words(named, task.form)):
            task.form.refill(result, words)
            turn.is_changed = True
            task.report.note("content-shape", at, "kept what it holds as words")
    elif not turn.parts and (words := foreign_words(named, task.form)):
        if turn.role is Role.OTHER:
            turn.role = Role.USER  # no new message can have an unknown role
        turn.parts, turn.source, turn.is_changed = [task.form.text(words, turn.role)], None, True
        task.report.note("content-shape", at, "kept what it holds as words")
    return [turn]


def _has_new(turn: MessageTurn) -> bool:
    for part in turn.parts:  # noqa: SIM110 - called for each turn: `any` takes three times as long
        if part.is_new:
            return True
    return False


def _is_sendable(value: Value) -> bool:
    try:
        return not is_text_too_deep(msgspec.json.encode(value))  # checking the text takes half the time
    except (UnicodeEncodeError, TypeError, ValueError, RecursionError):
        return False


def _is_json(value: Value) -> bool:
    try:
        msgspec.json.encode(value)
    except (UnicodeEncodeError, TypeError, ValueError, RecursionError):
        return False
    return True


def has_surrogates(value: Value, depth: int = DEPTH_MAX) -> bool:
    """Whether any text in a value has a lone surrogate."""
    if isinstance(value, str):
        return storable(value) is not value
    if depth and isinstance(value, dict):
        return any(has_surrogates(k, depth - 1) or has_surrogates(v, depth - 1) for k, v in value.items())
    return bool(depth) and isinstance(value, list) and any(has_surrogates(item, depth - 1) for item in value)


def _mend(value: Value, depth: int) -> Value:
    """Copy a value with repaired texts; signed thinking with a changed text loses its signature."""
    if depth == 0:
        raise RecursionError("too deep")
    if isinstance(value, str):
        return storable(value)
    if isinstance(value, dict):
        mended = {_mend(key, depth): _mend(item, depth - 1) for key, item in value.items()}
        if value.get("thinking") != mended.get("thinking") and "signature" in mended:
            mended["signature"] = ""
        elif value.get("text") != mended.get("text"):
            mended.pop(
                "signature", None
            )  # for Bedrock: models that sign nothing accept thinking without a signature
        return mended
    if isinstance(value, list | tuple):
        return [_mend(item, depth - 1) for item in value]
    return value
