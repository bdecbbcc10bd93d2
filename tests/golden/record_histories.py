"""Record the golden histories: `python -m tests.golden.record_histories [--inputs]`.

Without `--inputs` the committed inputs stay and only the outcomes are recorded again.
"""

from __future__ import annotations

import argparse
import copy
import json
import lzma
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from tests.golden import adapter
from tests.golden.golden_histories import (
    CASES_PER_FORMAT,
    DATA,
    FORMATS,
    digests_path,
    examples_path,
    inputs_of,
    inputs_path,
    summary_of,
    text_of,
)
from tests.oracles.accidents import ODD
from tests.oracles.scripts import valid

Json = dict[str, Any]

SEED = 16
EXAMPLE_EVERY = 125
"""Interval of the cases that are also stored in full, as readable JSON."""
PROFILES: dict[str, tuple[str | None, ...]] = {
    "anthropic": (None, "bedrock-claude", "vertex", "minimax", "portable", "claude-proxy"),
    "openai-chat": (None, "deepseek", "kimi", "minimax", "strict-template", "portable", "claude-proxy"),
    "openai-responses": (None, "portable", "neutral"),
    "gemini": (None, "gemini-3", "portable"),
    "mistral": (None, "mistral-v3", "mistral-legacy", "portable"),
    "bedrock": (None, "bedrock-mistral", "bedrock-claude", "portable"),
    "pydantic-ai": (None, "neutral", "portable", "anthropic"),
    "langchain": (None, "strict-template", "portable", "gemini"),
}
OPTIONS: tuple[Json, ...] = (
    *({} for _ in range(8)),
    *({"mode": mode} for mode in ("strict", "drop", "sanitize", "rollback")),
    {"live_tail": True},
    {"prefill": True},
    {"thinking": True},
    {"thinking": False},
    {"thinking": "every"},
    {"system": "be brief"},
    {"model": "claude-opus-4-8"},
    {"model": "another-model"},
)


def draw_inputs(form: str) -> Iterator[Json]:
    """Yield new inputs of a format: valid histories after none to three accidents."""
    seen: set[str] = set()
    number = 0
    while len(seen) < CASES_PER_FORMAT:
        chance = Random(f"{SEED} {form} {number}")
        number += 1
        messages: list[Any] = valid(form, chance, turns=chance.choice((1, 2, 3)))
        messages = copy.deepcopy(messages)
        for _ in range(chance.choice((0, 1, 1, 1, 2, 2, 3, 3))):
            try:
                chance.choice(ODD)(form, messages, chance)
            except (AttributeError, TypeError, KeyError, ValueError, StopIteration, IndexError):
                continue  # The remains of an earlier accident cannot be broken in this way.
        case: Json = {
            "format": form,
            "profile": chance.choice(PROFILES[form]),
            "options": dict(chance.choice(OPTIONS)),
            "messages": messages,
            "target": chance.choice(FORMATS) if chance.random() < 0.25 else None,
        }
        if chance.random() < 0.1 and "mode" not in case["options"]:
            case["options"]["outcomes"] = _outcomes(messages, chance)
        try:
            case = json.loads(text_of(case))
        except ValueError:
            continue  # No JSON value: an accident made a cycle.
        text = text_of(case)
        if text not in seen:
            seen.add(text)
            yield case


def _outcomes(messages: list[Any], chance: Random) -> dict[str, str]:
    """Name an end for each id in any part of the history."""
    ids: list[str] = []
    stack: list[Any] = list(messages)
    while stack:
        thing = stack.pop()
        if isinstance(thing, list):
            stack.extend(thing)
        elif isinstance(thing, dict):
            stack.extend(thing.values())
            keys = ("tool_use_id", "tool_call_id", "call_id", "toolUseId", "id")
            ids += [thing[key] for key in keys if isinstance(thing.get(key), str)]
    ends = ("unknown", "interrupted", "denied", "not-started")
    return {each: chance.choice(ends) for each in sorted(set(ids))}


def _write(path: Path, lines: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(lzma.compress("".join(f"{line}\n" for line in lines).encode("ascii"), preset=9))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.golden.record_histories")
    parser.add_argument("--inputs", action="store_true", help="make the inputs again, too")
    is_new = parser.parse_args().inputs
    for form in FORMATS:
        if is_new:
            _write(inputs_path(form), [text_of(case) for case in draw_inputs(form)])
        digests, examples = [], []
        for number, case in enumerate(inputs_of(form)):
            outcome = adapter.repaired(case)
            digests.append(text_of(summary_of(case, outcome)))
            if number % EXAMPLE_EVERY == 0:
                examples.append({"number": number, "case": case, "outcome": outcome})
        _write(digests_path(form), digests)
        examples_path(form).write_text(
            json.dumps(examples, indent=1, sort_keys=True) + "\n", encoding="ascii"
        )
        print(f"{form}: {len(digests)} cases")  # noqa: T201 - for the person at the recording
    size = sum(path.stat().st_size for path in DATA.rglob("*") if path.is_file())
    print(f"{size / 1e6:.1f} MB in {DATA.name}")  # noqa: T201 - as above


if __name__ == "__main__":
    main()
