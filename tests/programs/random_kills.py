"""Random SIGKILLs of the gateway during answers of a program, and their consequences."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress

from midstream.environment import World
from tests.programs.agent_programs import processes_of
from tests.programs.gateway_process import ReadAnswer, assistant, user
from tests.programs.model_server import effects_of
from tests.programs.situations import Run

TRIES_MAX = 4
"""Requests that a client sends for one message, with the gateway alive after the first one."""


async def random_kills(run: Run, kills: int, seed: int) -> None:
    """Kill the gateway at a random moment of each turn, start it again, and repeat the request until it is
    answered.

    The tool of a turn may end in doubt, and never has its effect twice. After the next turn has begun, no
    process of a dead gateway is left.
    """
    chance = random.Random(seed)
    errors = effects = 0
    for number in range(1, kills + 1):
        name = f"{number}"
        is_tool = chance.random() < 0.5
        words = f"Q{name} {{{'tool 1' if is_tool else 'say 40'}}}"
        run.messages.append(user(words))
        cut = ReadAnswer()
        asking = asyncio.create_task(run.gateway.send_transcript(run.messages, answer=cut))
        await World().sleep(chance.uniform(0.0, 2.5))
        await run.gateway.kill()
        await asking
        dead = {*processes_of(run.place)}
        await run.gateway.start()
        answer = ReadAnswer()
        for _ in range(TRIES_MAX):
            answer = await run.gateway.send_transcript(run.messages)
            if not answer.error:
                break
        errors += bool(answer.error)
        left = dead & {*processes_of(run.place)}
        run.check(
            not left or answer.error, f"kill {number}: {len(left)} processes of the dead gateway are left"
        )
        run.check(answer.is_ended, f"kill {number}: no end of the answer: {answer.error[:100]}")
        count = effects_of(run.place.folder / "ledger")[name]
        effects += count
        run.check(count <= 1, f"kill {number}: the tool had its effect {count} times")
        for request in run.model.main(name)[-1:]:
            run.check(
                [*dict.fromkeys(request.ids)] == [*request.ids],
                f"kill {number}: the model got the messages {request.ids}",
            )
        run.messages.append(assistant(answer.text or "(no answer)"))
    run.verdict.facts.append(
        f"{kills} kills, seed {seed}, {effects} effects, {errors} turns without an answer"
    )
    with suppress(TimeoutError):
        await run.gateway.stop()
