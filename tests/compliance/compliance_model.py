"""A model server on loopback for the compliance suite: its answer depends on the content of the request."""

from __future__ import annotations

import re
from typing import Any

from aiohttp import web

from tests.programs.model_apis import API_OF_PATH, Part, ToolUse, Words

CODE_WORD = re.compile(r"code word: (\w+)")
EXACTLY = re.compile(r"exactly: (\w+)")


class ComplianceModel:
    """Serves chat completions.

    It calls the one tool that a request has, repeats the code word of the conversation when it is requested,
    and otherwise returns the word that the newest message requires.
    """

    def __init__(self) -> None:
        self.url = ""
        self.images = 0
        """Images that have arrived."""
        self.transcripts: list[str] = []
        """All texts of each request."""
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Listen on a free port of loopback."""
        app = web.Application(client_max_size=64 * 1024 * 1024)
        app.router.add_post("/v1/chat/completions", self._answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        """Close all connections."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body: Any = await request.json()
        api = API_OF_PATH["/chat/completions"]
        texts = [*api.texts(body)]
        self.transcripts.append("\n".join(texts))
        self.images += api.images(body)
        parts: list[Part] = [Words([_answer_to(texts)])]
        if tools := api.tools(body):
            parts = [ToolUse("call_1", '{"location": "San Francisco, CA"}', tool=tools[0])]
        if not api.is_stream(request.path, body):
            return web.json_response(api.whole(body, parts))
        answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await answer.prepare(request)
        for piece in api.stream(body, parts, is_whole=True):
            await answer.write(piece)
        return answer


def _answer_to(texts: list[str]) -> str:
    newest = texts[-1] if texts else ""
    word = CODE_WORD.search("\n".join(texts))
    if word and "What is the code word?" in newest:
        return word[1]
    wanted = EXACTLY.search(newest)
    return wanted[1] if wanted else "hello from here"
