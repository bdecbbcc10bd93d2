"""Dependencies are pinned, start nothing by themselves, and name no machine."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

from tests.house.source import ROOT

PINS = sorted((ROOT / "requirements").glob("*.txt"))
REQUIREMENT = re.compile(r"^(?P<name>[a-z0-9.-]+)==[^\s;]+( ; (?P<marker>[^\\]+))? \\$")
HASH = re.compile(r"^    --hash=sha256:[0-9a-f]{64}( \\)?$")

# Must not be in any tracked file: the address of a package index, a path of a developer's machine.
INDEX_HOST = re.compile(r"(?:pypi|pythonhosted|npmjs)\.(?:org|com|io)|\b(?:extra-)?index-url\b")
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:work|root|home|Users|opt)/\w")
MAY_NAME_INDEX_OPTIONS = {"tests/house/test_dependencies.py"}
# Large programs that packages of local.txt and upstreams.txt bring along, and our tests replace.
LEFT_OUT = tuple(
    f" requires {name}, which is not installed."
    for name in ("llama-cpp-python", "llm", "openai-codex-cli-bin")
)
BINARY = {".db", ".gif", ".ico", ".jpg", ".png", ".webp", ".woff2"}


def test_the_pins_are_these_files() -> None:
    assert [path.name for path in PINS] == [
        "a2a.txt",
        "agents.txt",
        "base.txt",
        "build.txt",
        "clients.txt",
        "dev.txt",
        "fuzz.txt",
        "local.txt",
        "peers-durable-apart.txt",
        "peers-durable.txt",
        "peers.txt",
        "schemathesis.txt",
        "templates.txt",
        "upstreams.txt",
    ]


@pytest.mark.parametrize("path", PINS, ids=lambda path: path.name)
def test_every_pin_has_a_version_and_hashes_and_no_address(path: Path) -> None:
    unpinned = []
    lines = path.read_text(encoding="utf-8").splitlines()
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        is_requirement = REQUIREMENT.match(line) is not None and HASH.match(following) is not None
        if not is_requirement and not HASH.match(line):
            unpinned.append(line)
    assert unpinned == []


def test_frameworks_have_the_same_versions_in_both_environments_of_their_tests() -> None:
    """Then `make hooks` can leave these tests to the main environment (the Makefile's HOOKS)."""
    names = ("langgraph", "pydantic-ai-slim")
    pins = [_versions(ROOT / "requirements" / file) for file in ("dev.txt", "peers-durable.txt")]
    assert [pins[0][name] for name in names] == [pins[1][name] for name in names]


@pytest.mark.slow
def test_the_pins_of_this_environment_are_complete_but_for_listed_exceptions() -> None:
    """They are installed without resolving, so that pip does not refuse an incomplete file (see the Makefile)."""
    command = [sys.executable, "-m", "pip", "check", "--disable-pip-version-check"]
    done = subprocess.run(command, capture_output=True, check=False, text=True, timeout=120)
    broken = [line for line in done.stdout.splitlines() if line != "No broken requirements found."]
    assert not done.stderr
    assert [line for line in broken if not line.endswith(LEFT_OUT)] == []


@pytest.mark.parametrize(
    ("folder", "package"),
    [
        ("tests/oracles/node", "ai"),
        ("tests/dialects/node", "ai"),
        ("examples/ai_sdk", "ai"),
        ("tests/compliance/node", "zod"),
    ],
)
def test_every_npm_pin_has_a_version_and_a_hash_and_no_address(folder: str, package: str) -> None:
    lock = (ROOT / folder / "package-lock.json").read_text(encoding="utf-8")
    packages = {name: found for name, found in json.loads(lock)["packages"].items() if name}
    assert [name for name, found in packages.items() if not found["integrity"].startswith("sha512-")] == []
    assert f"node_modules/{package}" in packages, "nothing was looked at"
    assert "://" not in lock


def test_no_runtime_dependency_hooks_the_start_of_every_interpreter() -> None:
    hooks = {
        name: [str(file) for file in distribution(name).files or () if file.suffix == ".pth"]
        for name in _names(ROOT / "requirements" / "base.txt")
        if _is_installed(name)
    }
    assert {name: files for name, files in hooks.items() if files} == {}
    assert "msgspec" in hooks, "nothing was looked at"


def test_no_tracked_file_names_an_index_or_a_machine() -> None:
    found = [
        f"{name}:{text.count(chr(10), 0, match.start()) + 1}: {match.group()}"
        for name in _tracked_files()
        if name not in MAY_NAME_INDEX_OPTIONS
        for text in [_text(ROOT / name)]
        for pattern in (INDEX_HOST, MACHINE_PATH)
        for match in pattern.finditer(text)
    ]
    assert found == []


def _names(pins: Path) -> list[str]:
    lines = pins.read_text(encoding="utf-8").splitlines()
    return [match["name"] for line in lines if (match := REQUIREMENT.match(line))]


def _versions(pins: Path) -> dict[str, str]:
    lines = (line.split() for line in pins.read_text(encoding="utf-8").splitlines() if "==" in line)
    return dict(words[0].split("==") for words in lines)


def _is_installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False  # A marker excludes it on this platform.
    return True


def _tracked_files() -> list[str]:
    try:
        done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True)
    except (FileNotFoundError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return [name for name in done.stdout.split("\0") if name]


def _text(path: Path) -> str:
    if path.suffix in BINARY or not path.is_file():
        return ""
    return path.read_text(encoding="utf-8", errors="replace")
