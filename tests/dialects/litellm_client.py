"""LiteLLM as an application would use it: `python litellm_client.py URL KEY STORY...`, where it is installed."""

from __future__ import annotations

import json
import sys
from typing import Any

import litellm

litellm.telemetry = False
url, key, *wanted = sys.argv[1:]
ASK: Any = {
    "model": "openai/m",
    "api_base": f"{url}/v1",
    "api_key": key,
    "messages": [{"role": "user", "content": "hi"}],
}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


def say(value: object) -> None:
    """Write a line of JSON."""
    sys.stdout.write(json.dumps(value) + "\n")


def whole() -> None:
    answer = litellm.completion(**ASK, num_retries=2)
    say({"text": answer.choices[0].message.content, "tokens": answer.usage.total_tokens})


def stream() -> None:
    chunks = list(litellm.completion(**ASK, stream=True))
    say({"text": "".join(chunk.choices[0].delta.content or "" for chunk in chunks)})


def tools() -> None:
    answer = litellm.completion(**ASK, tools=[TOOL])
    call = answer.choices[0].message.tool_calls[0]
    say({"id": call.id, "name": call.function.name, "arguments": call.function.arguments})


def messages() -> None:
    asked = {**ASK, "model": "anthropic/m", "api_base": url, "max_tokens": 9}
    say({"text": litellm.completion(**asked).choices[0].message.content})


stories = {"whole": whole, "stream": stream, "tools": tools, "messages": messages}
for story in wanted:
    stories[story]()
