"""Real-world damage of stored histories, as functions that break a list in place.

Each takes the format, the messages and a source of random numbers; without a place to break it does nothing.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

from tests.oracles.scripts import valid

Json = dict[str, Any]
Value = Any
Spot = tuple[list[Any], Any]
"""The list that contains an item, and the item."""

_LIST_KEY = {"anthropic": "content", "bedrock": "content", "gemini": "parts", "pydantic-ai": "parts"}
GROUPED = frozenset(_LIST_KEY)


def inner(message: Value) -> Json:
    """Return the object with a message's fields."""
    found = message.get("data", message)
    return found if isinstance(found, dict) else message


def parts_of(form: str, message: Json) -> list[Any]:
    """Return the list of parts of a message, if it has one."""
    found = message.get(_LIST_KEY[form]) if form in _LIST_KEY else inner(message).get("content")
    return found if isinstance(found, list) else []


def calls_in(form: str, messages: list[Any]) -> list[Spot]:
    """Find every call."""
    found: list[Spot] = []
    for message in messages:
        if form == "openai-responses":
            if str(message.get("type")).endswith("_call") and "call_id" in message:
                found.append((messages, message))
        elif form in GROUPED:
            parts = parts_of(form, message)
            found += [(parts, part) for part in parts if isinstance(part, dict) and _is_call(form, part)]
        else:
            calls = inner(message).get("tool_calls") or []
            found += [(calls, call) for call in calls if isinstance(call, dict)]
    return found


def results_in(form: str, messages: list[Any]) -> list[Spot]:
    """Find every result."""
    found: list[Spot] = []
    for message in messages:
        if form == "openai-responses":
            if str(message.get("type")).endswith("_output"):
                found.append((messages, message))
        elif form in GROUPED:
            parts = parts_of(form, message)
            found += [(parts, part) for part in parts if isinstance(part, dict) and _is_result(form, part)]
        elif message.get("role") == "tool" or message.get("type") == "tool":
            found.append((messages, message))
    return found


def _is_call(form: str, part: Json) -> bool:
    if form == "anthropic":
        return part.get("type") == "tool_use"
    if form == "pydantic-ai":
        return part.get("part_kind") == "tool-call"
    return "toolUse" in part or "functionCall" in part


def _is_result(form: str, part: Json) -> bool:
    if form == "anthropic":
        return part.get("type") == "tool_result"
    if form == "pydantic-ai":
        return part.get("part_kind") in ("tool-return", "retry-prompt")
    return "toolResult" in part or "functionResponse" in part


_ID_KEYS = ("tool_use_id", "tool_call_id", "call_id", "toolUseId", "id")


def id_spot(thing: Json) -> tuple[Json, str] | None:
    """Find the place of the call id of a call or a result."""
    for key in ("toolUse", "toolResult", "functionCall", "functionResponse", "data"):
        if isinstance(thing.get(key), dict):
            thing = thing[key]
    for key in _ID_KEYS:
        if key in thing:
            return thing, key
    return None


def argument_spot(thing: Json) -> tuple[Json, str] | None:
    """Find the place of a call's arguments."""
    for key in ("toolUse", "functionCall", "function"):
        if isinstance(thing.get(key), dict):
            thing = thing[key]
    return next(((thing, key) for key in ("input", "arguments", "args") if key in thing), None)


def objects(value: Value) -> Iterator[Json]:
    """Yield every object in a value."""
    if isinstance(value, dict):
        yield value
        for item in value.values():
            yield from objects(item)
    elif isinstance(value, list):
        for item in value:
            yield from objects(item)


def _remove(spot: Spot) -> None:
    holder, thing = spot
    holder[:] = [item for item in holder if item is not thing]


def _pick(spots: list[Spot], chance: Random) -> Spot | None:
    return chance.choice(spots) if spots else None


def drop_result(form: str, messages: list[Any], chance: Random) -> None:
    """A tool was killed."""
    if spot := _pick(results_in(form, messages), chance):
        _remove(spot)


def drop_call(form: str, messages: list[Any], chance: Random) -> None:
    """A call was pruned and its result stayed."""
    if spot := _pick(calls_in(form, messages), chance):
        _remove(spot)


def drop_message(form: str, messages: list[Any], chance: Random) -> None:
    """A write was lost."""
    del form
    if len(messages) > 1:
        del messages[chance.randrange(len(messages))]


def repeat_message(form: str, messages: list[Any], chance: Random) -> None:
    """A retry wrote twice, next to the first or later."""
    del form
    if messages:
        at = chance.randrange(len(messages))
        later = at + 1 if chance.random() < 0.6 else chance.randint(at + 1, len(messages))
        messages.insert(later, copy.deepcopy(messages[at]))


def repeat_result(form: str, messages: list[Any], chance: Random) -> None:
    """A result was recorded twice, the same or another one, here or in a later message."""
    if spot := _pick(results_in(form, messages), chance):
        holder, thing = spot
        twin = copy.deepcopy(thing)
        if chance.random() < 0.5:
            _reword(twin, chance)
        if form in GROUPED and chance.random() < 0.4:
            later = chance.randint(0, len(messages))
            messages.insert(later, _results_message(form, [twin]))
        else:
            holder.insert(chance.randint(0, len(holder)), twin)


def _reword(thing: Json, chance: Random) -> None:
    for found in objects(thing):
        for key in ("content", "output", "text", "result"):
            if isinstance(found.get(key), str) and found[key]:
                found[key] = f"another k{chance.randint(10000, 99999)}z"
                return


def _results_message(form: str, results: list[Any]) -> Json:
    if form == "gemini":
        return {"role": "user", "parts": results}
    if form == "pydantic-ai":
        return {"kind": "request", "parts": results, "instructions": None}
    return {"role": "user", "content": results}


def repeat_call(form: str, messages: list[Any], chance: Random) -> None:
    """A snapshot of a stream was appended after the one before."""
    if spot := _pick(calls_in(form, messages), chance):
        holder, thing = spot
        holder.insert(chance.randint(0, len(holder)), copy.deepcopy(thing))


def swap(form: str, messages: list[Any], chance: Random) -> None:
    """Two writes overtook one another."""
    del form
    if len(messages) > 1:
        at = chance.randrange(len(messages) - 1)
        messages[at], messages[at + 1] = messages[at + 1], messages[at]


def move(form: str, messages: list[Any], chance: Random) -> None:
    """A message turned up late, or early."""
    del form
    if messages:
        message = messages.pop(chance.randrange(len(messages)))
        messages.insert(chance.randint(0, len(messages)), message)


def move_result(form: str, messages: list[Any], chance: Random) -> None:
    """A result was stored with another turn's."""
    if spot := _pick(results_in(form, messages), chance):
        _remove(spot)
        made = _results_message(form, [spot[1]]) if form in GROUPED else spot[1]
        messages.insert(chance.randint(0, len(messages)), made)


def split_results(form: str, messages: list[Any], chance: Random) -> None:
    """Parallel results were stored one per message, perhaps with text in between."""
    spots = results_in(form, messages)
    if form not in GROUPED or not spots:
        return
    holder = chance.choice(spots)[0]
    for at, message in enumerate(messages):
        if parts_of(form, message) is holder:
            pieces = [_results_message(form, [part]) for part in holder]
            if chance.random() < 0.5:
                pieces.insert(chance.randint(0, len(pieces)), user_message(form, _fresh(chance)))
            messages[at : at + 1] = pieces
            return


def _fresh(chance: Random) -> str:
    return f"by the way k{chance.randint(10000, 99999)}z"


def user_message(form: str, words: str) -> Json:
    """Make a text of a user."""
    made: dict[str, Json] = {
        "anthropic": {"role": "user", "content": words},
        "bedrock": {"role": "user", "content": [{"text": words}]},
        "gemini": {"role": "user", "parts": [{"text": words}]},
        "pydantic-ai": {"kind": "request", "parts": [{"part_kind": "user-prompt", "content": words}]},
        "langchain": {"type": "human", "data": {"content": words, "type": "human"}},
    }
    return made.get(form, {"role": "user", "content": words})


def response_message(form: str, words: str) -> Json:
    """Make a text of a model."""
    made: dict[str, Json] = {
        "bedrock": {"role": "assistant", "content": [{"text": words}]},
        "gemini": {"role": "model", "parts": [{"text": words}]},
        "pydantic-ai": {"kind": "response", "parts": [{"part_kind": "text", "content": words}]},
        "langchain": {"type": "ai", "data": {"content": words, "type": "ai"}},
    }
    return made.get(form, {"role": "assistant", "content": words})


def interleave_user(form: str, messages: list[Any], chance: Random) -> None:
    """The user typed while a tool ran: before the results, in their message or anywhere."""
    words = user_message(form, _fresh(chance))
    spots = results_in(form, messages)
    if spots and chance.random() < 0.6:
        holder, thing = chance.choice(spots)
        at = next(at for at, item in enumerate(holder) if item is thing)
        if holder is not messages:
            words = (
                parts_of(form, words)[0]
                if parts_of(form, words)
                else {"type": "text", "text": words["content"]}
            )
        holder.insert(at, words)
    else:
        messages.insert(chance.randint(0, len(messages)), words)


def interleave_response(form: str, messages: list[Any], chance: Random) -> None:
    """Two responses in a row, or text of the model between a call and its result."""
    messages.insert(chance.randint(0, len(messages)), response_message(form, _fresh(chance)))


def cut_tail(form: str, messages: list[Any], chance: Random) -> None:
    """The process died."""
    del form
    del messages[chance.randint(1, max(1, len(messages))) :]


def cut_head(form: str, messages: list[Any], chance: Random) -> None:
    """A window moved past a part of a step."""
    del form
    del messages[: chance.randint(0, max(0, len(messages) - 1))]


def cut_parts(form: str, messages: list[Any], chance: Random) -> None:
    """A response was stored as far as it had been streamed."""
    if messages:
        at = chance.randrange(len(messages))
        parts = parts_of(form, messages[at])
        del parts[chance.randint(0, len(parts)) :]
        if chance.random() < 0.7:
            del messages[at + 1 :]


def merge_sessions(form: str, messages: list[Any], chance: Random) -> None:
    """Another session with the same ids was appended."""
    messages += copy.deepcopy(valid(form, chance, turns=2))


def reuse_ids(form: str, messages: list[Any], chance: Random) -> None:
    """The server gives every response the same ids, or every call one id."""
    is_constant = chance.random() < 0.5
    names: dict[Any, str] = {}
    for _, thing in [*calls_in(form, messages), *results_in(form, messages)]:
        if spot := id_spot(thing):
            old = spot[0][spot[1]]
            names.setdefault(old, "call_0" if is_constant else f"call_{len(names) % 3}")
            spot[0][spot[1]] = names[old]


def bad_id(form: str, messages: list[Any], chance: Random) -> None:
    """An id that another provider made, on both sides or on one."""
    spots = [*calls_in(form, messages), *results_in(form, messages)]
    found = [spot for _, thing in spots if (spot := id_spot(thing))]
    if not found:
        return
    holder, key = chance.choice(found)
    old = holder[key]
    new = chance.choice(("", "functions.read:0", "x" * 70, "call|fc_1", "id with\nnewline", None, "toolu_Ü"))
    is_pair = chance.random() < 0.6
    for each, its_key in found:
        if each is holder or (is_pair and each[its_key] == old):
            each[its_key] = new


def blank(form: str, messages: list[Any], chance: Random) -> None:
    """An empty text was stored."""
    del form
    if messages:
        message = chance.choice(messages)
        keys = ("text", "content", "output", "thinking")
        spots = [(o, k) for o in objects(message) for k in keys if isinstance(o.get(k), str)]
        if spots:
            holder, key = chance.choice(spots)
            holder[key] = chance.choice(("", " ", "\n\t "))


def empty_content(form: str, messages: list[Any], chance: Random) -> None:
    """A message without content, or with null."""
    if messages:
        fields = inner(chance.choice(messages))
        key = "parts" if form in ("gemini", "pydantic-ai") else "content"
        if key in fields:
            fields[key] = chance.choice(([], None, "") if key == "content" else ([], None))


def break_arguments(form: str, messages: list[Any], chance: Random) -> None:
    """The stream stopped inside a call's arguments; or a proxy sent them as text, or not at all."""
    if (spot := _pick(calls_in(form, messages), chance)) and (found := argument_spot(spot[1])):
        holder, key = found
        text = holder[key] if isinstance(holder[key], str) else json.dumps(holder[key])
        holder[key] = chance.choice((text[: max(1, len(text) - 3)], "", text, None, [text], json.dumps(text)))


def bad_result(form: str, messages: list[Any], chance: Random) -> None:
    """A result that is no text: a number, an object, null, nothing at all."""
    if spot := _pick(results_in(form, messages), chance):
        thing = spot[1]
        for key in ("toolResult", "functionResponse", "data"):
            thing = thing[key] if isinstance(thing.get(key), dict) else thing
        for key in ("content", "output", "response"):
            if key in thing:
                old = thing[key]
                thing[key] = chance.choice(({"data": old}, [old], None, str(old), [{"weird": old}], 7))
                if chance.random() < 0.2:
                    del thing[key]


def role_typo(form: str, messages: list[Any], chance: Random) -> None:
    """An unknown role."""
    del form
    if messages:
        message = chance.choice(messages)
        for key in ("role", "kind"):
            if key in message:
                message[key] = chance.choice(("human", "ai", "Assistant", "users", None, "tool"))


def other_role(form: str, messages: list[Any], chance: Random) -> None:
    """A message stored under the other side's role."""
    sides = {
        "gemini": ("user", "model"),
        "pydantic-ai": ("request", "response"),
    }.get(form, ("user", "assistant"))
    if messages:
        message = chance.choice(messages)
        for key in ("role", "kind"):
            if message.get(key) in sides:
                message[key] = sides[message[key] == sides[0]]


def system_inside(form: str, messages: list[Any], chance: Random) -> None:
    """A system prompt was injected again, or in mid-list."""
    words = chance.choice(("Be brief, k0z.", _fresh(chance)))
    made: dict[str, Json] = {
        "gemini": {"role": "system", "parts": [{"text": words}]},
        "bedrock": {"role": "system", "content": [{"text": words}]},
        "pydantic-ai": {"kind": "request", "parts": [{"part_kind": "system-prompt", "content": words}]},
        "langchain": {"type": "system", "data": {"type": "system", "content": words}},
    }
    message = made.get(form, {"role": "system", "content": words})
    messages.insert(chance.randint(0, len(messages)), message)


def spoil_thinking(form: str, messages: list[Any], chance: Random) -> None:
    """Thinking lost its signature, got another provider's, or moved to another place."""
    spots = [
        (parts, part) for m in messages for parts in [parts_of(form, m)] for part in parts if _thinks(part)
    ]
    if spot := _pick(spots, chance):
        holder, part = spot
        signed = [found for found in objects(part) if "signature" in found]
        if signed and chance.random() < 0.7:
            signed[0]["signature"] = chance.choice(
                ("", None, "gAAAAABoreign", "skip_thought_signature_validator")
            )
            if chance.random() < 0.2:
                del signed[0]["signature"]
        else:
            _remove(spot)
            holder.insert(chance.randint(0, len(holder)), part)


def _thinks(part: Value) -> bool:
    return isinstance(part, dict) and (
        part.get("type") == "thinking" or "reasoningContent" in part or part.get("part_kind") == "thinking"
    )


def shuffle_parts(form: str, messages: list[Any], chance: Random) -> None:
    """The order inside a message was lost."""
    if messages and (parts := parts_of(form, chance.choice(messages))):
        chance.shuffle(parts)


def glue(form: str, messages: list[Any], chance: Random) -> None:
    """A front end merged two neighbours into one message."""
    places = [
        at
        for at in range(len(messages) - 1)
        if parts_of(form, messages[at]) and parts_of(form, messages[at + 1])
    ]
    if places and form in GROUPED:
        at = chance.choice(places)
        parts_of(form, messages[at]).extend(parts_of(form, messages[at + 1]))
        del messages[at + 1]


def half_character(form: str, messages: list[Any], chance: Random) -> None:
    """A text was cut inside a surrogate pair."""
    del form
    if messages:
        keys = ("text", "content", "output", "path", "thinking")
        spots = [(o, k) for o in objects(chance.choice(messages)) for k in keys if isinstance(o.get(k), str)]
        if spots:
            holder, key = chance.choice(spots)
            holder[key] += "\ud83d"


def not_a_message(form: str, messages: list[Any], chance: Random) -> None:
    """A value that is no message at all, or a bare text in the place of a list of parts."""
    if chance.random() < 0.5:
        messages.insert(chance.randint(0, len(messages)), chance.choice((None, "", [], _fresh(chance), {})))
    elif messages and form in GROUPED:
        message = chance.choice(messages)
        key = _LIST_KEY[form]
        if isinstance(message, dict) and isinstance(message.get(key), list) and message[key]:
            message[key] = chance.choice(
                (_fresh(chance), [_fresh(chance)], message[key][0], [None, *message[key]])
            )


def bad_name(form: str, messages: list[Any], chance: Random) -> None:
    """A tool's name that servers refuse."""
    if spot := _pick(calls_in(form, messages), chance):
        thing = spot[1]
        for key in ("toolUse", "functionCall", "function"):
            thing = thing[key] if isinstance(thing.get(key), dict) else thing
        key = "tool_name" if "tool_name" in thing else "name"
        thing[key] = chance.choice(("", None, "functions.read", "read file", "x" * 140))


def drop_field(form: str, messages: list[Any], chance: Random) -> None:
    """A key is missing."""
    del form
    if messages and (found := list(objects(chance.choice(messages)))):
        holder = chance.choice(found)
        if holder:
            del holder[chance.choice(list(holder))]


def move_part(form: str, messages: list[Any], chance: Random) -> None:
    """A part appears in another message: an image in a response, a result in a question, thinking elsewhere."""
    lists = [parts_of(form, message) for message in messages]
    lists = [parts for parts in lists if parts]
    if len(lists) > 1:
        source, target = chance.sample(lists, 2)
        part = source.pop(chance.randrange(len(source)))
        target.insert(chance.randrange(len(target) + 1), part)


def prune_calls(form: str, messages: list[Any], chance: Random) -> None:
    """A window drops the calls of some responses with their results, and joins neighbouring responses."""
    if form not in GROUPED:
        return
    spots = calls_in(form, messages)
    for spot in chance.sample(spots, len(spots) // 2):
        _remove(spot)
    answered = {str(id_spot(call)) for _, call in calls_in(form, messages)}
    for spot in results_in(form, messages):
        if str(id_spot(spot[1])) not in answered and chance.random() < 0.5:
            _remove(spot)
    messages[:] = [message for message in messages if parts_of(form, message) or "content" in message]
    glue(form, messages, chance)


def fail_result(form: str, messages: list[Any], chance: Random) -> None:
    """A result with any content is marked as an error later on."""
    spot = _pick(results_in(form, messages), chance)
    if spot is not None and form == "anthropic":
        spot[1]["is_error"] = True
    elif spot is not None and form == "bedrock":
        spot[1]["toolResult"]["status"] = "error"


def junk(form: str, messages: list[Any], chance: Random) -> None:
    """Some value, anywhere, has changed."""
    del form
    holders = [(thing, key) for thing in objects(messages) for key in thing]
    if holders:
        thing, key = chance.choice(holders)
        thing[key] = copy.deepcopy(chance.choice(_JUNK))


_JUNK: tuple[Any, ...] = (None, "", " ", "{", 0, 1.5, True, [], ["x"], {}, {"a": 1})


def stranger(form: str, messages: list[Any], chance: Random) -> None:
    """An item in the list has text where no format keeps it, or another provider's shape."""
    word = _fresh(chance)
    use = {"id": f"c{word}", "type": "function", "function": {"name": "f", "arguments": f'{{"x": "{word}"}}'}}
    made: list[Any] = chance.choice(
        (
            [{"said": word}],
            [{"role": "user", "text": word}],
            [{"role": "user", "parts": [{"text": word}]}],
            [{"role": "user", "content": word}],
            [
                {"role": "assistant", "content": None, "tool_calls": [use]},
                {"role": "tool", "tool_call_id": use["id"], "content": word},
            ],
            [
                {"type": "function_call", "call_id": use["id"], "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": use["id"], "output": word},
            ],
        )
    )
    place = chance.randrange(len(messages) + 1)
    messages[place:place] = made


Accident = Callable[[str, list[Any], Random], None]

ACCIDENTS: tuple[Accident, ...] = (
    drop_result,
    drop_result,
    drop_call,
    drop_message,
    repeat_message,
    repeat_result,
    repeat_call,
    swap,
    move,
    move_result,
    split_results,
    interleave_user,
    interleave_response,
    cut_tail,
    cut_tail,
    cut_head,
    cut_parts,
    merge_sessions,
    reuse_ids,
    bad_id,
    blank,
    empty_content,
    break_arguments,
    bad_result,
    role_typo,
    other_role,
    system_inside,
    spoil_thinking,
    shuffle_parts,
    glue,
    half_character,
    move_part,
    prune_calls,
)
"""The accidents of the score."""

ODD = (*ACCIDENTS, not_a_message, bad_name, drop_field, fail_result, junk, junk, stranger)
"""Accidents that must at least not crash, and stay valid."""
