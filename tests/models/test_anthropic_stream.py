"""The events of a streamed message, valid and invalid; compared with the real SDK."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from typing import Any, get_args

import anthropic
import httpx2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from midstream.errors import (
    ContextOverflowError,
    ModelAccessError,
    ModelError,
    ModelFilteredError,
    ModelOverloadedError,
    ModelRejectedError,
    ModelStalledError,
    ModelUnavailableError,
)
from midstream.history.messages import (
    Finish,
    Outcome,
    Response,
    ResponsePart,
    Text,
    Thinking,
    ToolCall,
    ToolSpec,
    UpstreamCall,
    Usage,
)
from midstream.models.anthropic_stream import BLOCKS_MAX, MessageReader, render_tools
from midstream.models.responses import (
    Finished,
    KeepAlive,
    ModelEvent,
    ResponseBuilder,
    TextDelta,
    ThinkingDelta,
    ToolCallRequested,
    UpstreamCallEnded,
    UpstreamCallStarted,
    Working,
    is_progress,
)
from midstream.protocol.sse import SseDecoder
from midstream.session.call_references import AttemptRef
from tests.history.codecs.messages_wire import (
    PING,
    Json,
    block_delta,
    block_start,
    block_stop,
    call,
    message_end,
    message_start,
    redacted,
    result,
    text,
    thought,
    wire,
)
from tests.search import tried

END = Finished(Finish.STOP, "claude-1", Usage(7, 9))


def events_of(body: bytes, cuts: Iterable[int] = ()) -> list[ModelEvent]:
    """Decode a whole answer whose bytes arrive in pieces."""
    decoder, reader = SseDecoder(), MessageReader()
    places = [0, *sorted(cuts), len(body)]
    found: list[ModelEvent] = []
    for start, stop in itertools.pairwise(places):
        for event in decoder.feed(body[start:stop]):
            found += reader.read_json(event.data)
    return [*found, *reader.end()]


def decoded(*events: Json) -> list[ModelEvent]:
    """Return the decoded events, without keep-alives and empty pieces."""
    found = events_of(wire(events))
    return [each for each in found if is_progress(each) and not isinstance(each, Working)]


def response_of(events: Sequence[ModelEvent]) -> Response | None:
    builder = ResponseBuilder(AttemptRef(1, 1, 1))
    for event in events:
        builder.add(event)
    return builder.response()


# --- one response --------------------------------------------------------------------------------------------------


def test_blocks_arrive_in_order_and_thoughts_with_their_signatures() -> None:
    events = [
        message_start(),
        PING,
        *thought(0, "h", "m", signature="c2ln=="),
        *redacted(1, "c2VhbGVk"),
        *text(2, "Hel", "lo"),
        *call(3, "", '{"pa', 'th": "x"}'),
        *call(4, call_id="toolu_2", name="list"),
    ]
    assert decoded(*events, *message_end("tool_use")) == [
        ThinkingDelta("h"),
        ThinkingDelta("m"),
        ThinkingDelta("", "c2ln=="),
        ThinkingDelta("", "c2VhbGVk", is_redacted=True),
        TextDelta("Hel"),
        TextDelta("lo"),
        ToolCallRequested("toolu_1", "read", '{"path": "x"}'),
        ToolCallRequested("toolu_2", "list", ""),
        Finished(Finish.CALLS, "claude-1", Usage(7, 9)),
    ]


def test_a_thought_with_omitted_text_keeps_its_signature() -> None:
    response = response_of(decoded(message_start(), *thought(0), *text(1, "yes"), *message_end()))
    assert response is not None
    assert response.parts == (Thinking("", "c2ln"), Text("yes"))


def test_pings_are_no_progress_and_streamed_arguments_are() -> None:
    reader = MessageReader()
    first, *pieces, _ = call(0, '{"a": 1}')
    assert reader.read_json(json.dumps(PING).encode()) == [KeepAlive()]
    assert [reader.read_json(json.dumps(each).encode()) for each in (first, *pieces)] == [
        [Working("read")]
    ] * 2


def test_hosted_tools_are_reported_with_their_results() -> None:
    hit = {"type": "web_search_result", "title": "T", "url": "u", "encrypted_content": "x" * 99}
    search = {"call_id": "srvtoolu_1", "name": "web_search", "kind": "server_tool_use"}
    asked = {"call_id": "mcptoolu_1", "name": "echo", "kind": "mcp_tool_use", "server_name": "s"}
    events = [
        *call(0, '{"query": "q"}', **search),
        *result(1, [hit], call_id="srvtoolu_1", kind="web_search_tool_result"),
        *call(2, **asked),
        *result(
            3, [{"type": "text", "text": "no"}], call_id="mcptoolu_1", kind="mcp_tool_result", is_error=True
        ),
        *text(4, "T says so."),
    ]
    assert decoded(message_start(), *events, *message_end()) == [
        UpstreamCallStarted("srvtoolu_1", "web_search", '{"query": "q"}'),
        UpstreamCallEnded("srvtoolu_1", '{"type":"web_search_result","title":"T","url":"u"}'),
        UpstreamCallStarted("mcptoolu_1", "echo", "{}"),
        UpstreamCallEnded("mcptoolu_1", "no", Outcome.ERROR),
        TextDelta("T says so."),
        END,
    ]


def test_a_failed_hosted_tool_has_an_error_outcome() -> None:
    error = {"type": "web_search_tool_result_error", "error_code": "max_uses_exceeded"}
    (_, ending, _) = decoded(
        *call(0, call_id="s", name="web_search", kind="server_tool_use"),
        *result(1, error, call_id="s", kind="web_search_tool_result"),
        *message_end(),
    )
    assert isinstance(ending, UpstreamCallEnded)
    assert ending.outcome is Outcome.ERROR
    assert "max_uses_exceeded" in ending.content


@pytest.mark.parametrize(
    ("reason", "finish"),
    [
        ("end_turn", Finish.STOP),
        ("stop_sequence", Finish.STOP),
        ("max_tokens", Finish.LENGTH),
        ("model_context_window_exceeded", Finish.LENGTH),
        ("pause_turn", Finish.LENGTH),
        ("refusal", Finish.FILTER),
        ("of_next_year", Finish.STOP),
        (None, Finish.STOP),
    ],
)
def test_every_stop_reason_maps_to_a_finish(reason: str | None, finish: Finish) -> None:
    assert decoded(message_start(), *text(0, "Hm"), *message_end(reason))[-1] == Finished(
        finish, "claude-1", Usage(7, 9)
    )


def test_every_stop_reason_of_the_sdk_has_a_case() -> None:
    known = set(get_args(anthropic.types.StopReason))
    assert known == {
        "end_turn",
        "stop_sequence",
        "tool_use",
        "max_tokens",
        "model_context_window_exceeded",
        "pause_turn",
        "refusal",
    }


@pytest.mark.parametrize(
    ("reason", "kind"),
    [("refusal", ModelFilteredError), ("model_context_window_exceeded", ContextOverflowError)],
)
def test_a_refusal_or_a_full_window_without_content_is_an_error(reason: str, kind: type[ModelError]) -> None:
    with pytest.raises(ModelError) as caught:
        decoded(message_start(), *thought(0, "hm"), *message_end(reason))
    assert type(caught.value) is kind


def test_a_part_cut_by_the_length_limit_counts_as_far_as_it_came() -> None:
    begun = call(0, '{"path": ')[:-1]
    assert decoded(message_start(), *begun, *message_end("max_tokens")) == [
        ToolCallRequested("toolu_1", "read", '{"path": '),
        Finished(Finish.LENGTH, "claude-1", Usage(7, 9)),
    ]
    assert decoded(message_start(), *call(0)[:-1], *message_end("max_tokens"))[0] == ToolCallRequested(
        "toolu_1", "read", ""
    )


def test_cached_tokens_count_as_input() -> None:
    cached: dict[str, Any] = {"cache_creation_input_tokens": 20, "cache_read_input_tokens": 300}
    at_first = decoded(message_start(input_tokens=4, **cached), *text(0, "x"), *message_end())
    in_the_end = decoded(message_start(input_tokens=0), *text(0, "x"), *message_end(input_tokens=4, **cached))
    assert at_first == in_the_end
    assert at_first[-1] == Finished(Finish.STOP, "claude-1", Usage(324, 9, 300, 20))


def test_deviations_of_other_servers_are_accepted() -> None:
    """Arguments whole at the beginning, no usage, no reason, nothing after the reason, unknown events and blocks."""
    whole = [block_start(0, "tool_use", id="a", name="read", input={"path": "x"}), block_stop(0)]
    assert decoded(*whole, {"type": "message_stop"}, *text(1, "late")) == [
        ToolCallRequested("a", "read", '{"path":"x"}'),
        Finished(Finish.CALLS),
    ]
    begun, *pieces, _ = call(0, '{"path": ', '"x"}')
    begun["content_block"]["input"] = {"path": ""}
    assert decoded(begun, *pieces, *text(0, "yes"), *message_end("tool_use"))[:2] == [
        ToolCallRequested("toolu_1", "read", '{"path": "x"}'),
        TextDelta("yes"),
    ], "what is streamed counts, and a block that takes another's place ends it"
    odd = [{"type": "of_next_year"}, block_start(0, "container_upload", file_id="f"), block_stop(0)]
    assert decoded(*odd, *text(1, "x"), message_end()[0]) == [
        TextDelta("x"),
        Finished(Finish.STOP, usage=Usage(0, 9)),
    ]


# --- invalid streams
# --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ({"type": "overloaded_error", "message": "Overloaded"}, ModelOverloadedError),
        ({"type": "api_error", "message": "x"}, ModelUnavailableError),
        ({"type": "timeout_error", "message": "x"}, ModelStalledError),
        ({"type": "authentication_error", "message": "x"}, ModelAccessError),
        ({"type": "invalid_request_error", "message": "x"}, ModelRejectedError),
        (
            {"type": "invalid_request_error", "message": "prompt is too long: 9 tokens > 8 maximum"},
            ContextOverflowError,
        ),
        ("a string", ModelUnavailableError),
    ],
)
def test_an_error_in_the_middle_is_typed(error: object, kind: type[ModelError]) -> None:
    with pytest.raises(ModelError) as caught:
        decoded(message_start(), *text(0, "Hel"), {"type": "error", "error": error})
    assert type(caught.value) is kind


def test_a_stream_cut_anywhere_is_no_response() -> None:
    events = [message_start(), *thought(0, "hm"), *text(1, "yes"), *call(2, "{}"), *message_end("tool_use")]
    for count in range(len(events) - 1):
        with pytest.raises(ModelUnavailableError):
            decoded(*events[:count])


@pytest.mark.parametrize("data", [b"", b"[1]", b"<html>", b'{"type": 5}'])
def test_bytes_that_are_no_event_are_a_retryable_error(data: bytes) -> None:
    with pytest.raises(ModelUnavailableError):
        MessageReader().read_json(data)


def test_a_delta_without_its_block_and_too_many_blocks_are_errors() -> None:
    with pytest.raises(ModelUnavailableError):
        decoded(message_start(), block_delta(3, "input_json_delta", partial_json="{"))
    with pytest.raises(ModelUnavailableError):
        decoded(*(block_start(index, "text", text="") for index in range(BLOCKS_MAX + 1)))


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(["type", "text", "thinking", "id", "input", "usage", "model", "stop_reason"]),
            inner,
        )
    ),
    max_leaves=6,
)
_kinds = ["text", "thinking", "redacted_thinking", "tool_use", "server_tool_use", "x_tool_result"]
_deltas = ["text_delta", "thinking_delta", "signature_delta", "input_json_delta", "citations_delta"]
_events = st.one_of(
    st.builds(
        block_start, st.integers(0, 2), st.sampled_from(_kinds), text=_json, input=_json, content=_json
    ),
    st.builds(block_delta, st.integers(0, 2), st.sampled_from(_deltas), text=_json, partial_json=_json),
    st.builds(block_stop, st.integers(0, 2)),
    st.fixed_dictionaries(
        {"type": st.sampled_from(["message_start", "message_delta", "message_stop", "content_block_start"])},
        optional=dict.fromkeys(("index", "message", "content_block", "delta", "usage", "error"), _json),
    ),
)


@given(st.lists(_events, max_size=6))
def test_any_input_gives_events_or_a_typed_error(events: list[Json]) -> None:
    try:
        found = events_of(wire(events))
    except ModelError:
        return
    assert isinstance(found[-1], Finished)
    response_of(found)


# --- against the real SDK ---------------------------------------------------------------------------------------

_pieces = st.lists(st.text('aü\n {}"€🎈', max_size=4), max_size=3)
_arguments = st.dictionaries(
    st.sampled_from(["path", "ü"]), st.one_of(st.integers(), st.text('a"\n€', max_size=4))
)


@st.composite
def _blocks(draw: st.DrawFn, index: int) -> list[Json]:
    kind = draw(st.sampled_from(["text", "thinking", "withheld", "call", "search"]))
    if kind == "text":
        return text(index, *draw(_pieces))
    if kind == "thinking":
        return thought(index, *draw(_pieces), signature=f"sig{index}==")
    if kind == "withheld":
        return redacted(index, f"sealed{index}")
    written = json.dumps(draw(_arguments), ensure_ascii=draw(st.booleans()))
    place = draw(st.integers(0, len(written)))
    pieces = ("", written[:place], written[place:])
    if kind == "call":
        return call(index, *pieces, call_id=f"toolu_{index}")
    return call(index, *pieces, call_id=f"srvtoolu_{index}", name="web_search", kind="server_tool_use")


@st.composite
def _responses(draw: st.DrawFn) -> list[Json]:
    events = [
        message_start(input_tokens=draw(st.integers(0, 9)), cache_read_input_tokens=draw(st.integers(0, 9)))
    ]
    index = 0
    for _ in range(draw(st.integers(0, 4))):
        block = draw(_blocks(index))
        events += block
        if block[0]["content_block"]["type"] == "server_tool_use":
            index += 1
            hit = {"type": "web_search_result", "title": "T", "url": "u", "encrypted_content": "e"}
            asked = block[0]["content_block"]["id"]
            events += result(index, [hit], call_id=asked, kind="web_search_tool_result")
        events += draw(st.sampled_from([[], [PING]]))
        index += 1
    reason = draw(st.sampled_from(["end_turn", "stop_sequence", "max_tokens", "pause_turn"]))
    return [*events, *message_end(reason, cache_creation_input_tokens=draw(st.integers(0, 9)))]


def sdk_message(body: bytes) -> anthropic.types.Message:
    """Decode the same bytes with the real SDK."""

    def answer(request: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(200, headers={"content-type": "text/event-stream"}, content=body)

    http = httpx2.Client(transport=httpx2.MockTransport(answer))
    with anthropic.Anthropic(
        api_key="k", base_url="http://127.0.0.1", http_client=http, max_retries=0
    ) as client:
        asked: list[Any] = [{"role": "user", "content": "hi"}]
        with client.messages.stream(model="m", max_tokens=9, messages=asked) as stream:
            return stream.get_final_message()


def parts_of(message: anthropic.types.Message) -> list[ResponsePart]:
    """Return the SDK's response as our parts; neighbouring texts are one, empty ones none."""
    parts: list[ResponsePart] = []
    for block in message.content:
        match block.type:
            case "text":
                if block.text and parts and isinstance(parts[-1], Text):
                    parts[-1] = Text(parts[-1].text + block.text)
                elif block.text:
                    parts.append(Text(block.text))
            case "thinking":
                parts.append(Thinking(block.thinking, block.signature))
            case "redacted_thinking":
                parts.append(Thinking("", block.data, is_redacted=True))
            case "tool_use":
                parts.append(ToolCall(block.id, block.name, _dumped(block.input)))
            case "server_tool_use":
                parts.append(UpstreamCall(block.id, block.name, _dumped(block.input)))
            case "web_search_tool_result":
                reported = parts[-1]
                assert isinstance(reported, UpstreamCall)
                assert reported.id == block.tool_use_id
    return parts


def _dumped(value: object) -> str:
    return json.dumps(value, sort_keys=True)


def compared(part: ResponsePart) -> ResponsePart:
    """Normalise parts that the SDK has in another form: the spelling of arguments, the text of a result."""
    if isinstance(part, ToolCall):
        return ToolCall(part.id, part.name, _dumped(json.loads(part.arguments or "{}")))
    if isinstance(part, UpstreamCall):
        assert (part.content, part.outcome) == (
            '{"type":"web_search_result","title":"T","url":"u"}',
            Outcome.OK,
        )
        return UpstreamCall(part.id, part.name, _dumped(json.loads(part.arguments)))
    return part


@settings(max_examples=tried(60))
@given(_responses(), st.data())
def test_the_same_bytes_cut_anywhere_equal_the_response_of_the_sdk(
    events: list[Json], data: st.DataObject
) -> None:
    body = wire(events)
    cuts = data.draw(st.lists(st.integers(0, len(body)), max_size=8))
    found = events_of(body, cuts)
    theirs = sdk_message(body)

    assert found == events_of(body)
    ending = found[-1]
    assert isinstance(ending, Finished)
    counted, read_back = theirs.usage, theirs.usage.cache_read_input_tokens or 0
    written = counted.cache_creation_input_tokens or 0
    total = counted.input_tokens + written + read_back
    assert ending.usage == Usage(total, counted.output_tokens, read_back, written)
    assert ending.model == theirs.model

    expected, response = parts_of(theirs), response_of(found)
    if response is None:
        assert not any(isinstance(part, ToolCall | UpstreamCall) or part.text.strip() for part in expected)
    else:
        assert [compared(part) for part in response.parts] == expected


@settings(max_examples=tried(10))
@given(_responses())
def test_a_cut_at_every_single_byte_gives_the_same_response(events: list[Json]) -> None:
    body = wire(events)
    whole = events_of(body)
    assert events_of(body, range(1, len(body))) == whole
    assert all(events_of(body, [cut]) == whole for cut in range(0, len(body), 7))


# --- tools ------------------------------------------------------------------------------------------------------


def test_tools_have_the_form_of_the_api() -> None:
    schema = {"properties": {"path": {"type": "string"}}}
    assert render_tools([ToolSpec("read", "Read a file.", schema), ToolSpec("list", "", {})]) == [
        {"name": "read", "description": "Read a file.", "input_schema": {"type": "object", **schema}},
        {"name": "list", "input_schema": {"type": "object", "properties": {}}},
    ]
