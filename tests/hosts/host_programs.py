"""Agent programs, unmodified, as clients of the gateway: their settings, and the command that sends a
message.

The settings are the blocks of the guide, with another address and another key.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from msgspec import Struct

from tests.house.source import ROOT
from tests.programs.agent_programs import RunFolders
from tests.programs.gateway_process import OFFLINE, TOKEN

CODEX_KEY = "MIDSTREAM_KEY"
"""The variable of the key, as the guide has it."""
FEW_TOKENS = 12
"""Tokens of a conversation above which Codex compacts it: fewer than each answer of the model server counts.
"""
MCP_SERVER = Path(__file__).parents[1] / "programs" / "weather_server.py"
GUIDE = ROOT / "docs" / "guides" / "gateway.md"
INSTALLED = Path(os.environ.get("AGENT_PROGRAMS", ".venv/agents")).resolve()


class HostProgram(Struct, frozen=True):
    """One program.

    Args:
        path: The executable.
        arguments: Those that send a message; the second value is whether it continues the newest conversation.
        env: Variables that point it to the gateway at this URL.
        prepare: Writes its settings for the gateway at this URL.
        has_sub_agents: Its model is offered a tool that starts a sub-agent.
        compacts: Lets the conversation be compacted before the next message: returns the text to send for that, or ""
            for nothing. None if no setting or command of it does that without a terminal.
        requests_titles: It requests a title for a conversation.
        keeps_cut_words: It shows the text before a cut, and then the whole repeated answer.
    """

    name: str
    path: Callable[[], Path]
    arguments: Callable[[str, bool], list[str]]
    env: Callable[[RunFolders, str], Mapping[str, str]]
    prepare: Callable[[RunFolders, str], None]
    has_sub_agents: bool = False
    compacts: Callable[[RunFolders], str] | None = None
    requests_titles: bool = False
    keeps_cut_words: bool = False

    def version(self) -> str:
        """Return the reported version."""
        done = subprocess.run(
            [self.path(), "--version"], capture_output=True, text=True, timeout=60, check=True
        )
        return next(word for word in done.stdout.split() if word[0].isdigit())

    @property
    def is_installed(self) -> bool:
        """Return whether it can run here."""
        try:
            return self.path().exists()
        except (FileNotFoundError, StopIteration):
            return False


def environment(program: HostProgram, place: RunFolders, url: str) -> dict[str, str]:
    """Return all variables of a program that sends a message."""
    return {
        **os.environ,
        **OFFLINE,
        "HOME": str(place.home),
        "XDG_CONFIG_HOME": str(place.home / ".config"),
        "XDG_DATA_HOME": str(place.home / ".local" / "share"),
        "XDG_STATE_HOME": str(place.home / ".local" / "state"),
        "XDG_CACHE_HOME": str(place.home / ".cache"),
        **program.env(place, url),
    }


def guide_block(heading: str, language: str, url: str) -> str:
    """Return the block of the guide below a heading, for the gateway at this URL."""
    page = GUIDE.read_text(encoding="utf-8")
    section = page.partition(f"\n### {heading}\n")[2].partition("\n### ")[0]
    block = section.partition(f"```{language}\n")[2].partition("```")[0]
    assert "http://127.0.0.1:8100" in block, f"the guide has no such block for {heading}"
    return block.replace("http://127.0.0.1:8100", url).replace("KEY", TOKEN)


def _claude_env(_: RunFolders, url: str) -> Mapping[str, str]:
    return {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": TOKEN,
        "DISABLE_AUTOUPDATER": "1",
        "IS_SANDBOX": "1",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }


def _claude_arguments(words: str, is_continued: bool) -> list[str]:  # noqa: FBT001 - see HostProgram
    return ["-p", *(["--continue"] if is_continued else []), "--dangerously-skip-permissions", words]


def _codex_arguments(words: str, is_continued: bool) -> list[str]:  # noqa: FBT001 - see HostProgram
    return ["exec", *(["resume", "--last"] if is_continued else []), "--skip-git-repo-check", words]


def _codex_settings(place: RunFolders, url: str) -> None:
    folder = place.home / ".codex"
    folder.mkdir(parents=True, exist_ok=True)
    block = guide_block("Codex", "toml", url).replace(f"MIDSTREAM_{TOKEN}", CODEX_KEY)
    rights = ['approval_policy = "never"', 'sandbox_mode = "danger-full-access"']
    server = {"command": sys.executable, "args": [str(MCP_SERVER)]}
    lines = [f"{name} = {json.dumps(value)}" for name, value in server.items()]
    (folder / "config.toml").write_text("\n".join([*rights, block, "[mcp_servers.weather]", *lines, ""]))


def _codex_compacts(place: RunFolders) -> str:
    file = place.home / ".codex" / "config.toml"
    file.write_text(f"model_auto_compact_token_limit = {FEW_TOKENS}\n{file.read_text()}")
    return ""


def _codex_env(place: RunFolders, _: str) -> Mapping[str, str]:
    return {"CODEX_HOME": str(place.home / ".codex"), CODEX_KEY: TOKEN}


def _opencode_arguments(words: str, is_continued: bool) -> list[str]:  # noqa: FBT001 - see HostProgram
    return ["run", "-m", "midstream/agent", *(["-c"] if is_continued else []), words]


def _opencode_settings(place: RunFolders, url: str) -> None:
    folder = place.home / ".config" / "opencode"
    folder.mkdir(parents=True, exist_ok=True)
    block = json.loads(guide_block("opencode", "json", url))
    (folder / "opencode.json").write_text(json.dumps({**block, "autoupdate": False, "share": "disabled"}))


def _continue_arguments(words: str, is_continued: bool) -> list[str]:  # noqa: FBT001 - see HostProgram
    return ["-p", "--auto", *(["--resume"] if is_continued else []), words]


def _continue_settings(place: RunFolders, url: str) -> None:
    folder = place.home / ".continue"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(guide_block("Continue", "yaml", url))


PROGRAMS = {
    program.name: program
    for program in (
        HostProgram(
            "claude",
            lambda: INSTALLED / "site" / "claude_agent_sdk" / "_bundled" / "claude",
            _claude_arguments,
            _claude_env,
            lambda place, url: None,
            has_sub_agents=True,
            compacts=lambda place: "/compact",
        ),
        HostProgram(
            "codex",
            lambda: next((INSTALLED / "site" / "codex_cli_bin" / "bin").iterdir()),
            _codex_arguments,
            _codex_env,
            _codex_settings,
            compacts=_codex_compacts,
        ),
        HostProgram(
            "opencode",
            lambda: INSTALLED / "node" / "node_modules" / ".bin" / "opencode",
            _opencode_arguments,
            lambda place, url: {},
            _opencode_settings,
            has_sub_agents=True,
            requests_titles=True,
        ),
        HostProgram(
            "continue",
            lambda: INSTALLED / "node" / "node_modules" / ".bin" / "cn",
            _continue_arguments,
            lambda place, url: {"CONTINUE_TELEMETRY_ENABLED": "0"},
            _continue_settings,
            keeps_cut_words=True,
        ),
    )
}
