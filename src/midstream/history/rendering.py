"""Rendering of a session's history as a provider's messages.

A history is written entry by entry, independently of later entries. So the messages of a longer history begin with
those of the shorter one, and the provider's cached prefix stays valid. Rules for one message (names, ids, invalid
arguments, thinking, attachments) are applied here. Rules for the order of messages are applied by the profile's repair
of the whole list.
"""

from __future__ import annotations

import re

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from midstream.history.codecs.codec_spec import (
    RAW,
    Format,
    Json,
    MessageTurn,
    Part,
    PartKind,
    ResultPlacement,
    Role,
    Value,
    object_in_text,
)
from midstream.history.codecs.file_parts import file_part, file_words
from midstream.history.codecs.format_registry import find_format
from midstream.history.messages import (
    File,
    History,
    Outcome,
    Response,
    ResponsePart,
    Step,
    Text,
    Thinking,
    ToolCall,
    ToolResult,
    UpstreamCall,
    UserMessage,
    UserPart,
    storable,
)
from midstream.history.profiles import Profile, find_profile, profile_for
from midstream.history.repair.call_ids import Namer
from midstream.history.repair.placeholders import (
    NO_NAME,
    NO_OUTPUT,
    NO_REASON,
    NO_REASONING,
    NO_WORDS,
    SENTINEL,
)
from midstream.history.repair.report import Advice
from midstream.history.repair.walk import repair_messages
from midstream.history.upstream_calls import words_of
from midstream.json_depth import is_text_too_deep

NAME_CHARS_MAX = 64
"""Characters of a tool's name; OpenAI and Anthropic refuse longer ones, even in a failed call."""

_ODD_IN_NAME = re.compile(r"[^a-zA-Z0-9_-]")
_DATE = re.compile(r"[-@:]v?[0-9.:-]+").fullmatch


_object = msgspec.json.Decoder(dict[str, Value]).decode


class Rendered(Struct, frozen=True):
    """Request for a provider.

    `system` is the system prompt if the format has it separately, else empty.
    """

    messages: list[Value]
    system: str = ""
    advice: Advice = Advice()


def render(
    history: History,
    instructions: str,
    profile: str = "openai-chat",
    *,
    form: str | None = None,
    model: str = "",
    thinking: bool | None = None,
) -> Rendered:
    """Write any history as messages that a provider accepts.

    Pure, linear and stable: more entries add messages and change none.

    Args:
        history: The history to write; any history is accepted.
        instructions: The system prompt, or "".
        profile: The provider whose rules apply (`midstream.history.profiles.PROFILES`).
        form: The format of the messages; by default that of the profile's provider.
        model: The model of the request, with the name in its responses: only this model gets its signed thinking.
        thinking: Whether the request has thinking on, if known; `advice.thinking` may turn it off.

    Raises:
        UsageError: The profile or format is unknown.
    """
    named = find_profile(profile)
    written = find_format(form or named.format)
    rules = profile_for(written, profile)
    writer = _Writer(written, rules, model)
    for entry in history.entries:
        if isinstance(entry, UserMessage):
            writer.user(entry)
        else:
            writer.step(entry)
    done = repair_messages(writer.messages, written, rules, thinking=thinking)
    system = instructions if instructions.strip() else ""
    if not system or written.spec.system != "list":
        return Rendered(done.messages, system, done.advice)
    top = written.build(MessageTurn(Role.SYSTEM, [written.text(system, Role.SYSTEM)]))
    return Rendered([top, *done.messages], "", done.advice)


class _Writer:
    """Writes entries in one format, in order; its only state is the used ids."""

    def __init__(self, form: Format, profile: Profile, model: str) -> None:
        self.messages: list[Value] = []
        self._form = form
        self._profile = profile
        self._model = model
        self._takes_id = profile.id_test()
        self._namer = Namer(profile, set())
        self._calls = 0
        self._is_plain = form.spec.takes_plain
        self._has_text_arguments = form.spec.has_text_arguments

    # --- messages of a user -----------------------------------------------------------------------------------

    def user(self, message: UserMessage) -> None:
        """Write a user's message; an empty one gets a placeholder."""
        if self._is_plain and (words := _only_words(message.parts)):
            self.messages.append({"role": "user", "content": words})
            return
        if self._form.name == "pydantic-ai":
            self.messages.append(self._prompt(message))
            return
        parts = [self._user_part(part) for part in message.parts if not _is_blank(part)]
        if not parts:
            parts = [self._form.text(NO_WORDS, Role.USER)]
        source: Json | None = None
        if self._form.layout is ResultPlacement.FLAT and any(part.kind is PartKind.MEDIA for part in parts):
            source = {"type": "message", "role": "user"}
        self._write(MessageTurn(Role.USER, parts, source))

    def _user_part(self, part: Text | File) -> Part:
        if isinstance(part, Text):
            return self._form.text(part.text, Role.USER)
        shown = file_part(self._form, self._profile.files, part)
        return shown or self._form.text(file_words(part), Role.USER)

    def _prompt(self, message: UserMessage) -> Json:
        """Write a prompt of several parts, which only pydantic-ai has."""
        pieces: list[Value] = []
        for part in message.parts:
            if isinstance(part, Text):
                pieces += [part.text] if part.text.strip() else []
            else:
                shown = file_part(self._form, self._profile.files, part)
                pieces.append(shown.raw if shown else file_words(part))
        is_one = len(pieces) == 1 and isinstance(pieces[0], str)
        content: Value = pieces[0] if is_one else pieces or NO_WORDS
        return {"kind": "request", "parts": [{"part_kind": "user-prompt", "content": content}]}

    # --- responses of a model, and the results of its calls ---------------------------------------------------

    def step(self, step: Step) -> None:
        """Write a response and the results of its calls; an empty response is omitted."""
        response = _in_words(step.response)
        if self._is_plain and (words := _only_words(response.parts)):
            self.messages.append({"role": "assistant", "content": words})
            return
        if not step.results and not response.text.strip():
            return
        if self._profile.ids_are_unique == "response":
            self._namer.seen.clear()
        calls: dict[str, Part] = {}
        parts = self._response_parts(response, calls)
        layout = self._form.layout
        if layout is ResultPlacement.FLAT:
            for part in parts:
                self._write(MessageTurn(Role.ASSISTANT, [part]))
        else:
            self._write(MessageTurn(Role.ASSISTANT, parts))
        results = [self._result(result, calls[result.call_id]) for result in step.results]
        if layout is ResultPlacement.GROUPED:
            if results:
                self._write(MessageTurn(Role.USER, results))
            return
        for result in results:
            self._write(MessageTurn(Role.TOOL, [result]))

    def _response_parts(self, response: Response, calls: dict[str, Part]) -> list[Part]:
        form, profile = self._form, self._profile
        parts: list[Part] = []
        is_joined = form.layout is ResultPlacement.SEPARATE
        if is_joined and (text := response.text) and not text.isspace():
            parts.append(form.text(text, Role.ASSISTANT))
        has_thought = False
        for part in response.parts:
            if isinstance(part, ToolCall):
                calls[part.id] = made = self._call(part)
                self._sign(made, part, is_own=_is_of(response, self._model), is_first=len(calls) == 1)
                parts.append(made)
            elif isinstance(part, Thinking):
                thought = self._thought(part, is_own=_is_of(response, self._model))
                if thought is not None:
                    has_thought = True
                    parts.append(thought)
            elif isinstance(part, Text) and not is_joined and part.text.strip():
                parts.append(form.text(part.text, Role.ASSISTANT))
        if profile.wants_reasoning != "no" and form.spec.reasoning == "written" and calls and not has_thought:
            parts.append(Part(PartKind.THINKING, None, body=NO_REASONING))
        while parts[-1].kind is PartKind.THINKING and not is_joined:
            parts.pop()  # no provider accepts a response that ends in a thought
        return parts

    def _thought(self, part: Thinking, *, is_own: bool) -> Part | None:
        """Write a thought for the model that signed it, or for a provider that accepts all thoughts."""
        form = self._form
        if self._profile.takes_reasoning and form.spec.reasoning == "written":
            return Part(PartKind.THINKING, None, body=part.text) if part.text.strip() else None
        if not is_own or (self._profile.is_thinking_signed and not part.signature):
            return None
        write = form.spec.write_own_thought
        if write is None or (form.spec.signs_thinking and not self._profile.is_thinking_signed):
            return None
        raw = write(part.text, part.signature, part.is_redacted)
        if raw is None:
            return None
        return Part(PartKind.THINKING, raw, body=part.text, signature=part.signature, is_new=True)

    def _call(self, call: ToolCall) -> Part:
        self._calls += 1
        call_id, seen = call.id, self._namer.seen
        if not self._takes_id(call_id) or call_id in seen or call_id in self._namer.taken:
            call_id = self._namer.new(call_id, f"call_{self._calls}")
        seen.add(call_id)
        name = _ODD_IN_NAME.sub("_", call.name[:NAME_CHARS_MAX]) if call.name.strip() else NO_NAME
        arguments, text = arguments_of(call)
        if not self._has_text_arguments:
            return self._form.call(call_id, name, arguments)
        made = self._form.call(call_id, name, {})
        made.body = text  # exactly as the model wrote them, for the provider's cache
        inner = made.raw.get("function", made.raw)
        inner[self._form.spec.arguments_key] = text
        return made

    def _sign(self, made: Part, call: ToolCall, *, is_own: bool, is_first: bool) -> None:
        """Add a call's signature of its provider; use Google's stand-in for a missing required one."""
        spec, signature = self._form.spec, call.signature if is_own else None
        if signature is None and spec.matches_by_name and self._profile.signs_calls and is_first:
            signature = SENTINEL
        if signature is not None and spec.write_signature is not None:
            made.raw.update(spec.write_signature(signature))

    def _result(self, result: ToolResult, call: Part) -> Part:
        is_ok = result.outcome is Outcome.OK
        words = result.content
        if not words.strip():
            words = NO_OUTPUT if is_ok else NO_REASON
        made = self._form.answer(call, words, is_failed=not is_ok)
        if is_ok and self._form.spec.matches_by_name:
            self._form.refill(made, words)
        elif self._form.spec.has_outcomes:
            made.raw["outcome"] = _OUTCOMES[result.outcome]
        return made

    def _write(self, turn: MessageTurn) -> None:
        self.messages.append(self._form.build(turn))


_OUTCOMES = {
    Outcome.OK: "success",
    Outcome.ERROR: "failed",
    Outcome.CANCELLED: "interrupted",
    Outcome.DENIED: "denied",
    Outcome.UNKNOWN: "interrupted",
}
"""pydantic-ai's names of outcomes."""


def arguments_of(call: ToolCall) -> tuple[Json, str]:
    """Return a call's arguments as an object and as its text; invalid or too deep ones are wrapped in an object."""
    text = storable(call.arguments) or "{}"
    if is_text_too_deep(text):
        return _raw(text)
    try:
        return _object(text), text
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        found = object_in_text(text)
    if (
        found is None or RAW in found
    ):  # also for text that only Python's parser accepts: NaN, a lone surrogate
        return _raw(text)
    return found, msgspec.json.encode(found).decode()


def _raw(text: str) -> tuple[Json, str]:
    found: Json = {RAW: text}
    return found, msgspec.json.encode(found).decode()


def _is_of(response: Response, model: str) -> bool:
    """Whether a response is of this model; providers return the name of the dated snapshot."""
    if response.model == model:
        return True
    name = model.removesuffix("-latest").removesuffix("-0")  # claude-sonnet-4-0 is claude-sonnet-4-20250514
    return bool(name) and response.model.startswith(name) and _DATE(response.model, len(name)) is not None


def _in_words(response: Response) -> Response:
    """Describe upstream calls as text: no format has a part for them."""
    if not any(isinstance(part, UpstreamCall) for part in response.parts):
        return response
    parts: list[ResponsePart] = []
    last: ResponsePart | None = None
    for part in response.parts:
        if isinstance(part, UpstreamCall):
            words = words_of(part)
            parts.append(Text(words if last is None else f"\n{words}"))
        elif isinstance(part, Text) and isinstance(last, UpstreamCall):
            parts.append(Text(f"\n{part.text}"))
        else:
            parts.append(part)
        last = last if isinstance(part, Thinking | ToolCall) else part
    return replace(response, parts=tuple(parts))


def _only_words(parts: tuple[UserPart | ResponsePart, ...]) -> str:
    """Return the text of a message that has only one text, or an empty text."""
    first = parts[0] if len(parts) == 1 else None
    return first.text if isinstance(first, Text) and not first.text.isspace() else ""


def _is_blank(part: Text | File) -> bool:
    return isinstance(part, Text) and not part.text.strip()
