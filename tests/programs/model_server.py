"""A model provider on loopback for real agent programs: four APIs, scripted by the newest message of the user.

A user message contains a directive such as `Q7 {say 4}`: an id that occurs once in a run, and an instruction:

    say N               N words, `R7.0 R7.1 …`
    ask                 like `tool`, as a command that needs a permission
    tool [SECONDS]      a shell command that appends the id to the ledger after so long, then the word `R7.done`
    look                the tool of the MCP server, then the word `R7.done`
    agent               a sub-agent that gets the message `Q7s {say 2}`, then the word `R7.done`
    hang [N] [TIMES]    N words, then silence until the client leaves; only for the first TIMES requests
    cut [N] [TIMES]     N words, then the connection is closed; only for the first TIMES requests
    status CODE [TIMES] an error of this status; only for the first TIMES requests, then two words

A model that finds the command of the ledger after its directive does not run it again, as a sensible one would not.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from aiohttp import web
from msgspec import Struct
from msgspec.structs import replace

from midstream.environment import World
from tests.programs.model_apis import API_OF_PATH, Json, ModelApi, ToolUse, Words

DIRECTIVE = re.compile(r"Q(\w+) \{(\w+)((?: [\d.]+)*)\}")
ANSWER = re.compile(r"R\w+\.(\d|done)")
PAUSE_S = 0.02
"""Seconds between two words."""
HANG_S = 600.0


class Directive(Struct, frozen=True):
    """The newest instruction of a conversation."""

    id: str
    kind: str
    numbers: tuple[float, ...] = ()

    def number(self, place: int, otherwise: float) -> float:
        """Return one of its numbers."""
        return self.numbers[place] if place < len(self.numbers) else otherwise


class ModelRequest(Struct, frozen=True):
    """A request that a program sent.

    Args:
        ids: The ids in the texts of users and of transcripts, in order, each as often as it occurs.
        is_main: A request of the conversation itself; others (titles, routing) have no tools.
        is_replay: One text of it has a message of the user and an answer: a transcript as text.
        tools: The names of its tools.
        images: How many images it has.
        has_server: It offers the tool of the forwarded MCP server, by itself, in a namespace, or to be searched for.
    """

    path: str
    ids: tuple[str, ...]
    directive: Directive | None
    is_main: bool
    is_replay: bool
    tools: tuple[str, ...]
    images: int
    has_server: bool


class ModelServer:
    """A server of the APIs of OpenAI, Anthropic and Google; `requests` has the received requests.

    Args:
        ledger: The file in which tools note their effects.
        continues: An answer to `say` continues after the words that are in the transcript already, as a
            model's does when it is requested to finish an answer.
    """

    def __init__(self, ledger: Path, *, continues: bool = False) -> None:
        self._continues = continues
        self.requests: list[ModelRequest] = []
        self.url = ""
        self.tries: Counter[str] = Counter()
        """Number of requests for each directive."""
        self._ledger = ledger
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Listen on a free port of loopback."""
        app = web.Application(client_max_size=64 * 1024 * 1024)
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        """Close all connections."""
        if self._runner is not None:
            await self._runner.cleanup()

    def command_of(self, directive: Directive) -> str:
        """Return the shell command of a directive `tool`."""
        wait_s = directive.number(0, 0.0)
        return f"sleep {wait_s:g}; echo {directive.id} >> {self._ledger}"

    def main(self, directive_id: str) -> list[ModelRequest]:
        """Return the requests of the conversation whose newest directive this is."""
        return [
            each
            for each in self.requests
            if each.is_main and each.directive is not None and each.directive.id == directive_id
        ]

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body: Any = await request.json() if request.can_read_body else {}
        api = next((api for end, api in API_OF_PATH.items() if request.path.endswith(end)), None)
        if api is None:
            return web.json_response(_other(request.path))
        texts = [*api.texts(body)]
        whole = "\n".join(texts)
        found = [
            Directive(match[1], match[2], tuple(map(float, match[3].split())))
            for match in DIRECTIVE.finditer(whole)
        ]
        newest = _newest(found)
        tools = tuple(api.tools(body))
        is_main = bool(tools)
        self.requests.append(
            ModelRequest(
                request.path,
                tuple(each.id for each in found),
                newest,
                is_main,
                any(DIRECTIVE.search(text) and ANSWER.search(text) for text in texts),
                tools,
                api.images(body),
                any(name in json.dumps(body) for name in ("look_up_weather", "mcp__forwarded")),
            )
        )
        if not is_main or newest is None:
            return await self._send(request, api, body, [Words(["ok"])])
        self.tries[newest.id] += 1
        return await self._play(request, api, body, newest, whole)

    async def _play(
        self, request: web.Request, api: ModelApi, body: Json, directive: Directive, whole: str
    ) -> web.StreamResponse:
        tries = self.tries[directive.id]
        match directive.kind:
            case "status" if tries <= directive.number(1, 1e9):
                code = int(directive.number(0, 500))
                return web.json_response(api.error(code), status=code)
            case "tool" | "ask":
                behind = whole[whole.rindex(f"Q{directive.id} {{") :]
                command = self.command_of(directive)
                if f"echo {directive.id} >>" in behind:
                    return await self._send(request, api, body, [Words([f"R{directive.id}.done"])])
                use = ToolUse(f"call_{directive.id}_{tries}", command, directive.kind == "ask")
                return await self._send(request, api, body, [use])
            case "look" if "rain in" not in whole[whole.rindex(f"Q{directive.id} {{") :]:
                use = ToolUse(f"call_{directive.id}_{tries}", '{"place": "Basel"}', tool="look_up_weather")
                return await self._send(request, api, body, [use])
            case "look":
                return await self._send(request, api, body, [Words([f"R{directive.id}.done"])])
            case "agent" if f"Q{directive.id}s {{" not in whole:
                task = f"Q{directive.id}s {{say 2}}"
                return await self._send(
                    request, api, body, [ToolUse(f"call_{directive.id}_{tries}", task, is_sub_agent=True)]
                )
            case "agent":
                return await self._send(request, api, body, [Words([f"R{directive.id}.done"])])
            case "hang" if tries <= directive.number(1, 1e9):
                return await self._send(request, api, body, [Words(_answer_words(directive, 0))], end="hang")
            case "cut" if tries <= directive.number(1, 1e9):
                return await self._send(request, api, body, [Words(_answer_words(directive, 2))], end="cut")
            case "say" if self._continues:
                known = whole[whole.rindex(f"Q{directive.id} {{") :].count(f"R{directive.id}.")
                return await self._send(request, api, body, [Words(_answer_words(directive, 2)[known:])])
            case "say" | "hang":
                return await self._send(request, api, body, [Words(_answer_words(directive, 2))])
            case _:  # A finished error or loss.
                return await self._send(
                    request, api, body, [Words(_answer_words(replace(directive, numbers=()), 2))]
                )

    async def _send(
        self,
        request: web.Request,
        api: ModelApi,
        body: Json,
        parts: list[Words | ToolUse],
        end: str = "",
    ) -> web.StreamResponse:
        if not api.is_stream(request.path, body):
            return web.json_response(api.whole(body, parts))
        answer = web.StreamResponse(headers={"content-type": "text/event-stream", **api.headers})
        await answer.prepare(request)
        with suppress(ConnectionError):  # The program has left, or was killed.
            for piece in api.stream(body, parts, is_whole=not end):
                await answer.write(piece)
                await World().sleep(PAUSE_S)
        if end == "hang":
            await World().sleep(HANG_S)
        if end == "cut" and request.transport is not None:
            request.transport.abort()
        return answer


def _newest(found: list[Directive]) -> Directive | None:
    """Return the newest message of the user; the task of a sub-agent is none in the conversation that started it."""
    if len(found) > 1 and found[-2].kind == "agent" and found[-1].id == f"{found[-2].id}s":
        return found[-2]
    return found[-1] if found else None


def _answer_words(directive: Directive, otherwise: int) -> list[str]:
    return [f"R{directive.id}.{place} " for place in range(int(directive.number(0, otherwise)))]


def _other(path: str) -> Mapping[str, Any]:
    if path.endswith("/models"):
        return {"object": "list", "data": [], "models": []}
    return {}


def effects_of(ledger: Path) -> Counter[str]:
    """Return how often each directive has had its effect."""
    return Counter(ledger.read_text().split()) if ledger.exists() else Counter()
