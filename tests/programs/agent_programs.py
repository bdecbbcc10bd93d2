"""Real agent programs, each behind the gateway and pointed at the scripted model server."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace


class RunFolders(Struct, frozen=True):
    """The folders of one run, and the model server's address.

    Args:
        folder: All that programs write is below it; `home` is their home, `work` their working folder.
    """

    folder: Path
    model_url: str

    @property
    def home(self) -> Path:
        """Return the programs' home."""
        return self.folder / "home"

    @property
    def work(self) -> Path:
        """Return the folder that programs work in."""
        return self.folder / "work"


class AgentProgram(Struct, frozen=True):
    """One agent program.

    Args:
        upstream: The gateway's `--upstream` and its options.
        env: Added to the environment of the gateway.
        prepare: Writes the program's settings.
        is_agent: Recognizes a process of the agent by its command line.
        sessions: Folders below the home in which the program keeps its conversations.
        asking: The same as `upstream`, set so that the program requests a permission for each command; None where it
            cannot.
        prepare_asking: Writes other settings for that.
        other_version: Options of the gateway for another version of the program; empty where none is installed.
    """

    name: str
    upstream: Callable[[RunFolders], list[str]]
    env: Callable[[RunFolders], Mapping[str, str]]
    prepare: Callable[[RunFolders], None]
    is_agent: Callable[[str], bool]
    sessions: tuple[str, ...]
    asking: Callable[[RunFolders], list[str]] | None = None
    prepare_permissions: Callable[[RunFolders], None] | None = None
    other_version: Callable[[], list[str]] = list

    def with_permission_requests(self) -> AgentProgram | None:
        """Return the program set so that it requests permissions, or None."""
        if self.asking is None:
            return None
        return replace(self, upstream=self.asking, prepare=self.prepare_permissions or self.prepare)


def _nothing(_: RunFolders) -> None:
    pass


# The gateway gives an ACP agent few variables of its own; its command sets the others.
OFFLINE = {"HTTPS_PROXY": "http://127.0.0.1:9", "NO_PROXY": "127.0.0.1,localhost"}


def _claude_env(place: RunFolders) -> Mapping[str, str]:
    return {
        "ANTHROPIC_BASE_URL": place.model_url,
        "ANTHROPIC_API_KEY": "scripted",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        "IS_SANDBOX": "1",
    }


def _other_claude() -> list[str]:
    """Return the program of the version that claude-code-acp brings along."""
    adapter = shutil.which("claude-code-acp")
    if adapter is None:
        return []
    modules = next(each for each in Path(adapter).resolve().parents if each.name == "node_modules")
    program = modules / "@anthropic-ai" / "claude-agent-sdk" / "cli.js"
    return ["--agent-path", str(program)] if os.access(program, os.X_OK) else []


def _with_env(command: str, env: Mapping[str, str]) -> list[str]:
    words = ["env", *(f"{name}={value}" for name, value in {**env, **OFFLINE}.items()), command]
    return ["--upstream", f"acp:{shlex.join(words[:-1])} {command}"]


CODEX_SETTINGS = """
model = "gpt-5-codex"
model_provider = "scripted"
approval_policy = "{policy}"
sandbox_mode = "{sandbox}"

[model_providers.scripted]
name = "scripted"
base_url = "{url}/v1"
env_key = "SCRIPTED_KEY"
wire_api = "responses"
"""
FEW_RETRIES = "request_max_retries = 2\nstream_max_retries = 2\n"


def _codex_settings(place: RunFolders, policy: str = "never", sandbox: str = "danger-full-access") -> None:
    folder = place.home / ".codex"
    folder.mkdir(parents=True, exist_ok=True)
    settings = CODEX_SETTINGS.format(url=place.model_url, policy=policy, sandbox=sandbox)
    (folder / "config.toml").write_text(settings + FEW_RETRIES)


def _codex_permission_settings(place: RunFolders) -> None:
    _codex_settings(place, "on-request", "read-only")


def _codex_env(place: RunFolders) -> Mapping[str, str]:
    return {"CODEX_HOME": str(place.home / ".codex"), "SCRIPTED_KEY": "scripted"}


def _gemini_settings(place: RunFolders) -> None:
    folder = place.home / ".gemini"
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "model": {"name": "gemini-2.5-flash"},  # Otherwise a model chooses one, in requests of its own.
        "security": {"auth": {"selectedType": "gemini-api-key"}, "folderTrust": {"enabled": False}},
        "general": {"disableAutoUpdate": True, "enableAutoUpdate": False},
        "privacy": {"usageStatisticsEnabled": False},
        "telemetry": {"enabled": False},
    }
    (folder / "settings.json").write_text(json.dumps(settings))


def _gemini_env(place: RunFolders) -> Mapping[str, str]:
    return {
        "GEMINI_API_KEY": "scripted",
        "GEMINI_MODEL": "gemini-2.5-flash",
        "GOOGLE_GEMINI_BASE_URL": place.model_url,
        "GEMINI_CLI_TRUST_WORKSPACE": "true",
    }


def _opencode_permission_settings(place: RunFolders) -> None:
    _opencode_settings(place, permission={"bash": "ask"})


def _opencode_settings(place: RunFolders, **more: object) -> None:
    folder = place.home / ".config" / "opencode"
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "$schema": "https://opencode.ai/config.json",
        "model": "scripted/m",
        "small_model": "scripted/m",
        "autoupdate": False,
        "share": "disabled",
        "provider": {
            "scripted": {
                "npm": "@ai-sdk/openai-compatible",
                "name": "scripted",
                "options": {"baseURL": f"{place.model_url}/v1", "apiKey": "scripted"},
                "models": {"m": {"name": "m", "limit": {"context": 200000, "output": 8000}}},
            }
        },
        **more,
    }
    (folder / "opencode.json").write_text(json.dumps(settings))


PROGRAMS: Mapping[str, AgentProgram] = {
    program.name: program
    for program in (
        AgentProgram(
            "claude",
            lambda _: ["--upstream", "claude", "--permission-mode", "bypassPermissions"],
            _claude_env,
            _nothing,
            lambda line: "stream-json" in line,
            (".claude/projects",),
            asking=lambda _: ["--upstream", "claude"],
            other_version=_other_claude,
        ),
        AgentProgram(
            "codex",
            lambda _: ["--upstream", "codex", "--sandbox", "full-access"],
            _codex_env,
            _codex_settings,
            lambda line: "app-server" in line,
            (".codex/sessions",),
            asking=lambda _: ["--upstream", "codex", "--sandbox", "read-only"],
            prepare_permissions=_codex_permission_settings,
        ),
        AgentProgram(
            "gemini",
            lambda place: [*_with_env("gemini --acp", _gemini_env(place)), "--permission-mode", "yolo"],
            lambda _: {},
            _gemini_settings,
            lambda line: "gemini" in line and "--acp" in line,
            (".gemini/tmp",),
            asking=lambda place: _with_env("gemini --acp", _gemini_env(place)),
        ),
        AgentProgram(
            "opencode",
            lambda _: _with_env("opencode acp", {}),
            lambda _: {},
            _opencode_settings,
            lambda line: "opencode" in line and " acp" in line,
            (".local/share/opencode",),
            asking=lambda _: _with_env("opencode acp", {}),
            prepare_permissions=_opencode_permission_settings,
        ),
        AgentProgram(
            "claude-code-acp",
            lambda place: [
                *_with_env("claude-code-acp", _claude_env(place)),
                "--permission-mode",
                "bypassPermissions",
            ],
            lambda _: {},
            _nothing,
            lambda line: "claude-code-acp" in line,
            (".claude/projects",),
            asking=lambda place: _with_env("claude-code-acp", _claude_env(place)),
        ),
        AgentProgram(
            "codex-acp",
            lambda place: _with_env("codex-acp", _codex_env(place)),
            lambda _: {},
            _codex_settings,
            lambda line: "codex-acp" in line,
            (".codex/sessions",),
            asking=lambda place: _with_env("codex-acp", _codex_env(place)),
            prepare_permissions=_codex_permission_settings,
        ),
    )
}


def processes_of(place: RunFolders) -> dict[int, str]:
    """Return the command lines of the living processes whose home is this run's, by process id."""
    mark = f"HOME={place.home}".encode()
    found: dict[int, str] = {}
    for each in Path("/proc").iterdir():
        if not each.name.isdigit() or int(each.name) == os.getpid():
            continue
        try:
            if mark not in (each / "environ").read_bytes().split(b"\0"):
                continue
            line = (each / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace").strip()
        except OSError:
            continue
        if line:  # A zombie has none.
            found[int(each.name)] = line
    return found
