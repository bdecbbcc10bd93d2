"""The table of ARCHITECTURE.md covers every module."""

from __future__ import annotations

import re
from pathlib import Path

from tests.house.source import PACKAGE, ROOT, in_package, python_files

TABLE = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
NAMED = frozenset(re.findall(r"`(?:src/midstream/)?([a-z0-9_/]+\.py)`", TABLE))
FOLDERS = frozenset(re.findall(r"`src/midstream/([a-z0-9_/]+)/`", TABLE))
NO_IDEA_OF_THEIR_OWN = frozenset({"__init__.py", "__main__.py"})


def _is_covered(module: str) -> bool:
    """Return whether a row names the module (some rows name its file only), or a folder that contains it."""
    folders = {parent.as_posix() for parent in Path(module).parents}
    return module in NAMED or Path(module).name in NAMED or bool(folders & FOLDERS)


def test_every_module_is_in_a_row_or_below_a_folder_of_a_row() -> None:
    modules = [in_package(path) for path in python_files("src/midstream")]
    missing = [
        name for name in modules if Path(name).name not in NO_IDEA_OF_THEIR_OWN and not _is_covered(name)
    ]
    assert missing == [], "add a row to the table of ARCHITECTURE.md"


def test_a_folder_of_a_row_exists() -> None:
    assert [folder for folder in sorted(FOLDERS) if not (PACKAGE / folder).is_dir()] == []
