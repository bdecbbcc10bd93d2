"""The rules of each provider, as data.

Only `repair`, `check` and `render` read profiles; every rule is a value here. Sources and error texts:
`docs/spec/history.md`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from midstream.errors import UsageError
from midstream.history.codecs.codec_spec import Format, ResultPlacement, Value

T = TypeVar("T")

_ID_SIZE_LIMIT = 1 << 20
"""A limit for providers that document none, in characters."""
_ANYTHING = r"(?s:.+)"
_WORD = r"[a-zA-Z0-9_-]+"
_CLAUDES_WITH_LATER_SYSTEM = r"claude-(opus-(4-8|[5-9])|sonnet-[5-9]|haiku-(5-5|[6-9])|fable|mythos).*"
"""From Opus 4.8 on, only at Anthropic itself; elsewhere the role is refused."""
_ALNUM = r"[a-zA-Z0-9]+"


class Profile(Struct, frozen=True, kw_only=True):
    """The rules of one provider."""

    name: str
    format: str = "openai-chat"
    """The format of its messages."""
    signs: str = ""
    """The provider's own name if it signs thinking and requires it, else empty."""
    is_thinking_signed: bool = False
    """Whether unsigned thinking is refused, and thinking at the end of a response."""
    wants_reasoning: Literal["no", "calls", "every"] = "no"
    """With thinking on, responses that must have their reasoning: those with calls (DeepSeek), or every one."""
    takes_reasoning: bool = False
    """Whether responses may have `reasoning_content` of any model."""
    signs_calls: bool = False
    """Whether the first call of each step of the current turn must have its signature (Gemini 3)."""
    id_pattern: str = _ANYTHING
    """Pattern of a whole call id."""
    id_size_max: int = 0
    """In characters; 0 for no limit."""
    id_size_exact: int = 0
    """In characters; 0 for any length."""
    ids_refused: frozenset[str] = frozenset()
    ids_are_unique: Literal["response", "list"] = "response"
    """The scope in which a call id must be unique."""
    joins_users: bool = True
    """Whether successive user messages are one turn."""
    alternates: Literal["no", "roles", "spoken"] = "no"
    """`roles`: user and assistant must alternate. `spoken`: the same, without calls and results."""
    first: Literal["any", "call-later", "user"] = "call-later"
    """The first message: any; any except a response with calls; only a user's."""
    call_follows_user: bool = False
    """Whether a response with calls must not follow another response (Gemini)."""
    system: Literal["any", "after-user", "first", "apart"] = "any"
    """Places of system prompts: any; not after a response or a result; at the top; a parameter."""
    system_models: str = ""
    """Models that accept system prompts within the list, between a user's turn and a response."""
    user_follows_results: bool = True
    """Whether a user message may follow a result directly (not in Mistral's older templates)."""
    trims_prefill: bool = False
    """Whether a response that the model must continue may not end in white space."""
    repeats_system: bool = True
    """Whether equal system prompts may be repeated."""
    blank: Literal["ok", "empty", "white"] = "ok"
    """Refused texts: none; empty ones; also those of only white space."""
    is_white_result_refused: bool = False
    """Whether results of only white space are refused."""
    is_empty_user_refused: bool = True
    """Whether user messages without content are refused."""
    is_hollow_refused: bool = True
    """Whether responses without text and calls are refused."""
    mixes_results: bool = True
    """Whether one user message may have results and text."""
    pairs_hosted: bool = False
    """Whether a hosted call and its result must be in the same response."""
    files: Literal["any", "images", "none"] = "images"
    """A user's attachments that are sent; the others are described as text."""
    result_files: Literal["any", "unless-failed", "none"] = "any"
    """Results that may have images and other attachments."""
    responses_show_files: bool = False
    """Whether responses may have images and other attachments."""

    def takes_id(self, call_id: object) -> bool:
        """Whether this is a valid call id."""
        return self.id_test()(call_id)

    def id_test(self) -> Callable[[Value], bool]:
        """Return `takes_id` as a faster function, for many ids."""
        match = re.compile(self.id_pattern).fullmatch
        size_max = self.id_size_exact or self.id_size_max or _ID_SIZE_LIMIT
        size_min = self.id_size_exact or 1
        refused = self.ids_refused

        def test(call_id: Value) -> bool:
            return (
                type(call_id) is str
                and size_min <= len(call_id) <= size_max
                and call_id not in refused
                and match(call_id) is not None
            )

        return test


ProfileName = Literal[
    "anthropic",
    "bedrock-claude",
    "bedrock-mistral",
    "vertex",
    "openai-chat",
    "claude-proxy",
    "responses",
    "gemini",
    "gemini-3",
    "mistral",
    "mistral-v3",
    "mistral-legacy",
    "deepseek",
    "kimi",
    "minimax",
    "strict-template",
    "neutral",
    "pydantic-ai",
    "portable",
    # Aliases.
    "bedrock",
    "openai",
    "openai-responses",
    "google",
    "chat",
    "langchain",
]
"""The names of profiles, for a type checker: those of `PROFILES` and their aliases."""

_PROFILES = (
    Profile(
        name="anthropic",
        trims_prefill=True,
        result_files="unless-failed",
        system_models=_CLAUDES_WITH_LATER_SYSTEM,
        format="anthropic",
        files="any",
        signs="anthropic",
        is_thinking_signed=True,
        id_pattern=_WORD,
        ids_are_unique="list",
        first="user",
        system="apart",
        blank="white",
        is_white_result_refused=True,
        pairs_hosted=True,
    ),
    Profile(
        name="bedrock-claude",
        trims_prefill=True,
        result_files="unless-failed",
        format="bedrock",
        signs="anthropic",
        is_thinking_signed=True,
        id_pattern=_WORD,
        id_size_max=64,
        ids_are_unique="list",
        joins_users=False,
        alternates="roles",
        first="user",
        system="apart",
        blank="white",
        is_white_result_refused=True,
        pairs_hosted=True,
    ),
    Profile(
        name="bedrock-mistral",
        format="bedrock",
        files="none",
        id_pattern=_WORD,
        id_size_max=64,
        ids_are_unique="list",
        joins_users=False,
        alternates="roles",
        first="user",
        system="apart",
        blank="white",
        is_white_result_refused=True,
        mixes_results=False,
    ),
    Profile(
        name="vertex",
        trims_prefill=True,
        result_files="unless-failed",
        format="anthropic",
        files="any",
        signs="anthropic",
        is_thinking_signed=True,
        id_pattern=_WORD,
        ids_are_unique="list",
        joins_users=False,
        alternates="roles",
        first="user",
        system="apart",
        blank="white",
        is_white_result_refused=True,
        pairs_hosted=True,
    ),
    Profile(
        name="openai-chat",
        signs="openai",
        id_size_max=40,
        is_empty_user_refused=False,
        files="any",
        result_files="none",
    ),
    Profile(
        name="claude-proxy",
        trims_prefill=True,
        id_pattern=_WORD,
        id_size_max=64,
        ids_are_unique="list",
        blank="white",
        is_white_result_refused=True,
        files="any",
        result_files="none",
    ),
    Profile(
        name="responses",
        format="openai-responses",
        signs="openai",
        id_size_max=64,
        ids_are_unique="list",
        files="any",
    ),
    Profile(
        name="gemini",
        responses_show_files=True,
        format="gemini",
        files="any",
        signs="google",
        system="apart",
        joins_users=False,
        call_follows_user=True,
        blank="empty",
    ),
    Profile(
        name="gemini-3",
        responses_show_files=True,
        format="gemini",
        files="any",
        signs="google",
        system="apart",
        joins_users=False,
        call_follows_user=True,
        blank="empty",
        signs_calls=True,
    ),
    Profile(
        name="mistral",
        format="mistral",
        system="after-user",
        is_empty_user_refused=False,
        ids_refused=frozenset({"null"}),
    ),
    Profile(
        name="mistral-v3",
        format="mistral",
        system="after-user",
        is_empty_user_refused=False,
        id_pattern=_ALNUM,
        id_size_exact=9,
    ),
    Profile(
        name="mistral-legacy",
        format="mistral",
        system="after-user",
        is_empty_user_refused=False,
        id_pattern=_ALNUM,
        id_size_exact=9,
        user_follows_results=False,
        mixes_results=False,
    ),
    Profile(
        name="deepseek",
        result_files="none",
        is_empty_user_refused=False,
        ids_are_unique="list",
        wants_reasoning="calls",
        takes_reasoning=True,
        files="none",
    ),
    Profile(name="kimi", is_empty_user_refused=False, takes_reasoning=True),
    Profile(name="minimax", is_empty_user_refused=False, mixes_results=False, takes_reasoning=True),
    Profile(
        name="strict-template",
        files="none",
        id_pattern=_ALNUM,
        id_size_exact=9,
        joins_users=False,
        alternates="spoken",
        first="user",
        system="first",
        repeats_system=False,
        blank="empty",
        mixes_results=False,
    ),
    Profile(
        name="neutral",
        id_pattern=_WORD,
        id_size_max=40,
        ids_are_unique="list",
        blank="white",
        responses_show_files=True,
    ),
    Profile(
        name="pydantic-ai",
        repeats_system=False,
        responses_show_files=True,
        format="pydantic-ai",
        files="any",
        id_pattern=_WORD,
        id_size_max=40,
        ids_are_unique="list",
        first="user",
        blank="white",
        is_white_result_refused=True,
    ),
)


def both(first: Profile, second: Profile, *, name: str | None = None) -> Profile:
    """Return the profile that accepts only what both others accept."""
    sizes = [size for size in (first.id_size_max, second.id_size_max) if size]
    return Profile(
        name=name or second.name,
        format=second.format,
        signs=second.signs or first.signs,
        is_thinking_signed=first.is_thinking_signed or second.is_thinking_signed,
        wants_reasoning=_later(first.wants_reasoning, second.wants_reasoning, ("no", "calls", "every")),
        takes_reasoning=first.takes_reasoning and second.takes_reasoning,
        signs_calls=first.signs_calls or second.signs_calls,
        id_pattern=_narrower(first.id_pattern, second.id_pattern),
        id_size_max=min(sizes, default=0),
        id_size_exact=max(first.id_size_exact, second.id_size_exact),
        ids_refused=first.ids_refused | second.ids_refused,
        ids_are_unique=_later(first.ids_are_unique, second.ids_are_unique, ("response", "list")),
        joins_users=first.joins_users and second.joins_users,
        alternates=_later(first.alternates, second.alternates, ("no", "roles", "spoken")),
        first=_later(first.first, second.first, ("any", "call-later", "user")),
        call_follows_user=first.call_follows_user or second.call_follows_user,
        system=_later(first.system, second.system, ("any", "after-user", "first", "apart")),
        system_models=first.system_models if first.system_models == second.system_models else "",
        user_follows_results=first.user_follows_results and second.user_follows_results,
        trims_prefill=first.trims_prefill or second.trims_prefill,
        repeats_system=first.repeats_system and second.repeats_system,
        blank=_later(first.blank, second.blank, ("ok", "empty", "white")),
        is_white_result_refused=first.is_white_result_refused or second.is_white_result_refused,
        is_empty_user_refused=first.is_empty_user_refused or second.is_empty_user_refused,
        is_hollow_refused=first.is_hollow_refused or second.is_hollow_refused,
        mixes_results=first.mixes_results and second.mixes_results,
        pairs_hosted=first.pairs_hosted or second.pairs_hosted,
        files=_later(first.files, second.files, ("any", "images", "none")),
        result_files=_later(first.result_files, second.result_files, ("any", "unless-failed", "none")),
        responses_show_files=first.responses_show_files and second.responses_show_files,
    )


def _later(first: T, second: T, order: tuple[T, ...]) -> T:
    """Return the stricter of two values: the later one in their order."""
    return max(first, second, key=order.index)


def _narrower(first: str, second: str) -> str:
    return max(first, second, key=(_ANYTHING, _WORD, _ALNUM).index)


def _common_profile() -> Profile:
    """Return the rules that all providers accept. System prompts stay in the list: the format decides their place."""
    union = _PROFILES[0]
    for profile in _PROFILES:
        union = both(union, profile, name="portable")
    return replace(union, format="openai-chat", system="first", wants_reasoning="no", signs_calls=False)


PROFILES: dict[str, Profile] = {profile.name: profile for profile in (*_PROFILES, _common_profile())}
"""The profiles by name. `neutral` and `pydantic-ai` are for histories that may be sent to any provider next."""

WIRES = PROFILES | {
    "converse": replace(PROFILES["bedrock-claude"], signs="", is_thinking_signed=False, pairs_hosted=False)
}
"""The rules of each `Format.wire`: those of a profile, or those of Converse for any model."""

_ALIASES = {
    "bedrock": "bedrock-claude",
    "openai": "openai-chat",
    "openai-responses": "responses",
    "google": "gemini",
    "chat": "openai-chat",
    "langchain": "neutral",
}


def find_profile(name: str) -> Profile:
    """Return a profile by its name or by the name of its format.

    Raises:
        UsageError: There is none with this name; the message lists all names.
    """
    plain = name.strip().lower().replace("_", "-")
    found = PROFILES.get(plain) or PROFILES.get(_ALIASES.get(plain, ""))
    if found is None:
        raise UsageError(f"unknown profile {name!r}; known: {', '.join(PROFILES)}")
    return found


def profile_for(form: Format, name: str | None, model: str | None = None) -> Profile:
    """Return the rules for a format's messages at a provider: the format's own, and the provider's.

    Chat Completions with a Claude go through a proxy to Anthropic, whose rules are then the default.

    Raises:
        UsageError: There is no profile with this name.
    """
    if name is None and model is not None and "claude" in model:
        name = form.spec.claude_profile
    named = find_profile(name or form.profile)
    if named.alternates == "spoken" and form.layout is ResultPlacement.GROUPED:
        named = replace(
            named, mixes_results=False
        )  # results do not count as spoken, but text after them does
    if not form.wire or named.format == form.name:
        return named
    return both(WIRES[form.wire], named)
