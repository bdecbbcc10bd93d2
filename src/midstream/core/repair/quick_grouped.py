"""The quick look at formats whose results are parts of the next user message.

Each function looks at one message by itself. An exception means doubt: what has not the expected shape is the
walk's business.
"""

from __future__ import annotations

from midstream.core.formats.parts import Json, Value, object_in_text
from midstream.core.repair.names import takes_name
from midstream.core.repair.quick_rules import (
    CALLS,
    DOUBTED,
    FOREIGN_TEXTS,
    REPLIED,
    SAID,
    Key,
    Rules,
    Sight,
    is_signature,
    says,
)
from midstream.core.repair.words import SYSTEM_NOTE

_ANTHROPIC_REPLYS = frozenset(
    {"tool_use", "thinking", "redacted_thinking", "server_tool_use", "mcp_tool_use"}
)
_CONVERSE_RESULTS = frozenset({"text", "json", "image", "document", "video", "searchResult", "cachePoint"})
_STATUSES = ("success", "error")
_CONVERSE_FILES = frozenset({"image", "document", "video", "audio"})
_CONVERSE_REPLYS = frozenset({"toolUse", "reasoningContent"})
_ANTHROPIC_FILES = frozenset({"image", "document", "search_result"})
_GEMINI_FILES = frozenset({"inlineData", "fileData", "inline_data", "file_data"})
_GEMINI_OTHERS = frozenset(
    {
        *("executableCode", "executable_code", "codeExecutionResult", "code_execution_result"),
        *("toolCall", "toolResponse", "tool_call", "tool_response"),
    }
)
_GEMINI_CALLS = frozenset({"functionCall", "function_call"})
_GEMINI_ANSWERS = frozenset({"functionResponse", "function_response"})
_GEMINI_KEYS = _GEMINI_CALLS | _GEMINI_ANSWERS | _GEMINI_OTHERS | _GEMINI_FILES | {"text"}
_PYDANTIC_REQUESTS = frozenset({"user-prompt", "system-prompt", "tool-return", "retry-prompt"})
_PYDANTIC_HOSTED = frozenset(
    {"builtin-tool-call", "native-tool-call", "builtin-tool-return", "native-tool-return"}
)


def look_at_anthropic(message: Value, rules: Rules) -> Sight:
    """Look at an Anthropic message."""
    role, content = message["role"], message["content"]
    if type(content) is str:
        if not says(content):
            return DOUBTED
        return SAID if role == "user" else REPLIED if role == "assistant" else DOUBTED
    if type(content) is not list or not content:
        return DOUBTED
    if role == "user":
        return _anthropic_request(content, rules)
    return _anthropic_reply(content, message, rules) if role == "assistant" else DOUBTED


def _anthropic_request(content: list[Value], rules: Rules) -> Sight:
    answered: list[Key] = []
    has_words = False
    for block in content:
        kind = block["type"]
        if kind == "tool_result":
            call_id = block["tool_use_id"]
            if has_words or type(call_id) is not str or "name" in block:
                return DOUBTED
            if not _is_anthropic_answer(block, rules):
                return DOUBTED
            answered.append(call_id)
            continue
        has_words = True
        if kind == "text":
            if not says(block["text"]):
                return DOUBTED
        elif type(kind) is not str or kind in _ANTHROPIC_REPLYS or kind.endswith("_tool_result"):
            return DOUBTED
    return rules.answers(answered, has_words=has_words)


def _is_anthropic_answer(block: Json, rules: Rules) -> bool:
    content = block.get("content", "")
    if type(content) is str and content:
        return not content.isspace()
    if not content and type(content) in (str, list):
        return not block.get("is_error")
    if type(content) is list:
        for piece in content:
            kind = piece["type"]
            if kind == "text":
                if not says(piece["text"]):
                    return False
            elif (
                type(kind) is not str
                or kind in FOREIGN_TEXTS
                or not rules.takes_files(is_failed=bool(block.get("is_error")))
            ):
                return False
        return True
    return says(content)


def _anthropic_reply(content: list[Value], message: Json, rules: Rules) -> Sight:
    asked: list[Key] = []
    signatures: list[str] = []
    hosted: list[str] = []
    thoughts = 0
    kind = ""
    for block in content:
        kind = block["type"]
        if kind == "tool_use":
            call_id = block["id"]
            if (
                type(block["input"]) is not dict
                or not takes_name(block["name"], rules.names)
                or not rules.takes_id(call_id)
            ):
                return DOUBTED
            asked.append(call_id)
        elif kind == "text":
            if not says(block["text"]):
                return DOUBTED
        elif kind == "thinking":
            thoughts += 1
            signature = block["signature"]
            if asked or type(block["thinking"]) is not str or not is_signature(signature, signatures):
                return DOUBTED
            rules.signatures.append(signature)
        elif kind == "redacted_thinking":
            if asked or not is_signature(block["data"], signatures):
                return DOUBTED
        elif not _is_other_block(block, kind, hosted) or kind in _ANTHROPIC_FILES:
            return DOUBTED
    if kind in ("thinking", "redacted_thinking") or (signatures and rules.is_foreign(message.get("model"))):
        return DOUBTED
    if (hosted and not _are_pairs(hosted)) or (thoughts > 1 and not hosted):
        return DOUBTED
    return (CALLS, asked) if asked else REPLIED


def _is_other_block(block: Json, kind: Value, hosted: list[str]) -> bool:
    """Whether a reply may hold this; hosted calls and their results are noted."""
    if type(kind) is not str or kind == "tool_result":
        return False
    if kind in ("server_tool_use", "mcp_tool_use"):
        hosted.append(f"call {block['id']!r}")
        return type(block.get("input", {})) is dict
    if kind.endswith("_tool_result"):
        hosted.append(f"result {block['tool_use_id']!r}")
    return True


def _are_pairs(hosted: list[str]) -> bool:
    """Whether every hosted call is followed by its result, and nothing stands twice."""
    waiting: set[str] = set()
    for note in hosted:
        what, _, call_id = note.partition(" ")
        if what == "call":
            waiting.add(call_id)
        elif call_id in waiting:
            waiting.remove(call_id)
        else:
            return False
    return not waiting and len(set(hosted)) == len(hosted)


def look_at_bedrock(message: Value, rules: Rules) -> Sight:
    """Look at a Converse message."""
    role, content = message["role"], message["content"]
    if type(content) is not list or not content:
        return DOUBTED
    if role == "user":
        return _bedrock_request(content, rules)
    return _bedrock_reply(content, message, rules) if role == "assistant" else DOUBTED


def _bedrock_request(content: list[Value], rules: Rules) -> Sight:
    answered: list[Key] = []
    has_words = False
    for block in content:
        (key,) = block  # a block is an object with one key: what it is
        value = block[key]
        if key == "toolResult":
            call_id = value["toolUseId"]
            if has_words or type(call_id) is not str or not _is_bedrock_answer(value, rules):
                return DOUBTED
            answered.append(call_id)
            continue
        has_words = True
        if not (says(value) if key == "text" else type(value) is dict) or key in _CONVERSE_REPLYS:
            return DOUBTED
    return rules.answers(answered, has_words=has_words)


def _is_bedrock_answer(result: Json, rules: Rules) -> bool:
    content = result["content"]
    if type(content) is not list or not content or result.get("status", "success") not in _STATUSES:
        return False
    for piece in content:
        (key,) = piece
        if key == "text":
            if not says(piece[key]):
                return False
        elif key not in _CONVERSE_RESULTS or (
            key != "json" and not rules.takes_files(is_failed=result.get("status") == "error")
        ):
            return False
    return True


def _bedrock_reply(content: list[Value], message: Json, rules: Rules) -> Sight:
    asked: list[Key] = []
    signatures: list[str] = []
    key = ""
    for block in content:
        (key,) = block
        value = block[key]
        if key == "text":
            if not says(value):
                return DOUBTED
        elif key == "toolUse":
            call_id = value["toolUseId"]
            if (
                type(value["input"]) is not dict
                or not takes_name(value["name"], "bedrock")
                or not rules.takes_id(call_id)
            ):
                return DOUBTED
            asked.append(call_id)
        elif key == "reasoningContent":
            if asked or type(value) is not dict:
                return DOUBTED
            if not (_is_bedrock_thought(value, signatures) if rules.is_signed else _is_unsigned(value)):
                return DOUBTED
        elif key == "toolResult" or key in _CONVERSE_FILES or type(value) is not dict:
            return DOUBTED
    if (
        key == "reasoningContent"
        or len(signatures) > 1
        or (signatures and rules.is_foreign(message.get("model")))
    ):
        return DOUBTED
    rules.signatures += signatures
    return (CALLS, asked) if asked else REPLIED


def _is_bedrock_thought(thought: Json, signatures: list[str]) -> bool:
    if "redactedContent" in thought:
        return True
    text = thought["reasoningText"]
    return type(text["text"]) is str and is_signature(text["signature"], signatures)


def _is_unsigned(thought: Json) -> bool:
    """Whether a thought need not be signed: null is no signature."""
    if "redactedContent" in thought:
        return True
    text = thought.get("reasoningText") or {}
    return type(text) is dict and text.get("signature", "") is not None


def look_at_gemini(message: Value, rules: Rules) -> Sight:
    """Look at a Gemini content."""
    role, parts = message["role"], message["parts"]
    if type(parts) is not list or not parts:
        return DOUBTED
    if role == "user":
        return _gemini_request(parts, rules)
    return _gemini_reply(parts, rules) if role == "model" else DOUBTED


def _gemini_request(parts: list[Value], rules: Rules) -> Sight:
    answered: list[Key] = []
    has_words = False
    for part in parts:
        (key,) = part if len(part) == 1 else _GEMINI_KEYS.intersection(part)  # one thing, and marks beside it
        held = part[key]
        if key in _GEMINI_ANSWERS:
            call_id = held.get("id") or None
            if (
                has_words
                or type(held["response"]) is not dict
                or type(held["name"]) is not str
                or (call_id and type(call_id) is not str)
            ):
                return DOUBTED
            answered.append((held["name"], call_id))
        elif part.get("thought") or not _is_gemini_text_or_file(part, key, rules):
            return DOUBTED
        else:
            has_words = True
    return rules.answers(_numbered(answered), has_words=has_words)


def _gemini_reply(parts: list[Value], rules: Rules) -> Sight:
    asked: list[Key] = []
    is_thought = True
    for part in parts:
        (key,) = part if len(part) == 1 else _GEMINI_KEYS.intersection(part)  # one thing, and marks beside it
        held = part[key]
        if key in _GEMINI_CALLS:
            call_id = held.get("id") or None
            if (
                type(held.get("args", {})) is not dict
                or not takes_name(held["name"], rules.names)
                or (call_id and not rules.takes_id(call_id))
            ):
                return DOUBTED
            asked.append((held["name"], call_id))
        elif part.get("thought"):
            if rules.is_signed or key != "text" or not says(held):
                return DOUBTED
            continue
        elif (key in _GEMINI_FILES and not rules.replies_show_files) or not _is_gemini_text_or_file(
            part, key, rules
        ):
            return DOUBTED
        is_thought = False
    if is_thought:
        return DOUBTED
    if len(asked) > 1 and len({call_id for _, call_id in asked}) != (len(asked) if asked[0][1] else 1):
        return DOUBTED  # an id stands twice, or only some have one
    return (CALLS, _numbered(asked)) if asked else REPLIED


def _is_gemini_text_or_file(part: Json, key: str, rules: Rules) -> bool:
    held = part[key]
    if key == "text":
        return says(held) or (rules.takes_white and held == "" and says(part.get("thoughtSignature")))
    if key in _GEMINI_FILES:
        return bool(held.get("data") or held.get("fileUri") or held.get("file_uri"))
    return key in _GEMINI_OTHERS


def _numbered(keys: list[Key]) -> list[Key]:
    """Number the calls of one name that have no id: they are as many as their responses, in any order."""
    if len(keys) < 2 or all(call_id for _, call_id in keys):  # noqa: PLR2004 - one needs no number
        return keys
    counts: dict[str, int] = {}
    numbered: list[Key] = []
    for name, call_id in keys:
        if not call_id:
            counts[name] = call_id = counts.get(name, 0) + 1
        numbered.append((name, call_id))
    return numbered


def look_at_pydantic_ai(message: Value, rules: Rules) -> Sight:
    """Look at a pydantic-ai message."""
    kind, parts = message["kind"], message["parts"]
    if type(parts) is not list or not parts:
        return DOUBTED
    if kind == "request":
        sight = _pydantic_request(parts, rules)
        rules.has_begun = True
        return sight
    rules.has_begun = True
    return _pydantic_reply(parts, message, rules) if kind == "response" else DOUBTED


def _pydantic_request(parts: list[Value], rules: Rules) -> Sight:
    answered: list[Key] = []
    has_words = is_said = False
    for part in parts:
        kind, content = part["part_kind"], part["content"]
        if kind == "tool-return" or (kind == "retry-prompt" and part.get("tool_name")):
            if has_words or not _is_pydantic_answer(part, kind, content, rules):
                return DOUBTED
            answered.append(part["tool_call_id"])
            continue
        if kind == "user-prompt":
            if type(content) is str:
                if not says(content):
                    return DOUBTED
                if content.startswith(SYSTEM_NOTE):  # a system prompt, as an earlier repair keeps it
                    rules.told.add(content[len(SYSTEM_NOTE) + 1 :])
            elif type(content) is not list or not content:
                return DOUBTED
        elif kind not in ("system-prompt", "retry-prompt") or type(content) is not str:
            return DOUBTED
        elif kind == "system-prompt":
            if content in rules.told or not rules.tells(
                is_after_words=has_words, is_after_result=bool(answered)
            ):
                return DOUBTED
            rules.told.add(content)
        is_said = is_said or kind != "system-prompt"
        if has_words and rules.is_spoken:
            return DOUBTED  # each prompt is a message of its own
        has_words = True
    if has_words and not is_said and not answered:
        return DOUBTED  # system prompts alone are no user's turn where they begin
    return rules.answers(answered, has_words=has_words)


def _is_pydantic_answer(part: Json, kind: str, content: Value, rules: Rules) -> bool:
    if type(part["tool_call_id"]) is not str or not takes_name(part["tool_name"], "pydantic-ai"):
        return False
    if "name" in part or (type(content) is list and not rules.takes_files(is_failed=kind != "tool-return")):
        return False
    return says(content) if type(content) is str else kind == "tool-return" or bool(content)


def _pydantic_reply(parts: list[Value], message: Json, rules: Rules) -> Sight:
    asked: list[Key] = []
    signatures: list[str] = []
    kind = ""
    for part in parts:
        kind = part["part_kind"]
        if type(kind) is not str:
            return DOUBTED
        if kind == "tool-call":
            args = part["args"]
            if (
                (type(args) is not dict and args not in (None, "") and object_in_text(args) is not None)
                or not takes_name(part["tool_name"], "pydantic-ai")
                or not rules.takes_id(part["tool_call_id"])
            ):
                return DOUBTED
            asked.append(part["tool_call_id"])
        elif kind == "text":
            if not says(part["content"]):
                return DOUBTED
        elif kind == "thinking":
            if asked or (rules.is_signed and not _is_pydantic_thought(part, signatures)):
                return DOUBTED
        elif kind in _PYDANTIC_REQUESTS or (kind in _PYDANTIC_HOSTED and rules.pairs_hosted):
            return DOUBTED
    if kind == "thinking" or (signatures and rules.is_foreign(message.get("model"))):
        return DOUBTED
    return (CALLS, asked) if asked else REPLIED


def _is_pydantic_thought(part: Json, signatures: list[str]) -> bool:
    return type(part["content"]) is str and is_signature(part.get("signature"), signatures)
