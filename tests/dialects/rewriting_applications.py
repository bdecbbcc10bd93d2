"""Client applications that resend their conversation and change it in between, as bytes in each API's format."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

from midstream.dialects import dialect_registry
from midstream.dialects.dialect import Dialect

Json = dict[str, Any]

REWRITES = {
    "nothing": 12,
    "queue": 2,
    "edit": 2,
    "edit and go on": 2,
    "revert": 2,
    "compact": 1,
    "twice": 1,
    "keys": 1,
    "system": 1,
    "doubtful": 2,
    "nothing new": 2,
}
STYLES: tuple[Json, ...] = (
    {"separators": (",", ":")},
    {"separators": (", ", ": ")},
    {"separators": (" ,\n", "\t: "), "ensure_ascii": False},
)


class RewritingApplication:
    """A client application of one API.


    Args:
        chars: The approximate length of a message.     is_sound: It sends nothing that needs repair.
            has_shapes: It sends messages back in the shapes of dumps and of hand-written code.
    """

    def __init__(
        self,
        chance: random.Random,
        dialect: Dialect,
        *,
        chars: int = 20,
        is_sound: bool = False,
        has_shapes: bool = False,
    ) -> None:
        self.chance = chance
        self.dialect = dialect
        self.messages: list[Any] = []
        self.model = "m"
        self.style = chance.choice(STYLES)
        self._chars = chars
        self._is_sound = is_sound
        self._has_shapes = has_shapes
        self._marks_cache = chance.random() < 0.3
        self._number = 0

    @property
    def path(self) -> str:
        """The path of its requests."""
        return {
            dialect_registry.CHAT: "/v1/chat/completions",
            dialect_registry.RESPONSES: "/v1/responses",
            dialect_registry.MESSAGES: "/v1/messages",
        }[self.dialect]

    def body(self) -> bytes:
        """Rewrite the conversation at random, usually add a message, and return the body of the request."""
        rewrite = self.chance.choices(list(REWRITES), list(REWRITES.values()))[0]
        self._rewrite(rewrite)
        if rewrite != "nothing new" or not self.messages:
            self.messages.append(self.user())
        if self.chance.random() < 0.03:
            self.style = self.chance.choice(STYLES)
        if self.chance.random() < 0.03:
            self.model = self.chance.choice("mn")
        return self.current_body()

    def current_body(self) -> bytes:
        """Return the body as it is."""
        messages = self._marked() if self._marks_cache else self.messages
        field = "input" if self.dialect is dialect_registry.RESPONSES else "messages"
        around: list[tuple[str, Any]] = [("model", self.model), (field, messages), ("max_tokens", 9)]
        if self.dialect is dialect_registry.RESPONSES:
            around.append(("store", False))
        if self.chance.random() < 0.2:
            self.chance.shuffle(around)
        if not self._is_sound and self.chance.random() < 0.05:
            other = self.chance.choice(
                [messages, messages[:-1], [{"role": "user", "content": "other"}], None]
            )
            around.insert(self.chance.randrange(4), (field, other))
        comma, colon = map(str, self.style["separators"])
        pairs = (f"{json.dumps(name)}{colon}{json.dumps(value, **self.style)}" for name, value in around)
        return ("{" + comma.join(pairs) + "}").encode()

    def take_answer(self, words: str) -> None:
        """Append an answer."""
        if self._has_shapes and self.chance.random() < 0.2:
            self.messages.append(self.response(""))  # an answer that was cancelled before its first word
            return
        response = self.response(words)
        self.messages.append(shape(self.chance, self.dialect, response) if self._has_shapes else response)

    def user(self) -> Json:
        """Append a user message."""
        words = self._words("said")
        kind = "input_text" if self.dialect is dialect_registry.RESPONSES else "text"
        match self.chance.randrange(5):
            case 0:
                return {"role": "user", "content": [{"type": kind, "text": words}]}
            case 1:
                parts = [{"type": kind, "text": words}, {"type": kind, "text": "and more"}, self._image()]
                return {"role": "user", "content": parts}
            case _:
                return {"role": "user", "content": words}

    def response(self, words: str) -> Json:
        """Return an answer."""
        return {"role": "assistant", "content": words}

    def calls(self, ids: list[str]) -> list[Json]:
        """Return an answer with calls, and their results."""
        match self.dialect:
            case dialect_registry.CHAT:
                calls = [
                    {"id": each, "type": "function", "function": {"name": "look", "arguments": "{}"}}
                    for each in ids
                ]
                results = [{"role": "tool", "tool_call_id": each, "content": f"of {each}"} for each in ids]
                return [{"role": "assistant", "content": None, "tool_calls": calls}, *results]
            case dialect_registry.MESSAGES:
                uses = [{"type": "tool_use", "id": each, "name": "look", "input": {}} for each in ids]
                given: list[Json] = [
                    {"type": "tool_result", "tool_use_id": each, "content": f"of {each}"} for each in ids
                ]
                if self.chance.random() < 0.3:
                    given.append({"type": "text", "text": self._words("beside")})
                return [{"role": "assistant", "content": uses}, {"role": "user", "content": given}]
            case _:
                asked = [
                    {"type": "function_call", "call_id": each, "name": "look", "arguments": "{}"}
                    for each in ids
                ]
                for item in asked:
                    if self.chance.random() < 0.5:
                        item["id"] = f"fc_{self.chance.randrange(30 if not self._is_sound else 10**9)}"
                outputs = [
                    {"type": "function_call_output", "call_id": each, "output": f"of {each}"} for each in ids
                ]
                thought = {"type": "reasoning", "id": f"rs_{self._next()}", "summary": []}
                return [*([thought] if self.chance.random() < 0.3 else []), *asked, *outputs]

    def _rewrite(self, what: str) -> None:
        chance, messages = self.chance, self.messages
        users = [at for at, message in enumerate(messages) if _is_users(message)]
        for _ in range(chance.choice((0, 0, 0, 1, 2))):
            few = [chance.choice(["c1", f"c{self._next()}"]) for _ in range(chance.choice((1, 1, 2)))]
            calls = self.calls(list(dict.fromkeys(few)))
            messages += [shape(chance, self.dialect, each) for each in calls] if self._has_shapes else calls
        match what:
            case "queue":
                messages.append(self.user())
            case "edit" if users:
                del messages[chance.choice(users) :]
            case "edit and go on" if users:
                messages[chance.choice(users)] = self.user()
            case "revert" if users:
                del messages[chance.choice(users) + 1 :]
            case "compact" if users:
                messages[: chance.choice(users)] = [{"role": "user", "content": self._words("summary")}]
            case "twice" if users:
                messages.append(copy.deepcopy(messages[chance.choice(users)]))
            case "keys":
                at = chance.randrange(len(messages) + 1)
                messages[:at] = [
                    dict(reversed(each.items())) if isinstance(each, dict) else each for each in messages[:at]
                ]
            case "system" if self.dialect is not dialect_registry.MESSAGES:
                messages.insert(
                    chance.randrange(len(messages) + 1), {"role": "system", "content": self._words("system")}
                )
            case "doubtful" if not self._is_sound:
                self._doubtful()
            case _:
                pass

    def _doubtful(self) -> None:
        """Make a change that needs repair, or may."""
        chance, messages = self.chance, self.messages
        at = chance.randrange(len(messages) + 1)
        match chance.randrange(9):
            case 0:
                messages.extend(self.calls(["late"])[:1])
            case 1:
                messages.extend(self.calls(["late"])[1:])
            case 2:
                messages.insert(at, self.response(chance.choice(["", " ", "twice"])))
            case 3:
                messages.insert(at, chance.choice(["words", "", None, 7, [], {}]))
            case 4 if messages:
                del messages[chance.randrange(len(messages))]
            case 5:
                messages.extend(self.calls([""]))
            case 6 if messages:
                messages.insert(at, copy.deepcopy(chance.choice(messages)))
            case 7:
                messages.insert(at, {"role": "robot", "content": "beep", "tool_calls": None})
            case _:
                messages.append(self.response("the end"))

    def _marked(self) -> list[Any]:
        """Mark the user's last two messages for a provider's cache, as Anthropic's clients do."""
        messages = list(self.messages)
        users = [at for at, message in enumerate(messages) if _is_users(message)]
        for at in users[-2:]:
            content = messages[at]["content"]
            if isinstance(content, list) and content and isinstance(content[-1], dict):
                marked = {**content[-1], "cache_control": {"type": "ephemeral"}}
                messages[at] = {**messages[at], "content": [*content[:-1], marked]}
        return messages

    def _image(self) -> Json:
        data = f"{self._next():04}" * 5
        match self.dialect:
            case dialect_registry.CHAT:
                return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
            case dialect_registry.RESPONSES:
                return {"type": "input_image", "image_url": f"data:image/png;base64,{data}"}
            case _:
                source = {"type": "base64", "media_type": "image/png", "data": data}
                return {"type": "image", "source": source}

    def _words(self, what: str) -> str:
        return f'{what} {self._next()} "ü\u2028\U0001f600" ]}} \\ '.ljust(self._chars, "x")

    def _next(self) -> int:
        self._number += 1
        return self._number


def _is_users(message: Any) -> bool:  # noqa: ANN401 - anything may stand among messages
    return isinstance(message, dict) and message.get("role") == "user"


def shape(chance: random.Random, dialect: Dialect, message: Json) -> Json:
    """Write a message in another equivalent shape."""
    message = copy.deepcopy(message)
    match dialect:
        case dialect_registry.CHAT:
            _shape_chat(chance, message)
        case dialect_registry.MESSAGES:
            _shape_anthropic(chance, message)
        case dialect_registry.RESPONSES:
            _shape_item(chance, message)
    return message


def _shape_chat(chance: random.Random, message: Json) -> None:
    message |= chance.choice(
        [
            {},
            {"refusal": None, "audio": None, "annotations": []},
            {"function_call": None},
            {"provider_specific_fields": {}, "thinking_blocks": None, "reasoning_content": None},
            {"name": None, "function_call": None, "annotations": None},
        ]
    )
    if "tool_calls" not in message:
        message |= chance.choice([{}, {"tool_calls": None}, {"tool_calls": []}])
        if message["role"] == "tool":
            message["content"] = chance.choice([message["content"], "", None, [], " "])
        elif chance.random() < 0.3:
            more = chance.choice([None, "", " "])
            texts = [message["content"]] if more is None else [message["content"], more]
            message["content"] = [{"type": "text", "text": text} for text in texts]
        return
    match chance.randrange(5):
        case 0:
            del message["content"]
        case 1:
            message["content"] = chance.choice(["", " ", [], "I look.", [{"type": "text", "text": ""}]])
    for number, call in enumerate(message["tool_calls"]):
        call["function"]["arguments"] = chance.choice(["{}", "", " ", None, '{"a": 1}'])
        match chance.randrange(4):
            case 0:
                call["index"] = number
            case 1:
                del call["type"]
            case 2:
                call["type"] = None


def _shape_anthropic(chance: random.Random, message: Json) -> None:
    if message["role"] == "assistant":
        words = message["content"]
        blocks: list[Json] = words
        if isinstance(words, str):
            blocks = [{"type": "text", "text": words, "citations": None}]
        thought = {"type": "thinking", "thinking": "hm", "signature": chance.choice(["", "s", None])}
        before: list[Json] = chance.choice([[], [{"type": "text", "text": ""}], [thought]])
        message["content"] = [*before, *blocks]
        message |= chance.choice(
            [{}, {"id": "msg_1", "type": "message", "stop_reason": "end_turn", "usage": None}]
        )
        return
    for block in message["content"]:
        if block["type"] == "tool_result":
            block |= chance.choice([{}, {"is_error": None}, {"content": ""}, {"content": []}])


def _shape_item(chance: random.Random, item: Json) -> None:
    item |= chance.choice([{}, {"status": None}, {"id": None}, {"id": None, "status": "completed"}])
    match item.get("type", "message"):
        case "function_call":
            item["arguments"] = chance.choice(["{}", "", " "])
        case "function_call_output":
            item["output"] = chance.choice([item["output"], "", " "])
        case "reasoning":
            item |= {"content": None, "encrypted_content": chance.choice([None, "gAAAA"])}
            item["summary"] = chance.choice([[], [{"type": "summary_text", "text": "hm"}]])
            if chance.random() < 0.5:
                del item["id"]
        case _:
            parts: list[Json] = [
                {"type": "output_text", "text": text, "annotations": []} for text in (item["content"], "")
            ]
            item |= {"type": "message", "content": chance.choice([item["content"], parts, parts[:1]])}
