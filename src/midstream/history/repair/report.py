"""Findings and edits of a repair."""

from __future__ import annotations

from msgspec import Struct

from midstream.history.codecs.codec_spec import Value


class Edit(Struct, frozen=True, omit_defaults=True, gc=False):
    """One finding and the change that made it right.

    `at` is the place in the input: message number from 0, and the part in it (-1: the whole message). `lost` is what
    the output no longer holds, or empty: only unsendable thinking, blank text and exact copies are ever lost.
    """

    code: str
    at: int
    did: str
    part: int = -1
    call_id: str | None = None
    lost: str = ""


class Finding(Struct, frozen=True, omit_defaults=True, gc=False):
    """One thing a provider would refuse: its place and the rule it breaks."""

    code: str
    at: int
    rule: str
    part: int = -1
    call_id: str | None = None


class Advice(Struct, frozen=True, omit_defaults=True):
    """Settings for the coming request. None: no advice."""

    thinking: bool | None = None
    """False: the tool loop in progress lost its thinking, send this request with thinking off."""
    tools: bool | None = None
    """True: the history holds calls, so the request must declare tools (Bedrock's `toolConfig`)."""


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
        """Whether anything had to be repaired: then store the result, or it comes back on every resume."""
        return bool(self.edits)

    @property
    def is_lossy(self) -> bool:
        """Whether anything of the input is no longer there."""
        return any(edit.lost for edit in self.edits)


class EditLog:
    """Collects the edits of one repair."""

    def __init__(self) -> None:
        self.edits: list[Edit] = []

    def note(
        self, code: str, at: int, did: str, *, part: int = -1, call_id: Value = None, lost: str = ""
    ) -> None:
        """Note one edit. `call_id` may be whatever stood there: only a text names a call."""
        known = call_id if isinstance(call_id, str) else None
        self.edits.append(Edit(code, at, did, part, known, lost))
