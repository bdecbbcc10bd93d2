"""Exit codes of commands, and the line for each error: description, advice and code."""

from __future__ import annotations

import errno
import traceback
from pathlib import Path

import click

from midstream.errors import (
    ConflictError,
    MidstreamError,
    ModelError,
    NotFoundError,
    ProtocolError,
    StoreBusyError,
    UsageError,
)
from midstream.file_safety import replace_own

FAILURE = 1
USAGE = 2
NOT_FOUND = 3
CONFLICT = 4
UPSTREAM = 5
VERIFICATION = 6
UNREADABLE = 7
INTERRUPTED = 130

EXIT_CODES = {
    0: "done",
    FAILURE: "failed",
    USAGE: "wrong use",
    NOT_FOUND: "not found",
    CONFLICT: "conflict: another process, client or turn",
    UPSTREAM: "the model failed",
    VERIFICATION: "a check has findings",
    UNREADABLE: "a file could not be read, or a repair lost content",
    INTERRUPTED: "interrupted",
}

ADVICE = {
    "session_not_found": "`midstream sessions list` lists the sessions.",
    "stream_not_found": "Start a new turn.",
    "lease_held": "Stop the other process, or use its server with --url.",
    "lease_lost": "Another process took over. Connect to that one.",
    "agent_mismatch": "Serve that agent on this store, cancel the turn, or resume it with this agent.",
    "session_busy": "Wait for the end of the turn, or cancel it.",
    "question_closed": "`midstream sessions questions` lists the open questions.",
    "answer_mismatch": "`midstream sessions questions` lists the valid choices.",
    "nothing_to_resume": "Send a message; it opens a new turn.",
    "store_busy": "Try again in a few seconds, or stop the other program that uses the file.",
    "store_full": "Free some space, then try again.",
    "store_damaged": "Restore a copy of the file.",
    "events_lost": "Contact the operator: the server's store was truncated, or is an older copy.",
    "record_undecodable": "Use the midstream version that wrote it, or restore a copy.",
    "unauthorized": "Set MIDSTREAM_TOKEN='ORIGIN TOKEN', with the address of the server and its token.",
    "other_login": "Log out first, or confirm the new login.",
    "connection_lost": "Check that the server runs and that the address is right.",
    "draining": "Try again in a few seconds.",
    "recovering": "Try again in a few seconds.",
    "wrong_secret": "Use the --home of the client with its secret, or set MIDSTREAM_SECRET_FILE to a file with it.",
    "model_rejected": "Check the model's name, its key and the size of the conversation.",
    "model_unavailable": "Try again later.",
    "model_stalled": "Try again later.",
    "malformed_frame": "Check that this is the address of a midstream server.",
    "protocol": "Check that this is the address of a midstream server.",
}
"""Advice for error codes whose messages contain none."""


_OUTPUT_FAULTS = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG}
"""Errors of a write to stdout, which have no file name."""


def exit_code_of(error: MidstreamError) -> int:
    """Return the exit code for an error."""
    match error:
        case UsageError():
            return USAGE
        case NotFoundError():
            return NOT_FOUND
        case ConflictError() | StoreBusyError():
            return CONFLICT
        case ModelError() | ProtocolError():
            return UPSTREAM
        case _:
            return FAILURE


def of_error(error: MidstreamError) -> tuple[str, int]:
    """Return the line and the exit code for a `MidstreamError`."""
    return line_of(error.code, error.message), exit_code_of(error)


def line_of(code: str, message: str) -> str:
    """Return `description. advice. [code]`."""
    advice = ADVICE.get(code, "")
    return " ".join(filter(None, [_sentence(message), advice, f"[{code}]"]))


def of_usage(error: click.UsageError) -> tuple[str, int]:
    """Return the line and the exit code for an invalid command line."""
    command = error.ctx.command_path if error.ctx else "midstream"
    return f"{_sentence(error.format_message())} `{command} --help` shows how. [usage]", USAGE


def of_system(error: OSError, state: Path) -> tuple[str, int]:
    """Return the line and the exit code for an error of the system, such as a full disk."""
    if error.filename is None and error.errno in _OUTPUT_FAULTS:
        return f"the output could not be written: {_sentence(error.strerror or '')} [output]", FAILURE
    if error.filename is None:
        return of_bug(error, state)
    advice = "Choose another location with --home or --store, or make this one usable."
    return (
        f"{str(error.filename)!r} cannot be used: {_sentence(error.strerror or '')} {advice} [usage]",
        USAGE,
    )


def of_bug(error: Exception, state: Path) -> tuple[str, int]:
    """Return the line and the exit code for a defect; store the traceback in a file."""
    log = state / "crash.log"
    try:
        log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        replace_own(log, "".join(traceback.format_exception(error)).encode("utf-8", "replace"))
    except OSError:
        where = "(the traceback could not be stored)"
    else:
        where = f"Please report it with {log}"
    return (
        f"this is a bug in midstream: {type(error).__name__}: {_sentence(str(error))} {where} [bug]",
        FAILURE,
    )


def _sentence(message: str) -> str:
    text = message.strip()
    return text if text.endswith((".", "!", "?")) else f"{text}."
