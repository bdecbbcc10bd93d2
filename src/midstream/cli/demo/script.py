"""What the user says in the demo, and what the scripted model answers where no real one is installed."""

from __future__ import annotations

from collections.abc import Sequence

from midstream.core.messages import Text, UserMessage
from midstream.core.replies import ModelRequest
from midstream.testing import ScriptedModel, calls, text
from midstream.testing.models import Reply, exchanges_since_user

ASK = "Search the files for the word keeper, read lighthouse.txt, and tell me about her."
"""Answered at length: the connection is cut in the middle."""
WRITE = "Write a note to keeper.txt about Mary Quinn and the light."
"""The server is killed in the middle of the tool."""
CHECK = "List the files, and tell me what spring tides are."
"""Answered by the model from the history that recovery left."""

DELAY_S = 0.02
"""Seconds before each word of the scripted model."""

_SCRIPT: dict[str, Sequence[Reply]] = {
    ASK: (
        calls(("search_files", '{"word": "keeper"}')),
        calls(("read_file", '{"path": "lighthouse.txt"}')),
        text(
            "The keeper of the lighthouse at Grey Point was Mary Quinn. She kept the light for 41 years, and she "
            "wrote a diary all that time. Her tower was built in 1871, it is 32 metres tall, and its lamp turns once "
            "every ten seconds, so that ships can see it from 20 miles away."
        ),
    ),
    WRITE: (
        calls(
            (
                "write_note",
                (
                    '{"path": "keeper.txt", "text": "Mary Quinn kept the light at Grey Point for 41 years. '
                    'She wrote a diary."}'
                ),
            )
        ),
        text(
            "I began to write keeper.txt, but the outcome is unknown: the note may or may not be there. I will not "
            "write it again before somebody has looked."
        ),
    ),
    CHECK: (
        calls(("list_files", "{}")),
        text(
            "I looked at the folder: these are all the files there are. Spring tides come with the new moon and the "
            "full moon, and they are the highest."
        ),
    ),
}


def scripted_model() -> ScriptedModel:
    """Return a model that knows the demo's three messages by heart."""
    return ScriptedModel(_reply_to, delay_s=DELAY_S)


def _reply_to(request: ModelRequest) -> Reply:
    said = next(entry for entry in reversed(request.history.entries) if isinstance(entry, UserMessage))
    words = "".join(part.text for part in said.parts if isinstance(part, Text))
    replies = _SCRIPT.get(words, ())
    number = exchanges_since_user(request.history)
    return (
        replies[number] if number < len(replies) else text("I only know the demo's three messages by heart.")
    )
