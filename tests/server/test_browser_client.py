"""The browser client's own tests, which node runs: `browser_client.test.mjs` and those beside it."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

HERE = Path(__file__).parent
NODE = shutil.which("node")
RUN_S = 50.0


@pytest.mark.skipif(
    NODE is None, reason="the browser client is tested by node (20 or newer), which is not here"
)
@pytest.mark.parametrize("suite", ["browser_client", "browser_kept", "browser_lifecycle", "transcript"])
async def test_the_browser_client_keeps_its_promises(suite: str) -> None:
    assert NODE is not None
    process = await asyncio.create_subprocess_exec(
        NODE,
        "--test",
        "--test-reporter=spec",
        str(HERE / f"{suite}.test.mjs"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(RUN_S):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, output.decode(errors="replace")
