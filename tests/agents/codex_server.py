"""Codex's app server, scripted: a program with its JSON-RPC protocol that stores threads in a folder.

Each program is one process of the package. The folder holds what the processes share and the test's orders.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import sys
import threading
import uuid
from pathlib import Path
from typing import Any

SEPARATOR = " | "
Json = dict[str, Any]


class AppServer:
    """One run of the program."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writing = threading.Lock()
        self._interrupted: dict[str, threading.Event] = {}
        self._is_mute = False
        self._decisions: dict[str, queue.Queue[str]] = {}

    def serve(self) -> None:
        """Answer until the other end closes."""
        for line in sys.stdin:
            message = json.loads(line)
            if "id" not in message:
                continue
            if "method" not in message:
                self._decisions[message["id"]].put(message["result"]["decision"])
                continue
            try:
                result = self._answer(message["method"], message.get("params") or {})
            except LookupError as error:
                self._write({"id": message["id"], "error": {"code": -32600, "message": str(error.args[0])}})
                continue
            if not result and self._is_mute:
                self._is_mute = False
                continue
            turn = result.pop("_turn", None)
            self._write({"id": message["id"], "result": result})
            if turn is not None:
                threading.Thread(target=self._run, args=turn, daemon=True).start()
        for running in self._folder.glob(f"running/*.{os.getpid()}"):
            running.unlink()

    def _answer(self, method: str, params: Json) -> Json:
        match method:
            case "initialize":
                return {"userAgent": "codex/0.163.0", "serverInfo": {"name": "codex", "version": "0.163.0"}}
            case "account/read":
                is_in = not (self._folder / "refuse").exists()
                return {"requiresOpenaiAuth": True, "account": {"type": "apiKey"} if is_in else None}
            case "thread/start":
                with (self._folder / "started.jsonl").open("a") as started:
                    started.write(json.dumps(params.get("config")) + "\n")
                return self._thread(self._create_thread([]))
            case "thread/resume":
                name = params["threadId"]
                self._texts(name)
                return self._thread(self._create_thread([]) if self._once("wrong") else name)
            case "thread/fork":
                texts, turns = self._texts(params["threadId"]), self._turns(params["threadId"])
                return self._thread(self._create_thread(texts[: turns.index(params["lastTurnId"]) + 1]))
            case "thread/archive":
                self._texts(params["threadId"])
                return {}
            case "turn/start":
                return self._turn_start(params)
            case "thread/backgroundTerminals/terminate":
                with (self._folder / "terminated.jsonl").open("a") as terminated:
                    terminated.write(json.dumps([params["threadId"], params["processId"]]) + "\n")
                return {}
            case "turn/interrupt":
                self._interrupted[params["turnId"]].set()
                return {}
        raise LookupError(f"unknown method {method}")

    def _turn_start(self, params: Json) -> Json:
        name, turn = params["threadId"], f"turn-{uuid.uuid4()}"
        texts = self._texts(name)
        text = "".join(item.get("text", "") for item in params["input"])
        self._keep(name, [*texts, text], [*self._turns(name), turn])
        with (self._folder / "told.jsonl").open("a") as path:
            path.write(json.dumps([name, text]) + "\n")
        if self._once("lose"):
            os._exit(1)
        if self._once("mute"):
            self._is_mute = True
            return {}
        self._interrupted[turn] = threading.Event()
        (self._folder / "running" / f"{turn}.{os.getpid()}").touch()
        return {
            "turn": {"id": turn, "items": [], "status": "inProgress"},
            "_turn": (name, turn, [*texts, text]),
        }

    def _run(self, name: str, turn: str, texts: list[str]) -> None:
        ids = {"threadId": name, "turnId": turn}
        self._notify("turn/started", threadId=name, turn={"id": turn, "items": [], "status": "inProgress"})
        if (self._folder / "refuse").exists():
            fault = {"message": "your key is not accepted", "codexErrorInfo": "unauthorized"}
            self._end(name, turn, "failed", error=fault)
            return
        self._notify(
            "item/started", **ids, startedAtMs=1, item={"type": "reasoning", "id": "r", "summary": []}
        )
        if self._once("want"):
            self._ask(ids, "commandExecution", {"command": "make", "cwd": str(Path.cwd())}, command="make")
        if self._once("want-change"):
            changes = [{"path": "a.txt", "kind": {"type": "add"}, "diff": "+a"}]
            self._ask(ids, "fileChange", {"changes": changes})
        for number, (tool, arguments, content) in enumerate(self._tools()):
            item: Json = {"type": "mcpToolCall", "id": f"t{number}", "server": "files", "tool": tool}
            item["arguments"] = json.loads(arguments)
            self._notify("item/started", **ids, startedAtMs=1, item={**item, "status": "inProgress"})
            result = {"content": [{"type": "text", "text": content}]}
            done = {**item, "status": "completed", "result": result}
            self._notify("item/completed", **ids, completedAtMs=2, item=done)
        if self._once("run"):
            command: Json = {
                "type": "commandExecution",
                "id": "c",
                "command": "sleep 60",
                "cwd": str(Path.cwd()),
            }
            command |= {"commandActions": [], "processId": "7", "status": "inProgress"}
            self._notify("item/started", **ids, startedAtMs=1, item=command)
            (self._folder / "hang").touch()
        if self._once("hang"):
            self._interrupted[turn].wait()
            self._end(name, turn, "interrupted")
            return
        answer = SEPARATOR.join(texts)
        half = len(answer) // 2 + 1
        self._notify("item/agentMessage/delta", **ids, itemId="m", delta=answer[:half])
        if self._once("die"):
            os._exit(1)
        self._notify("item/agentMessage/delta", **ids, itemId="m", delta=answer[half:])
        item = {"type": "agentMessage", "id": "m", "text": answer}
        self._notify("item/completed", **ids, completedAtMs=2, item=item)
        counted = {"inputTokens": 100, "outputTokens": 7, "cachedInputTokens": 60}
        counted |= {"reasoningOutputTokens": 0, "totalTokens": 107}
        self._notify("thread/tokenUsage/updated", **ids, tokenUsage={"last": counted, "total": counted})
        self._end(name, turn, "completed")

    def _ask(self, ids: Json, kind: str, about: Json, **shown: object) -> None:
        """Request permission for an action, and run it if it is allowed."""
        item: Json = {"type": kind, "id": "w", **about, "status": "inProgress"}
        if kind == "commandExecution":
            item["commandActions"] = []
        self._notify("item/started", **ids, startedAtMs=1, item=item)
        request = f"ask-{uuid.uuid4()}"
        self._decisions[request] = queue.Queue()
        params = {**ids, "itemId": "w", "startedAtMs": 1, **shown}
        self._write({"method": f"item/{kind}/requestApproval", "id": request, "params": params})
        interrupted = self._interrupted[ids["turnId"]]
        decision = ""
        while not decision and not interrupted.is_set():
            with contextlib.suppress(queue.Empty):
                decision = self._decisions[request].get(timeout=0.05)
        with (self._folder / "decided.jsonl").open("a") as decided:
            decided.write(json.dumps([kind, decision]) + "\n")
        if decision == "accept":
            with (self._folder / "ran.jsonl").open("a") as ran:
                ran.write(json.dumps({"a": 1}) + "\n")
        status = "completed" if decision == "accept" else "declined"
        self._notify("item/completed", **ids, completedAtMs=2, item={**item, "status": status})

    def _end(self, name: str, turn: str, status: str, **fields: object) -> None:
        (self._folder / "running" / f"{turn}.{os.getpid()}").unlink(missing_ok=True)
        self._notify(
            "turn/completed", threadId=name, turn={"id": turn, "items": [], "status": status, **fields}
        )

    def _thread(self, name: str) -> Json:
        here = str(Path.cwd())
        thread = {"cliVersion": "0.163.0", "createdAt": 1, "updatedAt": 1, "cwd": here, "ephemeral": False}
        thread |= {
            "id": name,
            "sessionId": name,
            "modelProvider": "openai",
            "preview": "",
            "source": "appServer",
        }
        thread |= {"status": {"type": "idle"}, "turns": []}
        settings = {"approvalPolicy": "never", "approvalsReviewer": "user", "cwd": here, "model": "gpt-5"}
        return {**settings, "modelProvider": "openai", "sandbox": {"type": "readOnly"}, "thread": thread}

    def _create_thread(self, texts: list[str]) -> str:
        name = f"thread-{uuid.uuid4()}"
        self._keep(name, texts, [f"before-{number}" for number, _ in enumerate(texts)])
        return name

    def _keep(self, name: str, texts: list[str], turns: list[str]) -> None:
        path = self._folder / "threads" / name
        fresh = path.with_suffix(f".{threading.get_ident()}")
        fresh.write_text(json.dumps([texts, turns]))
        fresh.replace(path)

    def _texts(self, name: str) -> list[str]:
        return self._read_thread(name)[0]

    def _turns(self, name: str) -> list[str]:
        return self._read_thread(name)[1]

    def _read_thread(self, name: str) -> list[list[str]]:
        try:
            kept: list[list[str]] = json.loads((self._folder / "threads" / name).read_text())
        except FileNotFoundError:
            raise LookupError(f"no rollout found for thread id {name}") from None
        return kept

    def _tools(self) -> list[list[str]]:
        try:
            path: list[list[str]] = json.loads((self._folder / "tools").read_text())
        except FileNotFoundError:
            return []
        (self._folder / "tools").unlink()
        return path

    def _once(self, what: str) -> bool:
        with contextlib.suppress(FileNotFoundError):
            (self._folder / what).unlink()
            return True
        return False

    def _notify(self, method: str, **params: object) -> None:
        self._write({"method": method, "params": params})

    def _write(self, message: Json) -> None:
        with self._writing:
            sys.stdout.write(json.dumps(message) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    AppServer(Path(sys.argv[1])).serve()
