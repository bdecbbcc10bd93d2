"""The agent that is served: put yours here."""

from midstream import Agent
from midstream.testing import ScriptedModel, text

agent = Agent(ScriptedModel(lambda _request: text("Hello from one of three servers.")), name="example")
