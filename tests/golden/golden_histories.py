"""Read the golden histories: inputs and outcomes, one file for each format."""

from __future__ import annotations

import hashlib
import json
import lzma
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Json = dict[str, Any]

DATA = Path(__file__).parent / "data"
FORMATS = (
    "anthropic",
    "openai-chat",
    "openai-responses",
    "gemini",
    "mistral",
    "bedrock",
    "pydantic-ai",
    "langchain",
)
CASES_PER_FORMAT = 2500


def text_of(value: object) -> str:
    """Return canonical JSON; ASCII, because a history may contain half a surrogate pair."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def digest_of(outcome: Json) -> str:
    return hashlib.sha256(text_of(outcome).encode()).hexdigest()[:16]


def inputs_path(form: str) -> Path:
    return DATA / "histories" / f"{form}.inputs.xz"


def digests_path(form: str) -> Path:
    return DATA / "histories" / f"{form}.digests.xz"


def examples_path(form: str) -> Path:
    return DATA / "histories" / f"{form}.examples.json"


def inputs_of(form: str) -> Iterator[Json]:
    """Yield the cases in their order."""
    with lzma.open(inputs_path(form), "rt", encoding="ascii") as lines:
        for line in lines:
            yield json.loads(line)


def digests_of(form: str) -> list[Json]:
    """Return, for each case, the digest of its outcome and its edits in short."""
    with lzma.open(digests_path(form), "rt", encoding="ascii") as lines:
        return [json.loads(line) for line in lines]


def summary_of(case: Json, outcome: Json) -> Json:
    """Return the compared values: a digest of everything, and the edits, refusals and codes in full."""
    shown: Json = {
        key: outcome[key] for key in ("edits", "refused", "error", "same", "advice") if key in outcome
    }
    # The input is part of the digest: a damaged file of inputs must not go unnoticed.
    return {"digest": digest_of({"case": case, "outcome": outcome}), **shown}
