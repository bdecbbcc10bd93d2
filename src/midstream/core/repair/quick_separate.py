"""The quick look at formats whose results are messages, or items, of their own."""

from __future__ import annotations

import msgspec

from midstream.core.formats.parts import Value
from midstream.core.profiles import Profile
from midstream.core.repair.names import takes_name

_USER, _REPLY, _CALLS, _ANSWER, _SYSTEM = 1, 2, 3, 4, 5
_ITEM_ID_SIZE_MAX = 64
_read = msgspec.json.Decoder(dict[str, Value]).decode
Ids = dict[int, list[str]]


def _says(words: Value) -> bool:
    """Whether this is a text with more than white space in it."""
    return type(words) is str and bool(words) and not words.isspace()


def look_at_chat(messages: list[Value], profile: Profile, marks: bytearray, ids: Ids) -> None:
    """Mark what is beyond doubt in chat messages."""
    takes_id = profile.id_test()
    is_signed = profile.is_thinking_signed
    until = 0
    for at, message in enumerate(messages):
        if at < until:
            continue
        try:
            role, content = message["role"], message["content"]
            if role == "user":
                if _says(content) and "tool_calls" not in message:
                    marks[at] = _USER
            elif role == "assistant" and not profile.wants_reasoning:
                if is_signed and "reasoning_content" in message:
                    continue
                calls = message.get("tool_calls")
                if calls is None:
                    if _says(content) and "tool_calls" not in message and "function_call" not in message:
                        marks[at] = _REPLY
                elif content is None or type(content) is str:
                    asked = _chat_calls(calls, takes_id)
                    if asked and "function_call" not in message and _chat_answers(messages, at, asked):
                        until = at + 1 + len(asked)
                        marks[at:until] = bytes((_CALLS, *(_ANSWER,) * len(asked)))
                        ids[at] = asked
            elif role in ("system", "developer") and _says(content) and "tool_calls" not in message:
                marks[at] = _SYSTEM
        except (LookupError, TypeError, AttributeError, ValueError):
            continue


def _chat_calls(calls: list[Value], takes_id: Value) -> list[str] | None:
    asked: list[str] = []
    for call in calls:
        inner = call["function"]
        _read(inner["arguments"])
        is_typed = call["type"] == "function"
        if not is_typed or not takes_name(inner["name"], "openai-chat") or not takes_id(call["id"]):
            return None
        asked.append(call["id"])
    return asked if len(set(asked)) == len(asked) else None


def _chat_answers(messages: list[Value], at: int, asked: list[str]) -> bool:
    answers = messages[at + 1 : at + 1 + len(asked)]
    if len(answers) != len(asked):
        return False
    waiting = set(asked)
    for answer in answers:
        if answer["role"] != "tool" or type(answer["content"]) is not str or answer["content"].isspace():
            return False
        if "name" in answer and not takes_name(answer["name"], "openai-chat"):
            return False
        waiting.remove(answer["tool_call_id"])
    return True


def look_at_langchain(messages: list[Value], profile: Profile, marks: bytearray, ids: Ids) -> None:
    """Mark what is beyond doubt in LangChain messages of the `{"type", "data"}` kind."""
    takes_id = profile.id_test()
    until = 0
    for at, message in enumerate(messages):
        if at < until:
            continue
        try:
            kind, inner = message["type"], message["data"]
            content = inner["content"]
            if kind == "human":
                if _says(content):
                    marks[at] = _USER
            elif kind == "ai":
                calls = inner["tool_calls"]
                if inner["invalid_tool_calls"] or type(content) is not str or content.isspace():
                    continue
                if not calls:
                    if _says(content):
                        marks[at] = _REPLY
                    continue
                asked = _langchain_calls(calls, takes_id)
                if asked and _langchain_answers(messages, at, asked):
                    until = at + 1 + len(asked)
                    marks[at:until] = bytes((_CALLS, *(_ANSWER,) * len(asked)))
                    ids[at] = asked
            elif kind == "system" and _says(content):
                marks[at] = _SYSTEM
        except (LookupError, TypeError, AttributeError, ValueError):
            continue


def _langchain_calls(calls: list[Value], takes_id: Value) -> list[str] | None:
    asked: list[str] = []
    for call in calls:
        if (
            type(call["args"]) is not dict
            or not takes_name(call["name"], "langchain")
            or not takes_id(call["id"])
        ):
            return None
        asked.append(call["id"])
    return asked if len(set(asked)) == len(asked) else None


def _langchain_answers(messages: list[Value], at: int, asked: list[str]) -> bool:
    answers = messages[at + 1 : at + 1 + len(asked)]
    if len(answers) != len(asked):
        return False
    waiting = set(asked)
    for answer in answers:
        inner = answer["data"]
        if answer["type"] != "tool" or type(inner["content"]) is not str or inner["content"].isspace():
            return False
        waiting.remove(inner["tool_call_id"])
    return True


def look_at_responses(messages: list[Value], profile: Profile, marks: bytearray, ids: Ids) -> None:
    """Mark what is beyond doubt in Responses items: messages, and one run of calls with its outputs.

    Reasoning, item ids and hosted calls are looked at closely: their rules are about neighbours.
    """
    takes_id = profile.id_test()
    until = 0
    for at, message in enumerate(messages):
        if at < until:
            continue
        try:
            kind = message.get("type", "message")
            if kind == "message":
                marks[at] = _response_message(message)
            elif (
                kind == "reasoning"
                and at
                and profile.alternates == "no"
                and message["id"].startswith("rs_")
                and len(message["id"]) <= _ITEM_ID_SIZE_MAX
            ):
                after = messages[at + 1]
                if after["type"] == "function_call" or (after["type"], after["role"]) == (
                    "message",
                    "assistant",
                ):
                    marks[at] = _REPLY
            elif kind == "function_call":
                until = _end_of_run(messages, at)  # looked at once, whatever is in doubt in it
                asked = _response_calls(messages, at, until, takes_id)
                if asked and _response_answers(messages, until, asked):
                    until += len(asked)
                    marks[at:until] = bytes((*(_CALLS,) * len(asked), *(_ANSWER,) * len(asked)))
                    ids[at] = asked
        except (LookupError, TypeError, AttributeError, ValueError):
            continue


def _response_message(message: Value) -> int:
    role, content = message["role"], message["content"]
    if type(content) is list and len(content) == 1:
        wanted = "output_text" if role == "assistant" else "input_text"
        content = content[0]["text"] if content[0]["type"] == wanted else None
    if not _says(content):
        return 0
    if role == "assistant":
        item = message.get("id")
        return _REPLY if item is None or (item.startswith("msg_") and len(item) <= _ITEM_ID_SIZE_MAX) else 0
    return _USER if role == "user" else _SYSTEM if role in ("system", "developer") else 0


def _end_of_run(messages: list[Value], at: int) -> int:
    """Return the number of the first item that is no call."""
    end = at + 1
    while (
        end < len(messages) and type(messages[end]) is dict and messages[end].get("type") == "function_call"
    ):
        end += 1
    return end


def _response_calls(messages: list[Value], at: int, end: int, takes_id: Value) -> list[str]:
    """Return the ids of a run of calls, or nothing where one of them is in doubt."""
    asked: list[str] = []
    start = at
    while start and messages[start - 1].get("type") == "reasoning":
        start -= 1  # with a call before its reasoning, this run goes on with another one's reply
    before = messages[start - 1].get("type") if start else None
    is_fine = before in (None, "message", "function_call_output")
    if not is_fine or (end < len(messages) and messages[end].get("type") == "reasoning"):
        return []
    for message in messages[at:end]:
        _read(message["arguments"])
        item = message.get("id")
        if not (
            takes_name(message["name"], "openai-responses")
            and takes_id(message["call_id"])
            and (item is None or (item.startswith("fc_") and len(item) <= _ITEM_ID_SIZE_MAX))
        ):
            return []
        asked.append(message["call_id"])
    return asked if len(set(asked)) == len(asked) else []


def _response_answers(messages: list[Value], start: int, asked: list[str]) -> bool:
    answers = messages[start : start + len(asked)]
    if len(answers) != len(asked):
        return False
    waiting = set(asked)
    for answer in answers:
        if answer["type"] != "function_call_output" or not _says(answer["output"]):
            return False
        waiting.remove(answer["call_id"])
    return True
