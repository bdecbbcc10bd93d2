"""Refusals of the Messages API and of Bedrock Converse, from the error texts in the research, and nothing
else.

Written apart from the engine and from its author's own rules: it shares no code with either.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

Json = dict[str, Any]
Value = Any

_ID = re.compile(r"[a-zA-Z0-9_-]+")
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}")
_FOREIGN = ("gAAAA", "skip_thought_signature_validator")  # OpenAI's encrypted reasoning, Google's stand-in
_CONVERSE_RESULTS = frozenset({"text", "json", "image", "document", "video", "searchResult", "cachePoint"})
_PAIRED_BY_TURN = frozenset({"bedrock-claude", "bedrock-mistral", "vertex", "portable"})
_UNMIXED = frozenset({"bedrock-mistral", "minimax", "portable"})


def anthropic(messages: list[Any], profile: str = "anthropic") -> Iterator[str]:
    """Yield the errors of the Messages API for a list as sent."""
    turns: list[tuple[str, list[Any]]] = []
    seen: set[str] = set()
    if not messages or messages[0].get("role") != "user":
        yield "ANT-FIRST"
    for at, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if role not in ("user", "assistant"):
            yield f"ANT-ROLE {at}: {role!r}"
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        if not isinstance(content, list) or not content:
            yield f"ANT-EMPTY {at}"
            content = []
        if not all(isinstance(block, dict) and isinstance(block.get("type"), str) for block in content):
            yield f"ANT-SHAPE {at}"
            content = [block for block in content if isinstance(block, dict)]
        yield from (f"{fault} {at}" for block in content for fault in _block(block, role, seen))
        if role == "assistant":
            yield from (f"{fault} {at}" for fault in _response(content))
        elif profile in _UNMIXED and len({block.get("type") == "tool_result" for block in content}) > 1:
            yield f"MIXED {at}"
        turns.append((str(role), content))
    yield from _pairing([(role, _call_ids(b, "tool_use"), _result_ids(b)) for role, b in turns], profile)


def _call_ids(blocks: list[Any], kind: str) -> list[Any]:
    return [block.get("id") for block in blocks if block.get("type") == kind]


def _result_ids(blocks: list[Any]) -> list[Any]:
    """Return the ids of results, and None for other blocks; an invalid id belongs to no call."""
    return [
        (found if isinstance(found := block.get("tool_use_id"), str) else f"no id: {found!r}")
        if block.get("type") == "tool_result"
        else None
        for block in blocks
    ]


def _block(block: Json, role: str, seen: set[str]) -> Iterator[str]:
    kind = block.get("type")
    if kind == "text" and not _has_text(block.get("text")):
        yield "ANT-BLANK"
    elif kind == "tool_use":
        call_id = block.get("id")
        if role != "assistant":
            yield "ANT-ROLE tool_use of a user"
        if not isinstance(call_id, str) or not _ID.fullmatch(call_id):
            yield f"ANT-ID {call_id!r}"
        elif call_id in seen:
            yield f"ANT-UNIQUE {call_id}"
        else:
            seen.add(call_id)
        if not isinstance(block.get("input"), dict):
            yield "ANT-INPUT"
        if not isinstance(block.get("name"), str) or not _NAME.fullmatch(block["name"]):
            yield f"ANT-NAME {block.get('name')!r}"
    elif kind == "tool_result":
        if role != "user":
            yield "ANT-ROLE tool_result of an assistant"
        yield from _result(block)
    elif kind in ("image", "document") and role != "user":
        yield f"ANT-ROLE {kind} of an assistant"
    elif kind in ("server_tool_use", "mcp_tool_use") and role != "assistant":
        yield "ANT-ROLE hosted call of a user"
    elif kind in ("thinking", "redacted_thinking"):
        if role != "assistant":
            yield "ANT-ROLE thinking of a user"
        signature = block.get("signature" if kind == "thinking" else "data")
        if not _has_text(signature) or str(signature).startswith(_FOREIGN):
            yield "ANT-SIGNATURE"
        if kind == "thinking" and not isinstance(block.get("thinking"), str):
            yield "ANT-SHAPE thinking"


def _result(block: Json) -> Iterator[str]:
    content = block.get("content", "")
    if not isinstance(content, str | list):
        yield "ANT-SHAPE result"
    elif isinstance(content, str):
        if content and not content.strip():
            yield "ANT-BLANK in a result"
    else:
        for piece in content:
            if not isinstance(piece, dict) or not isinstance(piece.get("type"), str):
                yield "ANT-SHAPE result"
            elif piece["type"] == "text" and not _has_text(piece.get("text")):
                yield "ANT-BLANK in a result"
            elif piece["type"] != "text" and block.get("is_error"):
                yield "ANT-ERRTEXT"
    if block.get("is_error") and not content:
        yield "ANT-BLANK error result"


def _response(blocks: list[Any]) -> Iterator[str]:
    if blocks and blocks[-1].get("type") in ("thinking", "redacted_thinking"):
        yield "ANT-THINKLAST"
    kinds = [block.get("type") for block in blocks]
    if "tool_use" in kinds and {"thinking", "redacted_thinking"} & set(kinds[kinds.index("tool_use") :]):
        yield "ANT-SPLICE"
    responses = {
        str(block.get("signature")).partition(".")[0] for block in blocks if block.get("type") == "thinking"
    }
    signatures = [str(block.get("signature")) for block in blocks if block.get("type") == "thinking"]
    if len(responses) > 1 or len(set(signatures)) != len(signatures):
        yield "ANT-SPLICE two responses"
    open_calls: list[Any] = []
    closed: set[Any] = set()
    for block in blocks:
        kind = str(block.get("type"))
        if kind in ("server_tool_use", "mcp_tool_use"):
            open_calls.append(block.get("id"))
            if not isinstance(block.get("input"), dict):
                yield "ANT-INPUT hosted"
        elif kind.endswith("_tool_result"):
            if block.get("tool_use_id") not in open_calls or block["tool_use_id"] in closed:
                yield "ANT-SERVER result without call"
            closed.add(block.get("tool_use_id"))
    if set(open_calls) - closed:
        yield "ANT-SERVER call without result"


def _pairing(turns: list[tuple[str, list[Any], list[Any]]], profile: str) -> Iterator[str]:
    """Return for each turn: role, ids of calls, and per part the id of its result or None for other parts."""
    is_strict = profile in _PAIRED_BY_TURN
    merged: list[tuple[str, list[Any], list[Any]]] = []
    for at, (role, asked, answered) in enumerate(turns):
        if merged and merged[-1][0] == role == "user" and not is_strict:
            merged[-1] = (role, [], [*merged[-1][2], *answered])
            continue
        if merged and merged[-1][0] == role and is_strict:
            yield f"ALTERNATE {at}"
        merged.append((role, asked, answered))
    before: list[Any] = []
    for at, (role, asked, answered) in enumerate(merged):
        results = [answer for answer in answered if answer is not None]
        if role == "assistant":
            if before:
                yield f"ANT-PAIR turn {at}: {before}"
            before = asked
            continue
        if None in answered and any(answer is not None for answer in answered[answered.index(None) :]):
            yield f"ANT-PAIR turn {at}: results are not first"
        if len(set(results)) != len(results):
            yield f"ANT-DUPRESULT turn {at}"
        if missing := set(before) - set(results):
            yield f"ANT-PAIR turn {at}: {sorted(map(str, missing))}"
        if surplus := set(results) - set(before):
            yield f"ANT-ORPHAN turn {at}: {sorted(map(str, surplus))}"
        before = []
    if before:
        yield f"ANT-PAIR end: {before}"


def is_loop_without_thought(messages: list[Any]) -> bool:
    """ANT-THINKLEAD: with thinking on, return whether the tool loop in progress begins without thinking."""
    opening: list[Any] | None = None
    for at in range(len(messages) - 1, -1, -1):
        content = messages[at]["content"]
        blocks = [{"type": "text"}] if isinstance(content, str) else content
        if messages[at]["role"] == "assistant":
            if not any(block.get("type") == "tool_use" for block in blocks):
                break
            opening = blocks
        elif at < len(messages) - 1 and any(block.get("type") != "tool_result" for block in blocks):
            break
    return opening is not None and opening[0].get("type") not in ("thinking", "redacted_thinking")


def bedrock(messages: list[Any], profile: str = "bedrock-claude") -> Iterator[str]:
    """Yield the errors of Converse for a list as sent."""
    if messages and messages[0].get("role") != "user":
        yield "BED-FIRST"
    seen: set[str] = set()
    turns: list[tuple[str, list[Any], list[Any]]] = []
    for at, message in enumerate(messages):
        role, blocks = message.get("role"), message.get("content")
        if role not in ("user", "assistant"):
            yield f"BED-ROLE {at}"
        if not isinstance(blocks, list) or not blocks:
            yield f"BED-EMPTY {at}"
            blocks = []
        asked, answered = [], []
        for block in blocks:
            if not isinstance(block, dict) or len(block) != 1:
                yield f"BED-SHAPE {at}"
                continue
            yield from (f"{fault} {at}" for fault in _converse_block(block, role, seen, profile))
            if "toolUse" in block:
                asked.append(block["toolUse"].get("toolUseId"))
            answered.append(block["toolResult"].get("toolUseId") if "toolResult" in block else None)
        kinds = [next(iter(block), "") for block in blocks if isinstance(block, dict)]
        is_signed = profile != "bedrock-mistral"
        if role == "assistant" and {"image", "document", "video"} & set(kinds):
            yield f"BED-ROLE file of an assistant {at}"
        if is_signed and len(_responses(blocks)) > 1:
            yield f"ANT-SPLICE {at}: two responses"
        if is_signed and "toolUse" in kinds and "reasoningContent" in kinds[kinds.index("toolUse") :]:
            yield f"ANT-SPLICE {at}"
        if (
            is_signed
            and blocks
            and role == "assistant"
            and isinstance(blocks[-1], dict)
            and "reasoningContent" in blocks[-1]
        ):
            yield f"ANT-THINKLAST {at}"
        if profile == "bedrock-mistral" and role == "user" and None in answered and any(answered):
            yield f"BED-MIXED {at}"
        turns.append((str(role), asked, answered))
    yield from (fault.replace("ANT", "BED") for fault in _pairing(turns, "bedrock-claude"))


def _responses(blocks: list[Any]) -> set[str]:
    """Return the responses that the thinking in these blocks belongs to, by the signatures of the scripts."""
    thoughts = [block.get("reasoningContent") for block in blocks if isinstance(block, dict)]
    texts = [thought.get("reasoningText") or {} for thought in thoughts if isinstance(thought, dict)]
    return {str(text["signature"]).partition(".")[0] for text in texts if "signature" in text}


def _converse_block(block: Json, role: Value, seen: set[str], profile: str) -> Iterator[str]:
    if "text" in block and not _has_text(block["text"]):
        yield "BED-BLANK"
    if isinstance(use := block.get("toolUse"), dict):
        call_id = use.get("toolUseId")
        if role != "assistant":
            yield "BED-ROLE call"
        if not isinstance(call_id, str) or not re.fullmatch("[a-zA-Z0-9_-]{1,64}", call_id):
            yield f"BED-ID {call_id!r}"
        elif call_id in seen:
            yield f"BED-UNIQUE {call_id}"
        seen.add(str(call_id))
        if not isinstance(use.get("input"), dict):
            yield "BED-INPUT"
        if not _NAME.fullmatch(str(use.get("name") or "")):
            yield "BED-NAME"
    if isinstance(result := block.get("toolResult"), dict):
        content = result.get("content")
        if role != "user":
            yield "BED-ROLE result"
        if not isinstance(content, list):
            yield "BED-SHAPE result"
        elif not content and result.get("status") == "error":
            yield "BED-ERRCONTENT"
        elif not all(isinstance(piece, dict) and piece.keys() & _CONVERSE_RESULTS for piece in content):
            yield "BED-SHAPE result block"
        elif any("text" in piece and not _has_text(piece["text"]) for piece in content):
            yield "BED-BLANK result"
        elif result.get("status") == "error" and not all(
            piece.keys() & {"text", "json"} for piece in content
        ):
            if profile != "bedrock-mistral":
                yield "BED-ERRTEXT"
        elif not all(len(piece) == 1 for piece in content):
            yield "BED-SHAPE result block"
    if any(not isinstance(block.get(key, {}), dict) for key in ("reasoningContent", "toolUse", "toolResult")):
        yield "BED-SHAPE block"
    thought = block.get("reasoningContent")
    if isinstance(thought, dict) and _is_foreign(thought) and profile != "bedrock-mistral":
        yield "BED-SIGNATURE foreign"
    if isinstance(thought, dict) and role != "assistant":
        yield "BED-ROLE thinking"
    if isinstance(thought, dict) and "redactedContent" not in thought and profile != "bedrock-mistral":
        if not _has_text((thought.get("reasoningText") or {}).get("signature")):
            yield "BED-SIGNATURE"


def _is_foreign(thought: Json) -> bool:
    return str((thought.get("reasoningText") or {}).get("signature")).startswith(_FOREIGN)


def _has_text(value: Value) -> bool:
    return isinstance(value, str) and bool(value.strip())
