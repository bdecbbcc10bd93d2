"""The browsers of the page's tests: each starts once per test process, and keeps no page of an earlier test.

An open page reconnects to a server that has ended, and its lights pulse: each one costs the tests after it as
much time as a test.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from playwright.async_api import Browser, async_playwright, expect

from tests.server.devtools import CHROMIUM, FLAGS, WAIT_S, DevTools, devtools

# A busy machine may draw a page later than the five seconds of Playwright. A page that is ready is seen at
# once.
expect.set_options(timeout=1000 * WAIT_S)

THROTTLED = "--enable-features=IntensiveWakeUpThrottling:grace_period_seconds/1"
"""Run the timers of a background tab once a minute, from its first second on and not after five minutes."""


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def _playwright_browser() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        launched = await playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        try:
            yield launched
        finally:
            await launched.close()


@pytest_asyncio.fixture(loop_scope="session")
async def browser(_playwright_browser: Browser) -> AsyncIterator[Browser]:
    """Chromium, driven by Playwright; each test has its own profiles in it."""
    yield _playwright_browser
    for context in _playwright_browser.contexts:
        await context.close()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def _devtools_browser(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[DevTools]:
    assert CHROMIUM is not None
    async with devtools(CHROMIUM, [*FLAGS, THROTTLED], tmp_path_factory.mktemp("profile")) as launched:
        yield launched


@pytest_asyncio.fixture(loop_scope="session")
async def chromium(_devtools_browser: DevTools) -> AsyncIterator[DevTools]:
    """Chromium, whose tabs can be frozen."""
    yield _devtools_browser
    await _devtools_browser.close_tabs()
