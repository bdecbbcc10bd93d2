"""References to an attempt and to a tool call within one session."""

from __future__ import annotations

from msgspec import Struct


class AttemptRef(Struct, frozen=True, gc=False):
    """One attempt of a response: the numbers of its turn, its response in the turn, and itself, from 1 on."""

    turn: int
    response_no: int
    attempt: int


class CallRef(Struct, frozen=True, gc=False):
    """One tool call: the numbers of its turn and response, and the call's id, which is unique in the response."""

    turn: int
    response_no: int
    call_id: str
