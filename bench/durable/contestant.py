"""Run one contestant: `python -m bench.durable.contestant NAME FOLDER ...`. It prints one line of JSON."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import logging
import os
import time
from pathlib import Path

from bench.durable.play import Contestant, Play

MODULES = {
    "midstream": "native",
    "noeta-sdk": "noeta",
    "pydantic-ai": "pydantic_agents",
    "LangGraph": "graphs",
    "OpenAI": "openai_agents",
}
"""Modules by the beginning of the contestants' names."""
LIMIT_S = 90
STARTED_AT = time.perf_counter()
"""Time before a framework is imported."""


def contestant_named(name: str) -> Contestant:
    module = next(module for begin, module in MODULES.items() if name.startswith(begin))
    found: dict[str, Contestant] = importlib.import_module(f"bench.durable.{module}").CONTESTANTS
    return found[name]


async def run(name: str, play: Play, turns: int) -> dict[str, object]:
    """Run the turns. The first of several turns warms up."""
    cpu_s: list[float] = []
    wall_s: list[float] = []
    async with asyncio.timeout(LIMIT_S), contestant_named(name)(play) as turn:
        for number in range(turns):
            began, began_cpu = time.perf_counter(), time.process_time()
            answer = await turn(f"s{number}")
            wall_s.append(time.perf_counter() - began)
            cpu_s.append(time.process_time() - began_cpu)
    return {"answer": answer, "cpu_s": cpu_s, "wall_s": wall_s}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--scenario", default="seq")
    parser.add_argument("--dies", default="")
    parser.add_argument("--database", default="")
    parser.add_argument("--resumed", action="store_true")
    parser.add_argument("--turns", type=int, default=1)
    chosen = parser.parse_args()
    logging.disable(logging.CRITICAL)
    play = Play(
        chosen.folder,
        chosen.scenario,
        dies=chosen.dies,
        is_resumed=chosen.resumed,
        database=chosen.database,
    )
    try:
        report: dict[str, object] = asyncio.run(run(chosen.name, play, chosen.turns))
    except BaseException as error:  # noqa: BLE001 - the table has every error of a peer
        report = {"error": f"{type(error).__name__}: {error}"[:300]}
    report["recovered_s"] = max(0.0, play.first_noted_at - STARTED_AT)
    print(json.dumps(report), flush=True)
    os._exit(0)  # some contestants have threads that never end


if __name__ == "__main__":
    main()
