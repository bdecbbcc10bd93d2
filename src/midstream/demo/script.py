"""The demo's messages, and the scripted model's answers if no real model is installed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from midstream.environment import World
from midstream.history.messages import Text, UserMessage
from midstream.models.responses import ModelRequest
from midstream.testing import ScriptedModel, calls, text
from midstream.testing.scripted_model import Response, steps_since_user


@dataclass(frozen=True)
class Lines:
    """The user's messages, turn by turn."""

    ask: str
    """Gets a long answer, during which the connection is cut."""
    write: str
    """Leads to `write_note`, during which the server is killed."""
    again: str
    """Answered from the recovered history; on request, the tool may run again."""


# Worded so that the local model's guide finds the calls, and a small model the answers.
LINES = Lines(
    ask="Search the files for the word keeper, read lighthouse.txt, and tell me what the file says about the "
    "lighthouse and about Mary Quinn.",
    write="Write a note to keeper.txt about Mary Quinn and the light. Then tell me whether it was written.",
    again="List the files and write the note to keeper.txt again: Mary Quinn kept the light for 41 years. "
    "Which files did you find?",
)

DELAY_S = 0.02
"""Seconds before each word of the scripted model."""

_NOTE = '{"path": "keeper.txt", "text": "Mary Quinn kept the light at Grey Point for 41 years. She wrote a diary."}'
_SCRIPT: dict[str, Sequence[Response]] = {
    LINES.ask: (
        calls(("search_files", '{"word": "keeper"}')),
        calls(("read_file", '{"path": "lighthouse.txt"}')),
        text(
            "The keeper of the lighthouse at Grey Point was Mary Quinn. She kept the light for 41 years, and she "
            "wrote a diary all that time. Her tower was built in 1871, it is 32 metres tall, and its lamp turns once "
            "every ten seconds, so that ships can see it from 20 miles away."
        ),
    ),
    LINES.write: (
        calls(("write_note", _NOTE)),
        text(
            "I began to write keeper.txt, but the outcome is unknown: the note may or may not be there. I will not "
            "write it again before a person has checked."
        ),
    ),
    LINES.again: (
        calls(("list_files", "{}")),
        calls(("write_note", _NOTE)),
        text(
            "I looked first: the note was not finished. Now keeper.txt is written, once, because you asked for it."
        ),
    ),
}


def scripted_model(world: World) -> ScriptedModel:
    """Return a model with fixed answers to the demo's three messages."""
    return ScriptedModel(_response_to, delay_s=DELAY_S, world=world)


def _response_to(request: ModelRequest) -> Response:
    message = next(entry for entry in reversed(request.history.entries) if isinstance(entry, UserMessage))
    words = "".join(part.text for part in message.parts if isinstance(part, Text))
    responses = _SCRIPT.get(words, ())
    number = steps_since_user(request.history)
    return (
        responses[number]
        if number < len(responses)
        else text("This scripted model answers only the three messages of the demo.")
    )
