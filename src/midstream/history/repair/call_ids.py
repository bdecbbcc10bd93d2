"""Call ids: an id that the profile refuses is replaced, in the call and its result.

New ids are derived from the old one, or from the call if there is none. So the same history always gets the same ids,
and neither appended messages nor those that a repair inserted change them.
"""

from __future__ import annotations

import hashlib
import re

from midstream.history.codecs.codec_spec import CodecSpec, MessageTurn, Part, as_words
from midstream.history.codecs.openai_chat_codec import name_answer
from midstream.history.profiles import Profile
from midstream.history.repair.repair_task import Task
from midstream.history.repair.tool_names import takes_name

_ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_DIGEST_CHARS = 8


def settle_ids(turns: list[MessageTurn], calls: list[Part], task: Task) -> None:
    """Give every call an id that its profile accepts, and its result the same."""
    if not calls:
        return
    taken = {call.id for call in calls if isinstance(call.id, str)}
    namer = Namer(task.profile, taken)
    takes_id = task.profile.id_test()
    seen, is_per_response, response = namer.seen, task.profile.ids_are_unique == "response", -1
    for call in calls:
        if call.response != response:
            response = call.response
            if is_per_response:
                seen.clear()
        if not call.is_by_name:
            old = call.id
            if not takes_id(old):
                _rename(turns, call, namer.new(old, _nameless(call)), "bad-id", task)
            elif old in seen:
                _rename(turns, call, namer.new(old, _nameless(call)), "repeated-id", task)
            seen.add(str(call.id))
        for result in call.answers or ():
            _follow(turns, call, result, task)


def _nameless(call: Part) -> str:
    """Return an id for a call without one, derived from its content."""
    return f"call_{_digest(f'{call.name} {as_words(call.body)}')[:_DIGEST_CHARS]}"


def _rename(turns: list[MessageTurn], call: Part, new_id: str, code: str, task: Task) -> None:
    old = call.id if isinstance(call.id, str) else None
    task.form.rename(call, new_id)
    turn = turns[call.turn]
    turn.is_changed = True
    task.report.note(code, turn.at, f"renamed to {new_id!r}, with its result", call_id=old)


def _follow(turns: list[MessageTurn], call: Part, result: Part, task: Task) -> None:
    """Set the id (and, if results have names, the name) of a result to that of its call."""
    spec = task.form.spec
    by_name = spec.matches_by_name
    if call.is_by_name and not result.is_by_name and not by_name:
        name_answer(result, call.name)
        turns[result.turn].is_changed = True
    elif not call.is_by_name and result.id != call.id and (not result.is_by_name or not by_name):
        task.form.rename(result, str(call.id))
        turns[result.turn].is_changed = True
    if result.name != call.name and (by_name or _is_misnamed(result, spec)):
        task.form.retool(result, call.name)
        turns[result.turn].is_changed = True
        task.report.note("foreign-result-name", turns[result.turn].at, "named as its call")


def _is_misnamed(result: Part, spec: CodecSpec) -> bool:
    """Whether a result has an invalid tool name; a missing one is valid."""
    if result.name:
        return not takes_name(result.name, spec.names)
    return isinstance(result.raw, dict) and result.raw.get("name") not in (None, "")


class Namer:
    """Creates new ids that no other call has: none of those `taken` or `seen`."""

    def __init__(self, profile: Profile, taken: set[str]) -> None:
        self.profile = profile
        self.seen: set[str] = set()
        """Used ids in the response or the list, depending on the profile."""
        self.taken = taken
        self.next: dict[str, int] = {}

    def new(self, old: object, otherwise: str) -> str:
        """Return an id for a call with this old one, or without one: then similar to `otherwise`."""
        stem = old if isinstance(old, str) and old.strip() else otherwise
        if self.profile.id_size_exact:
            return self._exact(stem)
        plain = stem if self.profile.takes_id(stem) else self._plain(stem)
        candidate, count = plain, self.next.get(plain, 2)
        refused = self.profile.ids_refused
        while candidate in self.taken or candidate in self.seen or candidate in refused:
            candidate = self._with_suffix(plain, f"_{count}")
            count += 1
        self.next[plain] = count
        self.taken.add(candidate)
        return candidate

    def _plain(self, stem: str) -> str:
        plain = re.sub(r"[^a-zA-Z0-9_-]", "_", stem)
        size_max = self.profile.id_size_max
        if size_max and len(plain) > size_max:
            return self._with_suffix(plain, f"_{_digest(stem)[:_DIGEST_CHARS]}")
        return plain

    def _with_suffix(self, plain: str, suffix: str) -> str:
        size_max = self.profile.id_size_max
        return (plain[: size_max - len(suffix)] if size_max else plain) + suffix

    def _exact(self, stem: str) -> str:
        count = self.next.get(stem, 0)
        while True:
            candidate = _short(f"{stem}#{count}" if count else stem, self.profile.id_size_exact)
            count += 1
            if candidate not in self.taken and candidate not in self.seen:
                break
        self.next[stem] = count
        self.taken.add(candidate)
        return candidate


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _short(text: str, size: int) -> str:
    number = int(_digest(text), 16)
    chars = []
    for _ in range(size):
        number, place = divmod(number, len(_ALPHABET))
        chars.append(_ALPHABET[place])
    return "".join(chars)
