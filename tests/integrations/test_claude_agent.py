"""Claude Code through the real SDK, which starts a scripted CLI: `tests/integrations/claude_cli.py`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from midstream.runtime.upstreams import Upstream
from midstream.testing.upstream_contract import Told, Trait, UpstreamContract
from tests.house.source import ROOT
from tests.integrations.scripted_peer import Orders

pytest.importorskip("claude_agent_sdk", reason="the Claude Agent SDK is not installed")

from claude_agent_sdk import ClaudeAgentOptions

from midstream.integrations.claude_agent import Claude


class Cli:
    """The scripted CLI as a peer of the contract, in a folder of its own."""

    lacks = frozenset({Trait.KEYS})

    def __init__(self, folder: Path) -> None:
        self.orders = Orders(folder / "orders")
        self.cwd = folder / "project"
        self.cwd.mkdir()
        self.home = folder / "home"
        self.program = folder / "claude"
        self.program.write_text(
            f'#!/bin/sh\nPYTHONPATH="{ROOT}" exec "{sys.executable}" -m tests.integrations.claude_cli "$@"\n'
        )
        self.program.chmod(0o755)

    def options(self, **more: Any) -> ClaudeAgentOptions:  # noqa: ANN401 - the SDK's options
        env = {"SCRIPTED_CLAUDE": str(self.orders.folder), "CLAUDE_CONFIG_DIR": str(self.home)}
        return ClaudeAgentOptions(cli_path=self.program, env=env, **more)

    def upstream(self) -> Upstream:
        return Claude("opus", cwd=self.cwd, options=self.options())

    def told(self) -> list[Told]:
        return [Told(line["agent"], line["text"]) for line in self.orders.recorded("told")]

    def runs(self) -> int:
        return self.orders.runs()

    def expire(self, agent: str) -> None:
        for transcript in self.home.glob(f"projects/*/{agent}.jsonl"):
            transcript.unlink()

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


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    return Cli(tmp_path)


class TestClaude(UpstreamContract):
    @pytest.fixture
    def peer(self, cli: Cli) -> Cli:
        return cli
