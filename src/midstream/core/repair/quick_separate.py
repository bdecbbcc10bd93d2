"""The quick look at formats whose results are messages, or items, of their own.

Each function looks at one message by itself. An exception means doubt: what has not the expected shape is the
walk's business.
"""

from __future__ import annotations

import msgspec

from midstream.core.formats.parts import Json, Value
from midstream.core.repair.names import takes_name
from midstream.core.repair.quick_rules import (
    ANSWER,
    CALLS,
    DONE_ELSEWHERE,
    DOUBTED,
    FOREIGN_TEXTS,
    REPLIED,
    SAID,
    THOUGHT_ALOUD,
    TOLD,
    Key,
    Rules,
    Sight,
    says,
)

_ITEM_ID_SIZE_MAX = 64
_read = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_MIRRORS = ("tool_use", "tool_call")
_THOUGHTS = ("thinking", "redacted_thinking", "reasoning")
_OTHER_ITEMS = frozenset(
    {
        *("custom_tool_call", "custom_tool_call_output", "computer_call", "computer_call_output"),
        *("local_shell_call", "local_shell_call_output", "shell_call", "shell_call_output"),
        *("apply_patch_call", "apply_patch_call_output", "mcp_approval_response", "item_reference"),
    }
)
"""Items that are neither messages nor functions and still have rules of their own."""
_TEXTS = frozenset({"input_text", "output_text", "text"})
_CALL_BLOCKS = ("tool_use", "tool_result")
_FILES = frozenset(
    {
        *("image_url", "input_audio", "file", "image", "audio", "document_url"),
        *("video", "document", "input_image", "tool_use", "tool_result"),
    }
)
"""What a reply does not hold."""


def look_at_chat(message: Value, rules: Rules) -> Sight:
    """Look at a chat message."""
    role, content = message["role"], message["content"]
    if role == "user":
        return SAID if says(content) or _are_chunks(content, rules, is_reply=False) else DOUBTED
    if role == "assistant":
        return _chat_reply(message, content, rules)
    if role == "tool":
        return _separate_answer(message, content, rules)
    if role in ("system", "developer"):
        return TOLD if says(content) or _are_texts(content, "text") else DOUBTED
    return DOUBTED


def _are_texts(content: Value, kind: str) -> bool:
    """Whether these are chunks of text and nothing else."""
    if type(content) is not list or not content:
        return False
    return all(chunk["type"] == kind and says(chunk["text"]) for chunk in content)


def _are_chunks(content: Value, rules: Rules, *, is_reply: bool) -> bool:
    """Whether these are chunks that say what they are, with no blank text and something beside thoughts."""
    if type(content) is not list:
        return False
    is_thought = True
    for chunk in content:
        kind = chunk["type"]
        if kind == "text":
            if not says(chunk["text"]):
                return False
        elif kind == "thinking":
            if rules.is_signed or not is_reply:
                return False
            continue
        elif (
            kind in _CALL_BLOCKS
            or type(kind) is not str
            or kind in FOREIGN_TEXTS
            or (is_reply and kind in _FILES)
        ):
            return False
        is_thought = False
    return not is_thought


def _chat_reply(message: Json, content: Value, rules: Rules) -> Sight:
    if (rules.is_signed and message.get("reasoning_content")) or "function_call" in message:
        return DOUBTED
    if "tool_calls" not in message:
        return REPLIED if says(content) or _are_chunks(content, rules, is_reply=True) else DOUBTED
    is_silent = content is None or content == ""
    if not (is_silent or says(content) or _are_chunks(content, rules, is_reply=True)):
        return DOUBTED
    asked: list[Key] = []
    form, takes_id = rules.form, rules.takes_id
    for call in message["tool_calls"]:
        inner, call_id = call["function"], call["id"]
        arguments = inner["arguments"]
        if not (type(arguments) is dict and form == "mistral"):
            _read(arguments)
        if not takes_name(inner["name"], form) or not takes_id(call_id):
            return DOUBTED
        if call.get("type") != "function" and (form != "mistral" or "type" in call):
            return DOUBTED
        asked.append(call_id)
    return (CALLS, asked) if asked else DOUBTED


def _separate_answer(fields: Json, content: Value, rules: Rules) -> Sight:
    """A result names its call, and perhaps its tool, and has any content but white space."""
    name, call_id = fields.get("name"), fields["tool_call_id"]
    if type(call_id) is not str or (name not in (None, "") and not takes_name(name, "")):
        return DOUBTED
    if type(content) is str:
        return DOUBTED if content.isspace() else (ANSWER, [call_id])
    is_failed = fields.get("status") == "error"
    return (ANSWER, [call_id]) if _are_pieces(content, rules, is_failed=is_failed) else DOUBTED


def _are_pieces(content: Value, rules: Rules, *, is_failed: bool) -> bool:
    """Whether a result may hold these pieces."""
    if type(content) is not list or not content:
        return False
    for piece in content:
        kind = piece["type"]
        if kind in _TEXTS:
            if type(piece["text"]) is not str:
                return False
        elif type(kind) is not str or not rules.takes_files(is_failed=is_failed):
            return False
    return True


def thinks(message: Value) -> bool:
    """Whether a chat reply brings its reasoning along."""
    reasoning, content = message.get("reasoning_content"), message.get("content")
    if type(reasoning) is str and reasoning:
        return True
    return type(content) is list and any(chunk["type"] == "thinking" for chunk in content)


def look_at_langchain(message: Value, rules: Rules) -> Sight:
    """Look at a LangChain message: of the `{"type", "data"}` kind, or flat."""
    kind, fields = message["type"], message.get("data")
    if type(fields) is not dict:
        if "kwargs" in message:
            return DOUBTED
        fields = message
    content = fields["content"]
    if kind == "human":
        return SAID if says(content) or _are_blocks(content, [], rules, is_reply=False) else DOUBTED
    if kind == "ai":
        return _langchain_reply(fields, content, rules)
    if kind == "tool":
        is_named_twice = fields is not message and "name" in message
        return DOUBTED if is_named_twice else _separate_answer(fields, content, rules)
    return TOLD if kind == "system" and says(content) else DOUBTED


def _langchain_reply(fields: Json, content: Value, rules: Rules) -> Sight:
    asked: list[Key] = []
    if type(fields.get("tool_calls", [])) is not list or fields.get("invalid_tool_calls", []) != []:
        return DOUBTED
    for call in fields.get("tool_calls", []):
        if (
            "function" in call
            or type(call["args"]) is not dict
            or not takes_name(call["name"], "langchain")
            or not rules.takes_id(call["id"])
        ):
            return DOUBTED
        asked.append(call["id"])
    if says(content) or (asked and content in ("", [])) or _are_blocks(content, asked, rules, is_reply=True):
        return (CALLS, asked) if asked else REPLIED
    return DOUBTED


def _are_blocks(content: Value, asked: list[Key], rules: Rules, *, is_reply: bool) -> bool:
    """Whether these are blocks without a blank text; those of calls say again what the list says."""
    if type(content) is not list:
        return False
    is_thought = not asked
    for block in content:
        if type(block) is str:
            kind, words = "text", block
        else:
            kind, words = block["type"], block.get("text")
        if kind == "text":
            if not says(words):
                return False
        elif kind in _MIRRORS:
            if block["id"] not in asked:
                return False
        elif kind in _THOUGHTS:
            if rules.is_signed:
                return False
            continue
        elif type(kind) is not str or kind in FOREIGN_TEXTS or (is_reply and kind in _FILES):
            return False
        is_thought = False
    return not is_thought


def look_at_responses(message: Value, rules: Rules) -> Sight:
    """Look at a Responses item."""
    kind = message.get("type", "message")
    if kind == "message":
        return _response_message(message)
    if kind == "function_call":
        _read(message["arguments"])
        if not (
            takes_name(message["name"], "openai-responses")
            and rules.takes_id(message["call_id"])
            and _takes_item(message, "fc_")
        ):
            return DOUBTED
        return CALLS, [message["call_id"]]
    if kind == "function_call_output":
        return _response_answer(message, rules)
    if kind == "reasoning":
        is_fine = "id" in message and _takes_item(message, "rs_") and not rules.is_signed
        return THOUGHT_ALOUD if is_fine else DOUBTED
    if type(kind) is not str or kind in _OTHER_ITEMS or not _takes_item(message, ""):
        return DOUBTED
    return DONE_ELSEWHERE


def _takes_item(message: Json, prefix: str) -> bool:
    """Whether an item has no id, or one of its kind."""
    if "id" not in message:
        return True
    item = message["id"]
    return type(item) is str and 0 < len(item) <= _ITEM_ID_SIZE_MAX and item.startswith(prefix)


def _response_message(message: Json) -> Sight:
    role, content = message["role"], message["content"]
    is_reply = role == "assistant"
    if type(content) is list and content:
        wanted = "output_text" if is_reply else "input_text"
        for chunk in content:
            kind = chunk["type"]
            if kind == wanted:
                if not says(chunk["text"]):
                    return DOUBTED
            elif type(kind) is not str or kind in _TEXTS or kind in _CALL_BLOCKS or role != "user":
                return DOUBTED
    elif not says(content):
        return DOUBTED
    if not _takes_item(message, "msg_" if is_reply else ""):
        return DOUBTED
    if is_reply:
        return REPLIED
    return SAID if role == "user" else TOLD if role in ("system", "developer") else DOUBTED


def _response_answer(message: Json, rules: Rules) -> Sight:
    output, call_id = message["output"], message["call_id"]
    if type(call_id) is not str or not _takes_item(message, "") or "name" in message:
        return DOUBTED
    if type(output) is list:
        return (ANSWER, [call_id]) if _are_pieces(output, rules, is_failed=False) else DOUBTED
    return (ANSWER, [call_id]) if says(output) else DOUBTED
