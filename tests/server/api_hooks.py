"""Rules of our HTTP interface that OpenAPI cannot express; schemathesis loads them in its environment."""

from __future__ import annotations

from itertools import count
from typing import Any

import schemathesis
from hypothesis import strategies as st

KEY, SECRET = "x-idempotency-key", "x-idempotent-encryption-key"
KEY_CHARS_MAX = 256
WAIT_S_MAX = 10

_numbers = count()

# Without a format, headers are made of letters and digits alone.
schemathesis.openapi.format("event-id", st.builds("{}-{}".format, st.integers(0, 9), st.integers(0, 99)))


@schemathesis.hook
def before_call(context: schemathesis.HookContext, case: schemathesis.Case, kwargs: dict[str, Any]) -> None:
    """Correct generated requests that only the description allows.

    To JSON Schema 1.0 is an integer; to us it is not. A stream key identifies one first message and comes
    with its secret; a command needs both, and OpenAPI cannot require a header for one kind of body.
    """
    if case.query and str(case.query.get("wait")).isdecimal() and 1 < int(case.query["wait"]) <= WAIT_S_MAX:
        case.query["wait"] = 1  # As good as any other, and short enough for a search.
    if case.query and "stream_mode" in case.query:
        case.query["stream_mode"] = "values"  # A list in one string has no form that a schema can describe.
    if isinstance(case.body, dict):
        case.body = _without_point(case.body)
    if case.path == "/v1/chat" and isinstance(case.body, dict):
        _begin_turn(case.body)
    if case.path == "/v1/ag-ui" and isinstance(case.body, dict):
        _begin_ag_ui(case.body)
    if case.path == "/v1/mcp" and isinstance(case.body, dict) and case.body.get("jsonrpc") == "2.0":
        case.body |= {"id": 1, "method": "initialize"}  # All others need the session that this begins.
    if case.path.startswith("/v1/a2a"):
        _begin_task(case)
    if case.path.startswith("/v1/langgraph/") and isinstance(case.body, dict):
        _begin_run(case.body)
    if case.path.endswith("/{subscription}") and isinstance(case.body, dict):
        _begin_subscription(case.body)
    headers = case.headers
    if case.path == "/v1/stream/{stream}" and case.method == "POST":
        headers["stream-closed"] = "true"  # Without it a body is needed, in any form.
    headers.pop("x-schemathesis-unknown-property", None)  # HTTP lets clients send arbitrary headers.
    for name in ("last-event-id", "x-idempotency-event-id"):
        if headers.get(name) == "":  # Excluded values, which a format cannot express.
            del headers[name]
    if case.path == "/v1/mcp" and case.method == "GET":
        headers.setdefault("last-event-id", "x.0")  # Without one there is nothing to read.
    if isinstance(case.body, dict) and case.body.get("type") == "command" and not headers.get(KEY):
        headers[KEY] = "k"
    if headers.get(KEY):
        if not headers.get(SECRET):
            headers[SECRET] = "s" * 43
        if case.method == "POST" and len(headers[KEY]) <= KEY_CHARS_MAX:
            headers[KEY] = f"{headers[KEY]}-{next(_numbers)}"[-KEY_CHARS_MAX:]


def _begin_turn(body: dict[str, Any]) -> None:
    """Complete a well-formed chat with a new user message at its end, which no schema can require."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or not all(_is_message(each) for each in messages):
        return
    words = {"type": "text", "text": "hi"}
    messages[-1] = {"id": f"m{next(_numbers)}", "role": "user", "parts": [words]}


def _begin_subscription(body: dict[str, Any]) -> None:
    """Give a subscription the fields that its type needs, which no schema can require."""
    body.setdefault("pattern", "a/*")
    if body["pattern"] == "":
        body["pattern"] = "a/*"
    if body.get("type") == "webhook":
        webhook = body.setdefault("webhook", {"url": ""})
        if webhook is None or (isinstance(webhook, dict) and isinstance(webhook.get("url"), str)):
            body["webhook"] = {"url": "https://1.1.1.1/"}
    body.setdefault("wake_stream", "pool")


def _begin_ag_ui(body: dict[str, Any]) -> None:
    """Complete a well-formed thread with a new user message at its end, which no schema can require."""
    messages = body.get("messages")
    if isinstance(messages, list) and messages and all(_has_role(each) for each in messages):
        body["messages"] = [{"id": f"m{next(_numbers)}", "role": "user", "content": "hi"}]


def _begin_task(case: schemathesis.Case) -> None:
    """Give a request the served version and a user's message, and remove names that no schema can exclude."""
    case.headers["a2a-version"] = "1.0"
    for name in {"status", "pageToken", "statusTimestampAfter"} & (case.query or {}).keys():
        case.query[name] = ""
    message = case.body.get("message") if isinstance(case.body, dict) else None
    if (
        isinstance(message, dict)
        and message.get("role") == "ROLE_USER"
        and isinstance(message.get("parts"), list)
    ):
        case.body["message"] = {
            "messageId": f"m{next(_numbers)}",
            "role": "ROLE_USER",
            "parts": [{"text": "hi"}],
        }


def _has_role(message: object) -> bool:
    return isinstance(message, dict) and message.get("role") == "user" and _is_content(message.get("content"))


def _is_content(content: object) -> bool:
    return content is None or isinstance(content, str | list)


def _begin_run(body: dict[str, Any]) -> None:
    """Give a run a user's message, or the answers it resumes with, which no schema can require."""
    if "assistant_id" not in body:
        return
    body["input"] = {"messages": [{"id": f"m{next(_numbers)}", "role": "user", "content": "hi"}]}
    if isinstance(body.get("command"), dict):
        body["command"].pop("resume", None)


def _is_message(value: Any) -> bool:  # noqa: ANN401 - any JSON
    return (
        isinstance(value, dict)
        and value.get("role") in ("system", "user", "assistant")
        and isinstance(value.get("parts"), list)
        and all(isinstance(part, dict) for part in value["parts"])
        and isinstance(value.get("id", ""), str)
    )


def _without_point(value: Any) -> Any:  # noqa: ANN401 - any JSON
    if isinstance(value, dict):
        return {name: _without_point(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_without_point(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
