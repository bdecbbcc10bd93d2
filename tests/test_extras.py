"""Errors about missing packages of an extra name the extra."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from midstream.errors import MidstreamError, MissingExtraError
from midstream.extras import extra

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
SOURCE = ROOT / "src"
FOLDERS = ("agents", "frameworks", "models", "observability", "tools", "demo/local")
MODULES = sorted(
    ".".join(path.relative_to(SOURCE).with_suffix("").parts)
    for path in [
        *(path for folder in FOLDERS for path in (SOURCE / "midstream" / folder).rglob("*.py")),
        SOURCE / "midstream" / "store" / "encryption" / "ciphers.py",
    ]
    if path.stem != "__init__"
)
# Packages that `pip install midstream` installs, by the names under which they are imported.
BROUGHT = sorted(re.split(r"[\[>=<]", each)[0] for each in PROJECT["dependencies"])
# Packages that these packages install.
BELOW = {
    *("anyio", "h11", "idna", "sniffio", "typing_extensions", "httpcore2"),
    *("aiohappyeyeballs", "aiosignal", "attr", "attrs", "frozenlist", "multidict", "propcache", "yarl"),
}
PROGRAM = """
import importlib, sys

class Bare:
    def __init__(self, finders):
        self.finders = finders

    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if not (path or top in KNOWN or top in sys.stdlib_module_names or top.startswith("_")):
            return None
        found = (finder.find_spec(name, path, target) for finder in self.finders)
        return next((spec for spec in found if spec is not None), None)

    def find_distributions(self, *context):
        finders = (finder for finder in self.finders if hasattr(finder, "find_distributions"))
        return (each for finder in finders for each in finder.find_distributions(*context))

KNOWN = {KNOWN}
sys.meta_path[:] = [Bare(list(sys.meta_path))]
from midstream.errors import MidstreamError
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
        print(name)
    except MidstreamError as error:
        print(name, error.message)
"""


def test_each_integration_names_its_extra() -> None:
    brought = {"midstream", *BROUGHT, *BELOW}
    program = PROGRAM.replace("{KNOWN}", repr(brought))
    done = subprocess.run(
        [sys.executable, "-c", program, *MODULES], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    found = dict(line.split(" ", 1) for line in done.stdout.splitlines() if " " in line)
    named = {
        name: re.findall(r"pip install 'midstream\[([\w-]+)\]'", message) for name, message in found.items()
    }
    assert {name for name, extras in named.items() if len(extras) != 1 or extras[0] not in EXTRAS} == set()
    assert named["midstream.agents.claude"] == ["claude"]
    assert named["midstream.store.encryption.ciphers"] == ["crypto"]
    assert len(named) > 15


def test_every_extra_named_in_the_project_exists() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *SOURCE.rglob("*.py")]
    named = {
        name
        for page in pages
        for name in re.findall(r"midstream\[([\w-]+)\]", page.read_text(encoding="utf-8"))
    }
    assert named - EXTRAS.keys() == set()


def test_a_missing_package_raises_an_error_that_is_ours_and_an_import_error() -> None:
    with (
        pytest.raises(MissingExtraError, match=r"pip install 'midstream\[claude\]'") as caught,
        extra("claude"),
    ):
        import nothing_of_this_name  # type: ignore[import-not-found] # noqa: F401
    assert isinstance(caught.value, ImportError)
    assert isinstance(caught.value, MidstreamError)
    assert caught.value.name == "nothing_of_this_name"


def test_an_outdated_package_keeps_its_own_error() -> None:
    with pytest.raises(ImportError) as caught, extra("claude"):
        from midstream import nothing_of_this_name  # noqa: F401
    assert not isinstance(caught.value, MissingExtraError)
