"""Requests on their way to a provider, through httpx or httpx2: the history in them is repaired before it leaves.

    from midstream.frameworks.http_hooks import repairing

    client = anthropic.Anthropic(http_client=repairing(anthropic.DefaultHttpxClient()))
    client = openai.AsyncOpenAI(http_client=repairing(openai.DefaultAsyncHttpxClient(), profile="deepseek"))
    client.messages.create(...)  # a call without its result no longer ends the session

Known are OpenAI Chat Completions and Responses, Anthropic Messages (also on Vertex and, with a bearer token, Bedrock),
Gemini and Bedrock Converse, by the path of the request. Everything else goes through untouched, and so does, byte for
byte, a request in which nothing is wrong. No provider's package is imported.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from msgspec import Struct

from midstream.errors import HistoryRefusedError
from midstream.history.codecs.format_registry import find_format
from midstream.history.operations import Repaired
from midstream.history.profiles import find_profile, profile_for
from midstream.history.repair.modes import CallerKnowledge, Mode, repair_in_mode, require_mode

BODY_BYTES_MAX = 64 << 20
"""Larger bodies go as they are: twice what any of these providers takes."""

_LOG = logging.getLogger(__name__)

Json = dict[str, Any]
OnRepair = Callable[[Repaired], None]


class _Api(Struct, frozen=True):
    """Form of a request to one provider."""

    path: re.Pattern[str]
    format: str
    profile: str
    history: str = "messages"
    """The key of the body that holds the history."""
    has_pauses: bool = False
    """A response may be one that the next request goes on with (`pause_turn`)."""


def _anthropic(path: str, profile: str) -> _Api:
    return _Api(re.compile(path), "anthropic", profile, has_pauses=True)


def _gemini(path: str, profile: str) -> _Api:
    return _Api(re.compile(path), "gemini", profile, "contents")


def _converse(path: str, profile: str) -> _Api:
    return _Api(re.compile(path), "bedrock", profile)


_APIS = (
    _Api(re.compile(r"/chat/completions$"), "openai-chat", "openai-chat"),
    _Api(re.compile(r"/responses(/compact|/input_tokens)?$"), "openai-responses", "responses", "input"),
    _anthropic(r"/messages(/count_tokens)?$", "anthropic"),
    _anthropic(r"/publishers/anthropic/models/[^/]+:(streamR|r)awPredict$", "vertex"),
    _anthropic(r"/model/[^/]*anthropic[^/]*/invoke(-with-response-stream)?$", "bedrock-claude"),
    _gemini(r"/models/gemini-3[^/]*:(streamG|g)enerateContent$", "gemini-3"),
    _gemini(r"/models/[^/]+:(streamG|g)enerateContent$", "gemini"),
    _converse(r"/model/[^/]*mistral[^/]*/converse(-stream)?$", "bedrock-mistral"),
    _converse(r"/model/[^/]+/converse(-stream)?$", "bedrock-claude"),
)
"""The first whose path is found at the end of a request's."""
_SERVER_STATE = ("previous_response_id", "conversation")
"""With one of these the provider adds what it keeps itself: a result's call may be there and not here."""


class RepairedBody(Struct, frozen=True):
    """The body to send instead, and what was repaired in it."""

    body: bytes
    repaired: Repaired


def repair_body(
    path: str, body: bytes, *, profile: str | None = None, mode: Mode = "repair"
) -> RepairedBody | None:
    """Repair the history in a request's body; None where the body can go as it is.

    For any HTTP client or proxy that `repairing` does not support. Thinking is turned off in the new body where the
    repair advises it.

    Args:
        path: The path of the request's URL, without the query; it decides the format of the body.
        profile: Whose rules hold, if not those of the path.
        mode: As of `midstream.repair`. The prompt at the end stays in `rollback`, the system prompts at the top
            stay in `sanitize`: both belong to this request.

    Raises:
        HistoryRefusedError: In mode `strict`, something would be refused.
        InvalidHistoryError: The history can be in no request.
        ValueError: The body is no JSON.
        UsageError: There is no profile or mode of this name.
    """
    api = next((api for api in _APIS if api.path.search(path)), None)
    request = json.loads(body) if api is not None else None
    if api is None or not isinstance(request, dict):
        return None
    history = request.get(api.history)
    if not isinstance(history, list) or _is_continued(request, history):
        return None
    model = request["model"] if isinstance(request.get("model"), str) else None
    form = find_format(api.format)
    systems = form.spec.system_keys
    place = next((key for key in systems if key in request), systems[0] if systems else "")
    prompt = request.get(place)
    own_rules = api.profile if api.profile != form.profile else None
    given = CallerKnowledge(
        model=model,
        thinking=_thinking_in(request),
        system=prompt,
        live_tail=api.has_pauses and _is_paused(history),
        own=range(_systems_at_top(history)),
        has_prompt=True,
    )
    done = repair_in_mode(mode, history, form, profile_for(form, profile or own_rules, model), given)
    if not done.is_changed and done.advice.thinking is None:
        return None
    sent = {**request, api.history: done.messages}
    if done.system is not prompt:
        sent[place] = done.system
    if done.advice.thinking is False:
        sent = _without_thinking(sent)
    return RepairedBody(_encode(sent), done)


def _systems_at_top(history: list[Any]) -> int:
    """Count the system prompts that this very request brings along."""
    for place, message in enumerate(history):
        if not isinstance(message, dict) or message.get("role") not in ("system", "developer"):
            return place
    return len(history)


def _is_continued(request: Json, history: list[Any]) -> bool:
    """Whether the provider has more of this history than the request (Responses)."""
    return any(request.get(key) for key in _SERVER_STATE) or any(
        isinstance(item, dict) and item.get("type") == "item_reference" for item in history
    )


def _thinking_in(request: Json) -> bool | None:
    """Whether a response with calls must begin with thinking.

    Only where thinking is plainly on: with `adaptive` thinking a response may come without any.
    """
    asked = request.get("thinking")
    kind = asked.get("type") if isinstance(asked, dict) else None
    return {"enabled": True, "disabled": False}.get(kind) if isinstance(kind, str) else None


def _is_paused(history: list[Any]) -> bool:
    """Whether the list ends with a paused response: only the provider's own tools were still at work in it."""
    last = history[-1] if history else None
    if (
        not isinstance(last, dict)
        or last.get("role") != "assistant"
        or not isinstance(last.get("content"), list)
    ):
        return False
    kinds = [block.get("type") for block in last["content"] if isinstance(block, dict)]
    return "server_tool_use" in kinds and "tool_use" not in kinds


def _without_thinking(request: Json) -> Json:
    """Turn thinking off, with what is refused without it."""
    sent = {**request, "thinking": {"type": "disabled"}}
    managed = request.get("context_management")
    if isinstance(managed, dict) and isinstance(edits := managed.get("edits"), list):
        kept = [edit for edit in edits if not str(edit.get("type")).startswith("clear_thinking")]
        sent["context_management"] = {**managed, "edits": kept}
        if not kept:
            del sent["context_management"]
    return sent


def _encode(request: Json) -> bytes:
    """Write JSON as the providers' own clients do."""
    return json.dumps(request, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


# --- in a client ----------------------------------------------------------------------------------------------


class HookableClient(Protocol):
    """Interface needed of an HTTP client: those of httpx and httpx2 have it, sync and async."""

    @property
    def event_hooks(self) -> dict[str, list[Callable[..., Any]]]:
        """Return the hooks that are called for each request and each response."""


ClientT = TypeVar("ClientT", bound=HookableClient)


def repairing(
    client: ClientT,
    *,
    profile: str | None = None,
    mode: Mode = "repair",
    on_repair: OnRepair | None = None,
) -> ClientT:
    """Let a client repair what it sends, and return it. Its transports, proxies and other hooks stay as they are.

    A request is never lost to its repair: if that fails, it is logged (what kind of error and where, never
    content) and the request goes as it was. Requests signed over their body (AWS) go as they are, too.

    Args:
        client: An `httpx.Client`, `httpx.AsyncClient`, or one of httpx2; also a provider's subclass of these.
        profile: Whose rules hold, if not those of the path: `deepseek`, `kimi`, `minimax`, `strict-template`, …
        mode: As of `repair_body`. In `strict`, sending a request that would be refused raises `HistoryRefusedError`.
        on_repair: Called with each repair, before the request is sent: store its `messages`, show its `edits`.

    Raises:
        UsageError: There is no profile or mode of this name.
    """
    if profile is not None:
        find_profile(profile)
    require_mode(mode)
    hook = _RequestHook(profile, mode, on_repair)
    is_async = hasattr(client, "aclose")
    hooks = client.event_hooks
    hooks["request"] = [*hooks.get("request", ()), hook.on_async_request if is_async else hook.on_request]
    return client


class _RequestHook:
    """Looks at each request of one client. A request is `Any`: it may be httpx's or httpx2's."""

    def __init__(self, profile: str | None, mode: Mode, on_repair: OnRepair | None) -> None:
        self._profile = profile
        self._mode = mode
        self._on_repair = on_repair

    def on_request(self, request: Any) -> None:  # noqa: ANN401 - see the class
        if _is_ours(request):
            self._settle(request, request.read())

    async def on_async_request(self, request: Any) -> None:  # noqa: ANN401 - see the class
        if _is_ours(request):
            self._settle(request, await request.aread())

    def _settle(self, request: Any, body: bytes) -> None:  # noqa: ANN401 - see the class
        if len(body) > BODY_BYTES_MAX:
            return
        happened = "a history was sent as it is"
        try:
            instead = repair_body(request.url.path, body, profile=self._profile, mode=self._mode)
            if instead is None:
                return
            _rewrite(request, instead.body)
            happened = "a repaired history was sent, and the report to its caller failed"
            _log(instead.repaired)
            if self._on_repair is not None:
                self._on_repair(instead.repaired)
        except HistoryRefusedError:
            raise  # requested, with mode="strict"
        except Exception as error:  # noqa: BLE001 - whatever went wrong: the caller's request is worth more
            _log_failure(happened, error)


def _is_ours(request: Any) -> bool:  # noqa: ANN401 - httpx's or httpx2's
    headers = request.headers
    return (
        request.method == "POST"
        and any(api.path.search(request.url.path) for api in _APIS)
        and "content-encoding" not in headers
        and not headers.get("authorization", "").startswith("AWS4-")
    )


def _rewrite(request: Any, body: bytes) -> None:  # noqa: ANN401 - httpx's or httpx2's
    """Give a request another body. A new one is made and takes the old one's place, by public means only."""
    sizes = (b"content-length", b"transfer-encoding")
    headers = [(name, value) for name, value in request.headers.raw if name.lower() not in sizes]
    fresh = type(request)(
        request.method, request.url, headers=headers, content=body, extensions=request.extensions
    )
    vars(request).update(vars(fresh))


def _log(done: Repaired) -> None:
    """Log what was done: codes only, for everything else in an edit may come from the history."""
    level = logging.WARNING if done.is_lossy else logging.INFO
    codes = sorted({edit.code for edit in done.edits})
    _LOG.log(level, "repaired the history in a request", extra={"edits": len(done.edits), "codes": codes})
    if done.advice.thinking is False:
        _LOG.warning(
            "turned thinking off for a request, because the thinking of the tool loop in progress is lost"
        )


def _log_failure(happened: str, error: Exception) -> None:
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    where = f"{place.tb_frame.f_code.co_name}:{place.tb_lineno}" if place is not None else ""
    # Neither the message nor the traceback: a callback's or a reader's error may quote the history.
    _LOG.warning("%s: %s in %s", happened, type(error).__name__, where)
