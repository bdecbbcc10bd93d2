"""Guidance of a model with 135 million parameters through a turn with tools. Pure: requests in, prompts out.

Such a small model answers in fair English and copies words well, but it cannot plan: to "which tool, or none?" it
nearly always answers "none". So this module makes some of the decisions.

Decided here by rules, without the model:

- The user's message is cut into instructions ("list ..., read ..., then explain ..."). One is due a call if it holds
  all words of a tool's name, or two words of its name, description and parameters together; an address such as
  `notes/todo.txt` counts as the word "file". The n-th call of a turn belongs to the n-th such instruction, so a
  turn makes `CALLS_MAX` calls at most, and ends.
- The tools that share a word with the instruction are shown to the model, the best match last.
- A short string parameter takes one of the words, quotations and addresses of the instruction; one for an address
  (`path`, `file`, ...) takes an address of the instruction, or else of this turn's results. A parameter for writing
  (`text`, `content`, ..., or with a `maxLength` above `QUOTED_CHARS_MAX`) takes free text.
- The rest of the message is repeated at the end, after the results of the tools.
- An answer that repeats the same `CIRCLE_CHARS` a third time is ended there.

Decided by the model, each time by generating it:

- which of the tools shown is called (its answer is constrained to their names);
- every argument (constrained to the tool's JSON schema, with a limit on each string and list);
- every word of the answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from midstream.history.messages import Entry, History, Response, Step, Text, ToolSpec, UserMessage
from midstream.history.rendering import render
from midstream.models.responses import ModelRequest

CALLS_MAX = 8
"""Calls of one turn."""
TOOLS_SHOWN_MAX = 4
"""Tools the model chooses from: each more makes the prompt longer and the choice worse."""
QUOTED_CHARS_MAX = 80
"""A string parameter that permits more characters is free text instead of a choice from the conversation."""
COMPOSED_CHARS_MAX = 200
"""Characters of a free text without a limit in its schema: some four sentences, before the model repeats itself."""
CHOICES_MAX = 40
"""Words and addresses that are choices for a short parameter."""
ITEMS_MAX = 8
"""Items of a list without a limit in its schema."""
RESULT_CHARS_MAX = 1500
"""Characters of one result for the model."""
EARLIER_CHARS_MAX = 2000
"""Characters of earlier turns for the model, newest first."""
CIRCLE_CHARS = 40
CIRCLES_MAX = 3

_COMPOSED = {"text", "content", "contents", "body", "message", "note", "comment", "summary", "description"}
_ADDRESSES = {"path", "file", "filename", "file_name", "url", "uri"}
_WORD = re.compile(r"[A-Za-z]+")
_STOP_WORDS = frozenset(
    _WORD.findall(
        "a an the of in on to for from with and or then it its is are be me my you your that this these those please"
        " can could would about called named what how why who when which us i we any all some at by into as do does did"
        " was were will not no now also just there here"
    )
)
_BEGINNINGS = frozenset(
    _WORD.findall(
        "tell explain describe summarise summarize say answer give compare what how why who when where which is are do"
        " does can make write show list think suggest translate continue"
    )
)
"""First words of a new request or question; a piece with another first word belongs to the previous one."""
_REFERENCE = re.compile(r"\b(it|them|that|this|these|those|see|found)\b", re.IGNORECASE)
_TERM = re.compile(r"[\w'-]+")
_QUOTATION = re.compile(r"\"([^\"\n]+)\"|(?<!\w)'([^'\n]+)'(?!\w)|“([^”\n]+)”|`([^`\n]+)`")
_ADDRESS = re.compile(r"[\w~./-]*\w(?:/[\w.-]*\w|\.[A-Za-z][A-Za-z0-9]{0,4}\b)+/?")
_CUT = re.compile(r"(?:[.;!?](?=\s|$)|,|\n|\b(?:and|then)\b)[\s,]*(?:\b(?:and|then)\b[\s,]*)*", re.IGNORECASE)

# Without a penalty for its last words, a model of this size repeats a sentence for ever; with a strong penalty it
# cannot copy names from results. Found by trying penalties of 1.0 to 1.1 and 0 to 0.3 over 64 to 256 tokens.
_TEXT_SAMPLING = {"repeat_penalty": 1.05, "frequency_penalty": 0.1, "repeat_last_n": 128}
_RETELLING = {"frequency_penalty": 0.05, "repeat_last_n": 64}
_FILLING_IN = {"frequency_penalty": 0.3, "repeat_last_n": 64}

Messages = list[dict[str, Any]]
Schema = dict[str, Any]


class Instruction(Struct, frozen=True):
    """A piece of the user's message, with the matching tools, the best last; without tools it is for the answer."""

    text: str
    tools: tuple[ToolSpec, ...] = ()


class Due(Struct, frozen=True):
    """A call that is due, and the results of the earlier calls in this turn."""

    instruction: Instruction
    results: tuple[str, ...] = ()


class Prompt(Struct, frozen=True):
    """A prompt for the model. With a schema, its answer is one JSON value of it."""

    instructions: str
    entries: tuple[Entry, ...]
    sampling: dict[str, float] = {}
    schema: Schema | None = None

    @property
    def messages(self) -> Messages:
        """The sent messages, rendered for any chat template."""
        return render(History(self.entries), self.instructions, "strict-template").messages


# --- when a call is due ---------------------------------------------------------------------------------------


def due_call(request: ModelRequest) -> Due | None:
    """Return the next call, or None if the answer is next."""
    text, steps = _turn_of(request.history)
    results = tuple(result.content for step in steps for result in step.results)
    for_calls = [each for each in instructions_of(text, request.tools) if each.tools][:CALLS_MAX]
    if len(results) >= len(for_calls):
        return None
    return Due(for_calls[len(results)], results)


def instructions_of(text: str, tools: Sequence[ToolSpec]) -> list[Instruction]:
    """Cut a message into instructions, in order; nothing is cut inside a quotation or an address.

    A piece that matches no tool and does not begin like a request belongs to the previous one, so that "write a note
    about salt and the sea" stays one instruction.
    """
    whole: list[tuple[int, int, tuple[ToolSpec, ...]]] = []
    for start, end in _pieces(text):
        fitting = _fitting(text[start:end], tools)
        first = _WORD.match(text, start)
        if whole and not fitting and not (first and first.group().lower() in _BEGINNINGS):
            begin, _, before = whole.pop()
            whole.append((begin, end, before))
        else:
            whole.append((start, end, fitting))
    return [Instruction(text[start:end], fitting) for start, end, fitting in whole]


def _pieces(text: str) -> list[tuple[int, int]]:
    masked = _ADDRESS.sub(_blank, _QUOTATION.sub(_blank, text))
    bounds = [0, *(bound for cut in _CUT.finditer(masked) for bound in cut.span()), len(text)]
    pieces = []
    for start, end in zip(bounds[::2], bounds[1::2], strict=True):
        piece = text[start:end]
        if piece.strip():
            start += len(piece) - len(piece.lstrip())
            pieces.append((start, start + len(piece.strip())))
    return pieces


def _blank(match: re.Match[str]) -> str:
    return "_" * len(match.group())


def _fitting(piece: str, tools: Sequence[ToolSpec]) -> tuple[ToolSpec, ...]:
    """Return the tools that share a word with a piece, the best match last; none if no call is due."""
    bare = _ADDRESS.sub(" file ", _QUOTATION.sub(" ", piece))
    spoken = _stems(bare)
    scored: list[tuple[int, ToolSpec]] = []
    is_due = False
    for tool in tools:
        named, known = _stems(tool.name.replace("_", " ")), _vocabulary(tool)
        hits = len(spoken & known)
        is_due = is_due or hits >= 2 or bool(named and named <= spoken)  # noqa: PLR2004 - one word may be chance
        if hits:
            scored.append((2 * len(spoken & named) + hits, tool))
    if not is_due:
        return ()
    scored.sort(key=lambda pair: pair[0])
    return tuple(tool for _, tool in scored[-TOOLS_SHOWN_MAX:])


def _vocabulary(tool: ToolSpec) -> set[str]:
    parameters = " ".join(tool.parameters.get("properties", {}))
    return _stems(f"{tool.name} {tool.description} {parameters}".replace("_", " "))


def _stems(text: str) -> set[str]:
    return {_stem(word) for word in _WORD.findall(text.lower()) if word not in _STOP_WORDS}


def _stem(word: str) -> str:
    for ending in ("ing", "ed", "es", "s"):
        if word.endswith(ending) and len(word) - len(ending) > 2:  # noqa: PLR2004 - "bed" is no past tense
            return word[: -len(ending)].rstrip("e")
    return word.rstrip("e") if len(word) > 3 else word  # noqa: PLR2004 - "the", "toe"


# --- the request to the model ---------------------------------------------------------------------------------


def choice_prompt(due: Due) -> Prompt:
    """Return the prompt for the choice of a tool."""
    entries: list[Entry] = []
    for tool in due.instruction.tools:
        entries += _create_example(_example(tool)[0], {"tool": tool.name})
    entries.append(UserMessage.of(due.instruction.text))
    names = [tool.name for tool in due.instruction.tools]
    instructions = "Choose the tool for the instruction."
    return Prompt(instructions, tuple(entries), schema=_object({"tool": {"enum": names}}, ["tool"]))


def arguments_prompt(due: Due, tool: ToolSpec) -> Prompt:
    """Return the prompt for the arguments of the chosen tool."""
    properties: Schema = tool.parameters.get("properties", {})
    signature = f"{tool.name}({', '.join(properties)}): {_first_line(tool)}"
    instruction = due.instruction.text
    if due.results and _has_composed(properties) and _REFERENCE.search(instruction):
        instruction = f"{due.results[-1][:RESULT_CHARS_MAX]}\n\n{instruction}"
    entries = (*_create_example(*_example(tool)), UserMessage.of(instruction))
    instructions = f"Response with the JSON arguments of the tool {signature}"
    return Prompt(instructions, entries, _FILLING_IN, _limited_parameters(tool, due))


def answer_prompt(request: ModelRequest) -> Prompt:
    """Return the prompt for the answer: earlier turns within the limit, this turn with its results, the message's rest.

    A question about the results is directly before them; another question is repeated after them, because the model
    would otherwise only copy.
    """
    text, steps = _turn_of(request.history)
    instructions = request.instructions or "You are a helpful assistant."
    entries = _earlier(request.history)
    results = [result.content for step in steps for result in step.results]
    returned = "".join(f"\n{result[:RESULT_CHARS_MAX]}" for result in results)
    entries.append(UserMessage.of(f"{text}\n\nResults:{returned}" if returned else text))
    left = ", then ".join(each.text for each in instructions_of(text, request.tools) if not each.tools)
    if returned and (not left or _REFERENCE.search(left)):
        return Prompt(instructions, tuple(entries), _RETELLING)
    if returned:
        entries += [_response("Done."), UserMessage.of(f"{left[0].upper()}{left[1:]}.")]
    return Prompt(instructions, tuple(entries), _TEXT_SAMPLING)


def is_circling(answer: str) -> bool:
    """Whether an answer repeats its own last text, so that no new text will follow."""
    return len(answer) > CIRCLE_CHARS and answer.count(answer[-CIRCLE_CHARS:]) >= CIRCLES_MAX


def _create_example(text: str, answered: object) -> tuple[Entry, Entry]:
    return UserMessage.of(text), _response(msgspec.json.encode(answered).decode())


def _response(words: str) -> Step:
    return Step(Response((Text(words),)))


def _example(tool: ToolSpec) -> tuple[str, dict[str, object]]:
    """Return an example of an instruction and its arguments; a parameter's own `examples` are preferred."""
    words = iter(("alpha", "beta", "gamma", "delta"))
    arguments: dict[str, object] = {}
    for name, schema in tool.parameters.get("properties", {}).items():
        value = _example_value(name, schema, words)
        if value is not None:
            arguments[name] = value
    spoken = [
        f"{value} {name}" for name, value in reversed(arguments.items()) if not isinstance(value, list | dict)
    ]
    return " ".join([_first_line(tool).rstrip("."), *spoken]), arguments


def _example_value(name: str, schema: Schema, words: Iterable[str]) -> object | None:
    for known in ("examples", "enum"):
        if schema.get(known):
            return schema[known][0]  # type: ignore[no-any-return] # whatever the schema's author wrote
    match schema.get("type"):
        case "string" if _is_composed(name, schema):
            return "One is a number. It is the first."
        case "string":
            word = next(iter(words), "omega")
            return f"{word}.txt" if name in _ADDRESSES else word
        case "integer" | "number":
            return 3
        case "boolean":
            return True
    return None


def _first_line(tool: ToolSpec) -> str:
    return tool.description.strip().partition("\n")[0] or tool.name.replace("_", " ")


# --- schemas --------------------------------------------------------------------------------------------------


def _limited_parameters(tool: ToolSpec, due: Due) -> Schema:
    declared: Schema = tool.parameters.get("properties", {})
    required: list[str] = tool.parameters.get("required", [])
    parameters: Schema = _limit(tool.parameters)
    properties: Schema = dict(parameters.get("properties", {}))
    choices = _choices(due, tool)
    quoted = [name for name, schema in declared.items() if _is_quoted(name, schema)]
    for place, name in enumerate(sorted(quoted, key=lambda name: name not in required)):
        if place >= len(choices) and name not in required:
            del properties[name]  # the instruction has no word left for it
        elif known := (_addresses(due) if name in _ADDRESSES else []) or choices:
            properties[name] = {"enum": known[:CHOICES_MAX]}
    return {**parameters, **_object(properties, required)}


def _choices(due: Due, tool: ToolSpec) -> list[str]:
    """Return the choices for a short parameter: the instruction's quotations, addresses and words."""
    text = due.instruction.text
    quotations = [next(filter(None, match.groups())) for match in _QUOTATION.finditer(text)]
    text = _QUOTATION.sub(" ", text)
    known = _vocabulary(tool)
    terms = [
        term
        for term in _TERM.findall(_ADDRESS.sub(" ", text))
        if term.lower() not in _STOP_WORDS and _stem(term.lower()) not in known
    ]
    return _distinct((*quotations, *_ADDRESS.findall(text), *terms))


def _addresses(due: Due) -> list[str]:
    """Return the addresses in the instruction; if there are none, those in this turn's results."""
    addresses = _distinct(_ADDRESS.findall(due.instruction.text))
    return addresses or _distinct(address for result in due.results for address in _ADDRESS.findall(result))


def _distinct(texts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(text for text in texts if len(text) <= QUOTED_CHARS_MAX))


def _has_composed(properties: Schema) -> bool:
    return any(_is_composed(name, schema) for name, schema in properties.items())


def _is_composed(name: str, schema: Schema) -> bool:
    if schema.get("type") != "string" or "enum" in schema:
        return False
    return name in _COMPOSED or schema.get("maxLength", 0) > QUOTED_CHARS_MAX


def _is_quoted(name: str, schema: Schema) -> bool:
    shaped = {"enum", "const", "pattern", "format"} & schema.keys()
    return schema.get("type") == "string" and not shaped and not _is_composed(name, schema)


def _limit(schema: Any) -> Any:  # noqa: ANN401 - JSON: an object, a list or a plain value
    """Return a JSON schema (or a part of one) in which all strings and lists have limits."""
    if isinstance(schema, list):
        return [_limit(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    limited = {name: _limit(value) for name, value in schema.items()}
    if schema.get("type") == "string" and not {"enum", "const", "pattern", "format"} & schema.keys():
        limited.setdefault("maxLength", COMPOSED_CHARS_MAX)
    if schema.get("type") == "array":
        limited.setdefault("maxItems", ITEMS_MAX)
    return limited


def _object(properties: Schema, required: list[str]) -> Schema:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


# --- the history for the model ---------------------------------------------------------------------------------


def _turn_of(history: History) -> tuple[str, list[Step]]:
    """Return the user's last message and the steps since."""
    steps: list[Step] = []
    for entry in reversed(history.entries):
        if isinstance(entry, UserMessage):
            return _text_of(entry), steps[::-1]
        steps.append(entry)
    return "", steps[::-1]


def _earlier(history: History) -> list[Entry]:
    """Return the text of earlier turns, oldest first, without results of tools."""
    entries: list[Entry] = []
    left = EARLIER_CHARS_MAX
    is_current = True
    for entry in reversed(history.entries):
        if is_current:
            is_current = not isinstance(entry, UserMessage)
            continue
        is_user = isinstance(entry, UserMessage)
        text = _text_of(entry) if isinstance(entry, UserMessage) else entry.response.text
        left -= len(text)
        if left < 0:
            break
        if text:
            entries.append(UserMessage.of(text) if is_user else _response(text))
    return entries[::-1]


def _text_of(message: UserMessage) -> str:
    return "\n".join(part.text for part in message.parts if isinstance(part, Text))
