"""Requests of the Agent Client Protocol as commands: prompts as messages, permissions as answers."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from midstream.dialects.ui_message_stream import value_of
from midstream.errors import MalformedFrameError
from midstream.history.messages import File, Text, UserMessage, UserPart, storable
from midstream.session.calls import Choice, QuestionKind
from midstream.session.questions import Question

Json = dict[str, Any]

STREAM_PREFIX = "acp-"
"""Prefix of the stream keys of prompts."""
_OPTIONS: dict[Choice, tuple[str, str]] = {
    Choice.ALLOW: ("Allow", "allow_once"),
    Choice.DENY: ("Decline", "reject_once"),
    Choice.RERUN: ("Run it again", "allow_once"),
    Choice.HAPPENED: ("It took effect: do not run it again", "reject_once"),
    Choice.SKIP: ("Do not run it again", "reject_once"),
}
"""Name and kind of the option for each decision."""


def stream_of(key: str) -> str:
    """Return the stream key of a prompt; equal idempotency keys give equal stream keys."""
    digest = hashlib.blake2b(storable(key).encode(), digest_size=16, person=b"midstream-acp")
    return f"{STREAM_PREFIX}{digest.hexdigest()}"


def message_of(blocks: list[Json]) -> UserMessage:
    """Return the content blocks of a prompt as a message.

    Raises:
        MalformedFrameError: There is no block, or one cannot be read.
    """
    parts = tuple(_part_of(block) for block in blocks)
    if not parts:
        raise MalformedFrameError("a prompt needs at least one content block")
    return UserMessage(parts)


def text_of(message: UserMessage) -> str:
    """Return the text of a message."""
    return "\n".join(part.text for part in message.parts if isinstance(part, Text))


def _part_of(block: Json) -> UserPart:
    match block:
        case {"type": "text", "text": str(words)}:
            return Text(storable(words))
        case {"type": "image" | "audio", "data": str(data), "mimeType": str(media_type)}:
            return File(media_type, data=data)
        case {"type": "resource", "resource": {"uri": str(uri), "text": str(words)}}:
            return Text(storable(f'<resource uri="{uri}">\n{words}\n</resource>'))
        case {"type": "resource", "resource": {"uri": str(uri), "blob": str(data), **more}}:
            return File(
                str(more.get("mimeType") or "application/octet-stream"), data=data, name=storable(uri)
            )
        case {"type": "resource_link", "uri": str(uri), "mimeType": str(media_type), **more} if _is_web(uri):
            return File(media_type, url=uri, name=storable(str(more.get("name") or uri)))
        case {"type": "resource_link", "uri": str(uri), **more}:
            return Text(storable(f"[{more.get('title') or more.get('name') or uri}]({uri})"))
        case _:
            raise MalformedFrameError(
                f"a content block of type {str(block.get('type'))[:40]!r} cannot be read"
            )


def _is_web(uri: str) -> bool:
    return uri.startswith(("https://", "http://"))


def permission_request(session_id: str, question: Question, call_name: str) -> Json:
    """Return the permission request about a call; `call_name` is its id for the client."""
    words = question.text or _WORDS[question.kind].format(name=question.name)
    call = {
        "toolCallId": call_name,
        "title": question.name,
        "status": "pending",
        "rawInput": value_of(question.arguments),
        "content": [{"type": "content", "content": {"type": "text", "text": words}}],
    }
    options = [
        {"optionId": choice.value, "name": _OPTIONS[choice][0], "kind": _OPTIONS[choice][1]}
        for choice in question.choices
        if choice in _OPTIONS
    ]
    return {"sessionId": session_id, "toolCall": call, "options": options}


_WORDS = {
    QuestionKind.APPROVAL: "May {name} run?",
    QuestionKind.DOUBT: "{name} was started, and whether it took effect is unknown.",
    QuestionKind.QUESTION: "{name}",
}


def choice_in(question: Question, answer: object) -> Choice | None:
    """Return the decision in a client's answer; None for a cancelled or an invalid one."""
    try:
        outcome = msgspec.convert(answer, _Answer).outcome
        choice = Choice(outcome.optionId) if outcome.outcome == "selected" else None
    except (msgspec.ValidationError, ValueError):
        return None
    return choice if choice in question.choices else None


class _Outcome(msgspec.Struct):
    outcome: str
    optionId: str = ""  # noqa: N815 - its name in the protocol


class _Answer(msgspec.Struct):
    outcome: _Outcome
