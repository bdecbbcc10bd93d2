"""All retry rules: numbers of attempts, pauses, and pauses that servers may request.

All durations are in seconds. `tools/retries_js.py` generates the constants of the JavaScript client from this module.
"""

from __future__ import annotations

import datetime as dt
import email.utils
import math

from msgspec import Struct


class Backoff(Struct, frozen=True, gc=False):
    """Pauses between attempts.

    Args:
        first_s: Seconds before the second attempt.
        most_s: The longest pause.
        factor: Growth from one pause to the next.
        jitter: Random share of the pause: 0 none, 1 all of it ("full jitter").
    """

    first_s: float
    most_s: float
    factor: float = 2.0
    jitter: float = 0.0

    def wait_s(self, failures: int, *, chance: float, outage_s: float = math.inf) -> float:
        """Return the seconds to wait after `failures` failures in a row.

        Args:
            chance: A random number in [0, 1).
            outage_s: Seconds since the first of these failures. A pause above `first_s` is not longer.
        """
        if failures <= 0:
            return 0.0
        exponent = min(failures - 1, 64)
        wait = min(self.most_s, self.first_s * self.factor**exponent, max(self.first_s, outage_s))
        return wait * (1.0 - self.jitter * chance)


# --- pauses that a server requests ----------------------------------------------------------------------------------

RETRY_AFTER_S = 1.0
"""Pause that clients are requested to make for a temporary error without one."""
RETRY_AFTER_MAX_S = 120.0
"""Longest pause between attempts at a server's request. After it, the next attempt is made."""
ATTEMPT_PAUSE_MAX_S = 30.0
"""Longest pause at a server's request within an attempt, where it counts as silence of the model (`StallBudgets`). A
longer one ends the attempt with the error, which has the whole pause for the caller."""


def retry_after_s(header: str, *, now: float) -> float | None:
    """Return the seconds in a `Retry-After` header; None if there are none (RFC 9110, 10.2.3).

    Args:
        header: Seconds, or an HTTP date in any of its three forms; any other text is ignored.
        now: The wall clock, in seconds since 1970.
    """
    try:
        seconds = float(header)
    except ValueError:
        try:
            date = email.utils.parsedate_to_datetime(header)
            if date.tzinfo is None:  # asctime's form has no zone: all dates of HTTP are UTC
                date = date.replace(tzinfo=dt.UTC)
            seconds = date.timestamp() - now
        except (ValueError, OverflowError):
            return None
    return max(seconds, 0.0) if math.isfinite(seconds) else None


def pause_s(asked_s: float | None) -> float:
    """Return the pause for a server that requested `asked_s` seconds: from 0 to `RETRY_AFTER_MAX_S`."""
    return min(max(asked_s or 0.0, 0.0), RETRY_AFTER_MAX_S)


# --- model calls and upstream agents ---------------------------------------------------------------------------------

MODEL_ATTEMPTS_MAX = 3
"""Failed attempts of one model call before the turn fails."""
MODEL_BACKOFF = Backoff(first_s=1.0, most_s=4.0, jitter=0.25)
"""Between attempts of one model call: 1, 2, 4 s, with a random quarter."""
RESPONSE_RECONNECTS_MAX = 3
"""Successive connections to one background response without a new event, before the attempt fails."""
RESPONSE_BACKOFF = Backoff(first_s=0.25, most_s=4.0, jitter=0.5)
"""Between connections to one background response."""
AGENT_REPEAT_AFTER_S = (0.5, 1.5)
"""Before each further attempt to send a message to the same upstream agent after a network error or a rate limit."""
MCP_BACKOFF = Backoff(first_s=1.0, most_s=60.0, jitter=0.25)
"""Between connections to an MCP server that cannot be reached. A lost working connection is replaced at once."""

# --- stores and nodes ------------------------------------------------------------------------------------------------

APPEND_ATTEMPTS_MAX = 60
"""Attempts to append a model's or a tool's output while the store is unavailable: some seven minutes. After them the
outcome of a tool is lost, and its call is in doubt."""
APPEND_BACKOFF = Backoff(first_s=0.05, most_s=10.0, jitter=0.5)
CONFIRM_ATTEMPTS_MAX = 3
"""Attempts to confirm in the store that this process still has a session."""
STORE_ATTEMPTS_MAX = 100
"""Attempts of work that can wait for an unavailable store, with `RECONNECT_BACKOFF`: some 25 minutes."""
FORWARDED_WITHIN_S = 10.0
"""Seconds for the node of a session to decide a forwarded command."""
FORWARDED_BACKOFF = Backoff(first_s=0.1, most_s=1.0, jitter=0.5)
"""Between attempts to decide a forwarded command while the keys of the store are unavailable."""
RETURNED_ATTEMPTS_MAX = 6
"""Further attempts to take up an orphan whose node has returned; after that, the store has checked all orphans."""
RETURNED_BACKOFF = Backoff(first_s=0.25, most_s=5.0, jitter=0.25)
REPLACE_ATTEMPTS_MAX = 10
"""Attempts to replace one small value of the store that other processes also replace."""
NOTICE_ATTEMPTS_MAX = 5
"""Attempts to record that a connection began or ended. After them the next command records it."""
STOP_CHILD_ATTEMPTS_MAX = 14
"""Attempts to reach a sub-agent that must be stopped: for as long as its parent waits."""
TRIAL = Backoff(first_s=5.0, most_s=60.0, factor=4.0)
"""How long a suspect session resumes alone, by the number of deaths, unless its turn ends earlier: long enough for a
model response and a tool call."""
TRIAL_BACKOFF = Backoff(first_s=1.0, most_s=30.0, jitter=0.25)
"""Between the start of a process and a trial, by the number of further deaths: the first trial begins at once."""

WORKER_BACKOFF = Backoff(first_s=0.1, most_s=30.0, jitter=0.25)
"""Before a worker that ended is restarted, by the number of its successive failed starts."""

WEBHOOK_BACKOFF = Backoff(first_s=1.0, most_s=60.0, jitter=0.2)
"""Between failed deliveries to a webhook, as in the Durable Streams protocol."""

# --- clients (the JavaScript client has the same) --------------------------------------------------------------------

RECONNECT_BACKOFF = Backoff(first_s=1.0, most_s=30.0, jitter=1.0)
"""Between reconnects of a client after an immediate first one: 1 s to 30 s with full jitter. No pause is longer than
the outage so far, or 1 s: otherwise random short pauses would soon be followed by long ones."""
CONNECT_S = 10.0
"""How long a client waits until a connection is open, such as for the answer to a handshake (STREAM-109)."""
STOPPED_PATIENCE_S = 30.0
"""How long a client tries to read the end of a turn whose cancellation is acknowledged (STREAM-77)."""
HEARTBEATS_MISSED_MAX = 3
"""Missing heartbeats, or heartbeats without a due ack, before a connection counts as dead."""
