"""Requests of LangGraph clients: inputs become user messages, resume values become answers of people.

An unsupported field is refused; a field without effect is ignored. Both are reported by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct

from midstream.dialects.langgraph_messages import interrupt_id_of
from midstream.dialects.langgraph_protocol import CHANNEL_PATTERN, Subscription
from midstream.dialects.langgraph_runs import MODES, StreamMode
from midstream.dialects.request_digests import digest_of
from midstream.dialects.request_fields import bad_field
from midstream.dialects.run_fold import GivenAnswer, uuid_of
from midstream.errors import AnswerMismatchError, QuestionClosedError
from midstream.history.messages import File, Text, UserMessage, UserPart, storable
from midstream.json_depth import require_shallow
from midstream.session.calls import Choice, QuestionKind
from midstream.session.questions import Question
from midstream.session.turn.commands import Answer

Json = dict[str, Any]

_MESSAGE_ID = re.compile(r"[A-Za-z0-9_:-]{1,128}")
_INTERRUPT_ID = re.compile(r"[0-9a-f]{32}")
_YES = frozenset(
    ("approve", "approved", "accept", "accepted", "allow", "yes", "y", "true", "ok", "continue", "rerun")
)
_NO = frozenset(
    ("reject", "rejected", "deny", "denied", "decline", "ignore", "no", "n", "false", "cancel", "skip")
)
_HUMAN = frozenset(("human", "user"))
_IGNORED = ("config", "context", "metadata")
"""Fields of a run that are not passed to the agent."""
_json = msgspec.json.encode


class Multitask(StrEnum):
    """Treatment of a new run while another run is in progress."""

    ENQUEUE = "enqueue"
    REJECT = "reject"
    INTERRUPT = "interrupt"


class RunCommand(Struct):
    """Answers to the open interrupts of a thread. A session has no state to update and no nodes to go to."""

    resume: Any = UNSET
    update: None = None
    goto: None = None


class RunBody(Struct):
    """The body of a request to begin a run. Unsupported fields must be null; unknown fields are ignored."""

    assistant_id: str
    input: Any = None
    command: RunCommand | None = None
    stream_mode: StreamMode | list[StreamMode] = "values"
    multitask_strategy: Multitask = Multitask.ENQUEUE
    on_disconnect: Literal["continue", "cancel"] = "continue"
    if_not_exists: Literal["reject", "create"] = "reject"
    checkpoint: None = None
    checkpoint_id: None = None
    interrupt_before: None = None
    interrupt_after: None = None
    webhook: None = None
    after_seconds: None = None
    feedback_keys: None = None
    config: Json | None = None
    context: Json | None = None
    metadata: Json | None = None

    @property
    def resume(self) -> object:
        """The answers; UNSET for none."""
        return UNSET if self.command is None else self.command.resume


class ThreadBody(Struct):
    """Fields of a new thread."""

    thread_id: Annotated[str, Meta(pattern="^[A-Za-z0-9._:-]{1,128}$")] | None = None
    metadata: Json | None = None
    if_exists: Literal["raise", "do_nothing"] = "raise"
    supersteps: None = None


class ThreadPatch(Struct):
    """Changes to a thread."""

    metadata: Json = {}


class ThreadSearch(Struct):
    """Filters and paging of a search for threads."""

    metadata: Json = {}
    status: Literal["idle", "busy", "interrupted", "error"] | None = None
    ids: list[str] | None = None
    limit: Annotated[int, Meta(ge=1, le=1000)] = 10
    offset: Annotated[int, Meta(ge=0, le=1_000_000)] = 0


class AssistantSearch(Struct):
    """Filters and paging of a search for assistants."""

    graph_id: str | None = None
    name: str | None = None
    offset: int = 0


class HistoryBody(Struct):
    """The requested part of a thread's history; a session keeps one state."""

    limit: int = 10
    before: str | Json | None = None


class EventsBody(Struct):
    """The requested events of a thread."""

    channels: Annotated[list[Annotated[str, Meta(pattern=CHANNEL_PATTERN)]], Meta(min_length=1)]
    namespaces: list[list[str]] | None = None
    depth: Annotated[int, Meta(ge=0)] | None = None
    since: Annotated[int, Meta(ge=0)] | None = None

    def subscription(self) -> Subscription:
        """Return the subscription. Namespaces below that of the thread have no events."""
        is_root = not self.namespaces or [] in self.namespaces
        return Subscription(frozenset(self.channels), is_root, self.since or 0)


class CommandBody(Struct):
    """A command of the thread protocol."""

    id: int
    method: str
    params: Json = {}


class RunInput(Struct, frozen=True):
    """The message of a run.

    Args:
        messages: User messages; the last one begins the turn.
        message_id: Id that the client gave the last message; "" for none.
        run_id: Id of the run; equal for a repetition whose message has an id.
        digest: Digest of the request, for recognizing a repetition.
    """

    messages: tuple[UserMessage, ...]
    message_id: str
    run_id: str
    digest: str


def ignored_of(body: RunBody) -> tuple[str, ...]:
    """Return the fields of a request that have no effect."""
    return tuple(name for name in _IGNORED if getattr(body, name))


def modes_of(wanted: str | Sequence[str]) -> tuple[str, ...]:
    """Return the requested stream modes.

    Raises:
        BadFieldError: A mode is not supported.
    """
    modes = (wanted,) if isinstance(wanted, str) else tuple(wanted)
    for mode in modes:
        if mode not in MODES:
            raise bad_field(
                "stream_mode", f"stream mode {mode[:40]!r} is not supported; use {', '.join(MODES)}"
            )
    return modes


# --- inputs ---------------------------------------------------------------------------------------------------


def input_of(thread: str, given: object, *, fresh: str) -> RunInput:
    """Read the input of a run: `{"messages": [...]}`, with user messages.

    Args:
        thread: Id of the thread.
        given: Input of the request.
        fresh: Random text, for the id of a run whose message has no id.

    Raises:
        BadFieldError: The input is invalid.
    """
    _require_shallow("input", given)
    wanted = given.get("messages") if isinstance(given, dict) else None
    listed = wanted if isinstance(wanted, list) else [wanted]
    messages = tuple(_message(each) for each in listed if each is not None)
    if not messages:
        raise bad_field("input", 'the input of a run must be {"messages": [...]}, with a user message')
    digest = digest_of("graph", thread, given)
    last = listed[-1]
    named = last.get("id") if isinstance(last, dict) else None
    message_id = named if isinstance(named, str) and _MESSAGE_ID.fullmatch(named) else ""
    run_id = uuid_of(bytes.fromhex(digest) if message_id else fresh.encode())
    return RunInput(messages, message_id, run_id, digest)


def _require_shallow(name: str, given: object) -> None:
    try:
        require_shallow(given)
    except msgspec.DecodeError as error:
        raise bad_field(name, f"`{name}`: {error}") from error


def _message(given: object) -> UserMessage:
    if isinstance(given, str):
        return UserMessage.of(storable(given))
    if isinstance(given, list) and len(given) == 2:  # noqa: PLR2004 - (role, content)
        given = {"role": given[0], "content": given[1]}
    if not isinstance(given, dict):
        raise bad_field("input", "a message must be an object, a string or a pair of role and text")
    role = given.get("role", given.get("type"))
    if role not in _HUMAN:
        raise bad_field(
            "input", f"a message of role {str(role)[:40]!r} cannot be added; the agent has its own"
        )
    content = given.get("content")
    blocks = content if isinstance(content, list) else [content]
    parts = tuple(part for block in blocks for part in (_part(block),) if part is not None)
    if not parts:
        raise bad_field("input", "a message has no text and no file")
    return UserMessage(parts)


def _part(block: object) -> UserPart | None:
    if isinstance(block, str):
        return Text(storable(block)) if block else None
    if not isinstance(block, dict):
        raise bad_field("input", "the content of a message must be a string or a list of blocks")
    kind = block.get("type")
    if kind == "text" and isinstance(block.get("text"), str):
        return Text(storable(block["text"])) if block["text"] else None
    place = block.get("image_url") if kind == "image_url" else block
    url = place.get("url") if isinstance(place, dict) else place
    data = block.get("base64", block.get("data"))
    media_type = str(
        block.get("mime_type") or ("image/*" if "image" in str(kind) else "application/octet-stream")
    )
    about = block.get("metadata")
    name = about.get("filename", about.get("name")) if isinstance(about, dict) else None
    named = storable(name) if isinstance(name, str) else None
    if isinstance(data, str):
        return File(media_type, data=data, name=named)
    if isinstance(url, str):
        head, mark, inline = url.partition(";base64,")
        if mark and head.startswith("data:"):
            return File(head.removeprefix("data:"), data=inline, name=named)
        return File(media_type, url=storable(url), name=named)
    raise bad_field("input", f"a block of type {str(kind)[:40]!r} cannot be sent to the agent")


# --- answers --------------------------------------------------------------------------------------------------


def answers_of(
    questions: Iterable[Question], resume: object, given: Sequence[GivenAnswer] = ()
) -> list[tuple[Question, Answer]]:
    """Return the answers of a resume value, each with its question; an empty list for a repetition.

    Args:
        questions: Open questions of the session.
        resume: Answer to the only question, or answers by interrupt id.
        given: Answers that were already accepted.

    Raises:
        QuestionClosedError: The question is not open.
        AnswerMismatchError: The answer does not fit the question.
    """
    _require_shallow("resume", resume)
    open_questions = {interrupt_id_of(each): each for each in questions}
    if isinstance(resume, dict) and resume and all(_INTERRUPT_ID.fullmatch(str(name)) for name in resume):
        left = {name: value for name, value in resume.items() if not _is_given(given, name, value)}
        unknown = [name for name in left if name not in open_questions]
        if unknown:
            raise QuestionClosedError(f"interrupt {unknown[0]!r} is not open")
        return [(open_questions[name], _answer(open_questions[name], value)) for name, value in left.items()]
    if not open_questions:
        raise QuestionClosedError("this thread waits for no answer")
    if len(open_questions) > 1:
        raise AnswerMismatchError(f"{len(open_questions)} interrupts are open: answer them by their ids")
    return [(question, _answer(question, resume)) for question in open_questions.values()]


def _is_given(given: Sequence[GivenAnswer], name: str, value: object) -> bool:
    """Return whether this answer was already accepted: the client may have lost the reply."""
    return any(each.interrupt == name and each.is_of(_answer(each.question, value)) for each in given)


def _answer(question: Question, value: object) -> Answer:
    if question.kind is QuestionKind.QUESTION:
        return Answer(question.ref, question.digest, Choice.RESPOND, _words(value))
    decision, words, arguments = _decision(value, question.name)
    if question.kind is QuestionKind.DOUBT:
        if arguments is not None:
            raise AnswerMismatchError(
                "a call in doubt runs again with its own arguments: approve or reject it"
            )
        if decision == Choice.HAPPENED.value:
            return Answer(question.ref, question.digest, Choice.HAPPENED, words)
        return Answer(
            question.ref, question.digest, Choice.RERUN if decision == "yes" else Choice.SKIP, words
        )
    if decision == Choice.HAPPENED.value:
        raise AnswerMismatchError(
            "`happened` answers a call in doubt, and this call has not started: approve or reject it"
        )
    choice = Choice.ALLOW if decision == "yes" else Choice.DENY
    return Answer(question.ref, question.digest, choice, words, arguments if choice is Choice.ALLOW else None)


def _words(value: object) -> str:
    if isinstance(value, dict) and value.get("type") == "response":
        value = value.get("args", value.get("message"))
    return storable(value) if isinstance(value, str) else _json(value).decode()


def _decision(value: object, name: str) -> tuple[str, str, str | None]:
    """Return yes, no or happened, the accompanying text, and changed arguments of the tool `name`.

    Reads the values of LangChain's human-in-the-loop middleware and agent inbox, `true`, `false`, and plain text.
    """
    if isinstance(value, list) and len(value) == 1:
        return _decision(value[0], name)
    if isinstance(value, bool):
        return ("yes" if value else "no"), "", None
    if isinstance(value, str):
        word = value.strip().lower()
        if word in _YES or word in _NO or word == Choice.HAPPENED.value:
            return ("yes" if word in _YES else "no" if word in _NO else word), "", None
    if isinstance(value, dict):
        if isinstance(decisions := value.get("decisions"), list):
            return _decision(decisions, name)
        if isinstance(approved := value.get("approved"), bool):
            return ("yes" if approved else "no"), _reason(value), None
        if value.get("type") == "edit":
            return "yes", _reason(value), _edited(value, name)
        if value.get("type") in ("response", "respond"):
            return "no", _reason(value), None
        if isinstance(value.get("type"), str):
            decision, _, _ = _decision(value["type"], name)
            return decision, _reason(value), None
    raise AnswerMismatchError(
        'this is not a decision; resume with {"decisions": [{"type": "approve"}]}, or "reject" there'
    )


def _reason(value: Json) -> str:
    words = value.get("message", value.get("reason", value.get("args")))
    return storable(words) if isinstance(words, str) else ""


def _edited(value: Json, name: str) -> str:
    action = value.get("edited_action", value.get("args"))
    arguments = action.get("args") if isinstance(action, dict) else None
    if not isinstance(action, dict) or not isinstance(arguments, dict):
        raise AnswerMismatchError(
            'edited arguments have the form {"edited_action": {"name": "...", "args": {...}}}'
        )
    if (edited := action.get("name", action.get("action", name))) != name:
        raise AnswerMismatchError(
            f"an edit changes the arguments of {name!r}, not the tool (to {str(edited)[:100]!r}); "
            "reject the call instead"
        )
    return _json(arguments).decode()
