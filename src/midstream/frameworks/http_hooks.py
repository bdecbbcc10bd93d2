"""Repair of the history in each request to a provider, as a hook of httpx or httpx2.

    from midstream.frameworks.http_hooks import repairing

    client = anthropic.Anthropic(http_client=repairing(anthropic.DefaultHttpxClient()))
    client = openai.AsyncOpenAI(http_client=repairing(openai.DefaultAsyncHttpxClient(), profile="deepseek"))
    client.messages.create(...)  # a call without its result no longer causes a refusal

The path of a request identifies its API: OpenAI Chat Completions and Responses, Anthropic Messages (also on Vertex and,
with a bearer token, Bedrock), Gemini and Bedrock Converse. Other requests, and those without findings, are sent
unchanged, byte for byte. No provider's package is imported.
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
"""Larger bodies are sent unchanged: twice the limit of any of these providers."""

_LOG = logging.getLogger(__name__)

Json = dict[str, Any]
OnRepair = Callable[[Repaired], None]


class _Api(Struct, frozen=True):
    """Format of the requests of one API."""

    path: re.Pattern[str]
    format: str
    profile: str
    history: str = "messages"
    """Key of the history in the body."""
    has_pauses: bool = False
    """Whether the next request may continue a response (`pause_turn`)."""


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
"""The first API whose pattern matches the end of the path counts."""
_SERVER_STATE = ("previous_response_id", "conversation")
"""With one of these fields, the provider adds its stored history, which may contain the call of a result."""


class RepairedBody(Struct, frozen=True):
    """The body to send instead, and the repairs."""

    body: bytes
    repaired: Repaired


def repair_body(
    path: str, body: bytes, *, profile: str | None = None, mode: Mode = "repair"
) -> RepairedBody | None:
    """Repair the history in a request's body; return None if the body needs no change.

    It is for HTTP clients and proxies that `repairing` does not support. The new body turns thinking off if the repair
    advises it.

    Args:
        path: Path of the request's URL, without the query; it determines the format of the body.
        profile: Profile instead of that of the path.
        mode: As in `midstream.repair`. `rollback` keeps the prompt at the end, and `sanitize` the system prompts at the
            top, because both belong to this request.

    Raises:
        HistoryRefusedError: In mode `strict`, the provider would refuse the history.
        InvalidHistoryError: The history is not valid in any request.
        ValueError: The body is not JSON.
        UsageError: The profile or the mode is unknown.
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
    """Count the system prompts at the top, which belong to this request."""
    for place, message in enumerate(history):
        if not isinstance(message, dict) or message.get("role") not in ("system", "developer"):
            return place
    return len(history)


def _is_continued(request: Json, history: list[Any]) -> bool:
    """Return whether the provider stores an earlier part of this history (Responses)."""
    return any(request.get(key) for key in _SERVER_STATE) or any(
        isinstance(item, dict) and item.get("type") == "item_reference" for item in history
    )


def _thinking_in(request: Json) -> bool | None:
    """Return whether a response with calls must begin with thinking.

    This is so only with `enabled` thinking; with `adaptive` thinking, a response may have none.
    """
    thinking = request.get("thinking")
    kind = thinking.get("type") if isinstance(thinking, dict) else None
    return {"enabled": True, "disabled": False}.get(kind) if isinstance(kind, str) else None


def _is_paused(history: list[Any]) -> bool:
    """Return whether the list ends with a paused response, in which only hosted tools were running."""
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
    """Turn thinking off, and remove fields that are refused without it."""
    sent = {**request, "thinking": {"type": "disabled"}}
    managed = request.get("context_management")
    if isinstance(managed, dict) and isinstance(edits := managed.get("edits"), list):
        kept = [edit for edit in edits if not str(edit.get("type")).startswith("clear_thinking")]
        sent["context_management"] = {**managed, "edits": kept}
        if not kept:
            del sent["context_management"]
    return sent


def _encode(request: Json) -> bytes:
    """Encode JSON like the providers' own clients."""
    return json.dumps(request, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


# --- in a client ----------------------------------------------------------------------------------------------


class HookableClient(Protocol):
    """The interface of HTTP clients: sync and async clients of httpx and httpx2."""

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
    """Add the repair of histories to a client, and return the client. Its transports, proxies and other hooks do not
    change.

    If a repair fails, the error is logged (its type and place, without content), and the request is sent unchanged.
    Requests with a signature of their body (AWS) are also sent unchanged.

    Args:
        client: An `httpx.Client`, `httpx.AsyncClient`, or one of httpx2; also a provider's subclass of these.
        profile: Profile instead of that of the path: `deepseek`, `kimi`, `minimax`, `strict-template`, …
        mode: As in `repair_body`. In `strict`, sending a request that would be refused raises `HistoryRefusedError`.
        on_repair: Called with each repair before the request is sent, for example to store its `messages` or show its
            `edits`.

    Raises:
        UsageError: The profile or the mode is unknown.
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
    """Hook for the requests of one client. A request is `Any`, because it may be of httpx or httpx2."""

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
        happened = "a history was sent unchanged, because its repair failed"
        try:
            instead = repair_body(request.url.path, body, profile=self._profile, mode=self._mode)
            if instead is None:
                return
            _rewrite(request, instead.body)
            happened = "a repaired history was sent, but `on_repair` failed"
            _log(instead.repaired)
            if self._on_repair is not None:
                self._on_repair(instead.repaired)
        except HistoryRefusedError:
            raise  # requested, with mode="strict"
        except Exception as error:  # noqa: BLE001 - the caller's request is more important than this error
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
    """Replace the body of a request, with public methods only."""
    sizes = (b"content-length", b"transfer-encoding")
    headers = [(name, value) for name, value in request.headers.raw if name.lower() not in sizes]
    fresh = type(request)(
        request.method, request.url, headers=headers, content=body, extensions=request.extensions
    )
    vars(request).update(vars(fresh))


def _log(done: Repaired) -> None:
    """Log the codes of edits; their other fields may contain text of the history."""
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
    # Without message and traceback, which may quote the history.
    _LOG.warning("%s: %s in %s", happened, type(error).__name__, where)
