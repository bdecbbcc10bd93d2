from __future__ import annotations

from midstream.core.messages import History, ToolSpec, UserMessage
from midstream.core.replies import ModelRequest
from midstream.core.reuse.fingerprint import Heard
from midstream.core.reuse.resent import ResentRequest


def test_a_model_that_keeps_nothing_is_asked_with_the_whole_history() -> None:
    tools = (ToolSpec("look"),)
    history = History((UserMessage.of("a"), UserMessage.of("b")))
    tail = History(history.entries[1:])
    resent = ResentRequest("Be brief.", Heard(), tail, lambda: history, tools, "k", "s", is_ephemeral=True)
    assert resent.request() == ModelRequest(
        "Be brief.", history, tools, key="k", session="s", is_ephemeral=True
    )
