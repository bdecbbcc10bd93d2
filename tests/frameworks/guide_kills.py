"""Random SIGKILLs of programs of the frameworks' guides: `python -m tests.frameworks.guide_kills --kills 500`.

In each round a program is killed at random moments, one to three times, and then runs to its end. Its processes
are forked from this one, which has imported the frameworks and warmed their caches: it has no thread, no event
loop and no open store. With `--fresh`, each is a new interpreter instead, which costs seconds of imports. The
judge reads the ledger of effects, the journal, and the program's final state:

- no effect is in the ledger twice; - no outcome that is in the journal is missing from the program's final
history, or different there; - no turn is completed before its last response is in the journal and each of its
calls has an outcome.

The first line printed is the seed; the same seed draws the same moments. `--broken` deletes the journal before
each life: the judge must find faults.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import gc
import importlib
import importlib.util
import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import msgspec
from msgspec import Struct

from midstream.session.records import CallEnded, Record, ResponseCompleted, TurnEnded, TurnStatus, decode
from midstream.session.session import fold
from midstream.store.sqlite import SQLiteStore
from tests.frameworks.kill_programs import CALLS, SESSION, GuidePlay, Program, run_guide, write_report

LIFE_S = 60.0
"""Seconds after which a life without a kill counts as hanging."""
KILLS_MAX = 3
ROUNDS_MAX = 100_000
FILES_MAX = 1024
"""Descriptors that a process may have inherited."""
ROOT = Path(__file__).parents[2]
MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None  # noqa: PTH112 - SIGKILL loses nothing that was written
UNKNOWN = "may or may not have taken effect"


class Kind(Struct, frozen=True):
    """A framework.


    Args:
        module: The module with its programs.     needs: The required packages.     database: The journals of
            the program.     session: The session in it.
    """

    module: str
    needs: tuple[str, ...]
    database: str
    session: str = SESSION


KINDS = {
    "pydantic-ai": Kind("kill_pydantic_ai", ("pydantic_ai",), "agent.db"),
    "OpenAI Agents": Kind("kill_openai_agents", ("agents.testing",), "waiter.db"),
    "LangGraph": Kind(
        "kill_langgraph",
        ("langgraph.checkpoint.sqlite.aio",),
        "calls.db",
        f"langgraph:{SESSION}",
    ),
}
TWO_MESSAGES = (
    "conversation",
    "cancelled, then repeated",
    "two processes",
    "cancelled, then another message",
)
TWO_PROCESSES = "two processes"


class How(Struct, frozen=True):
    """The options of a play.


    Args:
        is_fresh: Each life is a new interpreter.     is_broken: Each life has lost its journal.
    """

    is_fresh: bool = False
    is_broken: bool = False


class Tally(Struct):
    """The results of the rounds of one program."""

    rounds: int = 0
    kills: int = 0
    effects: int = 0
    in_doubt: int = 0
    refused: int = 0
    cancelled: int = 0
    faults: list[str] = []


def is_installed(kind: Kind) -> bool:
    """Return whether a framework can be run here."""
    try:
        return all(importlib.util.find_spec(name) is not None for name in kind.needs)
    except ModuleNotFoundError:
        return False


@functools.cache
def programs_of(kind: Kind) -> Mapping[str, Program]:
    """Import a framework and return its programs."""
    # An OpenAI client reads all certificates of the machine, a third of a life's time: no program uses the
    # network.
    os.environ.setdefault("SSL_CERT_DIR", tempfile.mkdtemp(prefix="kills-certificates-"))
    module = importlib.import_module(f"tests.frameworks.{kind.module}")
    run_guide(module.PAGE, 0)  # imports of a first use happen here, and not in each process
    getattr(module, "warm", lambda: None)()
    programs: Mapping[str, Program] = module.PROGRAMS
    for name in _rehearse(kind, programs):
        importlib.import_module(name)
    assert threading.active_count() == 1, "a fork has no other threads of its parent, and perhaps their locks"
    gc.collect()
    gc.freeze()
    return programs


def _rehearse(kind: Kind, programs: Mapping[str, Program]) -> Sequence[str]:
    """Return the modules that lives of these programs import."""
    folder = Path(tempfile.mkdtemp(prefix="kills-", dir=MEMORY))

    def rehearse(program: Program, place: Path) -> None:
        known = {*sys.modules}
        asyncio.run(program(GuidePlay(place, 0)))
        found = [name for name in sys.modules if name not in known]
        (place / "modules").write_text("\n".join(found))

    names: dict[str, None] = {}
    for number, program in enumerate(programs.values()):
        place = folder / str(number)
        place.mkdir()
        with watch(fork(functools.partial(rehearse, program, place), place)) as wait:
            code = wait(LIFE_S)
        if code == 0:  # otherwise it is a fault as soon as it is played
            names |= dict.fromkeys((place / "modules").read_text().split())
    shutil.rmtree(folder)
    return [*names]


# --- processes ------------------------------------------------------------------------------------------------------


def fork(act: Callable[[], None], folder: Path) -> int:
    """Start a process that does `act` in a folder; its errors are in `log` there. It inherits no open descriptor."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.chdir(folder)
        log = os.open("log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.dup2(log, 2)
        os.closerange(3, FILES_MAX)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        random.seed()
        act()
        code = 0
    except BaseException:  # noqa: BLE001 - the process ends here
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def start_fresh(arguments: Sequence[str], folder: Path) -> int:
    """Start a new interpreter that lives one life in a folder; its errors are in `log` there."""
    with (folder / "log").open("ab") as log:
        command = [sys.executable, "-m", "tests.frameworks.guide_kills", "--live", str(folder), *arguments]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, env=environment).pid


@contextmanager
def watch(pid: int) -> Iterator[Callable[[float], int | None]]:
    """Yield a function that waits this many seconds for the end of a process, and returns its code or None."""
    descriptor = os.pidfd_open(pid)
    code: int | None = None

    def wait(seconds: float) -> int | None:
        nonlocal code
        if code is None and select.select([descriptor], [], [], seconds)[0]:
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        return code

    try:
        yield wait
    finally:
        if code is None:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        os.close(descriptor)


def kill_after(pid: int, seconds: float) -> bool:
    """Kill a process after some seconds; return whether it was running until then."""
    descriptor = os.pidfd_open(pid)
    try:
        select.select([descriptor], [], [], max(0.0, seconds))
        os.kill(pid, signal.SIGKILL)  # it is not reaped yet, so the id is still its own
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    finally:
        os.close(descriptor)


def start(kind: Kind, mode: str, folder: Path, seed: int, how: How) -> int:
    """Start a life of a program."""
    if how.is_fresh:
        name = next(name for name, each in KINDS.items() if each == kind)
        options = ("--broken",) if how.is_broken else ()
        return start_fresh(("--frameworks", name, "--modes", mode, "--seed", str(seed), *options), folder)
    return fork(lambda: live(kind, mode, folder, seed, is_broken=how.is_broken), folder)


def live(kind: Kind, mode: str, folder: Path, seed: int, *, is_broken: bool) -> None:
    """Run as a program, in its own process.


    Args:
        is_broken: It has lost its journal.
    """
    os.chdir(folder)
    if is_broken:
        for file in folder.glob(f"{kind.database}*"):
            shutil.rmtree(file) if file.is_dir() else file.unlink(missing_ok=True)
    play = GuidePlay(folder, seed)
    write_report(folder, asyncio.run(programs_of(kind)[mode](play)))


class Round:
    """One program, killed and then run to its end.


    Args:
        kind: Its framework.     mode: Its name.     chance: Where the moments come from.     life_s: Seconds
            that it runs without a kill.
    """

    def __init__(self, kind: Kind, mode: str, chance: random.Random, life_s: float, how: How) -> None:
        self.kills = 0
        self.was_killed_at_once = False
        """Whether the first life was killed."""
        self._kind = kind
        self._mode = mode
        self._chance = chance
        self._life_s = life_s
        self._how = how
        self._processes = 2 if mode == TWO_PROCESSES else 1

    def play(self, folder: Path) -> list[str]:
        """Kill and finish; return the faults."""
        for number in range(self._chance.randint(1, KILLS_MAX)):
            self._live_and_die(folder)
            if number == 0:
                self.was_killed_at_once = self.kills > 0
        if (fault := self._finish(folder)) is not None:
            return [fault]
        return self._judge(folder)

    def _start(self, folder: Path) -> list[int]:
        return [
            start(self._kind, self._mode, folder, self._chance.getrandbits(32), self._how)
            for _ in range(self._processes)
        ]

    def _live_and_die(self, folder: Path) -> None:
        """Let the processes run for a random time each; one that ends before was not killed."""
        started = [(pid, self._chance.random() * self._life_s) for pid in self._start(folder)]
        at = time.monotonic()
        for pid, seconds in sorted(started, key=lambda each: each[1]):
            self.kills += kill_after(pid, at + seconds - time.monotonic())

    def _finish(self, folder: Path) -> str | None:
        (folder / "report").unlink(missing_ok=True)
        for pid in self._start(folder):
            with watch(pid) as wait:
                if (code := wait(LIFE_S)) != 0:
                    log = (folder / "log").read_text()[-3000:]
                    return f"the last life {'hangs' if code is None else f'ended with {code}'}:\n{log}"
        return None

    def _judge(self, folder: Path) -> list[str]:
        """Judge in a separate process: the store has threads, and this process forks."""

        def judge() -> None:
            faults = asyncio.run(faults_of(self._kind, self._mode, folder))
            (folder / "verdict").write_text(json.dumps(faults))

        with watch(fork(judge, folder)) as wait:
            if wait(LIFE_S) != 0:
                return [f"the judge failed:\n{(folder / 'log').read_text()[-3000:]}"]
        faults: list[str] = json.loads((folder / "verdict").read_text())
        return faults


# --- judging --------------------------------------------------------------------------------------------------------


async def faults_of(kind: Kind, mode: str, folder: Path) -> list[str]:
    """Return the faults in the state that a program left."""
    results, answers = json.loads((folder / "report").read_text())
    lines = (folder / "ledger").read_text().splitlines()
    effects = Counter(line.removeprefix("effect ") for line in lines if line.startswith("effect "))
    records = await _records(kind, folder)
    journaled = {
        record.result.call_id.rpartition("/")[2]: record.result.content
        for _, record in records
        if isinstance(record, CallEnded) and record.result.content.startswith("result of ")
    }
    messages = ("m1", "m2") if mode in TWO_MESSAGES else ("m1",)
    is_overtaken = mode == "cancelled, then another message"
    whole = messages[-1:] if is_overtaken else messages
    faults = [f"{name} took effect {count} times" for name, count in effects.items() if count > 1]
    for name, content in results.items():
        faults += _faults_of_result(name, content, effects, journaled)
    expected = {f"{message}-{call}" for message in whole for call in CALLS}
    if missing := expected - results.keys():
        faults.append(f"no results of {sorted(missing)}")
    done = [f"done {message}" for message in whole]
    texts = [answer.strip() for answer in answers if answer.strip()]
    if texts[-len(done) :] != done or (not is_overtaken and texts != done):
        faults.append(f"the answers are {texts}, not {done}")
    is_graph = kind.module == "kill_langgraph"
    return faults + (_faults_of_thread(records) if is_graph else _faults_of_turns(records, len(messages)))


def _faults_of_result(
    name: str, content: str, effects: Mapping[str, int], journaled: Mapping[str, str]
) -> list[str]:
    if name in journaled and content != journaled[name]:
        return [f"the journal has an outcome of {name}, and the model reads {content!r}"]
    if content == f"result of {name}":
        return [] if effects.get(name) == 1 else [f"{name} has a result without an effect"]
    if UNKNOWN in content:
        return []
    return [f"{name} took effect, and the model reads {content!r}"] if effects.get(name) else []


def _faults_of_turns(records: list[tuple[int, Record]], count: int) -> list[str]:
    """Check that each turn ended once, as completed, and not before it was whole."""
    faults: list[str] = []
    ended: list[int] = []
    for place, (_, record) in enumerate(records):
        if not isinstance(record, TurnEnded):
            continue
        if record.status is not TurnStatus.COMPLETED:
            faults.append(f"turn {record.turn} ended as {record.status}")
            continue
        ended.append(record.turn)
        before = [each for _, each in records[:place] if getattr(each, "turn", 0) == record.turn]
        responses = [each for each in before if isinstance(each, ResponseCompleted)]
        calls = {(each.response, call.id) for each in responses for call in each.body.calls}
        outcomes = [(each.response, each.result.call_id) for each in before if isinstance(each, CallEnded)]
        if not responses or responses[-1].body.calls:
            faults.append(f"turn {record.turn} was completed before its last response")
        if sorted(calls) != sorted(outcomes):
            faults.append(
                f"turn {record.turn} was completed with {sorted(calls)}, and outcomes {sorted(outcomes)}"
            )
    if ended != list(range(1, count + 1)):
        faults.append(f"the turns {ended} were completed, not {count}")
    return faults


def _faults_of_thread(records: list[tuple[int, Record]]) -> list[str]:
    """Check that no call of a thread is running for ever."""
    return ["a turn of the thread is running for ever"] if fold(records).is_live else []


async def _records(kind: Kind, folder: Path) -> list[tuple[int, Record]]:
    store = SQLiteStore(folder / kind.database)
    await store.open()
    found = await store.read(kind.session, after=0, limit=100_000)
    await store.close()
    return [(each.epoch, decode(each.body)) for each in found]


# --- the command ----------------------------------------------------------------------------------------------------


def run(
    kind: Kind,
    mode: str,
    seed: int,
    *,
    kills: int,
    rounds: int = ROUNDS_MAX,
    how: How,
    until: float = float("inf"),
) -> Tally:
    """Play rounds of one program, until it was killed this often."""
    chance = random.Random(f"{seed} {kind.module} {mode}")
    tally = Tally()
    life_s = _measure(kind, mode, how)
    while tally.kills < kills and tally.rounds < rounds and time.monotonic() < until:
        folder = Path(tempfile.mkdtemp(prefix="kills-", dir=MEMORY))
        played = Round(kind, mode, chance, life_s, how)
        faults = played.play(folder)
        life_s *= 1.03 if played.was_killed_at_once else 0.93  # the load of the machine changes
        tally.kills += played.kills
        lines = (folder / "ledger").read_text().splitlines() if (folder / "ledger").exists() else []
        report = json.loads((folder / "report").read_text()) if (folder / "report").exists() else [{}]
        tally.effects += sum(line.startswith("effect ") for line in lines)
        tally.refused += sum(line.startswith("refused ") for line in lines)
        tally.cancelled += lines.count("cancelled")
        tally.in_doubt += sum(UNKNOWN in content for content in report[0].values())
        tally.faults += [f"round {tally.rounds} in {folder}: {fault}" for fault in faults]
        tally.rounds += 1
        if not faults or how.is_broken:
            shutil.rmtree(folder)
    return tally


def _measure(kind: Kind, mode: str, how: How) -> float:
    """Return how long a program runs without a kill."""
    folder = Path(tempfile.mkdtemp(prefix="kills-", dir=MEMORY))
    at = time.monotonic()
    with watch(start(kind, mode, folder, 0, how)) as wait:
        code = wait(LIFE_S)
    assert code == 0, f"{mode} does not run: {(folder / 'log').read_text()}"
    shutil.rmtree(folder)
    return time.monotonic() - at


def run_all(programs: Sequence[tuple[str, str]], play: Callable[[str, str], Tally], jobs: int) -> list[str]:
    """Play programs, this many at once in their own processes; print a line for each, and return the faults.

    A program that cannot be played is a fault, and the others are played.
    """
    place = Path(tempfile.mkdtemp(prefix="kills-tallies-", dir=MEMORY))
    waiting, playing = list(enumerate(programs)), dict[int, int]()
    faults: list[str] = []
    while waiting or playing:
        if waiting and len(playing) < jobs:
            number, (name, mode) = waiting.pop(0)
            (place / f"{number}").mkdir()

            def work(name: str = name, mode: str = mode) -> None:
                Path("tally").write_bytes(msgspec.json.encode(play(name, mode)))

            playing[fork(work, place / f"{number}")] = number
            continue
        pid, status = os.wait()
        number = playing.pop(pid)
        found = _faults_played(programs[number], place / f"{number}", has_ended=status == 0)
        faults += [f"{', '.join(programs[number])}, {fault}" for fault in found]
    shutil.rmtree(place)
    return faults


def _faults_played(program: tuple[str, str], place: Path, *, has_ended: bool) -> list[str]:
    """Print the line of a program, whose process has ended by itself or not, and return its faults."""
    if not has_ended:
        print_line(f"| {' | '.join(program)} | not played | | | | | | 1 |")
        return [f"could not be played:\n{(place / 'log').read_text()[-3000:].rstrip()}"]
    tally = msgspec.json.decode((place / "tally").read_bytes(), type=Tally)
    cells = (tally.rounds, tally.kills, tally.effects, tally.in_doubt, tally.refused, tally.cancelled)
    print_line(f"| {' | '.join(program)} | {' | '.join(map(str, cells))} | {len(tally.faults)} |")
    return tally.faults


def main() -> int:
    """Play the rounds that the command line selects, and print a table; return 1 if there are faults."""
    parser = argparse.ArgumentParser(prog="python -m tests.frameworks.guide_kills")
    parser.add_argument("--kills", type=int, default=30, help="of each program, at least (30)")
    parser.add_argument("--rounds", type=int, default=ROUNDS_MAX, help="of each program, at most")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for each program, at most")
    parser.add_argument("--seed", type=int, default=random.randrange(2**32), help="a random one by default")
    parser.add_argument("--frameworks", default=",".join(KINDS), help="by name, with commas; all by default")
    parser.add_argument("--modes", default="", help="by name, with semicolons; all by default")
    parser.add_argument("--jobs", type=int, default=1, help="programs that are played at once (1)")
    parser.add_argument("--fresh", action="store_true", help="each life is a new interpreter")
    parser.add_argument("--broken", action="store_true", help="each life has lost its journal")
    parser.add_argument("--live", type=Path, help="live one life in this folder (for --fresh)")
    given = parser.parse_args()
    if given.live is not None:
        live(KINDS[given.frameworks], given.modes, given.live, given.seed, is_broken=given.broken)
        return 0
    print_line(f"--seed {given.seed}")
    print_line("| framework | program | rounds | kills | effects | in doubt | refused | cancelled | faults |")
    print_line("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    programs: list[tuple[str, str]] = []
    for name in given.frameworks.split(","):
        if not is_installed(KINDS[name]):
            print_line(f"{name} is not installed here: skipped", to=sys.stderr)
            continue
        modes = given.modes.split(";") if given.modes else [*programs_of(KINDS[name])]
        programs += [(name, mode) for mode in modes if mode in programs_of(KINDS[name])]

    def play(name: str, mode: str) -> Tally:
        until = time.monotonic() + given.seconds
        how = How(is_fresh=given.fresh, is_broken=given.broken)
        kills, rounds = given.kills, given.rounds
        return run(KINDS[name], mode, given.seed, kills=kills, rounds=rounds, how=how, until=until)

    faults = run_all(programs, play, given.jobs)
    for fault in faults:
        print_line(fault, to=sys.stderr)
    return 1 if faults else 0


def print_line(line: str, *, to: TextIO | None = None) -> None:
    """Print a line at once."""
    print(line, file=to, flush=True)


if __name__ == "__main__":
    sys.exit(main())
