"""The demo's agent: real tools over a real folder, and a ledger line at the start and the end of every execution.

`midstream demo` starts the real server with it; the environment has the folder and the model.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from midstream.demo.folder import Folder
from midstream.demo.local import LocalModel
from midstream.demo.script import scripted_model
from midstream.engine.agent import Agent
from midstream.environment import World
from midstream.errors import UsageError
from midstream.models.model import Model
from midstream.tools.function_tools import Tool, current_call, tool

FOLDER_VARIABLE = "MIDSTREAM_DEMO_FOLDER"
MODEL_VARIABLE = "MIDSTREAM_DEMO_MODEL"

INSTRUCTIONS = "You are a friendly assistant. Answer from the notes, in two or three short sentences."
RESPONSE_TOKENS_MAX = 110
WRITE_STEPS = 5
WRITE_STEP_S = 0.2
"""Writing takes about a second, so that it can be killed meanwhile."""


def tools_over(folder: Folder, world: World) -> list[Tool]:
    """Return the tools of an agent that works on a folder."""

    @contextmanager
    def log_execution(name: str) -> Iterator[str]:
        key = current_call().effect_key
        folder.log(name, key, "started", world)
        yield key
        folder.log(name, key, "finished", world)

    @tool(has_effects=False)
    def list_files() -> str:
        """List the files in the folder."""
        with log_execution("list_files"):
            return "\n".join(path.name for path in folder.all_notes())

    @tool(has_effects=False)
    def read_file(path: str) -> str:
        """Read a file.

        Args:
            path: Name of the file.
        """
        with log_execution("read_file"):
            return folder.note(path).read_text(encoding="utf-8")

    @tool(has_effects=False)
    def search_files(word: str) -> str:
        """Search all files for a word.

        Args:
            word: What to look for.
        """
        with log_execution("search_files"):
            found = [
                f"{path.name}: {line}"
                for path in folder.all_notes()
                for line in path.read_text(encoding="utf-8").splitlines()
                if word.lower() in line.lower()
            ]
            return "\n".join(found) or f"No file holds {word!r}."

    @tool
    async def write_note(path: str, text: str) -> str:
        """Write a note to a file.

        Args:
            path: Name of the file.
            text: What to write.
        """
        with log_execution("write_note") as key:
            note = folder.note(path)
            growing = note.with_name(f".{note.name}.part")
            for step in range(1, WRITE_STEPS + 1):
                await world.sleep(WRITE_STEP_S)
                growing.write_text(text[: len(text) * step // WRITE_STEPS], encoding="utf-8")
                folder.log("write_note", key, f"wrote {step}/{WRITE_STEPS}", world)
            growing.rename(note)
            return f"Wrote {len(text)} characters to {path}."

    return [list_files, read_file, search_files, write_note]


def agent_over(path: Path, model_name: str, world: World) -> Agent:
    """Return the demo's agent for a folder.

    Raises:
        UsageError: The model is unknown.
    """
    model: Model
    if model_name == "local":
        model = LocalModel(response_tokens_max=RESPONSE_TOKENS_MAX)
    elif model_name == "scripted":
        model = scripted_model(world)
    else:
        raise UsageError(f"{MODEL_VARIABLE} is local or scripted, not {model_name!r}")
    tools = tools_over(Folder(path), world)
    return Agent(model, instructions=INSTRUCTIONS, tools=tools, name="demo")


def __getattr__(name: str) -> Agent:
    """Create `agent` when the server requests it: importing other parts of this module needs no environment."""
    if name != "agent":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if FOLDER_VARIABLE not in os.environ:
        raise UsageError(f"this agent belongs to `midstream demo`, which sets {FOLDER_VARIABLE}")
    return agent_over(Path(os.environ[FOLDER_VARIABLE]), os.environ.get(MODEL_VARIABLE, "local"), World())
