"""A scripted Claude Code: the CLI's side of its stream-json protocol over stdio, as the SDK uses it.

Transcripts are where the CLI stores them, `$CLAUDE_CONFIG_DIR/projects/FOLDER/ID.jsonl`, or below
`$HOME/.claude`. Orders and received messages are in the folder `$SCRIPTED_CLAUDE`. The SDK starts it; of this
repository it imports only `scripted_peer`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.agents.scripted_peer import SEPARATOR, Orders

Json = dict[str, Any]
USAGE = {
    "input_tokens": 30,
    "cache_creation_input_tokens": 10,
    "cache_read_input_tokens": 60,
    "output_tokens": 1,
}


def new_id() -> str:
    return str(uuid.uuid4())


def print_event(kind: str, **fields: object) -> None:
    sys.stdout.write(json.dumps({"type": kind, **fields}) + "\n")
    sys.stdout.flush()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for option in ("--resume", "--resume-session-at", "--model", "--permission-mode", "--mcp-config"):
        parser.add_argument(option)
    parser.add_argument("--system-prompt")
    parser.add_argument("--append-system-prompt")
    parser.add_argument("--permission-prompt-tool")
    parser.add_argument("--fork-session", action="store_true")
    parser.add_argument("--session-mirror", action="store_true")
    return parser.parse_known_args()[0]


class Session:
    """A transcript on disk."""

    def __init__(self, session_id: str, *, is_mirrored: bool) -> None:
        home = Path(os.environ.get("CLAUDE_CONFIG_DIR") or Path.home() / ".claude")
        self.folder = home / "projects" / re.sub(r"[^a-zA-Z0-9]", "-", str(Path.cwd().resolve()))
        self.id = session_id
        self.entries: list[Json] = []
        self._is_mirrored = is_mirrored

    @property
    def path(self) -> Path:
        return self.folder / f"{self.id}.jsonl"

    def load(self, until: str | None) -> bool:
        if not self.path.exists():
            return False
        for line in self.path.read_text(encoding="utf-8").splitlines():
            self.entries.append(json.loads(line))
            if until is not None and self.entries[-1]["uuid"] == until:
                return True
        return until is None

    def branch(self) -> None:
        self.id = new_id()
        entries, self.entries = self.entries, []
        for entry in entries:
            self.add(**{**entry, "sessionId": self.id})

    def add(self, **entry: Any) -> None:  # noqa: ANN401 - any JSON
        before = self.entries[-1]["uuid"] if self.entries else None
        entry = {"sessionId": self.id, "uuid": new_id(), "parentUuid": before, **entry}
        self.entries.append(entry)
        self.folder.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
        if self._is_mirrored:
            print_event("transcript_mirror", filePath=str(self.path), entries=[entry])

    @property
    def texts(self) -> list[str]:
        return [entry["text"] for entry in self.entries if entry["type"] == "user" and "text" in entry]


class ClaudeProgram:
    def __init__(self) -> None:
        self.orders = Orders(Path(os.environ["SCRIPTED_CLAUDE"]))
        self.options = arguments()
        self.session = Session(new_id(), is_mirrored=self.options.session_mirror)
        self.hanging: contextlib.ExitStack | None = None
        self.asked: dict[str, Any] = {}

    def main(self) -> None:
        self.orders.record("started", argv=sys.argv[1:], cwd=str(Path.cwd()))
        if self.options.resume:
            self.resume(self.options.resume)
        for line in self.lines():
            if line["type"] == "control_request":
                self.control(line)
            elif line["type"] == "user":
                self.turn(line)
        if self.hanging is not None:
            self.hanging.close()

    def lines(self) -> Iterator[Json]:
        for line in iter(sys.stdin.readline, ""):
            yield json.loads(line)

    def resume(self, session_id: str) -> None:
        if self.orders.holds(f"busy-{session_id}") and not self.options.fork_session:
            sys.stderr.write(
                f"Session {session_id} is currently running as a background agent (bg). Use `claude agents` to "
                "find and attach to it, or add --fork-session to branch off a copy.\n"
            )
            sys.exit(1)
        self.session.id = session_id
        if not self.session.load(self.options.resume_session_at):
            self.refuse(session_id)
        if self.orders.take("wrong"):
            self.session = Session(new_id(), is_mirrored=self.options.session_mirror)
        elif self.options.fork_session:
            self.session.branch()

    def refuse(self, session_id: str) -> None:
        words = f"No conversation found with session ID: {session_id}"
        if self.session.entries:
            words = f"No message found with message.uuid of: {self.options.resume_session_at}"
        if self.orders.holds("prose"):  # older versions report it on stderr only
            sys.stderr.write(words + "\n")
        else:
            self.result(subtype="error_during_execution", is_error=True, errors=[words])
        sys.exit(1)

    def control(self, line: Json) -> None:
        request, response = line["request"], {}
        if request["subtype"] == "initialize":
            if self.orders.holds("frozen"):
                signal.pause()
            is_in = not self.orders.holds("refused")
            response = {"commands": [], "account": {"email": "a@b.example"} if is_in else {}}
        elif request["subtype"] == "interrupt":
            if self.orders.holds("deaf"):
                return
            self.orders.record("interrupted")
        answer = {"subtype": "success", "request_id": line["request_id"], "response": response}
        print_event("control_response", response=answer)
        if request["subtype"] == "interrupt" and self.hanging is not None:
            self.hanging.close()
            self.hanging = None
            self.result(subtype="error_during_execution", is_error=True, terminal_reason="aborted_streaming")

    def turn(self, line: Json) -> None:
        content = line["message"]["content"]
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        text = "".join(block["text"] for block in blocks if block["type"] == "text")
        files = [block for block in blocks if block["type"] != "text"]
        self.orders.record("told", agent=self.session.id, text=text, files=files, line=line)
        is_hanging = self.orders.take("hang")
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.orders.run())
            if end := self.orders.take("lose") or self.orders.take("mute"):
                self.session.add(type="user", uuid=line["uuid"], text=text)
                if end == "lose":
                    sys.stderr.write("network error\n")
                    os._exit(137)
                self.hanging = stack.pop_all()
                return None
            self.init()
            if self.orders.holds("refused"):
                return self.signed_out()
            self.session.add(type="user", uuid=line["uuid"], text=text)
            if failure := self.orders.take("failure"):
                return self.result(**failure)
            if is_hanging:
                self.hanging = stack.pop_all()
                return None
            self.answer(line)
        return None

    def init(self) -> None:
        print_event(
            "system",
            subtype="init",
            session_id=self.session.id,
            uuid=new_id(),
            cwd=str(Path.cwd()),
            model=self.options.model or "claude-test",
            tools=[],
            mcp_servers=[],
            permissionMode=self.options.permission_mode or "default",
            claude_code_version="2.1.300",
        )

    def signed_out(self) -> None:
        words = "Invalid API key · Please run /login"
        message: Json = {"id": new_id(), "role": "assistant", "model": "<synthetic>"}
        message["content"] = [{"type": "text", "text": words}]
        print_event(
            "assistant",
            message=message,
            session_id=self.session.id,
            error="authentication_failed",
            uuid=new_id(),
        )
        self.result(subtype="success", is_error=True, result=words, api_error_status=401)

    def answer(self, line: Json) -> None:
        if call := self.orders.take("tool"):
            self.tool(**call)
        answer = SEPARATOR.join(self.session.texts)
        if status := self.orders.take("retry"):
            self.retry(int(status))
        message_id = new_id()
        self.event({"type": "message_start", "message": {"id": message_id, "usage": USAGE}})
        self.event({"type": "content_block_start", "index": 0, "content_block": {"type": "thinking"}})
        self.delta(type="thinking_delta", thinking="hmm")
        self.event({"type": "content_block_stop", "index": 0})
        thinking = {"type": "thinking", "thinking": "hmm", "signature": "signed"}
        self.assistant(message_id, thinking)
        half = len(answer) // 2
        self.delta(type="text_delta", text=answer[: half or 1])
        if self.orders.take("die"):
            os._exit(137)
        self.delta(type="text_delta", text=answer[half or 1 :])
        self.assistant(message_id, {"type": "text", "text": answer})
        self.event({"type": "message_delta", "usage": {"output_tokens": 7}})
        self.event({"type": "message_stop"})
        for reported in self.orders.take("other") or []:  # a turn that the CLI starts by itself
            self.result(**reported)
        self.result(
            subtype="success",
            is_error=False,
            result=answer,
            usage={**USAGE, "output_tokens": 7},
            user_message_uuids=[line["uuid"]],
            stop_reason="end_turn",
        )

    def retry(self, status: int) -> None:
        """The connection to the provider is lost in the middle of a response."""
        self.event({"type": "message_start", "message": {"id": new_id(), "usage": USAGE}})
        self.delta(type="text_delta", text="a cut text")
        self.event({"type": "message_stop"})
        print_event(
            "system",
            subtype="api_retry",
            attempt=1,
            max_retries=10,
            retry_delay_ms=500,
            error_status=status,
            error="unknown",
            session_id=self.session.id,
            uuid=new_id(),
        )

    def tool(self, name: str, arguments: str, content: str, is_asked: bool = False) -> None:  # noqa: FBT001, FBT002 - JSON's
        call_id = f"toolu_{new_id()}"
        call = {"type": "tool_use", "id": call_id, "name": name, "input": json.loads(arguments)}
        self.assistant(new_id(), call, uuid=new_id())
        is_error = False
        if is_asked:
            is_error, content = self.ask(name, call["input"], content)
        block = {
            "type": "tool_result",
            "tool_use_id": call_id,
            "content": [{"type": "text", "text": content}],
            "is_error": is_error,
        }
        message = {"role": "user", "content": [block]}
        self.session.add(type="user", message=message)
        print_event(
            "user", message=message, session_id=self.session.id, uuid=new_id(), parent_tool_use_id=None
        )

    def ask(self, name: str, given: Json, content: str) -> tuple[bool, str]:
        if self.options.permission_prompt_tool != "stdio":
            return True, "nobody to ask"
        request = {"subtype": "can_use_tool", "tool_name": name, "input": given}
        print_event("control_request", request_id="ask", request=request)
        answer = next(line for line in self.lines() if line["type"] == "control_response")
        decided = answer["response"]["response"]
        if decided["behavior"] == "allow":
            self.orders.record("ran", arguments=decided.get("updatedInput") or given)
        return (False, content) if decided["behavior"] == "allow" else (True, decided["message"])

    def event(self, event: Json) -> None:
        print_event("stream_event", event=event, session_id=self.session.id, uuid=new_id())

    def delta(self, **delta: object) -> None:
        self.event({"type": "content_block_delta", "index": 0, "delta": delta})

    def assistant(self, message_id: str, block: Json, **_: object) -> None:
        message = {"id": message_id, "role": "assistant", "model": "claude-test", "content": [block]}
        entry_id = new_id()
        self.session.add(type="assistant", uuid=entry_id, message=message)
        print_event(
            "assistant", message=message, session_id=self.session.id, uuid=entry_id, parent_tool_use_id=None
        )

    def result(self, **fields: object) -> None:
        about = {"duration_ms": 1, "duration_api_ms": 1, "num_turns": 1}
        print_event("result", **{**about, "session_id": self.session.id, "uuid": new_id(), **fields})


if __name__ == "__main__":
    ClaudeProgram().main()
