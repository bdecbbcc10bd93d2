"""A further dialect is one file and one row of the registry: a toy one is added and used like the others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from midstream.dialects import dialect_registry
from midstream.dialects.api_errors import ApiError
from midstream.dialects.dialect import Asked, Dialect, Form, Writer
from midstream.dialects.request_fields import Fields, bad_field, field
from midstream.models.responses import Finished, ModelEvent, TextDelta
from midstream.store.sqlite import SQLiteStore
from midstream.testing.scripted_model import text
from tests.dialects.gateway_serving import served

QUESTION = {"talk": [{"role": "user", "content": "hi"}]}
ONCE = {"idempotency-key": "k"}


class ToyWriter(Writer):
    """Writes `data: "WORDS"` for each text, and `{"answer": "WORDS"}` as a whole."""

    def __init__(self, form: Form) -> None:
        self._id = form.id
        self._texts: list[str] = []

    def begin(self) -> list[bytes]:
        return [_event({"id": self._id})]

    def write(self, event: ModelEvent) -> list[bytes]:
        if isinstance(event, TextDelta):
            self._texts.append(event.text)
            return [_event(event.text)]
        return [_event({"is": "over"})] if isinstance(event, Finished) else []

    def fail(self, refusal: ApiError) -> list[bytes]:
        return [_event(_error(refusal))]

    def cancel(self, refusal: ApiError) -> list[bytes]:
        return self.fail(refusal)

    def whole(self) -> bytes:
        return msgspec.json.encode({"id": self._id, "answer": "".join(self._texts)})


def read_toy(fields: Fields, known: int = 0) -> Asked:
    talk = field(fields, "talk", list[Any])
    if talk is None or not (talk or known):
        raise bad_field("talk", "`talk` is a list with at least one message")
    return Asked(dialect=TOY, model="", messages=talk, is_stream=bool(field(fields, "live", bool)))


def _event(value: object) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def _error(refusal: ApiError) -> dict[str, Any]:
    return {"wrong": refusal.code}


TOY = Dialect(
    name="toy",
    path=("toy",),
    format="openai-chat",
    messages="talk",
    id_prefix="toy-",
    read=read_toy,
    writer=ToyWriter,
    error=_error,
)


@pytest.fixture(autouse=True)
def toy() -> Iterator[None]:
    dialect_registry.DIALECTS.append(TOY)
    yield
    dialect_registry.DIALECTS.remove(TOY)


async def test_it_answers_whole_and_as_a_stream() -> None:
    async with served([text("one two")]) as gateway:
        whole = (await gateway.http.post("/v1/toy", json=QUESTION)).json()
        assert (whole["answer"], whole["id"][:4]) == ("one two", "toy-")
        live = await gateway.http.post(
            "/v1/toy", json={"talk": [{"role": "user", "content": "so"}], "live": True}
        )
        events = [
            msgspec.json.decode(line[6:]) for line in live.text.splitlines() if line.startswith("data:")
        ]
        assert "".join(event for event in events if isinstance(event, str)) == "one two"
        assert events[-1] == {"is": "over"}


async def test_its_errors_have_its_shape() -> None:
    async with served([]) as gateway:
        refused = await gateway.http.post("/v1/toy", json={"talk": []})
        assert (refused.status_code, refused.json()) == (400, {"wrong": "malformed_frame"})


async def test_its_responses_are_journaled_and_replayed_after_a_restart(tmp_path: Path) -> None:
    found = []
    for script in ([text("one two")], []):
        async with served(script, store=SQLiteStore(tmp_path / "gateway.db")) as gateway:
            found.append((await gateway.http.post("/v1/toy", json=QUESTION, headers=ONCE)).json())
    assert found[0] == found[1]
    assert found[0]["answer"] == "one two"
