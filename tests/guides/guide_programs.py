"""Programs of each page, and their servers. A block in no row fails `test_every_block_is_executed`."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

URL = "http://127.0.0.1:8000"
"""The address that pages print for a server; a test replaces it."""
ANYTHING = "…"
SERVED_JS = ("/static/client/midstream.js", "https://agents.example/static/client/midstream.js")
"""Addresses from which pages import the browser's client; a test puts the file there."""


class ServedBlock(Struct, frozen=True):
    """The block of a page that defines an agent, as the file that `midstream serve` is given.

    Args:
        page: File name of the page.
        block: Number of the block, among those in Python.
        before: Put in front of it.
    """

    page: str
    block: int = 0
    before: str = ""


def _played(page: str, module: str, kind: str, *, block: int = 0) -> ServedBlock:
    """Play the upstream of a page: an agent's software, with an account; all else of the block is as printed."""
    before = f"""
import importlib
from midstream.testing.scripted_upstream import ScriptedUpstream
setattr(importlib.import_module({module!r}), {kind!r}, lambda *arguments, **options: ScriptedUpstream())
"""
    return ServedBlock(page, block, before)


_INTEGRATIONS = "midstream.agents"
SERVED = {
    "hello:agent": ServedBlock("README.md"),
    "approvals:agent": ServedBlock("approvals.md"),
    "in_claude:agent": _played("claude.md", f"{_INTEGRATIONS}.claude", "Claude"),
    "in_acp:agent": _played("acp.md", f"{_INTEGRATIONS}.acp", "AcpAgent"),
    "in_approvals:agent": _played("approvals.md", f"{_INTEGRATIONS}.acp", "AcpAgent", block=1),
    "in_cursor:agent": _played("cursor.md", f"{_INTEGRATIONS}.cursor", "Cursor"),
    "in_codex:agent": _played("codex.md", f"{_INTEGRATIONS}.codex", "Codex"),
    "in_memory:agent": _played("openai-memory.md", f"{_INTEGRATIONS}.openai_conversation", "OpenAIChain"),
    "in_reuse:agent": ServedBlock("reuse.md"),
}
"""The agents that programs use, by the name that `midstream serve` is given."""


class GuideProgram(Struct, frozen=True):
    """Blocks of one page in one file, as a reader would combine them, and the reader's use of them.

    Args:
        page: File name of the page.
        blocks: Numbers of the blocks, in this order.
        then: Appended: a reader's call of the definitions in the blocks.
        prints: The exact output of the program; `ANYTHING` matches any text.
        language: Of the blocks.
        before: Put in front, where a block of JavaScript stands for an application that the page leaves to its reader.
        needs: Modules of extras and of other projects.
        environment: `main`, or a separate one of the frameworks and of the SDK of A2A.
        is_of_provider: Run it against the strict provider of this machine instead of OpenAI's and Anthropic's servers.
        served_agent: The name in `SERVED` of the agent that is served, for a program that uses a server. It is run
            three times: with an intact connection, with one that is cut in mid-answer, and with a server that is
            killed in mid-answer; with an agent of `POOLED` only the last.
        session: The session of the program.
    """

    page: str
    blocks: tuple[int, ...]
    then: str = ""
    prints: str = ""
    language: Literal["python", "js"] = "python"
    before: str = ""
    needs: tuple[str, ...] = ()
    environment: Literal["main", "frameworks", "a2a"] = "main"
    is_of_provider: bool = False
    served_agent: str = ""
    session: str = "my-session"

    @property
    def name(self) -> str:
        """Return the name for people: `network.md-python-0`."""
        served_agent = f"-to-{SERVED[self.served_agent].page}" if self.served_agent else ""
        return f"{self.page}-{self.language}-{'-'.join(map(str, self.blocks))}{served_agent}"


_COAT = "Let me look. Take a coat: it is 8 degrees in Oslo."
_ASK = f"""
import asyncio
print(asyncio.run(ask("{URL}", "Do I need a coat in Oslo?")), end="")
"""
_IN_PROCESS = """
import asyncio
print(asyncio.run(main("Do I need a coat in Oslo?")), end="")
"""
_ASK_TWICE = f"""
import asyncio
for words in ("one", "two"):
    print(asyncio.run(ask("{URL}", words)))
"""
POOLED = {
    "in_claude:agent": ("claude_agent_sdk",),
    "in_acp:agent": ("acp",),
    "in_approvals:agent": ("acp",),
    "in_cursor:agent": ("cursor_sdk",),
    "in_codex:agent": ("openai_codex",),
    "in_memory:agent": ("openai",),
    "in_reuse:agent": (),
}
"""Agents whose upstream continues a conversation, with the modules they need."""
_DECIDE = f"""
def decide(question):
    return ("respond", "the large one") if question.kind == "question" else ("allow", "")

import asyncio
print(asyncio.run(ask("{URL}", "Pay the invoice.", decide)), end="")
"""
_ANSWER_TWICE = """
import asyncio

async def main():
    first = await answer("chat-42", "m-1", "Book a hotel in Oslo.")
    assert await answer("chat-42", "m-1", "Book a hotel in Oslo.") == first
    print(first, end="")

asyncio.run(main())
"""
_SERVED = """
import asyncio
from midstream import Host
from midstream.models.pydantic_ai import PydanticAIModel
from midstream.store.memory import MemoryStore
from pydantic_ai.models.test import TestModel

async def main():
    served_porter.model = PydanticAIModel(TestModel(call_tools=[], custom_output_text="on it"))
    async with Host(served_porter, MemoryStore()) as host:
        print(await host.ask("chat-42", "Book a hotel in Oslo."), end="")

asyncio.run(main())
"""
_SERVED_SDK = """
import asyncio
from agents.testing import ScriptedModel, assistant_message
from midstream import Host
from midstream.store.memory import MemoryStore

async def main():
    assert served_porter.model.name == "openai-agents:gpt-5"
    porter.model = ScriptedModel([[assistant_message("on it")]])
    async with Host(make_agent(porter, context=Hotels()), MemoryStore()) as host:
        print(await host.ask("chat-42", "Book a hotel in Oslo."), end="")

asyncio.run(main())
"""
_ANSWER_AND_CARRY_ON = """
import asyncio

async def main():
    print(await answer("chat-42", "m-1", "Book a hotel in Oslo."), end="")
    await carry_on()
    await durable.close()

asyncio.run(main())
"""
_KILLED_IN_ITS_TOOL = """
import asyncio, os, signal

async def book_and_die(city):
    with open("booked", "a") as file:
        file.write(city)
    os.kill(os.getpid(), signal.SIGKILL)

book.coroutine = book_and_die
child = os.fork()
if child == 0:
    asyncio.run(answer("thread", "m-1", "Book a hotel in Oslo."))
os.waitpid(child, 0)

async def main():
    for _ in range(2):  # the second time after its end
        said = await answer("thread", "m-1", "Book a hotel in Oslo.")
    async with AsyncSqliteSaver.from_conn_string("graph.db") as saver:
        graph = builder.compile(checkpointer=saver)
        state = await graph.aget_state({"configurable": {"thread_id": "thread"}})
    print(said, open("booked").read(), len(state.values["messages"]), end="")

asyncio.run(main())
"""
_CANCELLED = """
import asyncio

class Noting:
    def on_append(self, session, records):
        if any(type(record).__name__ == "CallEnded" for record in records):
            has_booked.set()

guard = at_most_once("calls-2.db", observers=[Noting()])

@tool
async def wait(city: str) -> str:
    \"\"\"Wait.\"\"\"
    at_work.set()
    await asyncio.Event().wait()

async def two_calls(state):
    if len(state["messages"]) > 1:
        return {"messages": [AIMessage("It is done.")]}
    calls = [{"name": name, "args": {"city": "Oslo"}, "id": name} for name in ("book", "wait")]
    return {"messages": [AIMessage("", tool_calls=calls)]}

async def main():
    global at_work, has_booked
    at_work, has_booked = asyncio.Event(), asyncio.Event()
    builder = StateGraph(MessagesState)
    builder.add_node("model", careful_model)
    builder.add_node("tools", guard.tool_node([book, wait]))
    builder.add_edge(START, "model")
    builder.add_conditional_edges("model", lambda state: "tools" if state["messages"][-1].tool_calls else END)
    builder.add_edge("tools", "model")
    config = {"configurable": {"thread_id": "thread"}}
    async with AsyncSqliteSaver.from_conn_string("graph.db") as saver:
        graph = builder.compile(checkpointer=saver)

        async def run(text):
            async with guard.run("thread"):
                return await graph.ainvoke({"messages": [HumanMessage(text)]}, config, durability="sync")

        cut = asyncio.create_task(run("Book a hotel."))
        await at_work.wait()
        await has_booked.wait()
        cut.cancel()
        await asyncio.wait([cut])
        messages = (await run("Never mind."))["messages"]
    found = {message.tool_call_id: message.content for message in messages[:4] if message.type == "tool"}
    assert "may or may not have taken effect" in found["wait"]
    print(found["book"], end="")

model = two_calls
asyncio.run(main())
"""
_CONVERSE = """
import asyncio, json

async def main():
    first = await answer("chat-42", "m-1", "Book a hotel in Oslo.")
    def sizes():
        return [len(json.loads(after)) for (after,) in chats.execute("SELECT after FROM message ORDER BY rowid")]
    (one,) = sizes()
    await answer("chat-42", "m-2", "And one in Rome.")
    two = sizes()[1]
    stored = chats.execute("SELECT after FROM message").fetchall()
    await answer("chat-42", "m-2", "And one in Rome.")
    again = sizes()[1]
    is_same = json.loads(chats.execute("SELECT after FROM message").fetchall()[0][0]) == json.loads(stored[0][0])
    print(first, one, two, again, is_same, end="")

asyncio.run(main())
"""
_STREAM_TWICE = """
import asyncio
from agents.testing import ScriptedModel, assistant_message

agent.model = durable.model(ScriptedModel([[assistant_message("on it")]]))

async def main():
    for _ in range(2):
        words = [word async for word in stream("chat-42", "m-1", "Book a hotel in Oslo.")]
    print(words[-1].strip(), end="")

asyncio.run(main())
"""
_APPROVE_DEFERRED = """
import asyncio
from pydantic_ai.models.function import FunctionModel
from pydantic_ai.messages import ModelResponse, TextPart, ToolCallPart

def model(messages, info):
    is_first = isinstance(messages[-1].parts[0].content, str) and len(messages) == 1
    return ModelResponse([ToolCallPart("pay", {"amount": 3}, "c") if is_first else TextPart("paid 3")])

async def main():
    with cashier.override(model=FunctionModel(model)):
        stored = await ask_to_pay("chat-42", "m-1", "Pay.")
        for _ in range(2):
            answer = await pay_or_not("chat-42", "m-1", stored, is_allowed=True)
    print(answer, end="")

asyncio.run(main())
"""
_APPROVE = """
import asyncio
from agents.testing import ScriptedModel, assistant_message, function_call

asked = ScriptedModel([[function_call("pay", {"amount": 3}, call_id="c")], [assistant_message("paid 3")]])
cashier.model = durable.model(asked)

async def main():
    stored = await ask_to_pay("chat-42", "m-1", "Pay.")
    for _ in range(2):
        answer = await pay_or_not("chat-42", "m-1", "Pay.", stored, is_allowed=True)
    print(answer, end="")

asyncio.run(main())
"""
_REUSE = """
import asyncio
from midstream.testing import run_turn

async def main():
    await host.start()
    for text in ("one", "two"):
        await run_turn(host, "s", text)
    print(agent.model.last("s").way, end="")
    await host.stop()

asyncio.run(main())
"""
_PRINT_MODEL = "print(agent.model.name != '', end='')"
_OWN = f"const url = '{URL}';\nconst token = () => 'a-token';\n"

IN_A_BROWSER = {
    ("browser.md", "js"): "tests/server/test_browser_guide.py",
    ("ai-sdk.md", "js"): "tests/dialects/test_ui_stream.py",
    ("ag-ui.md", "js"): "tests/dialects/test_ag_ui_cuts.py",
    ("langgraph-api.md", "js"): "tests/dialects/test_langgraph_stream.py",
    ("durable-streams.md", "js"): "tests/dialects/test_plain_streams.py",
}
"""Blocks that need a real page or packages of npm, and the test that runs each of them, also while the server
is killed.
"""
TABLE = [
    GuideProgram("README.md", (0,), "print(agent.model.name, end='')", "scripted"),
    GuideProgram("README.md", (1,), _ASK, _COAT, served_agent="hello:agent"),
    *(
        GuideProgram("README.md", (1,), _ASK_TWICE, "answer 1\nanswer 2\n", needs=needs, served_agent=agent)
        for agent, needs in POOLED.items()
    ),
    GuideProgram("README.md", (2,), _IN_PROCESS, _COAT),
    GuideProgram("README.md", (3,), "print(app.routes[0].path, end='')", "/agent"),
    GuideProgram("README.md", (4,), needs=("openai", "pydantic_ai")),
    GuideProgram("acp-agent.md", (0,), prints=f"{_COAT}\n", needs=("acp",)),
    GuideProgram(
        "a2a.md",
        (0,),
        prints=_COAT.removeprefix("Let me look. ") + "\n",
        environment="a2a",
        served_agent="hello:agent",
        session="oslo",
    ),
    GuideProgram("a2a.md", (1,), "print(skill.id, app.requires_authentication, end='')", "forecast False"),
    GuideProgram("acp.md", (0,), _PRINT_MODEL, "True", needs=("acp",)),
    GuideProgram("acp.md", (1,), needs=("acp",)),
    GuideProgram("ai-sdk.md", (0,), _PRINT_MODEL, "True"),
    GuideProgram("approvals.md", (1,), _PRINT_MODEL, "True", needs=("acp",)),
    GuideProgram("approvals.md", (0,), "print(is_large('Ann', 99), end='')", "False"),
    GuideProgram("approvals.md", (2,), _DECIDE, "It is paid.", served_agent="approvals:agent"),
    GuideProgram("claude.md", (0,), _PRINT_MODEL, "True", needs=("claude_agent_sdk",)),
    GuideProgram("claude.md", (1,), needs=("claude_agent_sdk",)),
    GuideProgram("claude.md", (2,), needs=("claude_agent_sdk",)),
    GuideProgram("codex.md", (0,), _PRINT_MODEL, "True", needs=("openai_codex",)),
    GuideProgram("cursor.md", (0,), _PRINT_MODEL, "True", needs=("cursor_sdk",)),
    GuideProgram("encryption.md", (0,), "import os; print(os.path.exists('keys'), end='')", "True"),
    GuideProgram(
        "encryption.md", (1,), "print(keys.routes[0].path, remote.url, end='')", "/wrap https://keys.example"
    ),
    GuideProgram("encryption.md", (2,), "import os; print(os.path.exists('keys'), end='')", "True"),
    *(
        GuideProgram(
            "hooks.md", (number,), f"print('on it' in repr({what}), end='')", "True", is_of_provider=True
        )
        for number, what in ((1, "response"), (2, "result"), (3, "state"), (5, "response"))
    ),
    GuideProgram(
        "hooks.md",
        (0,),
        "print(response.content[0].text, end='')",
        "(Edit(code='dangling-call', at=1, did='added a result that states the outcome', …\non it",
        is_of_provider=True,
    ),
    GuideProgram(
        "hooks.md",
        (4,),
        "print('on it' in repr(agent.invoke({'messages': [('user', 'Deploy it.')]})), end='')",
        "True",
        needs=("langchain",),
    ),
    GuideProgram(
        "mcp-server.md",
        (0,),
        prints=_COAT.removeprefix("Let me look. ") + "\n",
        needs=("mcp",),
        served_agent="hello:agent",
        session="oslo",
    ),
    GuideProgram(
        "mcp-server.md", (1,), "print(review.name, app.requires_authentication, end='')", "review False"
    ),
    GuideProgram("mcp.md", (0,), "print([each.name for each in agent.sources], end='')", "['files', 'mail']"),
    GuideProgram("models.md", (0,), "print(agent.stalls.first_token_s, end='')", "60.0"),
    GuideProgram("gateway.md", (0,), "print(agent.name != '', end='')", "True", needs=("claude_agent_sdk",)),
    GuideProgram("models.md", (1,), "print(model.name, end='')", "openai-compatible:some-model"),
    GuideProgram("models.md", (2,), "print(model.name, end='')", "anthropic-messages:some-model"),
    GuideProgram("models.md", (3,), "print(model.name, end='')", "openai-responses:some-model"),
    GuideProgram(
        "langgraph-api.md",
        (0,),
        prints="Take a coat: it is 8 degrees in Oslo.\n",
        needs=("langgraph_sdk",),
        served_agent="hello:agent",
        session="my-thread",
    ),
    GuideProgram("network.md", (0,), prints=f"{_COAT}\n", served_agent="hello:agent", session="private"),
    GuideProgram("network.md", (1,), prints=f"{_COAT}\n", served_agent="hello:agent", session="session-1"),
    GuideProgram("openai-memory.md", (0,), _PRINT_MODEL, "True", needs=("openai",)),
    GuideProgram("prefix-cache.md", (0,), "print('cache_control' in repr(marked), end='')", "True"),
    GuideProgram("pydantic-ai.md", (0, 1), _ANSWER_AND_CARRY_ON, "on it", is_of_provider=True),
    GuideProgram("pydantic-ai.md", (0, 2), _CONVERSE, "on it 2 4 4 True", is_of_provider=True),
    GuideProgram("pydantic-ai.md", (0, 2, 3), _APPROVE_DEFERRED, "paid 3", is_of_provider=True),
    GuideProgram("pydantic-ai.md", (4,), _SERVED, "on it", is_of_provider=True),
    GuideProgram(
        "openai-agents.md", (0,), _ANSWER_TWICE, "on it", environment="frameworks", is_of_provider=True
    ),
    GuideProgram(
        "openai-agents.md", (0, 1), _STREAM_TWICE, "on it", environment="frameworks", is_of_provider=True
    ),
    GuideProgram(
        "openai-agents.md",
        (0, 2),
        _CONVERSE,
        "on it 2 4 4 True",
        environment="frameworks",
        is_of_provider=True,
    ),
    GuideProgram(
        "openai-agents.md", (0, 3), _APPROVE, "paid 3", environment="frameworks", is_of_provider=True
    ),
    GuideProgram(
        "openai-agents.md", (4,), _SERVED_SDK, "on it", environment="frameworks", is_of_provider=True
    ),
    GuideProgram("langgraph.md", (0, 1), _KILLED_IN_ITS_TOOL, "It is done. Oslo 4", environment="frameworks"),
    GuideProgram("langgraph.md", (0, 1, 2), _CANCELLED, "booked in Oslo", environment="frameworks"),
    GuideProgram(
        "langgraph.md",
        (3,),
        "print('reserve' in reserve.name, served_graph.name, end='')",
        "True porter",
        needs=("langchain",),
    ),
    GuideProgram(
        "rejected.md", (0,), "print(len(messages), end='')", "orphan-result 1 kept as a user's words\n2"
    ),
    GuideProgram("retention.md", (0,), "print(app.open_streams, end='')", "0"),
    GuideProgram("reuse.md", (0,), _REUSE, "resumed"),
    GuideProgram("security.md", (0, 1, 2, 3), "print(app.requires_authentication, end='')", "True"),
    GuideProgram("security.md", (0,), "client.close();", language="js", before=_OWN),
    GuideProgram("transactions.md", (0,), "print(agent.tools['order'].on_doubt, end='')", "in_transaction"),
]
