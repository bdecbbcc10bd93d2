"""Public fakes: a scripted model, stores that fail, worlds that die. For our tests and for yours."""

from midstream.testing.models import Gate, Pause, ScriptedModel, Stall, calls, text
from midstream.testing.turns import records_until_end, run_turn

__all__ = ["Gate", "Pause", "ScriptedModel", "Stall", "calls", "records_until_end", "run_turn", "text"]
