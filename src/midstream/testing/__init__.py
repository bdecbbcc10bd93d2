"""Public fakes: a scripted model, stores that fail, worlds that die. For our tests and for yours."""

from midstream.testing.scripted_model import Gate, Pause, ScriptedModel, Stall, calls, text
from midstream.testing.store_fakes import FailingStore
from midstream.testing.turns import records_until_end, run_turn
from midstream.testing.worlds import Crashed, FakeWorld, KillingWorld

__all__ = [
    "Crashed",
    "FailingStore",
    "FakeWorld",
    "Gate",
    "KillingWorld",
    "Pause",
    "ScriptedModel",
    "Stall",
    "calls",
    "records_until_end",
    "run_turn",
    "text",
]
