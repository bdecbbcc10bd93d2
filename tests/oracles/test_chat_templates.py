"""Repaired histories in the chat templates of real models, which raise where they cannot render."""

from __future__ import annotations

import contextlib
import functools
from random import Random
from typing import Any

import pytest

import midstream.history.operations
from tests.oracles.accidents import ODD
from tests.oracles.chat_templates import (
    EXCLUDED,
    LENIENT,
    STRICT,
    can_render,
    lacking,
    raising,
    refusal,
    with_due_prompt,
)
from tests.oracles.measures import broken, lost_words
from tests.oracles.projection import as_chat
from tests.oracles.scripts import WRITERS
from tests.search import tried

QUESTIONS = tried(30)
"""Histories per format and profile; every template that fits the profile renders each."""
UNREPAIRED = 100
"""Limit of broken histories for each template until it raises."""

pytestmark = pytest.mark.skipif(bool(lacking()), reason=lacking() or "they are all here")

TEMPLATES = {
    "strict-template": (*STRICT, *LENIENT),
    "portable": (*STRICT, *LENIENT),
    None: LENIENT,
}
"""Templates that must accept histories repaired for a profile; None is the format's own."""


@pytest.mark.parametrize("form", WRITERS)
@pytest.mark.parametrize("profile", TEMPLATES, ids=str)
def test_templates_render_repaired_histories_without_loss(form: str, profile: str | None) -> None:
    refused: list[Any] = []
    asked = dict.fromkeys(TEMPLATES[profile], 0)
    for number in range(QUESTIONS):
        _, messages, how = broken(form, Random(f"{form}/templates/{profile}/{number}"))
        done = midstream.history.operations.repair_by_name(messages, format=form, profile=profile)
        chat = with_due_prompt(as_chat(form, done.messages))
        names = [name for name in TEMPLATES[profile] if can_render(name, chat)]
        asked.update({name: asked[name] + 1 for name in names})
        refused += [(number, how, verdict) for name in names if (verdict := refusal(name, chat))]
        refused += [(number, how, word) for word in lost_words(messages, [done.messages, done.system])]
    assert refused == []
    assert sum(asked.values()) >= QUESTIONS * len(asked) / 2


def test_every_raising_template_is_used_or_excluded_with_a_reason() -> None:
    assert raising() == {*STRICT, *LENIENT, *EXCLUDED}


@pytest.mark.parametrize("name", [*STRICT, *LENIENT])
def test_each_template_raises_for_some_unrepaired_history(name: str) -> None:
    assert any(
        "TemplateRaisedError" in refusal(name, chat) for chat in unrepaired() if can_render(name, chat)
    )


@functools.cache
def unrepaired() -> list[list[dict[str, Any]]]:
    """Yield the same accidents, and cases that no strict template accepts, as sent by a server without repair."""
    first = {"role": "user", "content": "k1z"}
    shown = [[first, {"role": role, "content": "k2z"}] for role in ("human", "user", "system")]
    shown.append([{"role": "system", "content": "k0z"}, first])
    for number in range(UNREPAIRED):
        _, messages, _ = broken("openai-chat", Random(f"templates/unrepaired/{number}"), accidents=ODD)
        if all(isinstance(message, dict) and message.get("role") for message in messages):
            # Junk that no server could send on.
            with contextlib.suppress(AttributeError, TypeError, KeyError):
                shown.append(with_due_prompt(as_chat("openai-chat", messages)))
    return shown
