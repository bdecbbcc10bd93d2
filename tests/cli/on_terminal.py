"""A command on a real pseudo-terminal of 80 columns: its output, and typed keys."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import termios
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

from tests.forked import Forked

WAIT_S = 60.0


class TerminalResult(NamedTuple):
    """The final text of the terminal (without colours), and the exit code."""

    text: str
    code: int


class OnTerminal(Protocol):
    def __call__(self, *arguments: str | Path, answers: Mapping[str, str] | None = None) -> TerminalResult:
        """Run `midstream` with these arguments; when a text appears, type its answer."""


class Terminal:
    """`midstream` as a process on a pseudo-terminal."""

    def __init__(self, arguments: list[str], environment: Mapping[str, str], cwd: Path | None = None) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.process = Forked(
            *("midstream", *arguments),
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**os.environ, **environment},
            cwd=cwd,
            has_terminal=True,
        )
        os.close(slave)
        self._seen = ""
        self._from = 0

    @property
    def text(self) -> str:
        """Everything printed so far, without colours."""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self._seen).replace("\r\n", "\n")

    def until(self, text: str) -> None:
        """Read until `text` appears after the text of the previous wait."""
        while text not in self.text[self._from :]:
            assert self._read(), f"{text!r} never came:\n{self.text}"
        self._from += self.text[self._from :].index(text) + len(text)

    def press(self, keys: str) -> None:
        """Type keys."""
        os.write(self._master, keys.encode())

    def read_to_end(self) -> TerminalResult:
        """Read to the end."""
        while self._read():
            pass
        code = self.process.wait(WAIT_S)
        os.close(self._master)
        return TerminalResult(self.text, code)

    def _read(self) -> bool:
        ready, _, _ = select.select([self._master], [], [], WAIT_S)
        if not ready:
            self.process.kill()
            raise AssertionError(f"nothing more came:\n{self.text}")
        try:
            piece = os.read(self._master, 65536)
        except OSError:  # the error with which Linux reports that the other side was closed
            return False
        self._seen += piece.decode("utf-8", "replace")
        return bool(piece)


def runner(environment: Mapping[str, str]) -> OnTerminal:
    """Return a function that runs a command line to its end."""

    def run(*arguments: str | Path, answers: Mapping[str, str] | None = None) -> TerminalResult:
        terminal = Terminal([str(each) for each in arguments], environment)
        for question, answer in (answers or {}).items():
            terminal.until(question)
            terminal.press(answer)
        return terminal.read_to_end()

    return run
