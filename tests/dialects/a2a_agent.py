"""An agent that asks two questions, one after the other, and notes their answers, for `midstream serve`."""

from __future__ import annotations

import json

from midstream.engine.agent import Agent
from midstream.history.messages import Step
from midstream.models.responses import ModelRequest
from midstream.testing.scripted_model import Response, ScriptedModel, calls, steps_since_user, text
from midstream.tools.function_tools import question
from tests.dialects.chat_agent import note

QUESTIONS = ("First?", "Second?")


def answer(request: ModelRequest) -> Response:
    """Return the next response for the state of a request."""
    number = steps_since_user(request.history)
    if number < len(QUESTIONS):
        return calls(("ask_user", json.dumps({"question": QUESTIONS[number]})))
    steps = [each for each in request.history.entries if isinstance(each, Step)][-number:]
    answers = " ".join(result.content for step in steps[: len(QUESTIONS)] for result in step.results)
    if number == len(QUESTIONS):
        return calls(("note", json.dumps({"what": answers})))
    return text(f"Noted: {answers}")


agent = Agent(ScriptedModel(answer), tools=[note, question()], name="asking")
