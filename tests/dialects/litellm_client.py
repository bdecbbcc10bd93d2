"""LiteLLM as an application uses it, if it is installed. Each line of stdin is `URL KEY STORY`.

Its import takes seconds: one process plays all stories.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import litellm

litellm.telemetry = False
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


def ask(url: str, key: str) -> dict[str, Any]:
    """Return the request of all stories."""
    messages = [{"role": "user", "content": "hi"}]
    return {"model": "openai/m", "api_base": f"{url}/v1", "api_key": key, "messages": messages}


def whole(url: str, key: str) -> object:
    answer = litellm.completion(**ask(url, key), num_retries=2)
    return {"text": answer.choices[0].message.content, "tokens": answer.usage.total_tokens}


def stream(url: str, key: str) -> object:
    chunks = list(litellm.completion(**ask(url, key), stream=True))
    return {"text": "".join(chunk.choices[0].delta.content or "" for chunk in chunks)}


def tools(url: str, key: str) -> object:
    answer = litellm.completion(**ask(url, key), tools=[TOOL])
    call = answer.choices[0].message.tool_calls[0]
    return {"id": call.id, "name": call.function.name, "arguments": call.function.arguments}


def messages(url: str, key: str) -> object:
    asked = {**ask(url, key), "model": "anthropic/m", "api_base": url, "max_tokens": 9}
    return {"text": litellm.completion(**asked).choices[0].message.content}


def failure(url: str, key: str) -> object:
    """Return LiteLLM's error class for an error, in both of its modes."""
    found = {}
    for name, base in (("openai/m", f"{url}/v1"), ("anthropic/m", url)):
        try:
            litellm.completion(
                **{**ask(url, key), "model": name, "api_base": base, "max_tokens": 9}, num_retries=0
            )
        except Exception as error:  # noqa: BLE001 - its class is the result
            found[name] = type(error).__name__
    return found


stories = {"failure": failure, "whole": whole, "stream": stream, "tools": tools, "messages": messages}
for line in sys.stdin:
    address, token, story = line.split()
    sys.stdout.write(json.dumps(stories[story](address, token)) + "\n")
    sys.stdout.flush()
