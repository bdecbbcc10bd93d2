"""The situations of every program as a client of the gateway, each in a home and folders of its own.

Two sources are checked: the log of the model server (the number of requests for a message, and their earlier
messages), and the screen (each word once).
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

from msgspec import Struct, field

from midstream.environment import World
from tests.hosts.host_programs import HostProgram, environment
from tests.hosts.line_cuts import ByteCountingRelay, LineCut, Way
from tests.programs.agent_programs import RunFolders
from tests.programs.gateway_process import GatewayProcess
from tests.programs.model_server import ModelServer, effects_of
from tests.programs.situations import SituationVerdict

TURN_S = 180.0
"""Seconds for one message; a machine under load starts some of these programs in half a minute."""
WAIT_S = 60.0
POLL_S = 0.02
LONG = 60
"""Words of a long answer; the model server writes 50 a second."""


class HostRun(Struct):
    """One situation in progress."""

    program: HostProgram
    place: RunFolders
    model: ModelServer
    gateway: GatewayProcess
    relay: ByteCountingRelay
    chance: random.Random
    verdict: SituationVerdict = field(default_factory=SituationVerdict)
    is_played: bool = True

    async def send(self, words: str, *, is_continued: bool = False, place: RunFolders | None = None) -> str:
        """Send a message with the program, at another place where one is given; return its standard output."""
        place = place or self.place
        process = await asyncio.create_subprocess_exec(
            self.program.path(),
            *self.program.arguments(words, is_continued),
            env=environment(self.program, place, self.relay.url),
            cwd=place.work,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            shown, errors = await asyncio.wait_for(process.communicate(), TURN_S)
        except TimeoutError:
            process.kill()
            shown, errors = await process.communicate()
            self.verdict.faults.append(f"{words}: no end within {TURN_S:.0f} s")
        self.check(process.returncode == 0, f"{words}: ended with {process.returncode}: {errors[-300:]!r}")
        return shown.decode()

    def check(self, holds: object, fault: str) -> None:
        """Count a fault if a condition does not hold."""
        if not holds:
            self.verdict.faults.append(fault)

    def not_played(self, reason: str) -> None:
        """Leave the situation out."""
        self.is_played = False
        self.verdict.facts.append(reason)

    def shown_once(self, screen: str, directive_id: str, count: int, *, is_cut: bool = False) -> None:
        """Check that a screen has so many words of an answer, each once and in order.

        Args:
            is_cut: The answer was cut; some programs show the words before the cut, too.
        """
        words = [word for word in screen.split() if word.startswith(f"R{directive_id}.")]
        expected = [f"R{directive_id}.{place}" for place in range(count)]
        before = len(words) - count
        if is_cut and self.program.keeps_cut_words and before > 0:
            self.check(words[:before] == expected[:before], "the words before the cut are others")
            self.verdict.facts.append(f"shows {before} words before the cut once more")
            words = words[before:]
        self.check(words == expected, f"the screen has {_shorten(words)}, not {_shorten(expected)}")

    def check_requests(self, directive_id: str, *before: str, times: int = 1) -> None:
        """Check the number of requests to the model for a message, and that it had each message of the user once."""
        requests = self.model.main(directive_id)
        self.check(len(requests) == times, f"Q{directive_id} was sent to the model {len(requests)} times")
        for request in requests:
            counts = Counter(request.ids)
            expected = {*before, directive_id}
            self.check(
                counts.keys() == expected and set(counts.values()) == {1},
                f"Q{directive_id} came with the messages {list(request.ids)}, not {sorted(expected)}",
            )

    async def until(self, holds: Callable[[], bool], what: str) -> None:
        """Wait for a state of the outside world."""
        for _ in range(round(WAIT_S / POLL_S)):
            if holds():
                return
            await World().sleep(POLL_S)
        raise TimeoutError(f"{what}, not within {WAIT_S:.0f} s")

    async def restart(self) -> None:
        """Start a gateway that was killed; the relay connects to it."""
        await self.gateway.start()
        self.relay.port = port_of(self.gateway.url)


HostSituation = Callable[[HostRun], Awaitable[None]]


def port_of(url: str) -> int:
    """Return the port of a URL."""
    return int(url.rstrip("/").rpartition(":")[2])


async def two_turns(run: HostRun) -> None:
    """Two turns with a tool of the program between them."""
    run.shown_once(await run.send("Q1 {say 3}"), "1", 3)
    assert "R2.done" in await run.send("Q2 {tool}", is_continued=True)
    run.check(effects_of(run.place.folder / "ledger") == {"2": 1}, "the tool did not run once")
    run.shown_once(await run.send("Q3 {say 2}", is_continued=True), "3", 2)
    run.check_requests("1")
    run.check_requests("3", "1", "2")


async def two_conversations(run: HostRun) -> None:
    """Two people have a conversation each, concurrently."""
    other = place_in(run.place.folder / "other", run.model)
    run.program.prepare(other, run.relay.url)
    screens = await asyncio.gather(run.send("Q1 {say 20}"), run.send("Q2 {say 20}", place=other))
    run.shown_once(screens[0], "1", 20)
    run.shown_once(screens[1], "2", 20)
    await asyncio.gather(
        run.send("Q3 {say 2}", is_continued=True),
        run.send("Q4 {say 2}", is_continued=True, place=other),
    )
    run.check_requests("1")
    run.check_requests("2")
    run.check_requests("3", "1")
    run.check_requests("4", "2")


async def _cut(run: HostRun, way: Way) -> None:
    after = run.chance.randrange(200, 8000)
    run.relay.cut = LineCut(after, way, b"Q1 {say")
    screen = await run.send(f"Q1 {{say {LONG}}}")
    run.verdict.facts.append(f"after {after} bytes")
    run.check(run.relay.cut.is_done, "the line was not cut")
    run.shown_once(screen, "1", LONG, is_cut=True)
    run.check_requests("1")
    run.shown_once(await run.send("Q2 {say 2}", is_continued=True), "2", 2)
    run.check_requests("2", "1")


async def cut_by_reset(run: HostRun) -> None:
    """A reset cuts the connection at a random byte of the answer."""
    await _cut(run, "reset")


async def cut_by_fin(run: HostRun) -> None:
    """A FIN closes the connection at a random byte of the answer."""
    await _cut(run, "fin")


async def killed_in_answer(run: HostRun) -> None:
    """The gateway is killed in the middle of an answer, and started again at once."""
    sending = asyncio.create_task(run.send(f"Q1 {{say {LONG}}}"))
    await run.until(lambda: bool(run.model.main("1")), "the model was not asked")
    await World().sleep(run.chance.uniform(0.2, 0.9))
    await run.gateway.kill()
    await run.restart()
    run.shown_once(await sending, "1", LONG, is_cut=True)
    run.shown_once(await run.send("Q2 {say 2}", is_continued=True), "2", 2)
    run.check_requests("2", "1")


async def killed_between_turns(run: HostRun) -> None:
    """The gateway is killed between two turns."""
    run.shown_once(await run.send("Q1 {say 3}"), "1", 3)
    await run.gateway.kill()
    await run.restart()
    run.shown_once(await run.send("Q2 {say 2}", is_continued=True), "2", 2)
    run.check_requests("1")
    run.check_requests("2", "1")


async def sub_agent(run: HostRun) -> None:
    """The model starts a sub-agent, whose messages are no part of the main conversation."""
    if not run.program.has_sub_agents:
        run.not_played("starts none by this tool")
        return
    run.check("R1.done" in await run.send("Q1 {agent}"), "the main agent did not end")
    run.check_requests("1s")
    run.shown_once(await run.send("Q2 {say 2}", is_continued=True), "2", 2)
    run.check_requests("2", "1", "1s")


async def mcp_tool(run: HostRun) -> None:
    """The model calls a tool of an MCP server of the program; Codex declares it in a namespace."""
    if run.program.name != "codex":
        run.not_played("only played with codex")
        return
    run.check("R1.done" in await run.send("Q1 {look}"), "the tool was not called")
    run.shown_once(await run.send("Q2 {say 2}", is_continued=True), "2", 2)
    run.check_requests("2", "1")


async def compaction(run: HostRun) -> None:
    """The conversation is compacted, and continues."""
    if run.program.compacts is None:
        run.not_played("has no command for it without a terminal")
        return
    run.shown_once(await run.send("Q1 {say 3}"), "1", 3)
    if command := run.program.compacts(run.place):
        await run.send(command, is_continued=True)
    before = len(run.model.requests)
    run.shown_once(await run.send("Q2 {say 2}", is_continued=True), "2", 2)
    run.check(len(run.model.main("2")) == 1, "Q2 was not sent to the model once")
    summaries = [each for each in run.model.requests if not each.is_main and "1" in each.ids]
    run.check(
        command or summaries, f"no summary was requested in {len(run.model.requests) - before} requests"
    )


async def title(run: HostRun) -> None:
    """The program requests a title beside the conversation, which has it in none of its requests."""
    if not run.program.requests_titles:
        run.not_played("requests none without a terminal")
        return
    run.shown_once(await run.send("Q1 {say 3}"), "1", 3)
    run.check(any(not each.is_main for each in run.model.requests), "no title was requested")
    run.shown_once(await run.send("Q2 {say 2}", is_continued=True), "2", 2)
    run.check_requests("1")
    run.check_requests("2", "1")


SITUATIONS: dict[str, HostSituation] = {
    "two turns with a tool": two_turns,
    "two conversations at once": two_conversations,
    "connection closed by TCP reset (RST)": cut_by_reset,
    "connection closed normally (FIN)": cut_by_fin,
    "gateway killed during an answer": killed_in_answer,
    "gateway killed between turns": killed_between_turns,
    "sub-agent": sub_agent,
    "tool of an MCP server": mcp_tool,
    "compaction": compaction,
    "title": title,
}


def _shorten(words: list[str]) -> str:
    return (
        " ".join(words)
        if len(words) < 8
        else f"{' '.join(words[:4])} … {' '.join(words[-3:])} ({len(words)})"
    )


def place_in(folder: Path, model: ModelServer) -> RunFolders:
    """Create the folders of a run, and return their place."""
    place = RunFolders(folder, model.url)
    for each in (place.home, place.work):
        each.mkdir(parents=True, exist_ok=True)
    return place
