"""The quick look at formats whose results are parts of the next user message."""

from __future__ import annotations

from midstream.core.formats.parts import Value
from midstream.core.profiles import Profile
from midstream.core.repair.names import takes_name

_USER, _REPLY, _CALLS, _ANSWER = 1, 2, 3, 4
Ids = dict[int, list[str]]


def _says(words: Value) -> bool:
    """Whether this is a text with more than white space in it."""
    return type(words) is str and bool(words) and not words.isspace()


def look_at_anthropic(messages: list[Value], profile: Profile, marks: bytearray, ids: Ids) -> None:
    """Mark what is beyond doubt in Anthropic messages."""
    takes_id = profile.id_test()
    skip = -1
    last = len(messages) - 1
    for at, message in enumerate(messages):
        if at == skip:
            continue
        try:
            role, content = message["role"], message["content"]
            if type(content) is str:
                if content and not content.isspace():
                    marks[at] = _USER if role == "user" else _REPLY if role == "assistant" else 0
            elif role == "user":
                if content and all(b["type"] == "text" and _says(b["text"]) for b in content):
                    marks[at] = _USER
            elif role == "assistant" and "model" not in message:
                asked = _anthropic_reply(content, takes_id)
                if asked is None:
                    continue
                if not asked:
                    marks[at] = _REPLY
                elif at < last and _anthropic_answers(messages[at + 1], asked, profile):
                    marks[at], marks[at + 1] = _CALLS, _ANSWER
                    ids[at] = asked
                    skip = at + 1
        except (LookupError, TypeError, AttributeError):
            continue


def _anthropic_reply(content: Value, takes_id: Value) -> list[str] | None:
    """Return the ids a reply asks for, or None where anything needs a closer look."""
    asked: list[str] = []
    kind = None
    for block in content:
        kind = block["type"]
        if kind == "text":
            if not _says(block["text"]):
                return None
        elif kind == "tool_use":
            call_id = block["id"]
            if (
                type(block["input"]) is not dict
                or not takes_name(block["name"], "anthropic")
                or not takes_id(call_id)
            ):
                return None
            asked.append(call_id)
        elif kind == "thinking" and not asked and type(block["thinking"]) is str:
            signature = block["signature"]
            if not _says(signature) or signature.startswith(("gAAAA", "skip_")) or block is not content[0]:
                return None
        else:
            return None
    if kind is None or kind == "thinking" or (len(asked) > 1 and len(set(asked)) != len(asked)):
        return None
    return asked


def _anthropic_answers(message: Value, asked: list[str], profile: Profile) -> bool:
    content = message["content"]
    count = len(asked)
    if message["role"] != "user" or type(content) is not list or len(content) < count:
        return False
    if len(content) > count:
        if not profile.mixes_results or not all(
            b["type"] == "text" and _says(b["text"]) for b in content[count:]
        ):
            return False
        content = content[:count]
    answered = [block["tool_use_id"] for block in content if block["type"] == "tool_result"]
    if answered != asked and (len(answered) != count or set(answered) != set(asked)):
        return False
    for block in content:
        said = block["content"]
        if not _says(said) and not (type(said) is list and said and all(map(_is_text_block, said))):
            return False
    return True


def _is_text_block(block: Value) -> bool:
    return bool(block["type"] == "text" and _says(block["text"]))


def look_at_bedrock(messages: list[Value], profile: Profile, marks: bytearray, ids: Ids) -> None:
    """Mark what is beyond doubt in Converse messages."""
    takes_id = profile.id_test()
    skip = -1
    last = len(messages) - 1
    for at, message in enumerate(messages):
        if at == skip:
            continue
        try:
            role, content = message["role"], message["content"]
            if type(content) is not list or not content:
                continue
            if role == "user":
                if "text" in content[0] and all(
                    _says(block["text"]) and len(block) == 1 for block in content
                ):
                    marks[at] = _USER
            elif role == "assistant" and "model" not in message:
                asked = _bedrock_reply(content, takes_id)
                if asked is None:
                    continue
                if not asked:
                    marks[at] = _REPLY
                elif at < last and _bedrock_answers(messages[at + 1], asked):
                    marks[at], marks[at + 1] = _CALLS, _ANSWER
                    ids[at] = asked
                    skip = at + 1
        except (LookupError, TypeError, AttributeError):
            continue


def _bedrock_reply(content: list[Value], takes_id: Value) -> list[str] | None:
    asked: list[str] = []
    if "reasoningContent" in content[0]:
        signature = content[0]["reasoningContent"]["reasoningText"]["signature"]
        if not _says(signature) or signature.startswith(("gAAAA", "skip_")):
            return None
        content = content[1:]
    if not content:
        return None
    for block in content:
        if "toolUse" in block:
            use = block["toolUse"]
            if (
                type(use["input"]) is not dict
                or not takes_name(use["name"], "bedrock")
                or not takes_id(use["toolUseId"])
            ):
                return None
            asked.append(use["toolUseId"])
        elif not _says(block["text"]) or len(block) != 1:
            return None
    return asked if len(set(asked)) == len(asked) else None


def _bedrock_answers(message: Value, asked: list[str]) -> bool:
    content = message["content"]
    if message["role"] != "user" or len(content) != len(asked):
        return False
    answered = set()
    for block in content:
        result = block["toolResult"]
        answered.add(result["toolUseId"])
        pieces = result["content"]
        if not pieces or result.get("status", "success") not in ("success", "error"):
            return False
        for piece in pieces:
            if not _says(piece["text"]) or len(piece) != 1:
                return False
    return answered == set(asked)


def look_at_gemini(messages: list[Value], profile: Profile, marks: bytearray, ids: Ids) -> None:
    """Mark what is beyond doubt in Gemini contents."""
    skip = -1
    last = len(messages) - 1
    for at, message in enumerate(messages):
        if at == skip:
            continue
        try:
            role, parts = message["role"], message["parts"]
            if type(parts) is not list or not parts:
                continue
            if role == "user":
                if all(_says(part["text"]) and "thought" not in part for part in parts):
                    marks[at] = _USER
            elif role == "model":
                asked = _gemini_reply(parts)
                if asked is None:
                    continue
                if not asked:
                    marks[at] = _REPLY
                elif at < last and not profile.signs_calls and _gemini_answers(messages[at + 1], asked):
                    marks[at], marks[at + 1] = _CALLS, _ANSWER
                    skip = at + 1
        except (LookupError, TypeError, AttributeError):
            continue
    ids.clear()


def _gemini_reply(parts: list[Value]) -> list[str] | None:
    """Return the names a reply calls; ids need a closer look."""
    asked: list[str] = []
    for part in parts:
        call = part.get("functionCall")
        if call is None:
            if not _says(part["text"]):
                return None
        elif "id" in call or not takes_name(call["name"], "gemini") or type(call["args"]) is not dict:
            return None
        else:
            asked.append(call["name"])
    return asked


def _gemini_answers(message: Value, asked: list[str]) -> bool:
    parts = message["parts"]
    if message["role"] != "user" or len(parts) != len(asked):
        return False
    answers = [part["functionResponse"] for part in parts]
    if any("id" in answer or type(answer["response"]) is not dict for answer in answers):
        return False
    answered = [answer["name"] for answer in answers]
    return answered == asked or sorted(answered) == sorted(asked)


def look_at_pydantic_ai(messages: list[Value], profile: Profile, marks: bytearray, ids: Ids) -> None:
    """Mark what is beyond doubt in pydantic-ai messages."""
    takes_id = profile.id_test()
    skip = -1
    last = len(messages) - 1
    for at, message in enumerate(messages):
        if at == skip:
            continue
        try:
            kind, parts = message["kind"], message["parts"]
            if type(parts) is not list or not parts:
                continue
            if kind == "request":
                if all(part["part_kind"] == "user-prompt" and _says(part["content"]) for part in parts):
                    marks[at] = _USER
            elif kind == "response":
                asked = _pydantic_reply(parts, profile, takes_id)
                if asked is None:
                    continue
                if not asked:
                    marks[at] = _REPLY
                elif at < last and _pydantic_answers(messages[at + 1], asked):
                    marks[at], marks[at + 1] = _CALLS, _ANSWER
                    ids[at] = asked
                    skip = at + 1
        except (LookupError, TypeError, AttributeError):
            continue


def _pydantic_reply(parts: list[Value], profile: Profile, takes_id: Value) -> list[str] | None:
    asked: list[str] = []
    kind = ""
    for part in parts:
        kind = part["part_kind"]
        if kind == "text":
            if not _says(part["content"]):
                return None
        elif kind == "tool-call":
            call_id = part["tool_call_id"]
            if (
                type(part["args"]) is not dict
                or not takes_name(part["tool_name"], "pydantic-ai")
                or not takes_id(call_id)
            ):
                return None
            asked.append(call_id)
        elif kind != "thinking" or profile.is_thinking_signed or len(parts) == 1:
            return None
    return asked if len(set(asked)) == len(asked) and kind != "thinking" else None


def _pydantic_answers(message: Value, asked: list[str]) -> bool:
    parts = message["parts"]
    if message["kind"] != "request" or len(parts) != len(asked):
        return False
    answered = set()
    for part in parts:
        if part["part_kind"] != "tool-return" or not _says(part["content"]):
            return False
        answered.add(part["tool_call_id"])
    return answered == set(asked)
