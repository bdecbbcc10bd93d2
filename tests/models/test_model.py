from __future__ import annotations

from midstream.history.messages import History, UserMessage
from midstream.models.model import Model
from midstream.models.responses import Finished, ModelRequest, TextDelta
from midstream.testing import ScriptedModel, text


async def test_the_scripted_model_is_a_model() -> None:
    model: Model = ScriptedModel([text("one two")])
    request = ModelRequest("", History((UserMessage.of("hi"),)))
    assert [event async for event in model.stream(request)] == [
        TextDelta("one"),
        TextDelta(" two"),
        Finished(),
    ]
