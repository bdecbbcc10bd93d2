"""The examples of `docs/guides/network.md` run, and its output of `midstream doctor` is correct."""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from midstream.cli.network import network_lines
from midstream.cli.terminal import COLUMNS, Ink
from midstream.client.client import REMEMBERED
from midstream.client.network_probe import NetworkReport, Pace, Probed, ProbeOutcome, judge
from midstream.client.transport_selection import FIRST_FRAME_S, TransportKind
from midstream.protocol.client_stream import STALL_AFTER_S
from midstream.testing import text
from tests.client.test_network_probe import arrivals
from tests.server.in_thread import in_a_thread
from tests.server.serving import make_app, served

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "network.md").read_text(encoding="utf-8")


@contextlib.asynccontextmanager
async def _serving() -> AsyncIterator[str]:
    async with served(make_app([text("It says hello.")])) as server:
        yield server.url


SCRIPTS = re.findall(r"^```python\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("script", SCRIPTS, ids=["with async", "without async"])
def test_the_script_sends_and_receives(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with in_a_thread(_serving) as url:
        exec(compile(script.replace("http://127.0.0.1:8000", url), "network.md", "exec"), {})  # our own guide
    assert capsys.readouterr().out == "It says hello.\n"


def test_the_guide_shows_the_doctors_output() -> None:
    probed = (
        Probed("websocket", ProbeOutcome.REFUSED, detail="it was answered with HTTP status 403"),
        judge("sse", arrivals(2.4, 2.4, 2.4, 2.4, 2.4), Pace()),
        Probed("poll", ProbeOutcome.WORKS, 5, 0.03),
        Probed("post", ProbeOutcome.WORKS, 1, 0.02),
    )
    report = NetworkReport("https://agents.example", probed, TransportKind.POLL)
    shown = "\n".join(network_lines(report, Ink(is_terminal=False, is_colored=False), COLUMNS))
    assert f"$ midstream doctor https://agents.example\n{shown}\n```" in GUIDE


def test_the_names_and_numbers_are_correct() -> None:
    assert [way for way in TransportKind if f"| `{way}` |" not in GUIDE] == []
    assert REMEMBERED in GUIDE
    assert f"within {FIRST_FRAME_S:g} s" in GUIDE
    assert f"`stall_after_s` ({STALL_AFTER_S:g} s)" in GUIDE
