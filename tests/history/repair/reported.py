"""Histories as people reported them: the smallest sequence that causes each refusal, with invented texts."""

# ruff: noqa: ANN401 - a history may hold anything
from __future__ import annotations

from typing import Any

from msgspec import Struct, field

Json = dict[str, Any]


class ReportedCase(Struct, frozen=True):
    """One broken history: its format and profile, and the edits that a test may expect."""

    name: str
    form: str
    messages: list[Any]
    profile: str | None = None
    system: Any = None
    options: Json = field(default_factory=dict)
    codes: tuple[str, ...] = ()


def user(content: Any) -> Json:
    return {"role": "user", "content": content}


def response(*blocks: Json) -> Json:
    return {"role": "assistant", "content": list(blocks)}


def text(words: str) -> Json:
    return {"type": "text", "text": words}


def use(call_id: Any, arguments: Any = None, name: str = "run") -> Json:
    return {"type": "tool_use", "id": call_id, "name": name, "input": {} if arguments is None else arguments}


def result(call_id: Any, content: Any = "m1x", **more: Any) -> Json:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content, **more}


def thought(words: str = "hm", signature: Any = "sig1.EqQB") -> Json:
    return {"type": "thinking", "thinking": words, "signature": signature}


def chat_call(call_id: Any, arguments: Any = "{}", name: str = "run") -> Json:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def chat_response(*calls: Json, content: Any = None, **more: Any) -> Json:
    return {"role": "assistant", "content": content, "tool_calls": list(calls), **more}


def tool(call_id: Any, content: Any = "m1x", **more: Any) -> Json:
    return {"role": "tool", "tool_call_id": call_id, "content": content, **more}


def item(call_id: str, **more: Any) -> Json:
    return {"type": "function_call", "call_id": call_id, "name": "run", "arguments": "{}", **more}


def output(call_id: str, words: Any = "m1x") -> Json:
    return {"type": "function_call_output", "call_id": call_id, "output": words}


def model(*parts: Json) -> Json:
    return {"role": "model", "parts": list(parts)}


def human(*parts: Json) -> Json:
    return {"role": "user", "parts": list(parts)}


def fcall(name: str = "run", **more: Any) -> Json:
    return {"functionCall": {"name": name, "args": {}, **more}}


def fresponse(name: str = "run", response: Any = None, **more: Any) -> Json:
    return {
        "functionResponse": {"name": name, "response": {"r": "m1x"} if response is None else response, **more}
    }


SEARCH = {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "m3x"}}
FOUND = {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": []}

ANTHROPIC = [
    ReportedCase(
        "killed in a tool",
        "anthropic",
        [user("m2x"), response(use("a")), user("m3x")],
        codes=("dangling-call",),
    ),
    ReportedCase(
        "killed at the end",
        "anthropic",
        [user("m2x"), response(text("m4x"), use("a"))],
        codes=("dangling-call",),
    ),
    ReportedCase(
        "prompt before result", "anthropic", [user("q"), response(use("a")), user([text("m2x"), result("a")])]
    ),
    ReportedCase(
        "queued prompt", "anthropic", [user("q"), response(use("a")), user("m2x"), user([result("a")])]
    ),
    ReportedCase(
        "empty text kept by the api",
        "anthropic",
        [user("m2x"), response(text(""), use("a")), user([result("a")])],
    ),
    ReportedCase("only an empty text", "anthropic", [user("m2x"), response(text("")), user("m3x")]),
    ReportedCase(
        "arguments as a string",
        "anthropic",
        [user("q"), response(use("a", '{"p": "m2x"}')), user([result("a")])],
    ),
    ReportedCase("cut arguments", "anthropic", [user("q"), response(use("a", '{"p": "m2x')), user("m3x")]),
    ReportedCase("empty arguments", "anthropic", [user("q"), response(use("a", "")), user([result("a")])]),
    ReportedCase(
        "odd id",
        "anthropic",
        [user("q"), response(use("functions.run:0")), user([result("functions.run:0")])],
    ),
    ReportedCase(
        "empty ids",
        "anthropic",
        [user("q"), response(use(""), use("")), user([result("", "m2x"), result("", "m3x")])],
    ),
    ReportedCase("id used again", "anthropic", [user("q"), *[response(use("a")), user([result("a")])] * 3]),
    ReportedCase(
        "orphan first",
        "anthropic",
        [user([result("a", "m2x"), text("m3x")]), response(text("m4x")), user("m5x")],
    ),
    ReportedCase(
        "error without words",
        "anthropic",
        [user("q"), response(use("a")), user([result("a", "", is_error=True)])],
    ),
    ReportedCase(
        "blank in result", "anthropic", [user("q"), response(use("a")), user([result("a", [text("")])])]
    ),
    ReportedCase(
        "image in an orphan",
        "anthropic",
        [user("q"), response(text("ok")), user([result("z", [text("m2x")])])],
    ),
    ReportedCase(
        "two different results",
        "anthropic",
        [user("q"), response(use("a")), user([result("a"), result("a", "m2x")])],
    ),
    ReportedCase(
        "second result later",
        "anthropic",
        [user("q"), response(use("a")), user([result("a")]), user([result("a", "m2x")])],
    ),
    ReportedCase(
        "unsigned thinking",
        "anthropic",
        [user("m2x"), response({"type": "thinking", "thinking": "hm"}, text("m3x"))],
    ),
    ReportedCase("thinking alone", "anthropic", [user("m2x"), response(thought()), user("m3x")]),
    ReportedCase(
        "thinking, then words apart", "anthropic", [user("q"), response(thought()), response(text("m2x"))]
    ),
    ReportedCase(
        "two responses in one",
        "anthropic",
        [
            user("q"),
            response(thought(), use("a"), thought("so", "sig2.EqQB"), use("b")),
            user([result("a"), result("b", "m2x")]),
        ],
        codes=("spliced-thinking",),
    ),
    ReportedCase(
        "half a character in thinking",
        "anthropic",
        [user("m2x"), response(thought("hm \ud83d"), text("m3x"))],
    ),
    ReportedCase("search cut", "anthropic", [user("q"), response(text("m2x"), SEARCH), user("m4x")]),
    ReportedCase(
        "search result in the next message",
        "anthropic",
        [user("q"), response(SEARCH), response(FOUND, text("m2x"))],
    ),
    ReportedCase("search result alone", "anthropic", [user("q"), response(FOUND, text("m2x"))]),
    ReportedCase("system in the list", "anthropic", [{"role": "system", "content": "m2x"}, user("m3x")]),
    ReportedCase(
        "system later",
        "anthropic",
        [user("m3x"), response(text("a")), {"role": "system", "content": "m2x"}, user("q")],
    ),
    ReportedCase(
        "system between call and result",
        "anthropic",
        [user("m3x"), response(use("a")), {"role": "system", "content": "m2x"}, user([result("a")])],
    ),
    ReportedCase("starts with a response", "anthropic", [response(text("m2x")), user("m3x")]),
    ReportedCase("starts with a call", "anthropic", [response(use("a")), user([result("a", "m2x")])]),
    ReportedCase(
        "call in a user's message", "anthropic", [user([text("m2x"), use("a")]), user([result("a")])]
    ),
    ReportedCase(
        "result in a response", "anthropic", [user("q"), response(use("a"), result("a", "m2x")), user("m3x")]
    ),
    ReportedCase(
        "tool role",
        "anthropic",
        [user("m3x"), response(text("a")), {"role": "tool", "content": "m2x"}, user("q")],
    ),
    ReportedCase(
        "null content", "anthropic", [user("m3x"), {"role": "assistant", "content": None}, user("m2x")]
    ),
    ReportedCase("a string as a message", "anthropic", ["m2x", user("m3x")]),
    ReportedCase(
        "parallel results split",
        "anthropic",
        [
            user("q"),
            response(use("a"), use("b")),
            user([result("a")]),
            user("m4x"),
            user([result("b", "m2x")]),
        ],
    ),
    ReportedCase(
        "calls in two responses",
        "anthropic",
        [user("q"), response(use("a")), response(use("b")), user([result("a"), result("b")])],
    ),
    ReportedCase(
        "mixed through minimax",
        "anthropic",
        [user("q"), response(use("a")), user([result("a"), text("m2x")])],
        "minimax",
    ),
    ReportedCase(
        "alternation on bedrock",
        "anthropic",
        [user("m2x"), user("m3x"), response(text("a")), response(text("m4x"))],
        "bedrock-claude",
    ),
]
CHAT = [
    ReportedCase(
        "killed",
        "openai-chat",
        [user("m2x"), chat_response(chat_call("a"), chat_call("b")), tool("b"), user("m3x")],
    ),
    ReportedCase("empty calls", "openai-chat", [user("m2x"), chat_response(content="m3x")]),
    ReportedCase("null result", "openai-chat", [user("m2x"), chat_response(chat_call("a")), tool("a", None)]),
    ReportedCase(
        "result as an object",
        "openai-chat",
        [user("m2x"), chat_response(chat_call("a")), tool("a", {"k": "m3x"})],
    ),
    ReportedCase(
        "cut arguments",
        "openai-chat",
        [user("m2x"), chat_response(chat_call("a", '{"p": "m3x')), user("m4x")],
    ),
    ReportedCase("hollow", "openai-chat", [user("m2x"), {"role": "assistant", "content": None}, user("m3x")]),
    ReportedCase(
        "hollow with thoughts",
        "openai-chat",
        [user("m2x"), {"role": "assistant", "content": "", "reasoning_content": "m3x"}],
    ),
    ReportedCase("long id", "openai-chat", [user("m2x"), chat_response(chat_call("c" * 80)), tool("c" * 80)]),
    ReportedCase(
        "one id for all",
        "openai-chat",
        [user("q"), chat_response(chat_call("x"), chat_call("x", name="b")), tool("x"), tool("x", "m2x")],
    ),
    ReportedCase(
        "call, text, result",
        "openai-chat",
        [user("q"), chat_response(chat_call("a")), {"role": "assistant", "content": "m2x"}, tool("a")],
    ),
    ReportedCase(
        "retry wrote twice",
        "openai-chat",
        [user("q"), chat_response(chat_call("a")), chat_response(chat_call("a")), tool("a")],
    ),
    ReportedCase("result of nothing", "openai-chat", [user("q"), tool("z", "m2x"), user("m3x")]),
    ReportedCase(
        "window cut", "openai-chat", [tool("z", "m2x"), {"role": "assistant", "content": "m3x"}, user("m4x")]
    ),
    ReportedCase(
        "starts with a call", "openai-chat", [chat_response(chat_call("a")), tool("a", "m2x"), user("m3x")]
    ),
    ReportedCase(
        "wrong id, one open", "openai-chat", [user("q"), chat_response(chat_call("a")), tool("b", "m2x")]
    ),
    ReportedCase(
        "result without id",
        "openai-chat",
        [user("q"), chat_response(chat_call("a")), {"role": "tool", "content": "m2x"}],
    ),
    ReportedCase(
        "old function calls",
        "openai-chat",
        [
            user("q"),
            {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
            user("m2x"),
        ],
    ),
    ReportedCase(
        "reasoning lost",
        "openai-chat",
        [
            user("q"),
            chat_response(chat_call("a"), reasoning_content="m2x"),
            tool("a"),
            chat_response(chat_call("b")),
            tool("b"),
        ],
        "deepseek",
        codes=("missing-reasoning",),
    ),
    ReportedCase(
        "template",
        "openai-chat",
        [
            user("q"),
            {"role": "system", "content": "m2x"},
            user("m3x"),
            chat_response(chat_call("a")),
            tool("a"),
            user("m4x"),
        ],
        "strict-template",
    ),
    ReportedCase(
        "mistral ids",
        "mistral",
        [user("q"), chat_response(chat_call("call_1")), tool("call_1")],
        "mistral-v3",
    ),
]
RESPONSES = [
    ReportedCase("killed", "openai-responses", [user("m2x"), item("a", id="fc_1"), user("m3x")]),
    ReportedCase("output of nothing", "openai-responses", [user("m2x"), output("z", "m3x")]),
    ReportedCase("twice", "openai-responses", [user("m2x"), item("a"), output("a"), output("a")]),
    ReportedCase(
        "item id as call id", "openai-responses", [user("m2x"), item("a", id="fc_1"), output("fc_1", "m3x")]
    ),
    ReportedCase(
        "reasoning alone",
        "openai-responses",
        [user("m2x"), {"type": "reasoning", "id": "rs_1", "summary": []}, user("m3x")],
    ),
    ReportedCase(
        "reasoning at the end",
        "openai-responses",
        [user("m2x"), {"type": "reasoning", "id": "rs_1", "summary": []}],
    ),
    ReportedCase(
        "reasoning parted from its call",
        "openai-responses",
        [
            user("m2x"),
            {"type": "reasoning", "id": "rs_1", "summary": []},
            user("m3x"),
            item("a", id="fc_1"),
            output("a"),
        ],
    ),
    ReportedCase(
        "same item twice",
        "openai-responses",
        [user("m2x"), item("a", id="fc_1"), output("a"), item("a", id="fc_1"), output("a")],
    ),
    ReportedCase(
        "no output",
        "openai-responses",
        [user("m2x"), item("a"), {"type": "function_call_output", "call_id": "a"}],
    ),
    ReportedCase(
        "output, then prompt between", "openai-responses", [user("q"), item("a"), user("m2x"), output("a")]
    ),
    ReportedCase(
        "custom tool cut",
        "openai-responses",
        [user("q"), {"type": "custom_tool_call", "call_id": "a", "name": "x", "input": "m2x"}, user("m3x")],
    ),
]
GEMINI = [
    ReportedCase("killed", "gemini", [human({"text": "m2x"}), model(fcall()), human({"text": "m3x"})]),
    ReportedCase(
        "one of two", "gemini", [human({"text": "m2x"}), model(fcall(), fcall("b")), human(fresponse("b"))]
    ),
    ReportedCase(
        "call after text",
        "gemini",
        [human({"text": "q"}), model({"text": "m2x"}), model(fcall()), human(fresponse())],
    ),
    ReportedCase(
        "starts with a call", "gemini", [model(fcall()), human(fresponse()), model({"text": "m2x"})]
    ),
    ReportedCase(
        "response of nothing", "gemini", [human({"text": "q"}), human(fresponse(response={"r": "m2x"}))]
    ),
    ReportedCase("empty parts", "gemini", [human({"text": "m2x"}), model(), human({"text": "m3x"})]),
    ReportedCase(
        "empty text", "gemini", [human({"text": "m2x"}), model({"text": ""}), human({"text": "m3x"})]
    ),
    ReportedCase(
        "response as text", "gemini", [human({"text": "q"}), model(fcall()), human(fresponse(response="m2x"))]
    ),
    ReportedCase(
        "signature lost",
        "gemini",
        [human({"text": "m2x"}), model(fcall()), human(fresponse())],
        "gemini-3",
        codes=("call-without-signature",),
    ),
    ReportedCase(
        "ids on one side",
        "gemini",
        [human({"text": "m2x"}), model(fcall(id="f1")), human(fresponse()), model(fcall(id="f2"))],
    ),
    ReportedCase(
        "function role",
        "gemini",
        [
            human({"text": "m2x"}),
            model(fcall()),
            {"role": "function", "parts": [fresponse()]},
            human({"text": "m3x"}),
            model(fcall()),
        ],
    ),
]


def bed_use(call_id: str) -> Json:
    return {"toolUse": {"toolUseId": call_id, "name": "run", "input": {}}}


def bed_result(call_id: str, content: Any = None, **more: Any) -> Json:
    made = [{"text": "m1x"}] if content is None else content
    return {"toolResult": {"toolUseId": call_id, "content": made, **more}}


BEDROCK = [
    ReportedCase(
        "killed", "bedrock", [user([{"text": "m2x"}]), response(bed_use("a")), user([{"text": "m3x"}])]
    ),
    ReportedCase(
        "blank", "bedrock", [user([{"text": "m2x"}]), response({"text": " "}), user([{"text": "m3x"}])]
    ),
    ReportedCase(
        "empty error",
        "bedrock",
        [user([{"text": "m2x"}]), response(bed_use("a")), user([bed_result("a", [], status="error")])],
    ),
    ReportedCase(
        "mixed on mistral",
        "bedrock",
        [user([{"text": "q"}]), response(bed_use("a")), user([bed_result("a"), {"text": "m2x"}])],
        "bedrock-mistral",
    ),
    ReportedCase(
        "more results than calls",
        "bedrock",
        [
            user([{"text": "q"}]),
            response(bed_use("a")),
            user([bed_result("a"), bed_result("b", [{"text": "m2x"}])]),
        ],
    ),
    ReportedCase(
        "unsigned",
        "bedrock",
        [
            user([{"text": "q"}]),
            response({"reasoningContent": {"reasoningText": {"text": "hm"}}}, {"text": "m2x"}),
        ],
    ),
    ReportedCase(
        "requests in a row",
        "bedrock",
        [user([{"text": "m1x"}]), user([{"text": "m2x"}]), user([{"text": "m3x"}])],
    ),
]


def request(*parts: Json) -> Json:
    return {"kind": "request", "parts": list(parts)}


def model_response(*parts: Json) -> Json:
    return {"kind": "response", "parts": list(parts)}


PROMPT = {"part_kind": "user-prompt", "content": "m2x"}
TOOL_CALL = {"part_kind": "tool-call", "tool_name": "run", "args": '{"p": "m3x"}', "tool_call_id": "a"}
TOOL_RETURN = {"part_kind": "tool-return", "tool_name": "run", "content": "m4x", "tool_call_id": "a"}
PYDANTIC_AI = [
    ReportedCase("aborted", "pydantic-ai", [request(PROMPT), model_response(TOOL_CALL), request(PROMPT)]),
    ReportedCase("empty response", "pydantic-ai", [request(PROMPT), model_response(), request(PROMPT)]),
    ReportedCase(
        "late return",
        "pydantic-ai",
        [request(PROMPT), model_response(TOOL_CALL), request(PROMPT), request(TOOL_RETURN)],
    ),
    ReportedCase(
        "returned twice",
        "pydantic-ai",
        [request(PROMPT), model_response(TOOL_CALL), request(TOOL_RETURN, TOOL_RETURN)],
    ),
    ReportedCase("return of nothing", "pydantic-ai", [request(PROMPT), request(TOOL_RETURN)]),
]


def lc(kind: str, content: Any, **more: Any) -> Json:
    return {"type": kind, "data": {"type": kind, "content": content, **more}}


LC_CALL = {"name": "run", "args": {"p": "m3x"}, "id": "a", "type": "tool_call"}
LANGCHAIN = [
    ReportedCase(
        "aborted", "langchain", [lc("human", "m2x"), lc("ai", "", tool_calls=[LC_CALL]), lc("human", "m4x")]
    ),
    ReportedCase(
        "invalid call",
        "langchain",
        [
            lc("human", "m2x"),
            lc(
                "ai",
                "",
                tool_calls=[],
                invalid_tool_calls=[
                    {
                        "name": "run",
                        "args": '{"p": "m3x',
                        "id": "a",
                        "error": None,
                        "type": "invalid_tool_call",
                    }
                ],
            ),
        ],
    ),
    ReportedCase("result of nothing", "langchain", [lc("human", "m2x"), lc("tool", "m3x", tool_call_id="z")]),
]

CASES = [*ANTHROPIC, *CHAT, *RESPONSES, *GEMINI, *BEDROCK, *PYDANTIC_AI, *LANGCHAIN]
