"""The starter for the AI SDK: it builds, and its page continues after a reload and after a kill of the server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from playwright.async_api import async_playwright, expect

from tests.dialects.chat_agent import FIRST
from tests.dialects.ui_stream import node, run_servers
from tests.server.devtools import CHROMIUM, FLAGS

SOURCE = Path(__file__).parents[2] / "examples" / "ai_sdk"
MODULES = Path(sys.prefix, "starter", "node_modules")
WAIT_S = 60.0
WAIT_MS = 60_000
WORDS = 1500

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.skipif(
        not (MODULES / "vite").exists(),
        reason="npm did not install the starter's packages here (make dialects)",
    ),
]


async def build(folder: Path) -> Path:
    """Build the starter in its own folder."""
    made = folder / "starter"
    shutil.copytree(SOURCE, made, ignore=shutil.ignore_patterns("node_modules", "dist"))
    (made / "node_modules").symlink_to(MODULES)
    await ran(made, "build")
    return made


async def ran(folder: Path, *arguments: str) -> None:
    process = await asyncio.create_subprocess_exec(
        *(node(), "node_modules/vite/bin/vite.js", *arguments),
        cwd=folder,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    out, _ = await asyncio.wait_for(process.communicate(), WAIT_S)
    assert process.returncode == 0, out.decode()


@contextlib.asynccontextmanager
async def serve_page(folder: Path, server: str) -> AsyncIterator[str]:
    """Serve the built page, with the server behind it, until the end of the block."""
    process = await asyncio.create_subprocess_exec(
        *(node(), "node_modules/vite/bin/vite.js", "preview", "--host", "127.0.0.1", "--port", "0"),
        cwd=folder,
        env={**os.environ, "MIDSTREAM_URL": server, "NO_COLOR": "1"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(WAIT_S):
            while b"http://" not in (line := await process.stdout.readline()):
                assert line, "vite has ended"
        yield line.decode().partition("http://")[1] + line.decode().partition("http://")[2].strip().rstrip(
            "/"
        )
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def test_the_starter_builds(tmp_path: Path) -> None:
    made = await build(tmp_path)
    assert list((made / "dist" / "assets").glob("*.js"))


@pytest.mark.long
@pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium here: apt-get install --no-install-recommends chromium"
)
async def test_its_page_continues_after_a_reload_and_after_a_kill(tmp_path: Path) -> None:
    made = await build(tmp_path)
    async with (
        run_servers(tmp_path, WORDS) as [server],
        serve_page(made, server.url) as url,
        async_playwright() as playwright,
    ):
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = await browser.new_page()
        await page.goto(url)
        await page.get_by_placeholder("Message").fill("hi")
        await page.get_by_role("button", name="Send").click()
        answer = page.locator("article.assistant")
        await expect(answer).to_contain_text("word20 ", timeout=WAIT_MS)
        await page.reload()
        await expect(answer).to_contain_text("word100 ", timeout=WAIT_MS)
        await server.kill()
        await server.start()
        await expect(answer).to_contain_text(f"word{WORDS - 1} ", timeout=WAIT_MS)
        texts = await answer.locator("p:not(.reasoning)").all_text_contents()
        assert "".join(texts) == FIRST + "".join(f"word{number} " for number in range(WORDS))
        assert await answer.count() == 1
        assert server.ledger.read_text(encoding="utf-8") == "it\n"
        await browser.close()
