"""The public names of `import midstream`, and the cost of the import."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import re
import subprocess
import sys

import pytest

from tests.house.source import ROOT
from tools.docs import PUBLIC_PACKAGES

# `import midstream` may load these packages and no other one: no server, no SDK, no database.
ON_IMPORT = {"midstream", "msgspec"}
# An interpreter with asyncio and msgspec has about 160; each further module costs start-up time.
MODULES_ON_IMPORT_MAX = 230
# Any command line may load these before its command is known.
ON_COMMAND = ON_IMPORT | {"click"}

PACKAGES = ("midstream", *(f"midstream.{name}" for name in PUBLIC_PACKAGES))
PUBLIC = [(package, name) for package in PACKAGES for name in importlib.import_module(package).__all__]
OTHER_MODULES = re.compile(
    r"midstream\.(errors|client\.sync|frameworks\.\w+|observability\.\w+|demo\.local"
    r"|testing\.(upstream_contract|pool_contract|conformance))"
)
"""Public modules beside the packages; docs/reference/python.md names them."""
IMPORT = re.compile(r"^ *from (midstream[\w.]*) import (\([^)]*\)|[^\n#(]+)", re.MULTILINE)


def test_every_public_name_can_be_imported_and_has_a_docstring() -> None:
    undocumented = [
        name
        for package, name in PUBLIC
        for public in [getattr(importlib.import_module(package), name)]
        if (inspect.isclass(public) or inspect.isfunction(public)) and not inspect.getdoc(public)
    ]
    assert undocumented == []


def test_every_public_name_is_in_the_docs() -> None:
    text = (ROOT / "docs" / "reference" / "python.md").read_text(encoding="utf-8")
    sections = {"midstream": text.partition("### midstream.")[0]}
    for package in PACKAGES[1:]:
        sections[package] = text.partition(f"### {package}\n")[2].partition("\n#")[0]
    assert [(package, name) for package, name in PUBLIC if f"| `{name}` |" not in sections[package]] == []


def test_documents_and_examples_import_public_names_only() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.py")]
    internal = [
        (page.name, module, name)
        for page in pages
        for module, names in IMPORT.findall(page.read_text(encoding="utf-8"))
        for name in re.findall(r"(\w+)(?: as \w+)?", names)
        if (module, name) not in PUBLIC and not OTHER_MODULES.fullmatch(module)
    ]
    assert internal == []


def test_a_client_is_imported_without_network_libraries() -> None:
    loaded = _modules_after("midstream.client")
    assert _third_parties(loaded) <= ON_IMPORT
    assert not {"asyncio", "ssl", "http.client"} & loaded
    assert not {"websockets", "httpx2", "aiohttp"} & _third_parties(_modules_after("midstream.client.client"))


def test_importing_midstream_loads_no_server_no_sdk_and_no_database() -> None:
    loaded = _modules_after("midstream")
    assert _third_parties(loaded) <= ON_IMPORT
    assert len(loaded) < MODULES_ON_IMPORT_MAX


def test_a_command_line_loads_only_the_packages_needed_to_find_its_command() -> None:
    if importlib.util.find_spec("midstream.cli") is None or not _has_main():
        pytest.skip("midstream.cli is not written yet")
    assert _third_parties(_modules_after("midstream.cli")) <= ON_COMMAND


def _has_main() -> bool:
    return (ROOT / "src" / "midstream" / "cli" / "__init__.py").exists()


def _modules_after(name: str) -> set[str]:
    """Return the modules that one import loads in a fresh interpreter."""
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
