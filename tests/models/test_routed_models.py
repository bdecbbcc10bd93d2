"""Several models behind one: a request reaches the one that it names, and no other."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from midstream.errors import ModelNotFoundError, ModelUnavailableError, UsageError
from midstream.history.messages import History, UserMessage
from midstream.models.model import ModelEvent, ModelRequest
from midstream.models.responses import Resumable, TextDelta
from midstream.models.routed_models import Route, RoutedModels, route_of
from midstream.store.contract import Store
from midstream.store.memory import MemoryStore
from midstream.testing.scripted_model import ScriptedModel, text

HISTORY = History((UserMessage.of("hi"),))


class ResumableScript:
    """A model whose provider keeps its responses, and that counts its uses and records its close."""

    name = "kept"

    def __init__(self) -> None:
        self.resumed: list[str] = []
        self.stopped: list[str] = []
        self.uses = 0
        self.is_closed = False

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelEvent]:
        self.resumed.append(request.resume)
        yield Resumable("token of\nlines")
        for event in text("kept"):
            assert not isinstance(event, ModelUnavailableError)
            yield event  # type: ignore[misc]

    async def stop(self, token: str) -> None:
        self.stopped.append(token)

    def begin_use(self, store: Store) -> None:
        del store
        self.uses += 1

    async def end_use(self) -> None:
        self.uses -= 1

    async def aclose(self) -> None:
        self.is_closed = True


class Unclosable(ResumableScript):
    """A model that cannot be closed."""

    async def end_use(self) -> None:
        raise ModelUnavailableError("it hangs")

    async def aclose(self) -> None:
        raise ModelUnavailableError("it hangs")


def routed(**models: ScriptedModel | ResumableScript) -> RoutedModels:
    return RoutedModels({name: Route(model) for name, model in models.items()})


async def answer_of(model: RoutedModels, name: str) -> str:
    request = ModelRequest("", HISTORY, model=name)
    return "".join([event.text async for event in model.stream(request) if isinstance(event, TextDelta)])


async def test_a_request_is_answered_by_the_model_that_it_names() -> None:
    model = routed(one=ScriptedModel([text("I am one")]), two=ScriptedModel([text("I am two")]))
    assert [await answer_of(model, name) for name in ("two", "one", "")] == [
        "I am two",
        "I am one",
        "I am one",
    ]
    assert (model.default, model.names) == ("one", ("one", "two"))
    with pytest.raises(ModelNotFoundError, match="available: one, two"):
        await answer_of(model, "three")


async def test_a_failing_model_does_not_affect_the_others() -> None:
    model = routed(down=ScriptedModel([[ModelUnavailableError("down")]]), up=ScriptedModel([text("I am up")]))
    with pytest.raises(ModelUnavailableError):
        await answer_of(model, "down")
    assert await answer_of(model, "up") == "I am up"


async def test_a_response_is_resumed_and_stopped_at_the_model_that_began_it() -> None:
    kept, other = ResumableScript(), ResumableScript()
    model = routed(other=other, kept=kept)
    first = await anext(model.stream(ModelRequest("", HISTORY, model="kept")))
    assert isinstance(first, Resumable)
    async for _ in model.stream(ModelRequest("", HISTORY, model="kept", resume=first.token)):
        pass
    await model.stop(first.token)
    await model.stop("gone\ntoken")
    assert kept.resumed == ["", "token of\nlines"]
    assert kept.stopped == ["token of\nlines"]
    assert (other.resumed, other.stopped) == ([], [])


async def test_all_models_are_used_and_closed_also_after_one_that_cannot_be() -> None:
    kept, last = ResumableScript(), ResumableScript()
    model = routed(kept=kept, bad=Unclosable(), plain=ScriptedModel(()), last=last)
    model.begin_use(MemoryStore())
    assert (kept.uses, last.uses) == (1, 1)
    with pytest.raises(ModelUnavailableError):
        await model.end_use()
    with pytest.raises(ModelUnavailableError):
        await model.aclose()
    assert (kept.uses, last.uses, kept.is_closed, last.is_closed) == (0, 0, True, True)


def test_models_need_names() -> None:
    for names in ([], [""], ["a\nb"]):
        with pytest.raises(UsageError, match="need a name each"):
            RoutedModels({name: Route(ScriptedModel(())) for name in names})


def test_a_single_model_answers_every_name() -> None:
    alone = ScriptedModel(())
    assert route_of(alone, "any").model is alone
