"""Findings and edits of a repair."""

from __future__ import annotations

from msgspec import Struct

from midstream.history.codecs.codec_spec import Value


class Edit(Struct, frozen=True, omit_defaults=True, gc=False):
    """One finding and its correction.

    `at` is the place in the input: message number from 0, and the part in it (-1: the whole message). `lost` is the
    removed content, or empty: only thinking that cannot be sent, blank text and exact copies are ever lost.
    """

    code: str
    at: int
    did: str
    part: int = -1
    call_id: str | None = None
    lost: str = ""


class Finding(Struct, frozen=True, omit_defaults=True, gc=False):
    """One fault that a provider would refuse: its place and its rule."""

    code: str
    at: int
    rule: str
    part: int = -1
    call_id: str | None = None


class Advice(Struct, frozen=True, omit_defaults=True):
    """Settings for the coming request. None: no advice."""

    thinking: bool | None = None
    """False: the running tool loop has lost its thinking, so send this request with thinking off."""
    tools: bool | None = None
    """True: the history has calls, so the request must declare tools (Bedrock's `toolConfig`)."""


class Repaired(Struct, frozen=True):
    """A history that the provider accepts, with the edits that were made.

    `messages` is the very list that was given where nothing was wrong; so is `system`.
    """

    messages: list[Value]
    system: Value = None
    edits: tuple[Edit, ...] = ()
    advice: Advice = Advice()

    @property
    def is_changed(self) -> bool:
        """Whether there was any repair: then store the result, so that it is not repeated."""
        return bool(self.edits)

    @property
    def is_lossy(self) -> bool:
        """Whether any content of the input was removed."""
        return any(edit.lost for edit in self.edits)


class EditLog:
    """Collects the edits of one repair."""

    def __init__(self) -> None:
        self.edits: list[Edit] = []

    def note(
        self, code: str, at: int, did: str, *, part: int = -1, call_id: Value = None, lost: str = ""
    ) -> None:
        """Record one edit. `call_id` may be any value: only a text identifies a call."""
        known = call_id if isinstance(call_id, str) else None
        self.edits.append(Edit(code, at, did, part, known, lost))
