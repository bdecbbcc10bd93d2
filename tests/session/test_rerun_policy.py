"""Rules for running a call again."""

from __future__ import annotations

import pytest

from midstream.session.calls import (
    CallState,
    OnDoubt,
)
from midstream.session.rerun_policy import RERUNS_MAX, CallVerdict, judge
from tests.session.test_calls import DONE, _call
from tests.session.turn_stories import at_client, reads, writes
from tests.spec import spec


@spec("TURN-13")
@pytest.mark.parametrize(
    ("call", "verdict"),
    [
        (_call(writes("a")), CallVerdict.START),
        (_call(writes("a"), runs=1, epoch=5), CallVerdict.LEAVE),
        (_call(writes("a"), runs=1, epoch=4), CallVerdict.GIVE_UP),
        (_call(writes("a"), runs=1, epoch=4, result=DONE), CallVerdict.DONE),
        (_call(reads("a"), runs=1, epoch=4), CallVerdict.RERUN),
        (_call(reads("a"), runs=RERUNS_MAX, epoch=4), CallVerdict.RERUN),
        (_call(reads("a"), runs=RERUNS_MAX + 1, epoch=4), CallVerdict.GIVE_UP),
        (_call(reads("a"), runs=RERUNS_MAX + 1, epoch=5), CallVerdict.LEAVE),
        (_call(writes("a", OnDoubt.RERUN_WITH_KEY), runs=1, epoch=4), CallVerdict.RERUN),
        (_call(at_client("a"), runs=1, epoch=4), CallVerdict.LEAVE),
    ],
)
def test_the_node_of_epoch_five_decides(call: CallState, verdict: CallVerdict) -> None:
    assert judge(call, epoch=5) is verdict
