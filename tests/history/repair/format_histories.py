"""Histories for tests: valid ones in every format, and their real-world defects.

Every text, argument and result carries its own marker word, so that a test can detect losses.
"""

# ruff: noqa: ANN401 - a history may hold anything
from __future__ import annotations

import copy
import json
import re
from random import Random
from typing import Any

Json = dict[str, Any]

FORMATS = (
    "anthropic",
    "openai-chat",
    "openai-responses",
    "gemini",
    "mistral",
    "bedrock",
    "pydantic-ai",
    "langchain",
)
MARKER = re.compile(r"m\d+x")


class HistoryScript:
    """A writer of one valid conversation in one format."""

    def __init__(self, form: str, chance: Random, *, turns: int = 6) -> None:
        self.form = form
        self.chance = chance
        self.count = 0
        self.messages: list[Json] = []
        for _ in range(chance.randint(1, turns)):
            self._turn()

    def word(self) -> str:
        self.count += 1
        return f"m{self.count}x"

    def _turn(self) -> None:
        chance = self.chance
        self.user(self.word())
        for _ in range(chance.randint(0, 2)):
            thought = chance.random() < 0.3
            text = self.word() if chance.random() < 0.5 else None
            calls = [self._call() for _ in range(chance.choice((1, 1, 1, 2, 3)))]
            self.response(thought=thought, text=text, calls=calls)
            self.results([(call, self.word()) for call in calls])
        self.response(thought=chance.random() < 0.2, text=self.word(), calls=[])

    def _call(self) -> Json:
        self.count += 1
        return {
            "id": f"call_{self.count}" if self.form != "mistral" else f"c{self.count:08d}",
            "name": self.chance.choice(("read", "write", "list")),
            "args": {"path": self.word()},
        }

    def user(self, words: str) -> None:
        blocks = self.chance.random() < 0.3
        match self.form:
            case "anthropic":
                content: Any = [{"type": "text", "text": words}] if blocks else words
                self.messages.append({"role": "user", "content": content})
            case "bedrock":
                self.messages.append({"role": "user", "content": [{"text": words}]})
            case "gemini":
                self.messages.append({"role": "user", "parts": [{"text": words}]})
            case "pydantic-ai":
                parts = [{"content": words, "part_kind": "user-prompt", "timestamp": "2026-01-01T00:00:00Z"}]
                self.messages.append({"parts": parts, "kind": "request"})
            case "langchain":
                self.messages.append({"type": "human", "data": {"content": words, "type": "human"}})
            case "openai-responses" if blocks:
                content = [{"type": "input_text", "text": words}]
                self.messages.append({"type": "message", "role": "user", "content": content})
            case _:
                self.messages.append({"role": "user", "content": words})

    def response(self, *, thought: bool, text: str | None, calls: list[Json]) -> None:
        getattr(self, "_response_" + self.form.replace("-", "_"))(thought=thought, text=text, calls=calls)

    def _response_anthropic(self, *, thought: bool, text: str | None, calls: list[Json]) -> None:
        blocks: list[Json] = []
        if thought:
            blocks.append({"type": "thinking", "thinking": "hm", "signature": f"sig{self.count}.EqQB"})
        if text:
            blocks.append({"type": "text", "text": text})
        blocks += [{"type": "tool_use", "id": c["id"], "name": c["name"], "input": c["args"]} for c in calls]
        self.messages.append({"role": "assistant", "content": blocks})

    def _response_bedrock(self, *, thought: bool, text: str | None, calls: list[Json]) -> None:
        blocks: list[Json] = []
        if thought:
            blocks.append(
                {"reasoningContent": {"reasoningText": {"text": "hm", "signature": f"sig{self.count}"}}}
            )
        if text:
            blocks.append({"text": text})
        blocks += [{"toolUse": {"toolUseId": c["id"], "name": c["name"], "input": c["args"]}} for c in calls]
        self.messages.append({"role": "assistant", "content": blocks})

    def _response_gemini(self, *, thought: bool, text: str | None, calls: list[Json]) -> None:
        parts: list[Json] = [{"text": "hm", "thought": True}] if thought else []
        if text:
            parts.append({"text": text})
        parts += [{"functionCall": {"name": c["name"], "args": c["args"]}} for c in calls]
        self.messages.append({"role": "model", "parts": parts})

    def _response_pydantic_ai(self, *, thought: bool, text: str | None, calls: list[Json]) -> None:
        parts: list[Json] = [{"content": "hm", "part_kind": "thinking"}] if thought else []
        if text:
            parts.append({"content": text, "part_kind": "text"})
        parts += [
            {"tool_name": c["name"], "args": c["args"], "tool_call_id": c["id"], "part_kind": "tool-call"}
            for c in calls
        ]
        self.messages.append({"parts": parts, "kind": "response"})

    def _response_langchain(self, *, thought: bool, text: str | None, calls: list[Json]) -> None:
        made = [{"name": c["name"], "args": c["args"], "id": c["id"], "type": "tool_call"} for c in calls]
        data = {"content": text or "", "type": "ai", "tool_calls": made, "invalid_tool_calls": []}
        self.messages.append({"type": "ai", "data": data})

    def _response_openai_chat(self, *, thought: bool, text: str | None, calls: list[Json]) -> None:
        message: Json = {"role": "assistant", "content": text}
        if calls:
            message["tool_calls"] = [
                {
                    "id": c["id"],
                    "type": "function",
                    "function": {"name": c["name"], "arguments": json.dumps(c["args"])},
                }
                for c in calls
            ]
        self.messages.append(message)

    _response_mistral = _response_openai_chat

    def _response_openai_responses(self, *, thought: bool, text: str | None, calls: list[Json]) -> None:
        if thought:
            self.messages.append({"type": "reasoning", "id": f"rs_{self.count}", "summary": []})
        if text:
            content = [{"type": "output_text", "text": text, "annotations": []}]
            message = {"type": "message", "role": "assistant", "id": f"msg_{self.count}", "content": content}
            self.messages.append(message | {"status": "completed"})
        for c in calls:
            item = {"type": "function_call", "call_id": c["id"], "name": c["name"], "id": f"fc_{c['id']}"}
            self.messages.append(item | {"arguments": json.dumps(c["args"])})

    def results(self, pairs: list[tuple[Json, str]]) -> None:
        match self.form:
            case "anthropic":
                blocks = [
                    {"type": "tool_result", "tool_use_id": c["id"], "content": words} for c, words in pairs
                ]
                self.messages.append({"role": "user", "content": blocks})
            case "bedrock":
                made = [{"toolResult": {"toolUseId": c["id"], "content": [{"text": w}]}} for c, w in pairs]
                self.messages.append({"role": "user", "content": made})
            case "gemini":
                parts = [{"functionResponse": {"name": c["name"], "response": {"r": w}}} for c, w in pairs]
                self.messages.append({"role": "user", "parts": parts})
            case "pydantic-ai":
                returns = [
                    {
                        "tool_name": c["name"],
                        "content": w,
                        "tool_call_id": c["id"],
                        "part_kind": "tool-return",
                    }
                    for c, w in pairs
                ]
                self.messages.append({"parts": returns, "kind": "request"})
            case "langchain":
                for c, w in pairs:
                    data = {"content": w, "type": "tool", "tool_call_id": c["id"], "status": "success"}
                    self.messages.append({"type": "tool", "data": data})
            case "openai-responses":
                self.messages += [
                    {"type": "function_call_output", "call_id": c["id"], "output": w} for c, w in pairs
                ]
            case _:
                self.messages += [{"role": "tool", "tool_call_id": c["id"], "content": w} for c, w in pairs]


def valid(form: str, chance: Random, *, turns: int = 6) -> list[Json]:
    """Return a history that every provider of this format accepts."""
    return HistoryScript(form, chance, turns=turns).messages


def broken(form: str, chance: Random, *, breaks: int = 3) -> list[Json]:
    """Return a valid history after a few accidents."""
    messages = copy.deepcopy(valid(form, chance))
    for _ in range(chance.randint(1, breaks)):
        chance.choice(ACCIDENTS)(messages, chance)
    return messages


def parts_of(message: Json) -> list[Any] | None:
    """Return the list in a message that accidents can change, if it has one."""
    for key in ("content", "parts", "tool_calls"):
        if isinstance(message.get(key), list):
            found: list[Any] = message[key]
            return found
    inner = message.get("data")
    return inner["tool_calls"] if isinstance(inner, dict) and inner.get("tool_calls") else None


def _place(messages: list[Json], chance: Random) -> int:
    return chance.randrange(len(messages)) if messages else 0


def lose_message(messages: list[Json], chance: Random) -> None:
    if len(messages) > 1:
        del messages[_place(messages, chance)]


def repeat_message(messages: list[Json], chance: Random) -> None:
    if messages:
        place = _place(messages, chance)
        messages.insert(place + 1, copy.deepcopy(messages[place]))


def move_message(messages: list[Json], chance: Random) -> None:
    if messages:
        moved = messages.pop(_place(messages, chance))
        messages.insert(chance.randint(0, len(messages)), moved)


def swap_messages(messages: list[Json], chance: Random) -> None:
    if len(messages) > 1:
        place = chance.randrange(len(messages) - 1)
        messages[place], messages[place + 1] = messages[place + 1], messages[place]


def cut_start(messages: list[Json], chance: Random) -> None:
    del messages[: chance.randint(0, max(0, len(messages) - 1))]


def cut_end(messages: list[Json], chance: Random) -> None:
    del messages[chance.randint(1, max(1, len(messages))) :]


def lose_part(messages: list[Json], chance: Random) -> None:
    if messages and (parts := parts_of(messages[_place(messages, chance)])):
        del parts[chance.randrange(len(parts))]


def repeat_part(messages: list[Json], chance: Random) -> None:
    if messages and (parts := parts_of(messages[_place(messages, chance)])):
        parts.append(copy.deepcopy(chance.choice(parts)))


def shuffle_parts(messages: list[Json], chance: Random) -> None:
    if messages and (parts := parts_of(messages[_place(messages, chance)])):
        chance.shuffle(parts)


ID_KEYS = {"id", "tool_use_id", "tool_call_id", "call_id", "toolUseId"}


def _objects(value: Any) -> list[Json]:
    if isinstance(value, dict):
        return [value, *(found for item in value.values() for found in _objects(item))]
    return [found for item in value for found in _objects(item)] if isinstance(value, list) else []


def change_id(messages: list[Json], chance: Random) -> None:
    if messages:
        spots = [(o, k) for o in _objects(messages[_place(messages, chance)]) for k in o if k in ID_KEYS]
        if spots:
            found, key = chance.choice(spots)
            found[key] = chance.choice(("", "call_1", "other_9", "functions.read:0", "x" * 70))


def same_id(messages: list[Json], chance: Random) -> None:
    for found in _objects(messages):
        for key in ID_KEYS & found.keys():
            if key != "id" or not str(found[key]).startswith(("rs_", "msg_", "fc_")):
                found[key] = "call_same"


def blank_text(messages: list[Json], chance: Random) -> None:
    if messages:
        spots = [
            (o, k)
            for o in _objects(messages[_place(messages, chance)])
            for k, v in o.items()
            if k in ("text", "content", "output", "signature") and isinstance(v, str)
        ]
        if spots:
            found, key = chance.choice(spots)
            found[key] = chance.choice(("", " ", "\n"))


def break_arguments(messages: list[Json], chance: Random) -> None:
    if messages:
        spots = [
            (o, k)
            for o in _objects(messages[_place(messages, chance)])
            for k in o
            if k in ("input", "arguments", "args")
        ]
        if spots:
            found, key = chance.choice(spots)
            old = found[key] if isinstance(found[key], str) else json.dumps(found[key])
            found[key] = chance.choice((old[: max(1, len(old) - 2)], "", old, None))


def half_character(messages: list[Json], chance: Random) -> None:
    if messages:
        spots = [
            (o, k)
            for o in _objects(messages[_place(messages, chance)])
            for k, v in o.items()
            if k in ("text", "content", "output") and isinstance(v, str)
        ]
        if spots:
            found, key = chance.choice(spots)
            found[key] += "\ud83d"


ACCIDENTS = (
    lose_message,
    lose_message,
    repeat_message,
    move_message,
    swap_messages,
    cut_start,
    cut_end,
    lose_part,
    repeat_part,
    shuffle_parts,
    change_id,
    same_id,
    blank_text,
    break_arguments,
    half_character,
)


def markers(value: Any) -> set[str]:
    """Return the marker words in a value."""
    return set(MARKER.findall(json.dumps(value, ensure_ascii=False)))


def prompt(form: str) -> Json:
    """Return the user's next message."""
    chance = Random(0)
    script = HistoryScript.__new__(HistoryScript)
    script.form, script.chance, script.messages, script.count = form, chance, [], 0
    script.user("next")
    return script.messages[0]
