"""The situations of every program, each in a gateway, a home and a working folder of its own."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, Literal

from msgspec import Struct, field

from midstream.client import connect
from midstream.environment import World
from tests.programs.agent_programs import AgentProgram, RunFolders, processes_of
from tests.programs.gateway_process import GatewayProcess, PeopleServer, ReadAnswer, assistant, user
from tests.programs.model_server import ModelServer, effects_of

WAIT_S = 60.0
POLL_S = 0.05
REQUESTS_MAX = 15
"""Requests to the provider for one message: those of the program, and of one fresh agent for a refused message."""
TRY_AGAIN = 503
MINUTE_S = 60.0
PIXEL = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJ"
    "AAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


class SituationVerdict(Struct):
    """The result of one situation with one program.

    Args:
        faults: Violations; empty if it held.
        facts: Observations, for the table.
    """

    faults: list[str] = field(default_factory=list)
    facts: list[str] = field(default_factory=list)


class Run(Struct):
    """One situation in progress."""

    program: AgentProgram
    place: RunFolders
    model: ModelServer
    gateway: GatewayProcess
    messages: list[Mapping[str, Any]] = field(default_factory=list)
    verdict: SituationVerdict = field(default_factory=SituationVerdict)

    async def send_next(self, words: str, **options: Any) -> ReadAnswer:  # noqa: ANN401 - those of `GatewayProcess.ask`
        """Send the next message of the conversation, and add its answer to the transcript."""
        self.messages.append(user(words))
        return await self.send_transcript(**options)

    async def send_transcript(self, **options: Any) -> ReadAnswer:  # noqa: ANN401 - those of `GatewayProcess.ask`
        """Send the transcript unchanged."""
        answer = await self.gateway.send_transcript(self.messages, **options)
        if answer.text and not answer.error:
            self.messages.append(assistant(answer.text))
        return answer

    def check(self, holds: object, fault: str) -> None:
        """Count a fault if a condition does not hold."""
        if not holds:
            self.verdict.faults.append(fault)

    def whole(self, answer: ReadAnswer, expected: str) -> None:
        """Check that an answer ended cleanly with these words only."""
        words = " ".join(answer.text.split())
        self.check(
            answer.is_ended and not answer.error, f"no complete answer: {answer.status} {answer.error[:200]}"
        )
        self.check(
            words.endswith(expected) and words.count("R") == expected.count("R"),
            f"{words!r}, not {expected!r}",
        )

    def resumed(self, directive_id: str, *before: str) -> None:
        """Check that the agent received each message of the user once, and record whether a transcript was sent."""
        requests = self.model.main(directive_id)
        self.check(bool(requests), f"Q{directive_id} never reached the model")
        if requests:
            ids = list(requests[-1].ids)
            expected = [*before, directive_id]
            self.check(ids == expected, f"the model got the messages {ids}, not {expected}")
            self.verdict.facts.append("transcript" if requests[-1].is_replay else "resumed")

    async def until(self, holds: Callable[[], bool], what: str) -> None:
        """Wait for a state of the outside world."""
        for _ in range(round(WAIT_S / POLL_S)):
            if holds():
                return
            await World().sleep(POLL_S)
        raise TimeoutError(f"{what}, not within {WAIT_S:.0f} s")

    def agents(self) -> list[int]:
        """Return the processes of the agent."""
        found = processes_of(self.place).items()
        return [pid for pid, line in found if self.program.is_agent(line) and " gateway " not in line]

    def kill_agents(self) -> None:
        """Kill the agent's processes, as the machine's memory killer would."""
        for pid in self.agents():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


Situation = Callable[[Run], Awaitable[None]]


async def two_turns(run: Run) -> None:
    run.whole(await run.send_next("Q1 {say 3}"), "R1.0 R1.1 R1.2")
    run.whole(await run.send_next("Q2 {say 2}"), "R2.0 R2.1")
    run.resumed("2", "1")


async def a_tool(run: Run) -> None:
    run.whole(await run.send_next("Q1 {tool}"), "R1.done")
    run.check(effects_of(run.place.folder / "ledger")["1"] == 1, "the tool had no effect")
    run.whole(await run.send_next("Q2 {say 2}"), "R2.0 R2.1")
    run.resumed("2", "1")


async def gateway_killed_between(run: Run) -> None:
    run.whole(await run.send_next("Q1 {say 3}"), "R1.0 R1.1 R1.2")
    await run.gateway.kill()
    await run.gateway.start()
    run.whole(await run.send_next("Q2 {say 2}"), "R2.0 R2.1")
    run.resumed("2", "1")


async def gateway_killed_and_a_minute_passes(run: Run) -> None:
    run.whole(await run.send_next("Q1 {say 3}"), "R1.0 R1.1 R1.2")
    await run.gateway.kill()
    await World().sleep(MINUTE_S - World().now() % MINUTE_S + 1.0)
    await run.gateway.start()
    run.whole(await run.send_next("Q2 {say 2}"), "R2.0 R2.1")
    run.resumed("2", "1")


async def another_version(run: Run) -> None:
    other = run.program.other_version()
    if not other:
        run.verdict.facts.append("none installed")
        return
    for number, options in enumerate(((), other, ()), start=1):
        run.gateway.options = tuple(options)
        await run.gateway.stop()
        await run.gateway.start()
        run.whole(await run.send_next(f"Q{number} {{say 2}}"), f"R{number}.0 R{number}.1")
        run.resumed(f"{number}", *map(str, range(1, number)))


async def gateway_killed_in_answer(run: Run) -> None:
    run.whole(await run.send_next("Q1 {say 2}"), "R1.0 R1.1")
    cut = ReadAnswer()
    asking = asyncio.create_task(run.send_next("Q2 {hang 3 1}", answer=cut))
    await run.until(lambda: "R2." in cut.text, "a word of the model")
    await run.gateway.kill()
    await asking
    await run.gateway.start()
    again = await run.send_transcript()
    run.check(again.is_ended and not again.error, f"no complete answer: {again.error[:200]}")
    run.check(again.text.split()[-3:] == ["R2.0", "R2.1", "R2.2"], f"{again.text!r}")
    run.resumed("2", "1")


async def gateway_killed_in_tool(run: Run) -> None:
    run.whole(await run.send_next("Q1 {say 2}"), "R1.0 R1.1")
    asking = asyncio.create_task(run.send_next("Q2 {tool 3}"))
    await run.until(lambda: _sleeps(run), "the tool")
    await run.gateway.kill()
    await asking
    await run.gateway.start()
    again = await run.send_transcript()
    run.check(again.is_ended, "no end")
    await World().sleep(4)  # Acts of a survivor would happen now.
    count = effects_of(run.place.folder / "ledger")["2"]
    run.check(count <= 1, f"the tool had its effect {count} times")
    run.verdict.facts.append(f"effects {count}, {'error' if again.error else 'answered'}")


async def agent_killed_between(run: Run) -> None:
    run.whole(await run.send_next("Q1 {say 3}"), "R1.0 R1.1 R1.2")
    run.kill_agents()
    run.whole(await run.send_next("Q2 {say 2}"), "R2.0 R2.1")
    run.resumed("2", "1")


async def agent_killed_before_a_word(run: Run) -> None:
    run.whole(await run.send_next("Q1 {say 3}"), "R1.0 R1.1 R1.2")
    asking = asyncio.create_task(run.send_next("Q2 {hang 0 1}"))
    await run.until(lambda: bool(run.model.main("2")), "the request")
    run.kill_agents()
    run.check((await asking).is_ended, "no end")


async def agent_killed_in_answer(run: Run) -> None:
    run.whole(await run.send_next("Q1 {say 2}"), "R1.0 R1.1")
    cut = ReadAnswer()
    asking = asyncio.create_task(run.send_next("Q2 {hang 2 1}", answer=cut))
    await run.until(lambda: len(cut.pieces) > 0, "a word")
    run.kill_agents()
    answer = await asking
    run.check(answer.is_ended, "no end")
    run.verdict.facts.append("error" if answer.error else "answered")


async def agent_killed_in_tool(run: Run) -> None:
    asking = asyncio.create_task(run.send_next("Q1 {tool 3}"))
    await run.until(lambda: _sleeps(run), "the tool")
    run.kill_agents()
    answer = await asking
    run.check(answer.is_ended, "no end")
    await World().sleep(4)
    count = effects_of(run.place.folder / "ledger")["1"]
    run.check(count <= 1, f"the tool had its effect {count} times")
    run.verdict.facts.append(f"effects {count}, {'error' if answer.error else 'answered'}")


async def memory_deleted(run: Run) -> None:
    run.whole(await run.send_next("Q1 {say 3}"), "R1.0 R1.1 R1.2")
    await run.gateway.stop()
    for folder in run.program.sessions:
        shutil.rmtree(run.place.home / folder, ignore_errors=True)
    await run.gateway.start()
    run.whole(await run.send_next("Q2 {say 2}"), "R2.0 R2.1")
    run.resumed("2", "1")


async def disconnection(run: Run) -> None:
    run.whole(await run.send_next("Q1 {say 2}"), "R1.0 R1.1")
    left = await run.gateway.send_transcript([*run.messages, user("Q2 {say 40}")], leave_after=2)
    run.check(bool(left.pieces), "nothing before the disconnection")
    run.whole(await run.send_next("Q2 {say 40}"), " ".join(f"R2.{n}" for n in range(40)))
    run.check(len(run.model.main("2")) == 1, f"{len(run.model.main('2'))} requests for one message")


async def stop(run: Run) -> None:
    await run.gateway.send_transcript([user("Q1 {hang 2}")], leave_after=1)
    await run.gateway.send_transcript([user("Q9 {say 1}")], session="other")
    await World().sleep(3)  # Beyond `--grace`.
    run.messages += [user("Q1 {hang 2}"), assistant("R1.0 ")]
    run.whole(await run.send_next("Q2 {say 2}"), "R2.0 R2.1")
    run.resumed("2", "1")


async def stop_in_a_tool(run: Run) -> None:
    run.whole(await run.send_next("Q1 {say 2}"), "R1.0 R1.1")
    run.messages.append(user("Q2 {tool 5}"))
    asking = asyncio.create_task(run.gateway.send_transcript(run.messages))
    await run.until(lambda: _sleeps(run), "the tool")
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await World().sleep(8)  # A process that is not stopped has its effect by now.
    count = effects_of(run.place.folder / "ledger")["2"]
    run.check(count == 0, "the tool ran on to its end")
    run.messages.append(user("Q3 {say 2}"))
    run.whole(await run.send_transcript(), "R3.0 R3.1")
    run.resumed("3", "1", "2")


def permission(effects: int) -> Situation:
    """Return a situation in which the program requests a permission for a command, and receives a decision."""

    async def situation(run: Run) -> None:
        answer = await run.send_next("Q1 {ask}")
        run.check(answer.is_ended, "no end")
        count = effects_of(run.place.folder / "ledger")["1"]
        run.check(count == effects, f"{count} effects, not {effects}")
        run.verdict.facts.append("error" if answer.error else "answered")

    return situation


def person(choice: Literal["allow", "deny"], effects: int) -> Situation:
    """Return a situation in which a person is asked for a permission, in a session of midstream."""

    async def situation(run: Run) -> None:
        await run.gateway.stop()
        server = PeopleServer(run.program, run.place)
        await server.start()
        try:
            async with connect(server.url, state=run.place.folder / "person.db") as client:
                async for event in client.send("s", "Q1 {ask}"):
                    for question in await client.questions("s") if event.question is not None else ():
                        await client.answer("s", question, choice)
                        run.verdict.facts.append("asked")
                    if event.is_end:
                        break
        finally:
            await server.stop()
        run.check(run.verdict.facts, "no person was asked")
        count = effects_of(run.place.folder / "ledger")["1"]
        run.check(count == effects, f"{count} effects, not {effects}")

    return situation


async def hang(run: Run) -> None:
    run.whole(await run.send_next("Q1 {say 2}"), "R1.0 R1.1")
    answer = await run.send_next("Q2 {hang 1}", limit_s=60.0)
    run.check(answer.is_ended, f"no end: {answer.error}")


async def edited(run: Run) -> None:
    run.whole(await run.send_next("Q1 {say 2}"), "R1.0 R1.1")
    run.whole(await run.send_next("Q2 {say 2}"), "R2.0 R2.1")
    run.messages[2:] = []
    run.whole(await run.send_next("Q3 {say 2}"), "R3.0 R3.1")
    run.resumed("3", "1")


async def regenerate(run: Run) -> None:
    run.whole(await run.send_next("Q1 {say 2}"), "R1.0 R1.1")
    run.whole(await run.send_next("Q2 {say 2}"), "R2.0 R2.1")
    run.messages.pop()
    run.whole(await run.send_transcript(), "R2.0 R2.1")
    run.resumed("2", "1")


async def new_instructions(run: Run) -> None:
    run.messages.append({"role": "system", "content": "Be brief."})
    run.whole(await run.send_next("Q1 {say 2}"), "R1.0 R1.1")
    run.messages[0] = {"role": "system", "content": "Be long."}
    run.whole(await run.send_next("Q2 {say 2}"), "R2.0 R2.1")
    run.resumed("2", "1")


async def image(run: Run) -> None:
    parts = [
        {"type": "text", "text": "Q1 {say 2}"},
        {"type": "image_url", "image_url": {"url": PIXEL}},
    ]
    run.messages.append({"role": "user", "content": parts})
    run.whole(await run.send_transcript(), "R1.0 R1.1")
    requests = run.model.main("1")
    run.verdict.facts.append("image" if requests and requests[-1].images else "no image")


async def forwarded_server(run: Run) -> None:
    run.whole(await run.send_next("Q1 {say 2}"), "R1.0 R1.1")
    requests = run.model.main("1")
    run.check(requests and requests[-1].has_server, "the model was not offered the tool of the MCP server")


def provider(directive: str, *, is_answered: bool) -> Situation:
    """Return a situation in which the provider fails in the second turn."""

    async def situation(run: Run) -> None:
        run.whole(await run.send_next("Q1 {say 2}"), "R1.0 R1.1")
        answer = await run.send_next(f"Q2 {{{directive}}}", limit_s=400.0)
        run.check(answer.is_ended, f"no end: {answer.status} {answer.error}")
        tries = run.model.tries["2"]
        run.verdict.facts.append(f"{answer.status}, {tries} requests, {answer.seconds:.0f} s")
        run.check(tries <= REQUESTS_MAX, f"{tries} requests of one message")
        if is_answered:
            if answer.status == TRY_AGAIN:  # The program does not retry by itself, and a client does.
                answer = await run.send_transcript()
            if (
                answer.text and answer.error
            ):  # It does not retry after the first word, and then neither may a client.
                run.verdict.facts.append("error")
                run.messages.append(assistant(answer.text))
                answer = await run.send_next("Q3 {say 2}")
                run.whole(answer, "R3.0 R3.1")
            else:
                run.whole(answer, "R2.0 R2.1")
        else:
            run.check(bool(answer.error), "an error that is an answer")
            run.whole(await run.send_next("Q3 {say 2}"), "R3.0 R3.1")
            run.resumed("3", "1", "2")

    return situation


SITUATIONS: Mapping[str, tuple[Situation, tuple[str, ...]]] = {
    "two turns": (two_turns, ()),
    "a tool of the agent": (a_tool, ()),
    "gateway killed between turns": (gateway_killed_between, ()),
    "gateway killed for a minute": (gateway_killed_and_a_minute_passes, ()),
    "another version of the program": (another_version, ()),
    "gateway killed in an answer": (gateway_killed_in_answer, ()),
    "gateway killed in a tool": (gateway_killed_in_tool, ()),
    "agent killed between turns": (agent_killed_between, ()),
    "agent killed before a word": (agent_killed_before_a_word, ()),
    "agent killed in an answer": (agent_killed_in_answer, ()),
    "agent killed in a tool": (agent_killed_in_tool, ()),
    "the agent's memory deleted": (memory_deleted, ()),
    "disconnection": (disconnection, ()),
    "stop": (stop, ("--grace", "0.5")),
    "stop in a tool": (stop_in_a_tool, ("--grace", "0.5")),
    "permission refused": (permission(0), ("--refuse-tool", "none")),
    "person allows": (person("allow", 1), ()),
    "person denies": (person("deny", 0), ()),
    "permission granted": (permission(1), ("--allow-kind", "execute", "--allow-kind", "other")),
    "hang": (hang, ("--silence", "10")),
    "edited message": (edited, ()),
    "regenerate": (regenerate, ()),
    "new instructions": (new_instructions, ()),
    "image": (image, ()),
    "forwarded MCP server": (forwarded_server, ("--mcp-servers", "{folder}/mcp.json")),
    "provider cuts once": (provider("cut 1 1", is_answered=True), ()),
    "provider 400": (provider("status 400", is_answered=False), ()),
    "provider 401": (provider("status 401", is_answered=False), ()),
    "provider 429": (provider("status 429", is_answered=False), ()),
    "provider 429 once": (provider("status 429 1", is_answered=True), ()),
}
"""Each with the options of the gateway that it needs."""
ASKING = {"permission refused", "permission granted", "person allows", "person denies"}
"""Situations for programs that request permissions."""


def _sleeps(run: Run) -> bool:
    return any(line.startswith("sleep ") for line in processes_of(run.place).values())
