"""Agents behind the Agent Client Protocol, through the real package on both sides: `tests/integrations/acp_agent.py`."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from midstream.runtime.upstreams import Upstream
from midstream.testing.upstream_contract import Told, Trait, UpstreamContract
from tests.house.source import ROOT
from tests.integrations.scripted_peer import Orders

pytest.importorskip("acp", reason="the Agent Client Protocol's package is not installed")

from midstream.integrations.acp import AcpAgent


LAUNCHER = ROOT / "tests" / "integrations" / "acp_launcher.py"
ENV = {**os.environ, "PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Where scripted agents can be had quickly."""
    with tempfile.TemporaryDirectory() as folder:
        address = f"{folder}/agents"
        command = [sys.executable, "-m", "tests.integrations.acp_agent", "--serve", address]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=ENV, text=True
        ) as server:
            assert server.stdin is not None
            assert server.stdout is not None
            assert server.stdout.readline() == "ready\n"
            yield address
            server.stdin.close()


class Program:
    """The scripted agent as a peer of the contract, in a folder of its own."""

    lacks: frozenset[Trait] = frozenset()

    def __init__(self, folder: Path, address: str, *can: str) -> None:
        self.orders = Orders(folder / "orders")
        self.cwd = folder / "project"
        self.cwd.mkdir()
        self.command = [sys.executable, "-E", "-S", str(LAUNCHER), address, str(self.orders.folder), *can]

    def agent(self, **more: object) -> AcpAgent:
        return AcpAgent(self.command, **{"cwd": self.cwd, **more})  # type: ignore[arg-type] # options of each test

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
    def peer(self, tmp_path: Path, address: str) -> Program:
        return Program(tmp_path, address, "resume", "load")


class TestAcpThatLoads(UpstreamContract):
    @pytest.fixture
    def peer(self, tmp_path: Path, address: str) -> Program:
        return Program(tmp_path, address, "load")
