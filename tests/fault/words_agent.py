"""An agent whose answer takes a second and a half, for a server that is killed meanwhile."""

from __future__ import annotations

from midstream.engine.agent import Agent
from midstream.testing.scripted_model import ScriptedModel, text

WORDS = " ".join(f"word{number}" for number in range(150))
agent = Agent(ScriptedModel([text(WORDS)], delay_s=0.01))
