"""Public fakes: a scripted model, stores that fail, worlds that die. For our tests and for yours."""

from midstream.testing.models import Gate, Pause, ScriptedModel, Stall, calls, text

__all__ = ["Gate", "Pause", "ScriptedModel", "Stall", "calls", "text"]
