from __future__ import annotations

from midstream.core.messages import History, UserMessage
from midstream.core.replies import Finished, ModelRequest, TextDelta
from midstream.core.reuse.fingerprint import Heard
from midstream.core.reuse.resent import ResentRequest
from midstream.runtime.models import Model, RememberingModel, events_of
from midstream.runtime.pool import Pooled
from midstream.store.memory import MemoryStore
from midstream.testing import ScriptedModel, text
from midstream.testing.upstreams import ScriptedUpstream


async def test_the_scripted_model_is_a_model() -> None:
    model: Model = ScriptedModel([text("one two")])
    request = ModelRequest("", History((UserMessage.of("hi"),)))
    assert [event async for event in model.stream(request)] == [
        TextDelta("one"),
        TextDelta(" two"),
        Finished(),
    ]


async def test_a_model_that_keeps_nothing_is_asked_with_the_whole_of_a_resent_request() -> None:
    model = ScriptedModel([text("one")])
    history = History((UserMessage.of("hi"), UserMessage.of("there")))
    tail = History(history.entries[1:])
    request = ResentRequest("", Heard(), tail, lambda: history, session="s")
    assert [event async for event in events_of(model, request)] == [TextDelta("one"), Finished()]
    assert model.requests == [ModelRequest("", history, session="s")]
    assert not isinstance(model, RememberingModel)
    assert isinstance(Pooled(ScriptedUpstream(), MemoryStore()), RememberingModel)
