"""Arbitrary input over a wire: no undocumented exception is raised.

Frames are good ones with one member removed or replaced by any JSON; and arbitrary bytes.
"""

from __future__ import annotations

import json
from random import Random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.protocol.upright import (
    CLIENT_FRAMES,
    CUT,
    HEADS,
    PAYLOADS,
    SERVER_FRAMES,
    decode_as_anything,
    feed_client,
    feed_server,
    mutate,
    read_events,
    seeds,
    take,
)
from tests.spec import spec

_any_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.sampled_from(["1-2", "9" * 19 + "-1", "never", "later", "\x00", "a" * 300]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def _bent(draw: st.DrawFn, good: list[bytes]) -> bytes:
    """Return a good frame, or one with a bad member."""
    frame: dict[str, Any] = json.loads(draw(st.sampled_from(good)))
    if draw(st.booleans()):
        return json.dumps(frame).encode()
    inner = frame
    while isinstance(inner.get("payload"), dict) and draw(st.booleans()):
        inner = inner["payload"]
    name = draw(st.sampled_from([*inner, "colour"]))
    if draw(st.booleans()):
        inner.pop(name, None)
    else:
        inner[name] = draw(_any_json)
    body = json.dumps(frame).encode()
    return body[: draw(st.integers(0, len(body)))] if draw(st.integers(0, 9)) == 0 else body


_deep = st.sampled_from(
    [b"[" * 100_000, b'{"type":' * 50_000, b'{"type":"command","seqno":0,"payload":' * 20_000, b"\xff\xfe"]
)
_client_frames = _bent(CLIENT_FRAMES) | st.binary(max_size=60) | _deep
_server_frames = _bent(SERVER_FRAMES) | st.binary(max_size=60) | _deep


@given(_client_frames | _server_frames | _bent(PAYLOADS))
def test_a_decoder_raises_only_documented_errors(body: bytes) -> None:
    decode_as_anything(body)


@given(st.lists(st.binary(max_size=40) | st.sampled_from([b"data: x\r", b"\nid: 1\n", b"\n\n"]), max_size=12))
def test_a_reader_of_events_raises_only_documented_errors(pieces: list[bytes]) -> None:
    read_events(pieces)


@spec("STREAM-33")
@given(st.lists(_client_frames | st.just(CUT), max_size=12))
def test_a_server_survives_any_frames_of_a_client(sent: list[bytes]) -> None:
    feed_server(sent)


@spec("STREAM-33")
@given(st.lists(_server_frames | st.just(CUT), max_size=12))
def test_a_client_survives_any_frames_of_a_server(sent: list[bytes]) -> None:
    feed_client(sent)


def test_each_seed_of_the_fuzzer_is_accepted_by_its_target() -> None:
    begun = seeds()
    assert {data[:1] for data in begun} == {*HEADS}
    for data in begun:
        take(data)


def test_repeatedly_mutated_stories_raise_nothing() -> None:
    """Run the fuzzer (`make fuzz`) without coverage guidance, for a second."""
    seed = 20261122
    chance = Random(seed)
    for data in seeds():
        for step in range(30):
            data = mutate(data, chance)
            try:
                take(data)
            except Exception as error:
                error.add_note(f"seed {seed}, step {step}: {data!r}")
                raise
