"""The JavaScript client with unreachable servers, and on pages of another origin: in node, and in Chromium."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from playwright.async_api import Browser, Page, Route

from midstream.testing import text
from tests.cli.processes import Serving
from tests.ports import held_port
from tests.server.devtools import CHROMIUM
from tests.server.known_people import guarded_app
from tests.server.serving import make_app, served
from tests.server.test_browser_client import CLIENT, ROOT, RUN_S, run_program
from tests.server.test_browser_guide import A_FRAME
from tests.server.test_page import WAIT_S
from tests.spec import spec

PAGE = "http://localhost:5173"
"""An address without a listener: the test serves it."""
ASK = """
import {{ connect }} from "{client}/midstream.js";
const client = await connect({{ url: "{url}", transport: "{transport}", settings: {{ reachWithinS: {within} }} }});
try {{
  console.log(await client.ask("s1", "hello"));
}} catch (error) {{
  console.log(error.code, error.message);
}}
client.close();
"""
UNREACHED = "connection_lost no connection to the server within 1 s"

needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="no node here")


def _program(
    url: str, *, client: str = CLIENT.as_uri(), transport: str = "auto", within: float = WAIT_S
) -> str:
    return ASK.format(url=url, client=client, transport=transport, within=within)


async def _output_of(url: str, folder: Path, *, within: float = 1) -> str:
    program = folder / "ask.mjs"
    program.write_text(_program(url, within=within))
    return await run_program("node", str(program), at=folder)


@pytest.mark.long
@needs_node
async def test_an_absent_server_is_reported(tmp_path: Path) -> None:
    with held_port() as port:
        output = await _output_of(
            f"http://127.0.0.1:{port}", tmp_path, within=4
        )  # The first attempt is over by then.
    last_error = "(last: the connection to the server broke (ECONNREFUSED))"
    assert output.startswith(f"connection_lost no connection to the server within 4 s {last_error}")


@needs_node
async def test_a_wrong_scheme_is_reported(tmp_path: Path) -> None:
    async with served(make_app([text("hi")])) as server:
        output = await _output_of(server.url.replace("http://", "https://"), tmp_path)
    assert output.startswith(UNREACHED)
    assert "check its address and scheme" in output


@needs_node
async def test_a_text_that_cannot_be_encoded_is_refused_before_sending(tmp_path: Path) -> None:
    file = tmp_path / "ask.mjs"
    async with served(make_app([text("hi")])) as server:
        program = _program(server.url)
        file.write_text(program.replace('"hello"', '"\\ud800"'))
        assert (await run_program("node", "ask.mjs", at=tmp_path)).startswith(
            "usage the text has a lone surrogate"
        )
        file.write_text(program)
        assert await run_program("node", "ask.mjs", at=tmp_path) == "hi\n"


@needs_node
async def test_a_failed_turn_throws_an_error_with_its_details(tmp_path: Path) -> None:
    members = "error.name, error.code, error.cause, error.turn, error.isResumable,"
    with Serving(tmp_path, options=["--no-auth"]) as server:
        program = _program(server.url).replace('"hello"', '"fail"').replace("error.code,", members)
        (tmp_path / "ask.mjs").write_text(program)
        output = await run_program("node", "ask.mjs", at=tmp_path)
    assert output.startswith("TurnFailedError turn_failed model_rejected 1 true turn 1 of session 's1'")


@needs_node
async def test_the_example_client_sends_its_token(tmp_path: Path) -> None:
    client = ROOT / "examples" / "minimal_client" / "ask.mjs"
    async with served(guarded_app()) as server:

        async def run_client(credential: str, folder: str) -> tuple[int | None, str]:
            process = await asyncio.create_subprocess_exec(
                *("node", "--experimental-websocket", "--no-warnings", str(client)),
                *(server.url, "s1", "Hello", folder),
                cwd=tmp_path,
                env={**os.environ, "MIDSTREAM_TOKEN": credential},
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
            )
            try:
                output, _ = await asyncio.wait_for(process.communicate(), RUN_S)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
            return process.returncode, output.decode()

        ended = (1, "The stream ended with unauthorized.\n")
        assert await run_client(f"{server.url} the-token-of-nobody", "wrong") == ended
        assert await run_client(f"{server.url} the-token-of-ada", "right") == (0, "Hello.\n")


@needs_node
@spec("STREAM-107")
async def test_the_example_client_connects_again_if_a_proxy_refuses_its_ticket(tmp_path: Path) -> None:
    """Only the server's own problem details end the stream, which deletes the unsent message."""
    body, asked = b'{"code":"rate_limited"}', asyncio.Queue[None]()

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = f"HTTP/1.1 429 Busy\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()
        writer.close()
        asked.put_nowait(None)

    client = ROOT / "examples" / "minimal_client" / "ask.mjs"
    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        process = await asyncio.create_subprocess_exec(
            *("node", "--experimental-websocket", "--no-warnings", str(client), url, "s1", "Hello", "kept"),
            cwd=tmp_path,
            env={**os.environ, "MIDSTREAM_TOKEN": f"{url} a-token-of-somebody"},
        )
        try:
            async with asyncio.timeout(RUN_S):
                for _ in range(2):
                    await asked.get()
            assert process.returncode is None
        finally:
            process.kill()
            await process.wait()


@pytest.mark.long
@pytest.mark.browser
@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")
@spec("SEC-87", "STREAM-73")
@pytest.mark.asyncio(loop_scope="session")
async def test_a_page_of_an_allowed_origin_is_served_and_any_other_gets_an_error(
    browser: Browser, tmp_path: Path
) -> None:
    options = ["--no-auth", "--allow-origin"]
    with Serving(tmp_path, options=[*options, PAGE]) as server:
        own = f"{server.url}/static/client"
        for transport in ("auto", "sse"):
            program = _program(server.url, client=own, transport=transport)
            assert await _output_of_page(browser, program) == "You said: hello."
    with Serving(tmp_path, options=[*options, "https://app.example"]) as server:
        for transport in ("auto", "sse"):
            program = _program(server.url, client="/client", transport=transport, within=1)
            output = await _output_of_page(browser, program)
            assert output.startswith(UNREACHED)
            assert "midstream serve --allow-origin" in output


async def _output_of_page(browser: Browser, program: str) -> str:
    """Return the last line that a page of only this program writes to its console."""
    texts: list[str] = []
    page = await (await browser.new_context()).new_page()
    page.on("console", lambda message: texts.append(message.text) if message.type == "log" else None)
    await page.route(f"{PAGE}/**", _answer(program))
    await page.goto(f"{PAGE}/")
    await _wait_for(page, texts)
    await page.context.close()
    return texts[-1]


def _answer(program: str) -> Callable[[Route], Awaitable[None]]:
    async def answer(route: Route) -> None:
        _, _, file = route.request.url.partition("/client/")
        if file:
            await route.fulfill(path=CLIENT / file, content_type="text/javascript")
        else:
            body = f'<!doctype html><script type="module">{program}</script>'
            await route.fulfill(body=body, content_type="text/html")

    return answer


async def _wait_for(page: Page, content: list[str]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not content:
            await page.evaluate(A_FRAME)
