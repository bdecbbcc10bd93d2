"""Session reuse: the cost of recognizing a conversation, and the bytes that it saves upstream.

Times are CPU times, so that other work on the machine changes them little. Only the storing of answers has wall times,
as it waits for the disk.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import statistics
import time
from collections.abc import Callable, MutableMapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any

import msgspec

from bench import reuse_path
from bench.reuse_rules import AlwaysFresh, Contestant, Original, Ours, Request, message_bytes
from midstream.agents.pool import Pooled
from midstream.agents.pool_records import confirm, create_fresh, with_answer
from midstream.agents.reuse_classification import RequestRelation, classify
from midstream.agents.upstream_abilities import Abilities
from midstream.agents.upstreams import UpstreamEvent
from midstream.dialects import dialect_registry
from midstream.dialects.conversation_index import place_of
from midstream.dialects.reading_cache import ReadingCache
from midstream.dialects.request_reading import read
from midstream.dialects.stored_conversations import Conversations
from midstream.environment import World
from midstream.history.messages import Entry, File, History, Response, Step, Text, UserMessage
from midstream.models.fingerprint import Chain, outline
from midstream.models.responses import Finished, TextDelta
from midstream.server.gateway_app import Gateway, gateway
from midstream.store.memory import MemoryStore
from midstream.store.sqlite import SQLiteStore
from midstream.testing.scripted_upstream import AgentConversation, ScriptedUpstream

MESSAGES = 10_000
CHARS = 300
"""Characters of one message: 10,000 messages are 3 MB."""
ROUNDS = 40
STORED_ANSWERS = 400
"""Answers of one conversation. The bench times_ms until each is in the store."""
COLD_BAR_MS = 15.0
TURNS = 50
HALFWAY = 25
QUESTION_CHARS, ANSWER_CHARS = 200, 1200
"""Characters of a question and of its answer in the counted conversations."""

ANSWER_MESSAGE = {"role": "assistant", "content": "well"}
IDENTITY = {"model": "opus", "folder": "/work"}
CONTESTANTS: dict[str, Callable[[], Contestant]] = {
    "always fresh": AlwaysFresh,
    "the original": Original,
    "ours": lambda: Ours(Abilities()),
    "ours, forking": lambda: Ours(Abilities(can_fork=True, can_reinstruct=True)),
}


class Time(msgspec.Struct):
    """Time of one operation: the best and the median of several rounds."""

    what: str
    best_ms: float
    median_ms: float


class Conversation(msgspec.Struct):
    """Bytes that a conversation of `TURNS` turns sent upstream.

    Args:
        said_bytes: Size of the user's messages, each counted once.
        wrong: Turns answered by an agent without the whole conversation.
    """

    what: str
    contestant: str
    sent_bytes: int
    said_bytes: int
    last_turn_bytes: int
    wrong: int


class Report(msgspec.Struct):
    """All results."""

    messages: int
    times: list[Time]
    cold_bar_ms: float
    is_met: bool
    conversations: list[Conversation]
    path: list[reuse_path.Passage]


def run(folder: Path) -> Report:
    """Measure, print, return."""
    times = [
        *_classification_times(),
        *_reading_times(),
        *asyncio.run(_gateway_times()),
        *asyncio.run(_storing_times(folder)),
    ]
    is_met = times[0].best_ms < COLD_BAR_MS
    print(f"{MESSAGES} messages, {MESSAGES * CHARS / 1e6:.0f} MB{'best ms':>35}{'median':>10}")
    for row in times:
        print(f"  {row.what:<46}{row.best_ms:>9.3f}{row.median_ms:>10.3f}")
    conversations = [
        conversation(what, requests(), contestant)
        for what, requests in SCENARIOS.items()
        for contestant in CONTESTANTS
    ]
    print(
        f"\n{TURNS} turns: bytes sent upstream (of the last turn; turns answered by an agent without the conversation)"
    )
    for each in conversations:
        wrong = f"; {each.wrong} wrong" if each.wrong else ""
        print(f"  {each.what:<26}{each.contestant:<15}{each.sent_bytes:>10} ({each.last_turn_bytes}{wrong})")
    path = reuse_path.measure(TURNS, QUESTION_CHARS, ANSWER_CHARS)
    print(f"\n{TURNS} turns: OpenAI's client, gateway, pool, OpenAI's package: bytes of the received bodies")
    for passage in path:
        print(
            f"  {passage.contestant:<15}{passage.sent_bytes:>10} (first turn {passage.first_turn_bytes}, "
            f"last {passage.last_turn_bytes}; {passage.users} user messages)"
        )
    return Report(MESSAGES, times, COLD_BAR_MS, is_met, conversations, path)


def _time(what: str, act: Callable[[], object]) -> Time:
    rounds = []
    for _ in range(ROUNDS):
        start = time.process_time()
        act()
        rounds.append((time.process_time() - start) * 1e3)
    return Time(what, min(rounds), statistics.median(rounds))


def _classification_times() -> list[Time]:
    entries: list[Entry] = []
    for number in range(MESSAGES // 2):
        entries.append(UserMessage.of(f"question {number} ".ljust(CHARS, "x")))
        entries.append(Step(Response((Text(f"answer {number} ".ljust(CHARS, "y")),))))
    before = History(tuple(entries[:-2]))
    entries.pop()
    now = History(tuple(entries))
    requested = outline("Be brief.", (), (), IDENTITY, before)
    record = confirm(create_fresh(requested, upstream="bench", now=0.0), "agent", now=0.0)
    record = with_answer(record, agent="agent", mark="", open_calls=(), now=0.0)

    def cold() -> None:
        assert (
            classify(record, outline("Be brief.", (), (), IDENTITY, now)).kind is RequestRelation.CONTINUATION
        )

    def appended() -> Time:
        rounds = []
        for _ in range(ROUNDS):
            chain = Chain().then(before)
            start = time.process_time()
            found = classify(record, chain.then(now).digest.outline("Be brief.", (), (), IDENTITY))
            rounds.append((time.process_time() - start) * 1e3)
            assert found.kind is RequestRelation.CONTINUATION
        return Time("classify, one message appended", min(rounds), statistics.median(rounds))

    return [_time("classify, cold", cold), appended()]


def _reading_times() -> list[Time]:
    messages = [
        {"role": ("user", "assistant")[n % 2], "content": f"{n} ".ljust(CHARS, "x")} for n in range(MESSAGES)
    ]
    body = {"model": "m", "messages": messages[:-2], "stream": True}
    memo = ReadingCache()
    read(dialect_registry.CHAT, {}, msgspec.json.encode(body | {"messages": messages[:-3]}), memo)
    raw = msgspec.json.encode(body | {"messages": messages[:-1]})

    def resent() -> None:
        assert read(dialect_registry.CHAT, {}, raw, memo).known

    return [
        _time("body, known messages", resent),
        _time("  SHA-256 of these bytes alone", lambda: hashlib.sha256(raw).digest()),
        _time("body, nothing known", lambda: read(dialect_registry.CHAT, {}, raw)),
        _time("  msgspec.json.decode alone", lambda: msgspec.json.decode(raw)),
    ]


async def _gateway_times() -> list[Time]:
    """Time a gateway with a pool, from the bytes of a POST to the first message for the upstream."""
    sent_at = 0.0

    def answer(_: AgentConversation) -> Sequence[UpstreamEvent]:
        nonlocal sent_at
        sent_at = time.process_time()
        return [TextDelta("well"), Finished()]

    store = MemoryStore()
    upstream = ScriptedUpstream(answer=answer)
    app = gateway(Pooled(upstream, store), token=None, store=store)
    talk: list[dict[str, Any]] = [
        {"role": ("user", "assistant")[n % 2], "content": f"{n} ".ljust(CHARS, "x")} for n in range(MESSAGES)
    ]
    dumped = {
        "role": "assistant",
        "content": "well",
        "refusal": None,
        "tool_calls": None,
        "function_call": None,
    }
    keys = itertools.count()

    async def post(messages: list[dict[str, Any]], key: str) -> float:
        body = msgspec.json.encode({"model": "m", "messages": messages})
        start = time.process_time()
        await _post(app, body, key)
        return (sent_at - start) * 1e3

    async def rounds(what: str, key: Callable[[], str], response: dict[str, Any] = ANSWER_MESSAGE) -> Time:
        del talk[MESSAGES - 1 :]
        await post(talk, key())
        times = []
        for _ in range(ROUNDS):
            talk.extend([response, {"role": "user", "content": "and now?"}])
            times.append(await post(talk, key()))
        return Time(what, min(times), statistics.median(times))

    async def fresh() -> Time:
        times = []
        for _ in range(ROUNDS):
            upstream.memory.talks.clear()  # it keeps no conversation
            talk.extend([ANSWER_MESSAGE, {"role": "user", "content": "and now?"}])
            times.append(await post(talk, "me"))
        return Time("POST to send, known, told to a fresh agent", min(times), statistics.median(times))

    known = await rounds("POST to send, known messages", lambda: "me")
    full = await fresh()
    shaped = await rounds("POST to send, known, responses as a dump", lambda: "dumps", dumped)
    cold = await rounds("POST to send, nothing known", lambda: f"{next(keys)}")
    times = [await post([{"role": "user", "content": f"{number}"}], "me") for number in range(ROUNDS)]
    short = Time("POST to send, one short message", min(times), statistics.median(times))
    raw = msgspec.json.encode({"model": "m", "messages": talk})
    ceiling = _time("  SHA-256 of these bytes alone", lambda: hashlib.sha256(raw).digest())
    await app.stop()
    return [known, ceiling, shaped, short, cold, full]


async def _storing_times(folder: Path) -> list[Time]:
    """Measure the wall time to store the place of an unnamed conversation at the end of each answer."""
    times = []
    stores: dict[str, MemoryStore | SQLiteStore] = {
        "in memory": MemoryStore(),
        "in SQLite": SQLiteStore(folder / "conversations.db"),
    }
    for where, store in stores.items():
        await store.open()
        conversations, place, times_ms = Conversations(store, World()), place_of("m", History()), []
        for number in range(STORED_ANSWERS):
            place = place.then([_question(number)])
            start = time.perf_counter()
            await conversations.add_response("conversation-1", place, Response((Text(f"answer {number}"),)))
            times_ms.append((time.perf_counter() - start) * 1e3)
            place = place.then([Step(Response((Text(f"answer {number}"),)))])
        times.append(
            Time(f"an unnamed conversation's place kept, {where}", min(times_ms), statistics.median(times_ms))
        )
        await store.close()
    return times


async def _post(app: Gateway, body: bytes, key: str) -> None:
    """Send a request as a server that has read it completely, and wait for the end of the answer."""
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/chat/completions",
        "query_string": b"",
        "headers": [(b"host", b"127.0.0.1"), (b"x-api-key", key.encode())],
        "client": ("127.0.0.1", 1),
    }
    messages = [{"type": "http.request", "body": body, "more_body": False}]
    is_over = asyncio.Event()

    async def receive() -> dict[str, object]:
        if messages:
            return messages.pop()
        await is_over.wait()
        return {"type": "http.disconnect"}

    async def send(message: MutableMapping[str, object]) -> None:
        assert message.get("status", 200) == HTTPStatus.OK
        if message["type"] == "http.response.body" and not message.get("more_body"):
            is_over.set()

    await app(scope, receive, send)


def _question(number: int) -> UserMessage:
    return UserMessage.of(f"question {number} ".ljust(QUESTION_CHARS, "x"))


def _answer(number: int) -> Step:
    return Step(Response((Text(f"answer {number} ".ljust(ANSWER_CHARS, "y")),)))


def _conversation(turns: int = TURNS) -> list[Request]:
    entries: list[Entry] = []
    requests = []
    for number in range(turns):
        entries.append(_question(number))
        requests.append(Request("Be brief.", tuple(entries)))
        entries.append(_answer(number))
    return requests


def _new_day() -> list[Request]:
    return [
        msgspec.structs.replace(request, system=f"Be brief. Day {number // HALFWAY}")
        for number, request in enumerate(_conversation())
    ]


def _title_first() -> list[Request]:
    return [Request("Make a title.", (UserMessage.of("Of: question 0"),)), *_conversation()]


def _repeated_request() -> list[Request]:
    requests = _conversation()
    return [*requests[:HALFWAY], requests[HALFWAY - 1], *requests[HALFWAY:]]


def _failing() -> list[Request]:
    requests = _conversation()
    requests[HALFWAY] = msgspec.structs.replace(requests[HALFWAY], is_failing=True)
    return requests


def _edited(message: UserMessage) -> list[Request]:
    """Return a conversation whose last message before halfway is edited from there on."""
    requests = _conversation()
    place = 2 * (HALFWAY - 1)
    for number in range(HALFWAY - 1, TURNS):
        entries = list(requests[number].entries)
        entries[place] = message
        requests[number] = msgspec.structs.replace(requests[number], entries=tuple(entries))
    return [*_conversation(HALFWAY), *requests[HALFWAY - 1 :]]


def _swapped_image() -> list[Request]:
    def with_image(request: Request, data: str) -> Request:
        first = UserMessage((Text("Look."), File("image/png", data)))
        return msgspec.structs.replace(request, entries=(first, *request.entries[1:]))

    images = ("AAAA" * 100, "BBBB" * 100)
    return [with_image(request, images[number >= HALFWAY]) for number, request in enumerate(_conversation())]


SCENARIOS: dict[str, Callable[[], list[Request]]] = {
    "clean": _conversation,
    "a new day in the prompt": _new_day,
    "a title call comes first": _title_first,
    "one answer asked for again": _repeated_request,
    "one message edited": lambda: _edited(UserMessage.of("edited".ljust(QUESTION_CHARS, "x"))),
    "one image swapped": _swapped_image,
    "one send fails for good": _failing,
}


def conversation(what: str, requests: list[Request], contestant: str) -> Conversation:
    """Run one conversation with one set of rules."""
    rules = CONTESTANTS[contestant]()
    sent = [rules.send(request) for request in requests]
    user_bytes = sum(message_bytes(entry) for entry in requests[-1].entries if isinstance(entry, UserMessage))
    return Conversation(
        what,
        contestant,
        sum(one.sent for one in sent),
        user_bytes,
        sent[-1].sent,
        sum(not one.is_right for one in sent),
    )
