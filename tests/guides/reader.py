"""A reader's folder: the environment of programs and commands there, and the agents of the pages as files."""

from __future__ import annotations

import os
from pathlib import Path

from tests.guides.blocks import ROOT, all_blocks
from tests.guides.guide_programs import SERVED

BLOCKS = {block.key: block for block in all_blocks()}


def environment(folder: Path, **more: str) -> dict[str, str]:
    """Return the environment of a reader with everything in a folder."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MIDSTREAM_")}
    ours = {"MIDSTREAM_HOME": str(folder / "home"), "PYTHONPATH": f"{folder}:{ROOT}:{ROOT / 'src'}"}
    return kept | ours | more


def write_agent(folder: Path, name: str, module: str = "") -> None:
    """Write the agent of this name in `SERVED` as the file that `midstream serve` is given."""
    served = SERVED[name]
    code = f"{served.before}\n{BLOCKS[served.page, 'python', served.block].code}"
    (folder / f"{module or name.partition(':')[0]}.py").write_text(code)
