"""Valid histories as people store them: one neutral plan, written into eight formats.

Every text, argument and result has its own marker word (`k12z`), so that losses of a repair are detected.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from random import Random
from typing import Any

Json = dict[str, Any]

PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNk+M8AAAMBAQDJ/pLvAAAAAElFTkSuQmCC"
NAMES = ("read_file", "write_file", "bash", "search")


@dataclass
class PlannedCall:
    """One tool call and its result."""

    id: str
    name: str
    args: Json
    output: str
    failed: bool = False


@dataclass
class PlannedResponse:
    """One response of the model."""

    number: int
    text: str
    thought: str
    calls: list[PlannedCall]
    hosted: str = ""


@dataclass
class PlannedTurn:
    """A user's text and the model's responses until its answer."""

    words: str
    extra: str
    responses: list[PlannedResponse] = field(default_factory=list)


class ConversationPlan:
    """A conversation, before it is written in any format."""

    def __init__(self, chance: Random, *, turns: int = 5, thinks: float = 0.4) -> None:
        self.chance = chance
        self.count = 0
        self.responses = 0
        self.thinks = thinks
        self.turns = [self._turn() for _ in range(chance.randint(1, turns))]

    def word(self) -> str:
        """Return a text with a marker in it."""
        self.count += 1
        return f"about k{self.count}z"

    def _turn(self) -> PlannedTurn:
        extra = self.chance.choice(("", "", "", "", "image", "document", "unknown"))
        turn = PlannedTurn(self.word(), extra)
        for _ in range(self.chance.choice((0, 0, 1, 1, 2, 3))):
            turn.responses.append(self._response(has_calls=True))
        turn.responses.append(self._response(has_calls=False))
        return turn

    def _response(self, *, has_calls: bool) -> PlannedResponse:
        chance = self.chance
        self.responses += 1
        calls = [self._call(at) for at in range(chance.choice((1, 1, 1, 2, 3)))] if has_calls else []
        text = self.word() if not calls or chance.random() < 0.4 else ""
        thought = self.word() if chance.random() < self.thinks else ""
        hosted = self.word() if not calls and chance.random() < 0.1 else ""
        return PlannedResponse(self.responses, text, thought, calls, hosted)

    def _call(self, at: int) -> PlannedCall:
        args: Json = {"path": self.word(), "lines": [1, at]} if self.chance.random() < 0.9 else {}
        self.count += 1
        call_id = f"c{self.count:03d}{self.responses:05d}"
        return PlannedCall(call_id, self.chance.choice(NAMES), args, self.word(), self.chance.random() < 0.15)


class HistoryWriter:
    """A writer of a plan in one format."""

    def __init__(self, plan: ConversationPlan) -> None:
        self.chance = plan.chance
        self.out: list[Json] = []
        for turn in plan.turns:
            self.user(turn)
            for response in turn.responses:
                self.response(response)
                if response.calls:
                    self.results(response.calls)

    def odds(self, share: float) -> bool:
        """Return whether an event of this likelihood happens."""
        return self.chance.random() < share

    def user(self, turn: PlannedTurn) -> None:
        """Write a text of the user."""
        raise NotImplementedError

    def response(self, response: PlannedResponse) -> None:
        """Write a response of the model."""
        raise NotImplementedError

    def results(self, calls: list[PlannedCall]) -> None:
        """Write the results of a response's calls."""
        raise NotImplementedError


class Anthropic(HistoryWriter):
    """Messages API, with caching, citations, hosted tools and split results."""

    def user(self, turn: PlannedTurn) -> None:
        words: Json = {"type": "text", "text": turn.words}
        if not turn.extra and self.odds(0.6):
            self.out.append({"role": "user", "content": turn.words})
            return
        if self.odds(0.3):
            words["cache_control"] = {"type": "ephemeral"}
        source = {"type": "base64", "media_type": "image/png", "data": PIXEL}
        text = {"type": "text", "media_type": "text/plain", "data": "plain"}
        extras: dict[str, list[Json]] = {
            "image": [{"type": "image", "source": source}],
            "document": [{"type": "document", "source": text, "title": "t", "citations": {"enabled": True}}],
            "unknown": [{"type": "container_upload", "file_id": "file_1"}],
            "": [],
        }
        self.out.append({"role": "user", "content": [*extras[turn.extra], words]})

    def response(self, response: PlannedResponse) -> None:
        blocks: list[Json] = []
        if response.thought:
            signature = f"R{response.number}.EqQBCkYICxgCKkA"
            blocks.append({"type": "thinking", "thinking": response.thought, "signature": signature})
            if self.odds(0.15):
                blocks.append({"type": "redacted_thinking", "data": f"R{response.number}.EmwKAhgB"})
        if response.hosted:
            use = {"type": "server_tool_use", "id": f"srvtoolu_{response.number}", "name": "web_search"}
            found = {
                "type": "web_search_result",
                "url": "https://x.test",
                "title": response.hosted,
                "page_age": None,
            }
            answer = {"type": "web_search_tool_result", "tool_use_id": use["id"]}
            blocks += [
                use | {"input": {"query": "q"}},
                answer | {"content": [found | {"encrypted_content": "E"}]},
            ]
        if response.text:
            blocks.append({"type": "text", "text": response.text})
            if self.odds(0.1):
                blocks[-1]["citations"] = [
                    {"type": "char_location", "cited_text": "c", "document_index": 0, "document_title": "t",
                     "start_char_index": 0, "end_char_index": 1}
                ]  # fmt: skip
        for call in response.calls:
            blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": call.args})
        if len(blocks) == 1 and response.text and self.odds(0.3) and "citations" not in blocks[0]:
            self.out.append({"role": "assistant", "content": response.text})
        else:
            self.out.append({"role": "assistant", "content": blocks})

    def results(self, calls: list[PlannedCall]) -> None:
        blocks = [self._result(call) for call in calls]
        if len(blocks) > 1 and self.odds(0.15):
            self.out += [{"role": "user", "content": [block]} for block in blocks]
            return
        self.out.append({"role": "user", "content": blocks})

    def _result(self, call: PlannedCall) -> Json:
        block: Json = {"type": "tool_result", "tool_use_id": call.id, "content": call.output}
        if self.odds(0.3):
            block["content"] = [{"type": "text", "text": call.output}]
            if self.odds(0.4) and not call.failed:  # "all content must be type 'text' if 'is_error' is true"
                source = {"type": "base64", "media_type": "image/png", "data": PIXEL}
                block["content"].append({"type": "image", "source": source})
        elif self.odds(0.08) and not call.failed:
            block["content"] = self.chance.choice(("", []))
        if call.failed:
            block["is_error"] = True
        return block


class Bedrock(HistoryWriter):
    """Converse."""

    def user(self, turn: PlannedTurn) -> None:
        blocks: list[Json] = [{"text": turn.words}]
        if turn.extra == "image":
            blocks.append({"image": {"format": "png", "source": {"bytes": PIXEL}}})
        elif turn.extra == "document":
            blocks.append({"document": {"format": "txt", "name": "notes", "source": {"bytes": "cGxhaW4="}}})
        elif turn.extra == "unknown":
            blocks.append({"cachePoint": {"type": "default"}})
        self.out.append({"role": "user", "content": blocks})

    def response(self, response: PlannedResponse) -> None:
        blocks: list[Json] = []
        if response.thought:
            text = {"text": response.thought, "signature": f"R{response.number}.EqQB"}
            blocks.append({"reasoningContent": {"reasoningText": text}})
        if response.text:
            blocks.append({"text": response.text})
        blocks += [
            {"toolUse": {"toolUseId": call.id, "name": call.name, "input": call.args}}
            for call in response.calls
        ]
        self.out.append({"role": "assistant", "content": blocks})

    def results(self, calls: list[PlannedCall]) -> None:
        blocks: list[Json] = []
        for call in calls:
            content: list[Json] = [{"text": call.output}]
            if self.odds(0.2):
                content = [{"json": {"out": call.output}}]
            result: Json = {"toolUseId": call.id, "content": content}
            if call.failed or self.odds(0.3):
                result["status"] = "error" if call.failed else "success"
            blocks.append({"toolResult": result})
        self.out.append({"role": "user", "content": blocks})


class ChatCompletions(HistoryWriter):
    """Chat Completions."""

    def __init__(self, plan: ConversationPlan) -> None:
        super().__init__(plan)
        if self.odds(0.4):
            role = self.chance.choice(("system", "developer"))
            self.out.insert(0, {"role": role, "content": "Be brief, k0z."})

    def user(self, turn: PlannedTurn) -> None:
        if not turn.extra and self.odds(0.7):
            self.out.append({"role": "user", "content": turn.words})
            return
        chunks: list[Json] = [{"type": "text", "text": turn.words}]
        if turn.extra:
            chunks.append({"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}})
        self.out.append({"role": "user", "content": chunks})

    def response(self, response: PlannedResponse) -> None:
        content = response.text or self.chance.choice((None, "")) if response.calls else response.text
        message: Json = {"role": "assistant", "content": content}
        if response.thought:
            message["reasoning_content"] = response.thought
        if response.calls:
            message["tool_calls"] = [
                {
                    "id": c.id,
                    "type": "function",
                    "function": {"name": c.name, "arguments": json.dumps(c.args)},
                }
                for c in response.calls
            ]
        self.out.append(message)

    def results(self, calls: list[PlannedCall]) -> None:
        for call in calls:
            content: Any = call.output
            if self.odds(0.1):
                content = [{"type": "text", "text": call.output}]
            elif self.odds(0.05):
                content = ""
            self.out.append({"role": "tool", "tool_call_id": call.id, "content": content})
            if self.odds(0.1):
                self.out[-1]["name"] = call.name


class Mistral(ChatCompletions):
    """Mistral: reasoning in chunks, arguments as objects now and then."""

    def __init__(self, plan: ConversationPlan) -> None:
        super().__init__(plan)
        for message in self.out:
            if message["role"] == "developer":
                message["role"] = "system"

    def response(self, response: PlannedResponse) -> None:
        super().response(response)
        message = self.out[-1]
        message.pop("reasoning_content", None)
        if response.thought and response.text:
            thought = {"type": "thinking", "thinking": [{"type": "text", "text": response.thought}]}
            message["content"] = [thought, {"type": "text", "text": response.text}]


class Responses(HistoryWriter):
    """Items of the Responses API."""

    def user(self, turn: PlannedTurn) -> None:
        if not turn.extra and self.odds(0.5):
            self.out.append({"role": "user", "content": turn.words})
            return
        chunks: list[Json] = [{"type": "input_text", "text": turn.words}]
        if turn.extra == "image":
            chunks.append({"type": "input_image", "image_url": "https://x.test/a.png", "detail": "auto"})
        self.out.append({"type": "message", "role": "user", "content": chunks})
        if turn.extra == "unknown" and self.odds(0.5):
            number = len(self.out)
            self.out.append({"type": "compaction", "id": f"cmp_{number}", "encrypted_content": "gAAAA"})

    def response(self, response: PlannedResponse) -> None:
        number = response.number
        if response.thought:
            summary = [{"type": "summary_text", "text": response.thought}] if self.odds(0.5) else []
            item: Json = {"type": "reasoning", "id": f"rs_{number}", "summary": summary}
            if self.odds(0.5):
                item["encrypted_content"] = "gAAAAAB"
            self.out.append(item)
        if response.hosted:
            action = {"type": "search", "query": response.hosted}
            self.out.append(
                {"type": "web_search_call", "id": f"ws_{number}", "status": "completed", "action": action}
            )
        if response.text:
            chunk = {"type": "output_text", "text": response.text, "annotations": []}
            message: Json = {
                "type": "message",
                "role": "assistant",
                "content": [chunk],
                "status": "completed",
            }
            self.out.append(message | {"id": f"msg_{number}"})
        for at, call in enumerate(response.calls):
            item = {"type": "function_call", "call_id": call.id, "name": call.name}
            item["arguments"] = json.dumps(call.args)
            if response.thought or self.odds(0.6):
                item |= {"id": f"fc_{number}_{at}", "status": "completed"}
            self.out.append(item)

    def results(self, calls: list[PlannedCall]) -> None:
        for call in calls:
            output: Any = call.output
            if self.odds(0.15):
                output = [{"type": "input_text", "text": call.output}]
            self.out.append({"type": "function_call_output", "call_id": call.id, "output": output})


class Gemini(HistoryWriter):
    """Contents of generateContent; one history has ids or has none."""

    def __init__(self, plan: ConversationPlan) -> None:
        self.has_ids = plan.chance.random() < 0.5
        super().__init__(plan)

    def user(self, turn: PlannedTurn) -> None:
        parts: list[Json] = [{"text": turn.words}]
        if turn.extra:
            parts.append({"inlineData": {"mimeType": "image/png", "data": PIXEL}})
        self.out.append({"role": "user", "parts": parts})

    def response(self, response: PlannedResponse) -> None:
        parts: list[Json] = []
        if response.thought and self.odds(0.5):
            parts.append({"text": response.thought, "thought": True})
        if response.hosted:
            parts.append({"executableCode": {"language": "PYTHON", "code": response.hosted}})
            parts.append({"codeExecutionResult": {"outcome": "OUTCOME_OK", "output": "1"}})
        if response.text:
            parts.append({"text": response.text})
        for at, call in enumerate(response.calls):
            inner: Json = {"name": call.name, "args": call.args}
            part: Json = {"functionCall": {"id": call.id, **inner} if self.has_ids else inner}
            if at == 0 and response.thought:
                part["thoughtSignature"] = "Q29RQkFk"
            parts.append(part)
        self.out.append({"role": "model", "parts": parts})

    def results(self, calls: list[PlannedCall]) -> None:
        parts = []
        for call in calls:
            key = "error" if call.failed else "result"
            inner: Json = {"name": call.name, "response": {key: call.output}}
            parts.append({"functionResponse": {"id": call.id, **inner} if self.has_ids else inner})
        self.out.append({"role": "user", "parts": parts})


class PydanticAI(HistoryWriter):
    """ModelMessages as pydantic-ai dumps them."""

    def user(self, turn: PlannedTurn) -> None:
        content: Any = turn.words
        if turn.extra:
            content = [turn.words, {"url": "https://x.test/a.png", "kind": "image-url"}]
        parts: list[Json] = []
        if not self.out and self.odds(0.4):
            parts.append({"content": "Be brief, k0z.", "part_kind": "system-prompt", "timestamp": WHEN})
        parts.append({"content": content, "timestamp": WHEN, "part_kind": "user-prompt"})
        self.out.append({"parts": parts, "kind": "request", "instructions": None, "run_id": "run-1"})

    def response(self, response: PlannedResponse) -> None:
        parts: list[Json] = []
        if response.thought:
            thought: Json = {"content": response.thought, "part_kind": "thinking", "id": None}
            parts.append(thought | {"signature": f"R{response.number}.EqQB", "provider_name": "anthropic"})
        if response.text:
            parts.append({"content": response.text, "part_kind": "text", "id": None})
        for call in response.calls:
            args: Any = json.dumps(call.args) if self.odds(0.5) else call.args
            made = {"tool_name": call.name, "args": args, "tool_call_id": call.id, "part_kind": "tool-call"}
            parts.append(made)
        usage = {"input_tokens": 1, "output_tokens": 1, "details": {}}
        message = {"parts": parts, "usage": usage, "model_name": "claude-sonnet-4-5", "timestamp": WHEN}
        self.out.append(message | {"kind": "response", "provider_name": "anthropic", "finish_reason": "stop"})

    def results(self, calls: list[PlannedCall]) -> None:
        parts: list[Json] = []
        for call in calls:
            made: Json = {"tool_name": call.name, "content": call.output, "tool_call_id": call.id}
            if call.failed:
                made["part_kind"] = "retry-prompt"
            else:
                made["part_kind"] = "tool-return"
                if self.odds(0.2):
                    made["content"] = {"out": call.output}
            parts.append(made | {"timestamp": WHEN})
        self.out.append({"parts": parts, "kind": "request", "instructions": None})


WHEN = "2026-01-01T00:00:00Z"


class LangChain(HistoryWriter):
    """Messages as `messages_to_dict` writes them."""

    def _add(self, kind: str, data: Json) -> None:
        common: Json = {
            "additional_kwargs": {},
            "response_metadata": {},
            "type": kind,
            "name": None,
            "id": None,
        }
        self.out.append({"type": kind, "data": {**common, **data}})

    def user(self, turn: PlannedTurn) -> None:
        if not self.out and self.odds(0.3):
            self._add("system", {"content": "Be brief, k0z."})
        content: Any = turn.words
        if turn.extra:
            image = {"type": "image_url", "image_url": {"url": "https://x.test/a.png"}}
            content = [{"type": "text", "text": turn.words}, image]
        self._add("human", {"content": content})

    def response(self, response: PlannedResponse) -> None:
        calls = [{"name": c.name, "args": c.args, "id": c.id, "type": "tool_call"} for c in response.calls]
        content: Any = response.text
        if response.calls and self.odds(0.3):
            content = [{"type": "text", "text": response.text}] if response.text else []
            content += [
                {"type": "tool_use", "id": c.id, "name": c.name, "input": c.args} for c in response.calls
            ]
        self._add(
            "ai", {"content": content, "tool_calls": calls, "invalid_tool_calls": [], "usage_metadata": None}
        )

    def results(self, calls: list[PlannedCall]) -> None:
        for call in calls:
            data: Json = {
                "content": call.output,
                "tool_call_id": call.id,
                "name": call.name,
                "artifact": None,
            }
            self._add("tool", data | {"status": "error" if call.failed else "success"})


WRITERS: dict[str, type[HistoryWriter]] = {
    "anthropic": Anthropic,
    "openai-chat": ChatCompletions,
    "openai-responses": Responses,
    "gemini": Gemini,
    "mistral": Mistral,
    "bedrock": Bedrock,
    "pydantic-ai": PydanticAI,
    "langchain": LangChain,
}


def valid(form: str, chance: Random, *, turns: int = 5) -> list[Json]:
    """Return a history that every server of this format accepts."""
    return WRITERS[form](ConversationPlan(chance, turns=turns)).out
