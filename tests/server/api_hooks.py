"""What our HTTP interface means beyond what OpenAPI can say; schemathesis loads it, in its environment."""

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
    """Mend what is right by the description alone.

    To JSON Schema 1.0 is an integer; to us it is none. A stream key stands for one first message, and comes with its
    secret; a command comes with both, which no header can say of one kind of body.
    """
    if case.query and str(case.query.get("wait")).isdecimal() and 1 < int(case.query["wait"]) <= WAIT_S_MAX:
        case.query["wait"] = 1  # as good as any other, and within the patience of a search
    if isinstance(case.body, dict):
        case.body = _without_point(case.body)
    headers = case.headers
    headers.pop("x-schemathesis-unknown-property", None)  # HTTP lets anybody send headers of their own
    for name in ("last-event-id", "x-idempotency-event-id"):
        if headers.get(name) == "":  # stands for none, which a format cannot say
            del headers[name]
    if isinstance(case.body, dict) and case.body.get("type") == "command" and not headers.get(KEY):
        headers[KEY] = "k"
    if headers.get(KEY):
        if not headers.get(SECRET):
            headers[SECRET] = "s" * 43
        if case.method == "POST" and len(headers[KEY]) <= KEY_CHARS_MAX:
            headers[KEY] = f"{headers[KEY]}-{next(_numbers)}"[-KEY_CHARS_MAX:]


def _without_point(value: Any) -> Any:  # noqa: ANN401 - any JSON
    if isinstance(value, dict):
        return {name: _without_point(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_without_point(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
