"""Literal conversion of one provider's messages to another format, with findings for lost content."""

from __future__ import annotations

import json

from msgspec import Struct

from midstream.errors import InvalidHistoryError
from midstream.history.codecs.codec_spec import (
    Format,
    Json,
    MessageTurn,
    Part,
    PartKind,
    ResultPlacement,
    Role,
    Value,
    as_words,
    both_words,
    object_in_text,
)
from midstream.history.codecs.media import media_for, media_in, thinking_for
from midstream.history.repair.report import Finding
from midstream.history.repair.system_prompts import with_words, words_of_system


class Converted(Struct, frozen=True):
    """A history in another format. `findings` lists lost content."""

    messages: list[Value]
    system: Value = None
    findings: tuple[Finding, ...] = ()


def convert_messages(
    messages: list[Value], source: Format, target: Format, *, system: Value = None
) -> Converted:
    """Write a history in another format; in its own format it is returned unchanged.

    Raises:
        InvalidHistoryError: A message is not an object.
    """
    if source.name == target.name:
        return Converted(messages, system)
    turns = []
    for at, message in enumerate(messages):
        if not isinstance(message, dict):
            raise InvalidHistoryError(f"message {at} is not an object but {type(message).__name__}")
        turns.append(source.parse(message, at))
    return _Crossing(source, target, system).run(_group(turns, source))


def _group(turns: list[MessageTurn], source: Format) -> list[MessageTurn]:
    """Join the parts that a format spreads over several messages: a response's items, a response's results."""
    if source.layout is ResultPlacement.GROUPED:
        return turns
    grouped: list[MessageTurn] = []
    for turn in turns:
        is_spread = turn.role is Role.TOOL or (
            turn.role is Role.ASSISTANT and source.layout is ResultPlacement.FLAT
        )
        if is_spread and grouped and grouped[-1].role is turn.role:
            grouped[-1] = MessageTurn(turn.role, [*grouped[-1].parts, *turn.parts], None, grouped[-1].at)
        else:
            grouped.append(turn)
    return grouped


class _Crossing:
    """State of one conversion: names and ids of calls, and findings."""

    def __init__(self, source: Format, target: Format, system: Value) -> None:
        self.source = source
        self.target = target
        self.system = system
        self.findings: list[Finding] = []
        self.out: list[MessageTurn] = []
        self.calls: dict[Value, list[Part]] = {}
        """Calls of the target that wait for a result, by their original id or name."""
        self.count = 0

    def run(self, turns: list[MessageTurn]) -> Converted:
        """Write every turn."""
        if self.system is not None and self.target.spec.system != "apart":
            self.out.append(
                MessageTurn(Role.SYSTEM, [self.target.text(words_of_system(self.system), Role.SYSTEM)])
            )
            self.system = None
        for turn in turns:
            if turn.role is Role.SYSTEM:
                self._system(turn)
            elif turn.role is Role.ASSISTANT:
                self._response(turn)
            else:
                self._user(turn)
        messages = [self._build(turn) for turn in self.out]
        return Converted(messages, self.system, tuple(self.findings))

    def _build(self, turn: MessageTurn) -> Json:
        if self.target.spec.system == "parts" and turn.role is Role.SYSTEM:
            words = as_words(turn.parts[0].body)
            return {"kind": "request", "parts": [{"content": words, "part_kind": "system-prompt"}]}
        return self.target.build(turn)

    def _note_loss(self, code: str, turn: MessageTurn, rule: str) -> None:
        self.findings.append(Finding(code, turn.at, rule))

    def _system(self, turn: MessageTurn) -> None:
        words = ""
        for part in turn.parts:
            words = both_words(words, as_words(part.body))
        if self.target.spec.system == "apart":
            self.system = with_words(self.system, words, self.target.spec.write_system)
        else:
            self.out.append(MessageTurn(Role.SYSTEM, [self.target.text(words, Role.SYSTEM)]))

    def _response(self, turn: MessageTurn) -> None:
        parts: list[Part] = []
        signer = self.source.name if self.source.spec.signs_thinking else ""
        for part in turn.parts:
            if part.kind is PartKind.CALL:
                parts.append(self._call(part, turn))
            elif part.kind is PartKind.THINKING:
                thought = thinking_for(self.target, signer, part)
                if thought is None:
                    self._note_loss(
                        "thinking-left-out", turn, "thinking stays with the provider that signed it"
                    )
                else:
                    parts.append(thought)
            elif (plain := self._plain(part, turn, Role.ASSISTANT)) is not None:
                parts.append(plain)
        if self.target.layout is not ResultPlacement.FLAT:
            self.out.append(MessageTurn(Role.ASSISTANT, parts, None, turn.at))
            return
        for part in parts:
            self.out.append(MessageTurn(Role.ASSISTANT, [part], None, turn.at))

    def _call(self, part: Part, turn: MessageTurn) -> Part:
        self.count += 1
        arguments = object_in_text(part.body) if isinstance(part.body, str) else part.body
        if arguments is None and isinstance(part.body, str):
            arguments = _object(part.body)
        if not isinstance(arguments, dict):
            arguments = {}
        if "_raw" in arguments:
            self._note_loss(
                "broken-arguments", turn, "arguments are a JSON object; the text is kept as `_raw`"
            )
        call_id = part.id if isinstance(part.id, str) and part.id else f"call_{self.count}"
        made = self.target.call(call_id, part.name, arguments)
        self.calls.setdefault(_key(part), []).append(made)
        return made

    def _user(self, turn: MessageTurn) -> None:
        results: list[Part] = []
        others: list[Part] = []
        for part in turn.parts:
            if part.kind is PartKind.RESULT:
                results.append(self._result(part, turn, others))
            elif part.kind is PartKind.SYSTEM:
                system = MessageTurn(Role.SYSTEM, [part], None, turn.at)
                self._system(system)
            elif (plain := self._plain(part, turn, Role.USER)) is not None:
                others.append(plain)
        if self.target.layout is ResultPlacement.GROUPED:
            if results or others:
                self.out.append(MessageTurn(Role.USER, [*results, *others], None, turn.at))
            return
        self.out += [MessageTurn(Role.TOOL, [result], None, turn.at) for result in results]
        if others:
            self.out.append(MessageTurn(Role.USER, others, None, turn.at))

    def _result(self, part: Part, turn: MessageTurn, others: list[Part]) -> Part:
        """Write a result; its images follow as the user's."""
        waiting = self.calls.get(_key(part)) or self.calls.get(("name", part.name))
        call = waiting.pop(0) if waiting else self.target.call(str(part.id or ""), part.name, {})
        words, media = self.source.pieces(part)
        if self.target.spec.matches_by_name and isinstance(part.body, dict):
            words = as_words(part.body)
        for piece in media:
            plain = self._plain(piece, turn, Role.USER)
            if plain is not None:
                others.append(plain)
        return self.target.answer(call, words, is_failed=part.failed)

    def _plain(self, part: Part, turn: MessageTurn, role: Role) -> Part | None:
        if part.kind is PartKind.TEXT:
            return self._text(part, turn, role)
        if part.kind is PartKind.MEDIA:
            media = media_in(self.source, part)
            written = media_for(self.target, media) if media else None
            if written is not None:
                return written
        self._note_loss("part-as-words", turn, "the target has no such part: it became text")
        return self.target.text(f"[{self.source.name}] {as_words(part.raw)}", role)

    def _text(self, part: Part, turn: MessageTurn, role: Role) -> Part | None:
        body = part.body
        if isinstance(body, list):
            self._note_loss(
                "part-as-words", turn, "the target has no prompt of several pieces: they became text"
            )
        return self.target.text(as_words(body), role)


def _object(text: str) -> Value:
    """Return the object in arguments that are its JSON text."""
    return json.loads(text)


def _key(part: Part) -> tuple[str, Value]:
    return (
        ("name", part.name)
        if part.is_by_name
        else ("id", part.id if isinstance(part.id, str) else repr(part.id))
    )
