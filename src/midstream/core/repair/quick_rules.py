"""What a quick look goes by: one profile's rules, in the form in which ten thousand messages ask for them."""

from __future__ import annotations

from typing import Any

from midstream.core.formats.parts import Mark, Value
from midstream.core.profiles import Profile
from midstream.core.repair.names import names_of
from midstream.core.repair.words import SENTINEL

DOUBT, USER, REPLY, CALLS, ANSWER, SYSTEM, MIXED, THOUGHT, ITEM = map(int, Mark)

Key = Any
"""What a call and its result have in common: the call id, or for Gemini a name with an id or a number."""
Sight = tuple[int, list[Key]]
"""A message's mark, and the keys of its calls or of its results."""

DOUBTED: Sight = (DOUBT, [])
SAID: Sight = (USER, [])
REPLIED: Sight = (REPLY, [])
TOLD: Sight = (SYSTEM, [])
THOUGHT_ALOUD: Sight = (THOUGHT, [])
DONE_ELSEWHERE: Sight = (ITEM, [])

FOREIGN_TEXTS = frozenset({"input_text", "output_text"})
"""Texts as the Responses API writes them."""
FOREIGN_STARTS = ("gAAAA", SENTINEL)
"""How other providers' signatures begin: OpenAI's encrypted reasoning, Google's stand-in."""


class Rules:
    """A profile's rules for one format's messages."""

    def __init__(self, form: str, profile: Profile, model: str | None = None) -> None:
        self.form = form
        self.names = names_of(form, profile)
        self.takes_id = profile.id_test()
        self.is_signed = profile.is_thinking_signed
        self.signatures: list[str] = []
        """Of the thinking in the messages looked at so far, of those formats that keep it in the content."""
        self.signs = profile.signs
        self.model = model
        self.mixes_results = profile.mixes_results
        self.pairs_hosted = profile.pairs_hosted
        self.told: set[str] = set()
        """System prompts inside users' messages, so far: each is said once."""
        self.system = profile.system
        self.has_begun = False
        """Whether a message was looked at already, of the formats that tell system prompts inside users'."""
        self.is_spoken = profile.alternates == "spoken"
        self.takes_white = profile.blank != "white"
        self.result_files = profile.result_files
        self.replies_show_files = profile.replies_show_files

    def is_foreign(self, model: Value) -> bool:
        """Whether thinking of this model would be refused; messages name theirs now and then."""
        if type(model) is not str or self.signs != "anthropic":
            return False
        return "claude" not in model or (self.model is not None and model != self.model)

    def answers(self, keys: list[Key], *, has_words: bool) -> Sight:
        """Return what a user's message with these results is, or without any."""
        if not keys:
            return SAID
        if not has_words:
            return ANSWER, keys
        return (MIXED, keys) if self.mixes_results else DOUBTED

    def tells(self, *, is_after_words: bool, is_after_result: bool) -> bool:
        """Whether a system prompt may be a part of this user's message, behind those parts."""
        if self.system in ("any", "apart"):
            return True
        if is_after_words:
            return self.system == "after-user"
        return not (self.has_begun or is_after_result)

    def takes_files(self, *, is_failed: bool) -> bool:
        """Whether a result may hold more than words."""
        return self.result_files == "any" or (self.result_files == "unless-failed" and not is_failed)


def says(words: Value) -> bool:
    """Whether this is a text with more than white space in it."""
    return type(words) is str and bool(words) and not words.isspace()


def is_signature(signature: Value, seen: list[str]) -> bool:
    """Whether this can be the provider's own signature, and new among those `seen`; then it is noted."""
    if not says(signature) or signature.startswith(FOREIGN_STARTS) or signature in seen:
        return False
    seen.append(signature)
    return True
