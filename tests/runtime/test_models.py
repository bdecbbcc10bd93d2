from __future__ import annotations

from midstream.core.messages import History, UserMessage
from midstream.core.replies import Finished, ModelRequest, TextDelta
from midstream.runtime.models import Model
from midstream.testing import ScriptedModel, text


async def test_the_scripted_model_is_a_model() -> None:
    model: Model = ScriptedModel([text("one two")])
    request = ModelRequest("", History((UserMessage.of("hi"),)))
    assert [event async for event in model.stream(request)] == [
        TextDelta("one"),
        TextDelta(" two"),
        Finished(),
    ]
