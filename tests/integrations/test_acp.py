"""Agents behind the Agent Client Protocol, through the real package on both sides: `tests/integrations/acp_agent.py`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from midstream.runtime.upstreams import Upstream
from midstream.testing.upstream_contract import Told, Trait, UpstreamContract
from tests.house.source import ROOT
from tests.integrations.scripted_peer import Orders

pytest.importorskip("acp", reason="the Agent Client Protocol's package is not installed")

from midstream.integrations.acp import AcpAgent


class Program:
    """The scripted agent as a peer of the contract, in a folder of its own."""

    lacks: frozenset[Trait] = frozenset()

    def __init__(self, folder: Path, *can: str) -> None:
        self.orders = Orders(folder / "orders")
        self.cwd = folder / "project"
        self.cwd.mkdir()
        self.command = [sys.executable, "-m", "tests.integrations.acp_agent", str(self.orders.folder), *can]

    def agent(self, **more: object) -> AcpAgent:
        given: dict[str, object] = {"cwd": self.cwd, "env": {"PYTHONPATH": str(ROOT)}, **more}
        return AcpAgent(self.command, **given)  # type: ignore[arg-type] # options of each test

    def upstream(self) -> Upstream:
        return self.agent()

    def told(self) -> list[Told]:
        return [Told(line["agent"], line["text"], line["key"]) for line in self.orders.recorded("told")]

    def runs(self) -> int:
        return self.orders.runs()

    def expire(self, agent: str) -> None:
        self.orders.lift(f"talk-{agent}")

    def be_busy(self, agent: str) -> None:
        self.orders.declare(f"busy-{agent}")

    def hang(self) -> None:
        self.orders.order("hang")

    def echo_wrong_id(self) -> None:
        self.orders.order("wrong")

    def die_mid_stream(self) -> None:
        self.orders.order("die")

    def refuse_key(self) -> None:
        self.orders.declare("refused")

    def run_tool(self, name: str, arguments: str, content: str) -> None:
        self.orders.order("tool", {"name": name, "arguments": arguments, "content": content})


class TestAcpThatResumes(UpstreamContract):
    @pytest.fixture
    def peer(self, tmp_path: Path) -> Program:
        return Program(tmp_path, "resume", "load")


class TestAcpThatLoads(UpstreamContract):
    @pytest.fixture
    def peer(self, tmp_path: Path) -> Program:
        return Program(tmp_path, "load")
