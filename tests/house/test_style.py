"""The rules of style that a machine can check and the linter does not."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.house.source import (
    Function,
    calls,
    full_name,
    functions,
    imported_names,
    in_package,
    name_of,
    nodes,
    python_files,
)
from tests.search import PROFILE

SOURCE = python_files("src/midstream")

# Clocks, chance, identity and background tasks come in through `midstream.environment.World`.
ONLY_IN_WORLD = re.compile(
    r"time\.(time|monotonic|perf_counter|process_time)(_ns)?|time\.sleep"
    r"|datetime\.(datetime|date)\.(now|utcnow|today)"
    r"|random\.\w+|secrets\.\w+|uuid\.uuid\d|os\.urandom"
    r"|asyncio\.(create_task|ensure_future|sleep)"
)
# File below src/midstream: the reason why it needs only the real world.
MAY_TOUCH_THE_WORLD: dict[str, str] = {
    "agents/owned_processes.py": "a bare interpreter runs it: it waits for processes, and no test waits for it",
    "environment.py": "it is the door",
    "store/sqlite/liveness.py": "a constructor waits a moment for another process to release a file; tests do not wait",
    "testing/fake_worlds.py": "it makes other worlds",
}

# File below src/midstream: the reason why no narrower exception can be caught there.
MAY_CATCH_EVERYTHING: dict[str, str] = {
    "client/http_transport.py": "what ends one of its tasks is raised by whoever reads, who would wait for ever",
    "client/os_keyring.py": "a backend is somebody else's code: whatever it raises, the file has the secret",
    "dialects/response_reader.py": "the client of a response gets an error, and the log has the defect",
    "cli/__init__.py": "the top of the process: it logs the traceback and sets the exit code",
    "agents/claude.py": "the SDK raises bare `Exception`s; each is typed, or is the end of a process",
    "tools/mcp.py": "an SDK over a network: whatever ends a connection or an answer, it is said to who waits",
    "frameworks/http_hooks.py": "a request is worth more than its repair; what failed is logged, it goes as it was",
    "observability/observers.py": "who looks on must not stop what it looks at: its error is logged, without its words",
    "agents/agent_runs.py": "an upstream is somebody else's code; what it raises goes to who waits for the answer",
    "agents/live_agents.py": "closing and forgetting is an upstream's code, on the way out: nothing depends on it",
    "engine/executors.py": "stopping a response is a model's code, on the way out: nothing depends on how it ends",
    "agents/pool.py": "a host's counter of turns is no part of the turn",
    "background_loops.py": "the top of a background task: it logs the error and begins again",
    "engine/recovery.py": "whatever a defect raises, it costs the recovery of one session only",
    "store/postgres/heartbeat_thread.py": "the top of a thread: without late beats other nodes would take the sessions",
    "store/sqlite/watcher.py": "the top of a thread: callers would wait for its results for ever",
    "engine/other_nodes.py": "a command of another node: whatever a defect raises, it costs that command only",
    "engine/runner.py": "the top of a session: it ends on a bug, the others go on",
    "engine/session_work.py": "the top of a task: a defect ends its session, the others go on",
    "engine/toolset.py": "a source of tools is somebody else's code; whatever it raises, its tools are left out",
    "engine/watchdog.py": "who watches must do no harm: what fails there is logged, the work goes on",
    "store/sqlite/group_commit.py": "whatever a commit on the event loop raises belongs to who asked, as on the thread",
    "store/sqlite/worker_thread.py": "whatever the work of a thread raises belongs to who asked for it",
    "frameworks/openai_agents_served.py": "tools and servers of an SDK: what one raises is its outcome",
    "tools/function_tools.py": "a tool is somebody else's code; whatever it raises is its outcome",
}

# Sources of unrepeatable randomness; `random.Random` is repeatable, but not without a seed.
CHANCE = re.compile(r"random\.(?!Random$)\w+|secrets\.\w+|uuid\.uuid[14]|os\.urandom|hypothesis\.(seed|find)")
SETTINGS_OF_ALL = {"derandomize", "database", "deadline", "print_blob"}
# Test file: the reason why its random values cannot decide whether it fails.
MAY_DRAW: dict[str, str] = {
    "tests/dialects/acp_kills.py": "only `make dialects` draws its seed, and prints it",
    "tests/dialects/a2a_kills.py": "only `make dialects` draws its seed, and prints it",
    "tests/dialects/ag_ui_cuts.py": "only `make dialects` draws its seed, and prints it",
    "tests/dialects/langgraph_stream.py": "only `make dialects` draws its seed, and prints it",
    "tests/dialects/mcp_kills.py": "only `make dialects` draws its seed, and prints it",
    "tests/dialects/plain_streams.py": "only `make dialects` draws its seed, and prints it",
    "tests/dialects/ui_stream.py": "only `make dialects` draws its seed, and prints it",
    "tests/hosts/__main__.py": "only `make hosts` draws its seed, and prints it",
    "tests/fault/test_nodes.py": "only `make fault` draws its seed, and prints it",
    "tests/fault/test_postgres_nodes.py": "likewise",
    "tests/fault/test_jetstream_nodes.py": "likewise",
    "tests/agents/acp_agent.py": "names of conversations: programs of one test must not make the same",
    "tests/agents/claude_cli.py": "names of messages and sessions, likewise",
    "tests/agents/codex_server.py": "names of threads and turns, likewise",
    "tests/programs/__main__.py": "only `make agents` draws its seed, and prints it",
    "tests/frameworks/guide_kills.py": "only `make frameworks` draws its seed, and prints it",
    "tests/fault/workers.py": "an idempotency key: any will do that was not used before",
}

NAMES_THAT_SAY_NOTHING = {"base", "common", "helper", "helpers", "misc", "util", "utils"}
CLASS_THAT_SAYS_NOTHING = re.compile(r"(Manager|Helper|Helpers|Util|Utils)$")


def test_only_the_world_accesses_time_chance_identity_and_tasks() -> None:
    found = [
        f"{name_of(path)}:{line} {name}"
        for path in SOURCE
        if in_package(path) not in MAY_TOUCH_THE_WORLD
        for line, name in _names_used(path)
        if ONLY_IN_WORLD.fullmatch(name)
    ]
    assert found == []


def test_input_is_never_checked_by_an_assertion() -> None:
    """A parameter of a public function is input: refuse it with an error that contains advice.

    The shipped contract tests are no such functions.
    """
    found = [
        f"{name_of(path)}:{check.lineno} assert on `{parameter}` in {function.name}"
        for path in SOURCE
        for function in functions(path)
        if not function.name.startswith(("_", "test_"))
        for check in ast.walk(function)
        if isinstance(check, ast.Assert)
        for parameter in sorted(_parameters(function) & _bare_names(check.test))
    ]
    assert found == []


def test_all_exceptions_are_caught_only_in_the_listed_places() -> None:
    found = [
        f"{name_of(path)}:{handler.lineno}"
        for path in SOURCE
        if in_package(path) not in MAY_CATCH_EVERYTHING
        for handler in nodes(path)
        if isinstance(handler, ast.ExceptHandler) and _is_broad(handler) and not _raises(handler)
    ]
    assert found == []


@pytest.mark.parametrize("exceptions", [MAY_TOUCH_THE_WORLD, MAY_CATCH_EVERYTHING, MAY_DRAW])
def test_every_listed_exception_has_a_reason(exceptions: dict[str, str]) -> None:
    assert [name for name, reason in exceptions.items() if not reason.strip()] == []


def test_no_module_and_no_class_has_a_meaningless_name() -> None:
    modules = [name_of(path) for path in SOURCE if path.stem.strip("_") in NAMES_THAT_SAY_NOTHING]
    folders = [name_of(path) for path in SOURCE if path.parent.name in NAMES_THAT_SAY_NOTHING]
    classes = [
        f"{name_of(path)}:{node.lineno} {node.name}"
        for path in SOURCE
        for node in nodes(path)
        if isinstance(node, ast.ClassDef) and CLASS_THAT_SAYS_NOTHING.search(node.name)
    ]
    assert modules + folders + classes == []


def test_no_test_sleeps() -> None:
    """`asyncio.sleep(0)` lets other tasks run and waits for nothing."""
    found = [
        f"{name_of(path)}:{call.lineno}"
        for path in python_files("tests")
        for imported in [imported_names(path)]
        for call in calls(path)
        if full_name(call.func, imported) in {"time.sleep", "asyncio.sleep"} and not _is_zero(call)
    ]
    assert found == []


def test_no_test_draws_unrepeatable_random_values() -> None:
    """A test that fails once in a hundred runs is a broken one; `make search` is the place for random searches."""
    found = [
        f"{name_of(path)}:{line} {name}"
        for path in python_files("tests")
        if name_of(path) not in MAY_DRAW
        for line, name in [*_names_used(path), *_unseeded(path)]
        if CHANCE.fullmatch(name) or name == "Random()"
    ]
    assert found == []


def test_the_settings_of_examples_are_in_one_place() -> None:
    found = [
        f"{name_of(path)}:{call.lineno}"
        for path in python_files("tests")
        if name_of(path) != "tests/conftest.py"
        for imported in [imported_names(path)]
        for call in calls(path)
        if full_name(call.func, imported) == "hypothesis.settings"
        for keyword in call.keywords
        if keyword.arg in SETTINGS_OF_ALL
        or (keyword.arg == "max_examples" and not _is_tried(keyword.value, imported))
    ]
    assert found == []
    assert settings().derandomize is (PROFILE == "midstream")


def _is_tried(number: ast.expr, imported: dict[str, str]) -> bool:
    """Return whether a number of examples is reduced in the quick check, and increased in a search."""
    return isinstance(number, ast.Call) and full_name(number.func, imported) == "tests.search.tried"


def _unseeded(path: Path) -> Iterator[tuple[int, str]]:
    imported = imported_names(path)
    for call in calls(path):
        if full_name(call.func, imported) == "random.Random" and not call.args:
            yield call.lineno, "Random()"


def _names_used(path: Path) -> Iterator[tuple[int, str]]:
    imported = imported_names(path)
    for node in nodes(path):
        if isinstance(node, ast.Attribute | ast.Name) and (name := full_name(node, imported)):
            yield node.lineno, name


def _parameters(function: Function) -> set[str]:
    arguments = function.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return {argument.arg for argument in every} - {"self", "cls"}


def _bare_names(expression: ast.expr) -> set[str]:
    return {node.id for node in ast.walk(expression) if isinstance(node, ast.Name)}


def _is_broad(handler: ast.ExceptHandler) -> bool:
    caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(
        kind is None or (isinstance(kind, ast.Name) and kind.id in {"Exception", "BaseException"})
        for kind in caught
    )


def _raises(handler: ast.ExceptHandler) -> bool:
    """Return whether the handler only cleans up: its last statement raises."""
    return isinstance(handler.body[-1], ast.Raise)


def _is_zero(call: ast.Call) -> bool:
    match call.args:
        case [ast.Constant(value=0)]:
            return True
    return False
