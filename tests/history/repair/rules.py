"""The refusals of providers, written down literally and apart from the code under test.

Each function takes a list of messages as sent, with the next prompt at its end, and returns the refusals.
Nothing here is shared with `midstream.session`.
"""

# ruff: noqa: ANN401, PERF401 - a history may hold anything
from __future__ import annotations

import json
import re
from typing import Any

Json = dict[str, Any]


def refusals(form: str, messages: list[Any], profile: str | None = None) -> list[str]:
    """Return all refusals of a list of messages by a provider of this format (or this profile)."""
    check = {
        "anthropic": anthropic,
        "bedrock": bedrock,
        "gemini": gemini,
        "openai-chat": chat,
        "mistral": mistral,
        "openai-responses": responses,
        "pydantic-ai": pydantic_ai,
        "langchain": langchain,
    }[form]
    found = list(check(messages, profile or ""))
    if has_surrogates(messages):
        found.append("X-UTF8")
    return found


def has_surrogates(value: Any) -> bool:
    return bool(re.search("[\ud800-\udfff]", json.dumps(value, ensure_ascii=False)))


def pairs(turns: list[tuple[str, list[Any]]], *, joined: bool) -> list[str]:
    """Return turns: ("response", call ids) or ("user", [result id or None for text])."""
    found: list[str] = []
    for place, (who, items) in enumerate(turns):
        if who == "response":
            if len(set(items)) != len(items):
                found.append(f"UNIQUE in {place}: {items}")
            here: list[Any] = []
            after = place + 1
            while after < len(turns) and turns[after][0] == "user":
                here += turns[after][1]
                after += 1
                if not joined:
                    break
            answers = here[: len(items)]
            if sorted(map(repr, answers)) != sorted(map(repr, items)):
                found.append(f"PAIR at {place}: asked {items}, got {here}")
        elif place == 0 or turns[place - 1][0] != "response":
            before = place - 1
            while joined and before >= 0 and turns[before][0] == "user":
                before -= 1
            asked = turns[before][1] if joined and before >= 0 else []
            found += [
                f"ORPHAN at {place}: {item}" for item in items if item is not None and item not in asked
            ]
        else:
            asked = turns[place - 1][1]
            found += [
                f"ORPHAN at {place}: {item}" for item in items if item is not None and item not in asked
            ]
            results = [item for item in items if item is not None]
            if len(results) != len(set(results)):
                found.append(f"DUPRESULT at {place}")
    return found


def anthropic(messages: list[Json], profile: str) -> list[str]:
    found: list[str] = []
    turns: list[tuple[str, list[Any]]] = []
    seen: set[str] = set()
    strict = profile in ("bedrock-claude", "vertex", "portable", "bedrock-mistral")
    if messages and messages[0].get("role") != "user":
        found.append("FIRST")
    before = None
    for place, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if role not in ("user", "assistant"):
            found.append(f"ROLE {role} at {place}")
        if strict and role == before:
            found.append(f"ALTERNATE at {place}")
        before = role
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not blocks or not isinstance(blocks, list):
            found.append(f"EMPTY at {place}")
            blocks = []
        found += _anthropic_blocks(blocks, place, seen, role)
        if role == "assistant":
            turns.append(("response", [b.get("id") for b in blocks if b.get("type") == "tool_use"]))
        else:
            items = [b.get("tool_use_id") if b.get("type") == "tool_result" else None for b in blocks]
            if None in items and any(item is not None for item in items[items.index(None) :]):
                found.append(f"PAIR results not first at {place}")
            if profile in ("minimax", "portable", "bedrock-mistral") and None in items and any(items):
                found.append(f"MIXED at {place}")
            turns.append(("user", items))
    return found + pairs(turns, joined=not strict)


def _anthropic_blocks(blocks: list[Any], place: int, seen: set[str], role: Any) -> list[str]:
    found: list[str] = []
    hosted = {b.get("id") for b in blocks if b.get("type") in ("server_tool_use", "mcp_tool_use")}
    answered = set()
    for block in blocks:
        kind = block.get("type")
        if kind == "text" and not (isinstance(block.get("text"), str) and block["text"].strip()):
            found.append(f"BLANK at {place}")
        if kind == "tool_use":
            if role != "assistant":
                found.append(f"tool_use in {role} at {place}")
            if not re.fullmatch("[a-zA-Z0-9_-]+", str(block.get("id"))) or not isinstance(
                block.get("id"), str
            ):
                found.append(f"ID at {place}")
            if block.get("id") in seen:
                found.append(f"UNIQUE at {place}")
            seen.add(block.get("id"))
            if not isinstance(block.get("input"), dict):
                found.append(f"INPUT at {place}")
        if kind == "tool_result":
            if role != "user":
                found.append(f"result in {role} at {place}")
            content = block.get("content")
            if isinstance(content, list):
                bad = [c for c in content if c.get("type") == "text" and not str(c.get("text") or "").strip()]
                found += [f"BLANK in result at {place}"] * len(bad)
            if block.get("is_error") and not content:
                found.append(f"empty error at {place}")
        if kind == "thinking" and not (
            isinstance(block.get("signature"), str) and block["signature"].strip()
        ):
            found.append(f"SIGNATURE at {place}")
        if isinstance(kind, str) and kind.endswith("_tool_result"):
            if block.get("tool_use_id") not in hosted:
                found.append(f"SERVER orphan at {place}")
            answered.add(block.get("tool_use_id"))
    if hosted - answered:
        found.append(f"SERVER open at {place}")
    if blocks and blocks[-1].get("type") in ("thinking", "redacted_thinking"):
        found.append(f"THINKLAST at {place}")
    signatures = [b.get("signature") for b in blocks if b.get("type") == "thinking"]
    if len({str(s).partition(".")[0] for s in signatures}) > 1:
        found.append(f"SPLICE at {place}")
    return found


def bedrock(messages: list[Json], profile: str) -> list[str]:
    found: list[str] = []
    turns: list[tuple[str, list[Any]]] = []
    if messages and messages[0].get("role") != "user":
        found.append("FIRST")
    before = None
    for place, message in enumerate(messages):
        role, blocks = message.get("role"), message.get("content")
        if role not in ("user", "assistant"):
            found.append(f"ROLE at {place}")
        if role == before:
            found.append(f"ALTERNATE at {place}")
        before = role
        if not isinstance(blocks, list) or not blocks:
            found.append(f"EMPTY at {place}")
            continue
        items: list[Any] = []
        calls: list[Any] = []
        for block in blocks:
            if "text" in block and not (isinstance(block["text"], str) and block["text"].strip()):
                found.append(f"BLANK at {place}")
            if "toolUse" in block:
                use = block["toolUse"]
                calls.append(use.get("toolUseId"))
                if not isinstance(use.get("input"), dict):
                    found.append(f"INPUT at {place}")
                if not re.fullmatch("[a-zA-Z0-9_-]{1,64}", str(use.get("toolUseId") or "")):
                    found.append(f"ID at {place}")
            if "reasoningContent" in block and "reasoningText" in block["reasoningContent"]:
                if (
                    not block["reasoningContent"]["reasoningText"].get("signature")
                    and profile not in ("bedrock-mistral", "strict-template")  # Their models do not sign.
                ):
                    found.append(f"SIGNATURE at {place}")
            items.append(block["toolResult"].get("toolUseId") if "toolResult" in block else None)
            if "toolResult" in block:
                content = block["toolResult"].get("content")
                if not isinstance(content, list) or (
                    not content and block["toolResult"].get("status") == "error"
                ):
                    found.append(f"result content at {place}")
                for piece in content or []:
                    if "text" in piece and not str(piece["text"] or "").strip():
                        found.append(f"BLANK in result at {place}")
        if profile == "bedrock-mistral" and None in items and any(items):
            found.append(f"MIXED at {place}")
        turns.append(("response", calls) if role == "assistant" else ("user", items))
    return found + pairs(turns, joined=False)


def gemini(messages: list[Json], profile: str) -> list[str]:
    found: list[str] = []
    for place, message in enumerate(messages):
        parts = message.get("parts")
        if message.get("role") not in ("user", "model"):
            found.append(f"ROLE at {place}")
        if not isinstance(parts, list) or not parts:
            found.append(f"PARTS at {place}")
            continue
        for part in parts:
            if not any(part.get(key) for key in part if key != "thought"):
                found.append(f"ONEOF at {place}")
        calls = [p["functionCall"] for p in parts if "functionCall" in p]
        answers = [p["functionResponse"] for p in parts if "functionResponse" in p]
        for call in calls:
            if not call.get("name") or not isinstance(call.get("args", {}), dict):
                found.append(f"CALL at {place}")
        for answer in answers:
            if not answer.get("name") or not isinstance(answer.get("response"), dict):
                found.append(f"RESPONSE at {place}")
        if calls:
            if place == 0 or messages[place - 1].get("role") != "user":
                found.append(f"CALLTURN at {place}")
            after = messages[place + 1] if place + 1 < len(messages) else {}
            got = [p["functionResponse"] for p in after.get("parts") or [] if "functionResponse" in p]
            if len(got) != len(calls):
                found.append(f"COUNT at {place}")
            elif sorted(str(c.get("name")) for c in calls) != sorted(str(c.get("name")) for c in got):
                found.append(f"NAMES at {place}")
        if answers:
            before = messages[place - 1] if place else {}
            if not any("functionCall" in p for p in before.get("parts") or []):
                found.append(f"RESPTURN at {place}")
    return found


def chat(messages: list[Json], profile: str) -> list[str]:
    found: list[str] = []
    expected: list[Any] = []
    all_ids: set[str] = set()
    for place, message in enumerate(messages):
        role = message.get("role")
        if role != "tool":
            if expected:
                found.append(f"PAIR before {place}: {expected}")
            expected = []
        if role == "tool":
            if message.get("tool_call_id") not in expected:
                found.append(f"ORPHAN at {place}")
            else:
                expected.remove(message["tool_call_id"])
            if message.get("content") is None:
                found.append(f"NULL at {place}")
        elif role == "function":
            expected = []
        elif role == "assistant":
            expected = _chat_response(message, place, profile, all_ids, found)
        elif role not in ("system", "developer", "user"):
            found.append(f"ROLE at {place}")
        elif message.get("content") is None or message.get("content") == []:
            found.append(f"NULL at {place}")
    if expected:
        found.append("PAIR at the end")
    return found + _chat_order(messages, profile)


def _chat_response(message: Json, place: int, profile: str, all_ids: set[str], found: list[str]) -> list[Any]:
    """Check a response; return the ids that need a result next."""
    calls = message.get("tool_calls")
    if calls is not None and not calls:
        found.append(f"EMPTYCALLS at {place}")
    ids = [call.get("id") for call in calls or []]
    found += [
        f"ID at {place}" for i in ids if not isinstance(i, str) or not i or (not profile and len(i) > 40)
    ]
    if len(set(ids)) != len(ids):
        found.append(f"UNIQUE at {place}")
    if profile == "deepseek" and all_ids & set(ids):
        found.append(f"UNIQUE over the list at {place}")
    if profile in ("mistral-v3", "strict-template", "portable"):
        found += [f"ID9 at {place}" for i in ids if not re.fullmatch("[a-zA-Z0-9]{9}", str(i))]
    all_ids |= set(ids)
    for call in calls or []:
        arguments = call["function"]["arguments"]
        try:
            good = isinstance(arguments if isinstance(arguments, dict) else json.loads(arguments), dict)
        except (TypeError, ValueError):
            good = False
        if not good:
            found.append(f"ARGS at {place}")
    if (
        not message.get("content")
        and not calls
        and not message.get("refusal")
        and "function_call" not in message
    ):
        found.append(f"HOLLOW at {place}")
    return list(ids)


def _chat_order(messages: list[Json], profile: str) -> list[str]:
    found: list[str] = []
    if messages and messages[0].get("role") == "assistant" and messages[0].get("tool_calls"):
        found.append("FIRST")
    if profile in ("strict-template", "portable"):
        found += _template(messages)
    return found


def mistral(messages: list[Json], profile: str) -> list[str]:
    return [each for each in chat(messages, profile) if not each.startswith("ID at")]


def _template(messages: list[Json]) -> list[str]:
    found: list[str] = []
    expected = "user"
    for place, message in enumerate(messages):
        role = message.get("role")
        if role == "system" and place:
            found.append(f"SYSTEM at {place}")
        if role == "user" or (role == "assistant" and not message.get("tool_calls")):
            if role != expected:
                found.append(f"ALTERNATE at {place}")
            expected = "assistant" if role == "user" else "user"
    return found


def responses(messages: list[Json], profile: str) -> list[str]:
    found: list[str] = []
    calls: dict[str, int] = {}
    outputs: dict[str, int] = {}
    ids: set[str] = set()
    as_chat: list[Json] = []
    for place, item in enumerate(messages):
        kind = item.get("type")
        if isinstance(item.get("id"), str) and kind != "item_reference":
            if item["id"] in ids:
                found.append(f"DUPID at {place}")
            ids.add(item["id"])
        if kind == "function_call":
            if item["call_id"] in calls or not item["call_id"] or len(item["call_id"]) > 64:
                found.append(f"call id at {place}")
            calls[item["call_id"]] = place
            call = {"id": item["call_id"], "function": {"name": item["name"], "arguments": item["arguments"]}}
            if as_chat and as_chat[-1].get("role") == "assistant" and as_chat[-1].get("tool_calls"):
                as_chat[-1]["tool_calls"].append(call)
            else:
                as_chat.append({"role": "assistant", "content": None, "tool_calls": [call]})
        elif kind == "function_call_output":
            if item["call_id"] in outputs:
                found.append(f"DUPOUT at {place}")
            outputs[item["call_id"]] = place
            if item.get("output") is None:
                found.append(f"OUTPUT at {place}")
            as_chat.append({"role": "tool", "tool_call_id": item["call_id"], "content": "x"})
        elif kind == "reasoning":
            after = messages[place + 1] if place + 1 < len(messages) else {}
            if (
                after.get("type") not in ("function_call", "message", "reasoning")
                or after.get("role") == "user"
            ):
                found.append(f"REASONFOLLOW at {place}")
        elif item.get("role") == "assistant":
            as_chat.append({"role": "assistant", "content": "words"})
        elif item.get("role") in ("user", "system", "developer"):
            as_chat.append({"role": "user", "content": "words"})
    found += [f"PAIR {call}" for call in calls if call not in outputs]
    found += [f"ORPHAN {call}" for call in outputs if call not in calls]
    return found + [f"as chat: {each}" for each in chat(as_chat, "") if not each.startswith(("ID", "ARGS"))]


def pydantic_ai(messages: list[Json], profile: str) -> list[str]:
    found: list[str] = []
    turns: list[tuple[str, list[Any]]] = []
    for place, message in enumerate(messages):
        parts = message.get("parts")
        if not parts:
            found.append(f"EMPTY at {place}")
            continue
        if message["kind"] == "response":
            calls = [p for p in parts if p["part_kind"] == "tool-call"]
            for call in calls:
                args = call.get("args")
                try:
                    good = args in (None, "") or isinstance(
                        args if isinstance(args, dict) else json.loads(args), dict
                    )
                except (TypeError, ValueError):
                    good = False
                if not good or not call.get("tool_name"):
                    found.append(f"CALL at {place}")
            turns.append(("response", [p["tool_call_id"] for p in calls]))
        else:
            items = [p.get("tool_call_id") if p["part_kind"] == "tool-return" else None for p in parts]
            turns.append(("user", items))
    if turns and turns[0][0] == "response" and turns[0][1]:
        found.append("FIRST")
    return found + pairs(turns, joined=True)


def langchain(messages: list[Json], profile: str) -> list[str]:
    as_chat: list[Json] = []
    for message in messages:
        inner = message.get("data", message)
        role = {"human": "user", "ai": "assistant", "tool": "tool", "system": "system"}[message["type"]]
        made: Json = {"role": role, "content": inner.get("content")}
        if role == "assistant":
            calls = [*(inner.get("tool_calls") or []), *(inner.get("invalid_tool_calls") or [])]
            if calls:
                made["tool_calls"] = [
                    {"id": c.get("id"), "function": {"name": c.get("name"), "arguments": c.get("args")}}
                    for c in calls
                ]
        if role == "tool":
            made["tool_call_id"] = inner.get("tool_call_id")
        as_chat.append(made)
    return [each for each in chat(as_chat, "") if not each.startswith("ID at")]
