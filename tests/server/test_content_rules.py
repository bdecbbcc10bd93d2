"""The rules of access about content, errors, defaults and dependencies (11 to 19).

The numbers are those of `docs/guides/security.md`.
"""

from __future__ import annotations

import ast
import asyncio
import http.client
import itertools
import json
import logging
import subprocess
import sys
from collections.abc import AsyncIterator, Collection, Sequence
from importlib.metadata import distribution, requires
from pathlib import Path

import httpx2
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import HTTPConnection

from midstream import errors
from midstream.cli.terminal import clean
from midstream.engine.agent import Agent
from midstream.engine.host import Host
from midstream.errors import MidstreamError, ModelUnavailableError, SeqnoGapError, UsageError
from midstream.history.messages import UserMessage
from midstream.models.responses import ModelRequest
from midstream.protocol.frames import Open, encode
from midstream.protocol.server_stream import ServerStream
from midstream.server.api.problems import problem_of
from midstream.server.auth.access import Access, proxy_user
from midstream.server.auth.principals import Principal
from midstream.server.pages import FOLDER
from midstream.server.transports.connection import Connection, Connections
from midstream.server.transports.frame_sending import SEND_S
from midstream.server.uvicorn_server import serve
from midstream.session.turn.commands import SendMessage
from midstream.store.contract import ListPlace, SessionInfo
from midstream.store.memory import MemoryStore
from midstream.testing.fake_worlds import FakeWorld
from midstream.testing.scripted_model import ScriptedModel, ScriptedStep, calls, text
from midstream.tools.function_tools import tool
from tests.house.source import nodes
from tests.server.known_people import ADA, BOB, guarded_app, post_message, status_and_code
from tests.server.serving import KEYS, Socket, asgi_client, command, make_app, served

SRC = Path(__file__).parents[2] / "src" / "midstream"
EVENTS = "/v1/sessions/s1/events"


# --- 11. slow readers -----------------------------------------------------------------------------


class StuckTransport:
    """A transport with a client that has stopped reading: its first write never returns."""

    ends_with_turn = False
    gap_s = 0.0
    is_full = False

    def __init__(self) -> None:
        self.sent = 0

    async def receive(self) -> bytes | None:
        await asyncio.Event().wait()
        return None

    async def send(self, frames: Sequence[bytes]) -> None:
        self.sent += len(frames)
        await asyncio.Event().wait()


async def test_rule_11_a_stalled_reader_holds_no_resources_and_is_dropped() -> None:
    world = FakeWorld()
    host = Host(Agent(ScriptedModel(lambda _: text("w " * 400))), MemoryStore(), world=world)
    await host.start()
    stream, stuck, connections = ServerStream(now=world.monotonic()), StuckTransport(), Connections()
    stream.receive(encode(Open()), now=world.monotonic())
    runner = await host.session("s1", create=True)
    await runner.submit(SendMessage(UserMessage.of("hi")))
    with Connection(host, "s1", stream, stuck, connections) as connection:
        running = asyncio.create_task(connection.run())
        await world.settle()
        assert stuck.sent == 1  # The welcome, which the client never read.
        held = stream.cursor  # The next write, one page at most.
        await runner.submit(SendMessage(UserMessage.of("more")))
        await world.advance(1.0)
        assert (stuck.sent, stream.cursor) == (1, held)
        assert runner.newest.position > held
        await world.advance(SEND_S)
        assert await asyncio.wait_for(running, 60) is None
        assert connection.is_gone
    assert len(connections) == 0
    await host.stop(grace_s=0)


# --- 12. logs -------------------------------------------------------------------------------------


async def test_rule_12_no_content_and_no_credential_is_in_a_log_an_error_or_a_repr(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    canaries = {
        name: f"canary-{name}-{number:016x}"
        for number, name in enumerate(
            ("words", "token", "guess", "secret", "query", "header", "frame", "tool", "bug")
        )
    }

    @tool(has_effects=False)
    def look() -> str:
        """Look."""
        raise RuntimeError(canaries["tool"])

    def response(request: ModelRequest) -> list[ScriptedStep]:
        message = request.history.entries[-1]
        if hasattr(message, "parts"):
            return calls(("look", "{}"), text=canaries["words"])
        raise ModelUnavailableError(f"the provider said {canaries['bug']}")

    app = guarded_app(response, known={canaries["token"]: Principal("ada")}, tools=[look])
    who = {"authorization": f"Bearer {canaries['token']}", "x-idempotent-encryption-key": canaries["secret"]}
    async with served(app) as server:
        body = command(words=canaries["words"])
        sent = {"x-idempotency-key": "k1", **who}
        assert (
            await server.http.post("/v1/sessions/s1/commands", json=body, headers=sent)
        ).status_code == 200
        answers = [
            await server.http.get("/v1/sessions", headers={"authorization": f"Bearer {canaries['guess']}"}),
            await server.http.get(f"{EVENTS}?ticket={canaries['query']}"),
            await server.http.get(
                f"/v1/sessions/s1?x={canaries['query']}", headers={"x-a": canaries["header"]}
            ),
            await server.http.post("/v1/sessions/s1/commands", content=canaries["frame"], headers=sent),
            await server.http.post("/v1/sessions/s1/answer", content=canaries["frame"], headers=who),
            await server.http.post("/v1/login", json={"login": canaries["guess"]}),
        ]
        assert [answer.status_code for answer in answers] == [401, 401, 401, 400, 400, 401]
        async with Socket(server.socket(headers={**who, "x-a": canaries["header"]})) as peer:
            await peer.send(canaries["frame"])
            received = [await peer.receive()]
            await peer.receive_close()
        raw = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60)
        await asyncio.to_thread(raw.request, "GET", f"/{canaries['query']}?{canaries['query']}")
        answers_raw = (await asyncio.to_thread(raw.getresponse)).read()
        raw.close()
    logged = "\n".join(
        f"{record.getMessage()} {record.exc_text} {vars(record)}" for record in _of_server(caplog)
    )
    seen = {
        "log": logged,
        "errors": "".join(answer.text for answer in answers) + json.dumps(received) + answers_raw.decode(),
        "reprs": f"{app.auth.access!r} {Open('k', canaries['secret'])!r}",
    }
    found = [(where, name) for where, text in seen.items() for name, word in canaries.items() if word in text]
    assert found == []
    assert logged  # Something was logged, and it was examined.


def _of_server(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Return the lines of the server: those of the test's own clients contain their sent frames."""
    clients = ("httpcore", "httpx", "websockets.client", "asyncio", "hpack")
    return [record for record in caplog.records if not record.name.startswith(clients)]


# --- 13. content in the page ----------------------------------------------------------------------


async def test_rule_13_the_page_executes_nothing_of_its_content_and_stores_no_credential() -> None:
    async with asgi_client(guarded_app()) as client:
        for path in ("/", "/static/app.js"):
            headers = (await client.get(path)).headers
            policy = dict(
                part.strip().partition(" ")[::2] for part in headers["content-security-policy"].split(";")
            )
            assert policy["default-src"] == "'self'"
            assert (policy["frame-ancestors"], policy["base-uri"], policy["form-action"]) == 3 * ("'none'",)
            assert "unsafe" not in headers["content-security-policy"]
            assert (headers["x-content-type-options"], headers["referrer-policy"]) == (
                "nosniff",
                "no-referrer",
            )
    doors = (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "new Function",
        "srcdoc",
    )
    scripts = [path for path in FOLDER.rglob("*") if path.suffix in {".js", ".html"}]
    assert len(scripts) >= 8
    for script in scripts:
        words = script.read_text(encoding="utf-8")
        assert [door for door in doors if door in words] == [], script.name
        assert [word for word in ("document.cookie", "sessionStorage", "localStorage") if word in words] == []
    assert "<script>" not in (FOLDER / "index.html").read_text(encoding="utf-8")


# --- 14. content in the terminal ------------------------------------------------------------------


@given(st.text(alphabet=st.characters(), max_size=40))
def test_rule_14_control_sequences_do_not_reach_the_terminal(words: str) -> None:
    hostile = "\x1b]0;title\x07\x1b[31m\x9b2J\u202e\u2066\x08\r"
    shown = clean(f"{hostile}{words}{hostile}")
    bidi = {*map(chr, (*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F, 0x061C))}
    acting = {each for each in shown if (ord(each) < 32 or 0x7F <= ord(each) < 0xA0) and each not in "\t\n"}
    assert (acting, bidi & set(shown)) == (set(), set())


# --- 15. unsafe reading ---------------------------------------------------------------------------


async def test_rule_15_nothing_is_unpickled_or_evaluated_and_depth_is_limited() -> None:
    forbidden = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "jsonpickle", "yaml"}
    found = []
    for path in SRC.rglob("*.py"):
        for node in nodes(path):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [each.name for each in node.names] if isinstance(node, ast.Import) else []
            found += [(path.name, name) for name in names if name.split(".")[0] in forbidden]
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            if node.func.id in {"eval", "exec", "__import__"}:
                found.append((path.name, node.func.id))
    assert found == []
    async with asgi_client(guarded_app()) as client:
        for deep in (
            b"[" * 4000,
            b'{"type":"command","seqno":0,"payload":' + b'{"a":' * 780,
            b"\xff\xfe",
            b"null",
        ):
            answer = await client.post("/v1/sessions/s1/commands", content=deep, headers={**KEYS, **ADA})
            assert status_and_code(answer) == (400, "malformed_frame")
            for place in ("/v1/sessions/s1/tickets", "/v1/login"):
                answer = await client.post(place, content=deep, headers=ADA)
                assert status_and_code(answer) == (400, "malformed_frame")


# --- 16. results of the past ----------------------------------------------------------------------


async def _until(events: httpx2.Response, word: str) -> AsyncIterator[str]:
    async for line in events.aiter_lines():
        yield line
        if word in line:
            return


async def test_rule_16_an_approval_is_valid_only_for_its_arguments() -> None:
    @tool(needs_approval=True)
    def pay(amount: int) -> str:
        """Pay."""
        return f"paid {amount}"

    async with served(guarded_app(lambda _: calls(("pay", '{"amount": 3}')), tools=[pay])) as server:
        client = server.http
        assert (await post_message(client, "s1", ADA)).status_code == 200
        async with client.stream("GET", EVENTS, headers={**KEYS, **ADA}) as events:
            assert [line async for line in _until(events, "question_asked")]
        open_ones = (await client.get("/v1/questions", headers=ADA)).json()["questions"]
        question = open_ones[0]
        place = {name: question[name] for name in ("turn", "response", "call_id", "digest")}
        other = {**place, "digest": "0" * len(place["digest"]), "choice": "allow"}
        answer = await client.post("/v1/sessions/s1/answer", json=other, headers=ADA)
        assert status_and_code(answer) == (409, "answer_mismatch")
        assert status_and_code(await client.post("/v1/sessions/s1/answer", json=other, headers=BOB)) == (
            404,
            "session_not_found",
        )
        assert (await client.get("/v1/questions", headers=BOB)).json()["questions"] == []
        again = (await client.get("/v1/questions", headers=ADA)).json()["questions"]
        assert [each["digest"] for each in again] == [question["digest"]]


# --- 17. errors -----------------------------------------------------------------------------------


def _kinds(kind: type[MidstreamError]) -> list[type[MidstreamError]]:
    return [kind, *itertools.chain.from_iterable(map(_kinds, kind.__subclasses__()))]


def test_rule_17_every_error_is_a_problem_with_a_stable_code_and_a_next_step() -> None:
    kinds = [kind for kind in _kinds(MidstreamError) if kind.__module__ == errors.__name__]
    assert len(kinds) > 40
    for kind in kinds:
        error = kind("text", expected=3) if kind is SeqnoGapError else kind("text")
        problem = msgspec.to_builtins(problem_of(error))
        assert problem["type"] == f"urn:midstream:error:{kind.code}"
        assert (problem["code"], problem["detail"]) == (kind.code, "text")
        assert 400 <= problem["status"] < 600
        assert problem["next"]


async def test_rule_17_a_bug_exposes_no_detail_and_a_foreign_session_looks_missing() -> None:
    class Broken(MemoryStore):
        is_broken = False

        def list(
            self,
            *,
            live: bool | None = None,
            of: Collection[str] | None = None,
            after: ListPlace | None = None,
            limit: int | None = None,
        ) -> AsyncIterator[SessionInfo]:
            if not self.is_broken:
                return super().list(live=live, of=of, after=after, limit=limit)
            raise RuntimeError("select secret from journal where tenant = 'acme'")

    store = Broken()
    async with asgi_client(guarded_app(store=store)) as client:
        assert (await post_message(client, "s1", ADA)).status_code == 200
        store.is_broken = True
        answer = await client.get("/v1/sessions", headers=ADA)
        assert status_and_code(answer) == (500, "internal")
        assert "secret" not in answer.text
        foreign = await client.get("/v1/sessions/s1", headers=BOB)
        missing = await client.get("/v1/sessions/s9", headers=BOB)
        assert foreign.content == missing.content.replace(b"s9", b"s1")
        assert {*foreign.headers} == {*missing.headers}


# --- 18. defaults ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "asks", "names", "starts"),
    [
        ("127.0.0.1", "", (), "starts"),
        ("127.0.0.1", "asks", (), "starts"),
        ("0.0.0.0", "", (), ""),
        ("0.0.0.0", "", ("*",), ""),
        ("0.0.0.0", "asks", (), ""),
        ("0.0.0.0", "asks", ("agents.example",), ""),
        ("0.0.0.0", "asks", ("agents.example",), "plain"),
    ],
)
async def test_rule_18_no_server_is_open_to_the_network_by_default(
    host: str, asks: str, names: tuple[str, ...], starts: str
) -> None:
    stop = asyncio.Event()
    stop.set()
    app = guarded_app() if asks else make_app()
    serving = serve(
        app, host=host, port=0, allowed_hosts=names, stop=stop, allows_plain_text=starts == "plain"
    )
    if starts:
        await asyncio.wait_for(serving, 60)
    else:
        with pytest.raises(UsageError, match="opens the server to the network"):
            await serving


@pytest.mark.parametrize("proxies", [[], ["127.0.0.1"]])
async def test_rule_18_proxy_headers_are_trusted_only_from_named_proxies(proxies: list[str]) -> None:
    seen: list[tuple[str, str]] = []

    def note(connection: HTTPConnection) -> None:
        assert connection.client is not None
        seen.append((connection.client.host, connection.url.scheme))

    app = make_app(access=Access(authenticate=note))
    async with served(app, trusted_proxies=proxies) as server:
        forwarded = {"x-forwarded-for": "198.51.100.7", "x-forwarded-proto": "https"}
        await server.http.get("/v1/sessions", headers=forwarded)
    assert seen == [("198.51.100.7", "https") if proxies else ("127.0.0.1", "http")]


async def test_rule_18_a_user_header_is_trusted_only_from_its_proxy() -> None:
    way = proxy_user("x-forwarded-user", proxies=["192.0.2.1"])
    for address, expected in (("192.0.2.1", 200), ("192.0.2.2", 401)):
        app = make_app(access=Access(authenticate=way))
        transport = httpx2.ASGITransport(app=app, client=(address, 4711))
        async with httpx2.AsyncClient(transport=transport, base_url="http://testserver") as client:
            answer = await client.get("/v1/sessions", headers={"x-forwarded-user": "ada"})
            assert answer.status_code == expected
        await app.stop(grace_s=0)


# --- 19. supply chain -----------------------------------------------------------------------------


def test_rule_19_a_server_loads_only_its_declared_dependencies_and_none_hooks_the_interpreter() -> None:
    program = (
        "import json, sys; import midstream.server.app, midstream.server.uvicorn_server;"
        "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, check=True, text=True, timeout=60
    )
    loaded = {name for name in json.loads(done.stdout) if name not in sys.stdlib_module_names}
    allowed = {
        "midstream",
        "msgspec",
        "starlette",
        "uvicorn",
        "apsw",
        "click",
        "h11",
        "httptools",
        "cython_runtime",  # Created by every extension that Cython compiled, httptools for one.
        "uvloop",
        "anyio",
    }
    allowed |= {"python_multipart", "websockets", "idna", "sniffio", "typing_extensions", "_cffi_backend"}
    assert {name for name in loaded if not name.startswith("_")} <= allowed
    base = [each for each in requires("midstream") or () if "extra ==" not in each]
    names = [each.partition(">")[0].strip() for each in base]
    assert len(names) <= 12
    hooks = [str(file) for name in names for file in distribution(name).files or () if file.suffix == ".pth"]
    assert hooks == []
