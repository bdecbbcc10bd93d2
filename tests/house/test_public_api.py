"""What `import midstream` gives, and what it costs."""

from __future__ import annotations

import importlib.util
import inspect
import json
import subprocess
import sys

import pytest

import midstream
from tests.house.source import ROOT

# `import midstream` may load these packages and no other one: no server, no SDK, no database.
ON_IMPORT = {"midstream", "msgspec"}
# An interpreter with asyncio and msgspec has about 160; each module more is start-up time.
MODULES_ON_IMPORT_MAX = 230
# Any command line may load these before it knows which command it runs.
ON_COMMAND = ON_IMPORT | {"click"}

PUBLIC: list[str] = sorted(getattr(midstream, "__all__", []))


def test_every_public_name_can_be_imported_and_says_what_it_is() -> None:
    undocumented = [
        name
        for name in PUBLIC
        for public in [getattr(midstream, name)]
        if callable(public) and not inspect.getdoc(public)
    ]
    assert undocumented == []


def test_every_public_name_is_in_the_docs() -> None:
    reference = sorted((ROOT / "docs" / "reference").rglob("*.md"))
    if not reference:
        pytest.skip("docs/reference is not written yet")
    text = "\n".join(page.read_text(encoding="utf-8") for page in (ROOT / "README.md", *reference))
    assert [name for name in PUBLIC if f"`{name}" not in text and f".{name}" not in text] == []


def test_importing_midstream_loads_no_server_no_sdk_and_no_database() -> None:
    loaded = _modules_after("midstream")
    assert _third_parties(loaded) <= ON_IMPORT
    assert len(loaded) < MODULES_ON_IMPORT_MAX


def test_a_command_line_loads_only_what_it_needs_to_find_its_command() -> None:
    if importlib.util.find_spec("midstream.cli") is None or not _has_main():
        pytest.skip("midstream.cli is not written yet")
    assert _third_parties(_modules_after("midstream.cli")) <= ON_COMMAND


def _has_main() -> bool:
    return (ROOT / "src" / "midstream" / "cli" / "__init__.py").exists()


def _modules_after(name: str) -> set[str]:
    """Return the modules a fresh interpreter has loaded because of one import."""
    program = (
        "import json, sys; before = set(sys.modules); "
        f"import {name}; print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, check=True, text=True, timeout=30
    )
    modules: list[str] = json.loads(done.stdout)
    return set(modules)


def _third_parties(modules: set[str]) -> set[str]:
    tops = {module.partition(".")[0] for module in modules}
    return {top for top in tops if top not in sys.stdlib_module_names and not top.startswith("_")}
