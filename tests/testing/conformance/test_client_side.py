"""The scripts for a client, played to ours."""

from __future__ import annotations

import pytest

from midstream.testing.conformance.client_side import ClientTrial
from midstream.testing.conformance.scripts import Script, scripts
from midstream.testing.conformance.server_side import ScriptOutcome


@pytest.mark.parametrize("script", scripts("client"), ids=lambda script: script.name)
def test_our_client_passes_every_script(script: Script) -> None:
    assert ClientTrial().run(script) == ScriptOutcome(script.name, script.clauses)


@pytest.mark.parametrize(
    ("steps", "problem"),
    [
        (({"sent": [{"type": "open"}]},), "0 frames were sent, not 1: []"),
        (({"connected": True}, {"sent": [{"type": "close"}]}), "frame 0: type is 'open', not 'close'"),
        (({"delivered": ["1-1"]},), "the application received []; expected ['1-1']"),
        (({"connected": True}, {"waiting": True}), "the client is not waiting"),
        (({"connected": True}, {"dropped": True}), "the connection was kept"),
        (({"detach": True}, {"connected": True}), "no connection is expected"),
        (({"ended": None},), "the stream has not ended"),
        (({"detach": True}, {"ended": "protocol"}), "the stream ended with None, not 'protocol'"),
        (({"has_checkpoint": False},), "has_checkpoint is True"),
        (({"sing": True},), "the script has an unknown step: ['sing']"),
    ],
)
def test_a_difference_is_reported(steps: tuple[dict[str, object], ...], problem: str) -> None:
    outcome = ClientTrial().run(Script("a script", (), steps))
    assert (outcome.problem, outcome.step, outcome.has_passed) == (problem, len(steps), False)


@pytest.mark.parametrize(
    ("steps", "problem"),
    [
        (({"connected": True},), "1 frames were sent, not 0: ['open']"),
        (
            (
                {"connected": True},
                {
                    "receive": {
                        "type": "welcome",
                        "stream": "$stream",
                        "event_id": "0-0",
                        "resume_from": "0-0",
                    }
                },
                {
                    "receive": {
                        "type": "events",
                        "events": [
                            {
                                "id": "1-1",
                                "record": {
                                    "type": "stream_opened",
                                    "stream": "$stream",
                                    "secret_digest": "d",
                                },
                            }
                        ],
                    }
                },
                {"sent": [{"type": "open"}]},
            ),
            "after the last step, the application had received ['1-1']",
        ),
    ],
)
def test_frames_and_events_without_a_step_are_reported(
    steps: tuple[dict[str, object], ...], problem: str
) -> None:
    outcome = ClientTrial().run(Script("a script", (), steps))
    assert (outcome.problem, outcome.step) == (problem, len(steps) + 1)
