"""Agent programs that people run, unmodified, as clients of the gateway: their settings, and how a message is sent."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from msgspec import Struct

from tests.programs.gateway_process import OFFLINE, TOKEN
from tests.programs.programs import CODEX_SETTINGS, Place

MCP_SERVER = Path(__file__).parents[1] / "programs" / "mcp_server.py"
INSTALLED = Path(os.environ.get("AGENT_PROGRAMS", ".venv/agents")).resolve()


class HostProgram(Struct, frozen=True):
    """One program.

    Args:
        path: The executable.
        arguments: Those that send a message; the second value is whether it continues the newest conversation.
        env: Variables by which it finds the gateway at this URL.
        prepare: Writes its settings for the gateway at this URL.
        has_sub_agents: Its model is offered a tool that starts a sub-agent.
    """

    name: str
    path: Callable[[], Path]
    arguments: Callable[[str, bool], list[str]]
    env: Callable[[Place, str], Mapping[str, str]]
    prepare: Callable[[Place, str], None]
    has_sub_agents: bool = False

    @property
    def is_installed(self) -> bool:
        """Whether it can be run here."""
        try:
            return self.path().exists()
        except (FileNotFoundError, StopIteration):
            return False


def environment(program: HostProgram, place: Place, url: str) -> dict[str, str]:
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


def _claude_env(_: Place, url: str) -> Mapping[str, str]:
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


def _codex_settings(place: Place, url: str) -> None:
    folder = place.home / ".codex"
    folder.mkdir(parents=True, exist_ok=True)
    settings = CODEX_SETTINGS.format(url=url, policy="never", sandbox="danger-full-access")
    server = {"command": sys.executable, "args": [str(MCP_SERVER)]}
    lines = [f"{name} = {json.dumps(value)}" for name, value in server.items()]
    (folder / "config.toml").write_text("\n".join([settings, "[mcp_servers.weather]", *lines, ""]))


def _codex_env(place: Place, _: str) -> Mapping[str, str]:
    return {"CODEX_HOME": str(place.home / ".codex"), "SCRIPTED_KEY": TOKEN}


def _opencode_arguments(words: str, is_continued: bool) -> list[str]:  # noqa: FBT001 - see HostProgram
    return ["run", *(["-c"] if is_continued else []), words]


def _opencode_settings(place: Place, url: str) -> None:
    folder = place.home / ".config" / "opencode"
    folder.mkdir(parents=True, exist_ok=True)
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "gateway",
        "options": {"baseURL": f"{url}/v1", "apiKey": TOKEN},
        "models": {"m": {"name": "m", "limit": {"context": 200000, "output": 8000}}},
    }
    settings = {
        "model": "gateway/m",
        "small_model": "gateway/m",
        "autoupdate": False,
        "share": "disabled",
        "provider": {"gateway": provider},
    }
    (folder / "opencode.json").write_text(json.dumps(settings))


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
        ),
        HostProgram(
            "codex",
            lambda: next((INSTALLED / "site" / "codex_cli_bin" / "bin").iterdir()),
            _codex_arguments,
            _codex_env,
            _codex_settings,
        ),
        HostProgram(
            "opencode",
            lambda: INSTALLED / "node" / "node_modules" / ".bin" / "opencode",
            _opencode_arguments,
            lambda place, url: {},
            _opencode_settings,
            has_sub_agents=True,
        ),
    )
}
