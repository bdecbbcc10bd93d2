"""References to an attempt and to a tool call within one session."""

from __future__ import annotations

from msgspec import Struct


class AttemptRef(Struct, frozen=True, gc=False):
    """One attempt at a response: the numbers of its turn, of its response in the turn, and of the attempt, from 1."""

    turn: int
    response_no: int
    attempt: int


class CallRef(Struct, frozen=True, gc=False):
    """One tool call: the numbers of its turn and response, and the call's id, which is unique in the response."""

    turn: int
    response_no: int
    call_id: str
