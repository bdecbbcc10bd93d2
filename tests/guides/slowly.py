"""An agent whose every answer stops after its first word until the file `go` is in the current folder.

`midstream serve tests.guides.slowly:agent` serves the agent that the variable GUIDE_AGENT names
(`MODULE:AGENT`). The file `begun` is in the current folder as soon as an answer has its first word.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import AsyncIterator
from typing import Any

from midstream import Agent, Model
from midstream.environment import World
from midstream.models.responses import ModelEvent, ModelRequest, TextDelta

LOOK_S = 0.005


class PausingModel:
    """A model in front of the guide's."""

    def __init__(self, model: Model) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - any attribute of the model
        return getattr(self._model, name)

    def stream(self, request: ModelRequest) -> AsyncIterator[ModelEvent]:
        return _slowed(self._model.stream(request))


async def _slowed(events: AsyncIterator[ModelEvent]) -> AsyncIterator[ModelEvent]:
    async for event in events:
        yield event
        if isinstance(event, TextDelta):
            os.close(os.open("begun", os.O_CREAT))
            while not os.access("go", os.F_OK):
                await World().sleep(LOOK_S)


def _find() -> Agent:
    module, _, name = os.environ["GUIDE_AGENT"].partition(":")
    agent: Agent = getattr(importlib.import_module(module), name)
    agent.model = PausingModel(agent.model)
    return agent


if "GUIDE_AGENT" in os.environ:
    agent = _find()
