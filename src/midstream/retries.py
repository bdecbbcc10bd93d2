"""Every retry rule: how often something is tried again, how long the pauses are, and which pauses servers may ask for.

All durations are in seconds. The constants of the JavaScript client are generated from here (`tools/retries_js.py`).
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
        most_s: No pause is longer.
        factor: Growth from one pause to the next.
        jitter: Share of the pause that chance decides: 0 none, 1 all of it ("full jitter").
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
"""Pause that clients are asked for where an error that passes by itself names none."""
RETRY_AFTER_MAX_S = 120.0
"""Longest pause that is waited for between attempts on request of a server. After it the next attempt is made."""
ATTEMPT_PAUSE_MAX_S = 30.0
"""Longest pause on request of a server that is waited for within an attempt, where it counts as silence of the model
(`StallBudgets`). A longer one ends the attempt with the error, which has the whole pause for the caller."""


def retry_after_s(header: str, *, now: float) -> float | None:
    """Return the seconds that a `Retry-After` header asks for; None where it asks for none (RFC 9110, 10.2.3).

    Args:
        header: Seconds, or an HTTP date in any of its three forms; any other text is ignored.
        now: The wall clock, in seconds since 1970.
    """
    try:
        seconds = float(header)
    except ValueError:
        try:
            date = email.utils.parsedate_to_datetime(header)
            if date.tzinfo is None:  # the form of asctime: all dates of HTTP are UTC
                date = date.replace(tzinfo=dt.UTC)
            seconds = date.timestamp() - now
        except (ValueError, OverflowError):
            return None
    return max(seconds, 0.0) if math.isfinite(seconds) else None


def pause_s(asked_s: float | None) -> float:
    """Return the seconds to wait for a server that asked for `asked_s`: from 0 to `RETRY_AFTER_MAX_S`."""
    return min(max(asked_s or 0.0, 0.0), RETRY_AFTER_MAX_S)


# --- model calls and upstream agents ---------------------------------------------------------------------------------

MODEL_ATTEMPTS_MAX = 3
"""Failed attempts of one model call before the turn fails."""
MODEL_BACKOFF = Backoff(first_s=1.0, most_s=4.0, jitter=0.25)
"""Between attempts of one model call: 1, 2, 4 s (the seeds' rule), a quarter of it by chance."""
RESPONSE_RECONNECTS_MAX = 3
"""Connections in a row to one background response that bring no new event, before the attempt fails."""
RESPONSE_BACKOFF = Backoff(first_s=0.25, most_s=4.0, jitter=0.5)
"""Between connections to one background response."""
AGENT_REPEAT_AFTER_S = (0.5, 1.5)
"""Before each further attempt to send a message to the same upstream agent, which refused it for the network or its
rate limit."""
MCP_BACKOFF = Backoff(first_s=1.0, most_s=60.0, jitter=0.25)
"""Between connections to an MCP server that cannot be reached. One that was lost while it worked is tried at once."""

# --- the store, and the owners of sessions ---------------------------------------------------------------------------

APPEND_ATTEMPTS_MAX = 60
"""Attempts to append what a model or a tool returned while the store is unavailable: some seven minutes. After them the
outcome of a tool that ran is lost, and its call in doubt."""
APPEND_BACKOFF = Backoff(first_s=0.05, most_s=10.0, jitter=0.5)
CONFIRM_ATTEMPTS_MAX = 3
"""Attempts to confirm in the store that this process still owns a session."""
STORE_ATTEMPTS_MAX = 100
"""Attempts of work that can wait for a store which is busy, full or away, with `RECONNECT_BACKOFF`: some 25 minutes."""
HAND_OVER_S = 10.0
"""Seconds that the node of a session has to decide a command that reached another one."""
HAND_OVER_BACKOFF = Backoff(first_s=0.1, most_s=1.0, jitter=0.5)
"""Between attempts to decide such a command while the keys of the store cannot be had."""
RETURNED_ATTEMPTS_MAX = 6
"""Further attempts to take up an orphan whose node has come back; later the store has looked at all orphans."""
RETURNED_BACKOFF = Backoff(first_s=0.25, most_s=5.0, jitter=0.25)
REPLACE_ATTEMPTS_MAX = 10
"""Attempts to replace one small value of the store that other processes replace at the same moment."""
NOTICE_ATTEMPTS_MAX = 5
"""Attempts to record that a connection came or went. After them the next command records it."""
STOP_CHILD_ATTEMPTS_MAX = 14
"""Attempts to reach a sub-agent that is to be stopped: as long as its parent waits for it."""
TRIAL = Backoff(first_s=5.0, most_s=60.0, factor=4.0)
"""How long a session that may have killed its server resumes alone, by the number of those deaths, unless its turn ends
earlier. Long enough for a model response and the tool that it calls."""
TRIAL_BACKOFF = Backoff(first_s=1.0, most_s=30.0, jitter=0.25)
"""Between the start of a process and such a trial, by the number of further deaths: the first trial begins at once."""

WORKER_BACKOFF = Backoff(first_s=0.1, most_s=30.0, jitter=0.25)
"""Before a worker that ended is started again, by the number of its failed starts in a row."""

WEBHOOK_BACKOFF = Backoff(first_s=1.0, most_s=60.0, jitter=0.2)
"""Between deliveries to a webhook that fail, as the Durable Streams protocol has it."""

# --- clients (the JavaScript client has the same) --------------------------------------------------------------------

RECONNECT_BACKOFF = Backoff(first_s=1.0, most_s=30.0, jitter=1.0)
"""Between reconnects of a client, after a first one at once: 1 s to 30 s with full jitter. None is longer than the
outage so far, or 1 s: short pauses by chance would else double the next ones within a second."""
STOPPED_PATIENCE_S = 30.0
"""How long a client tries to read the end of a turn that was stopped, when the server has the stop (STREAM-77)."""
HEARTBEATS_MISSED_MAX = 3
"""Heartbeats that may be missing, or come instead of an ack, before a connection counts as dead."""
