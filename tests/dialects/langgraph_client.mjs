// Clients of LangGraph, unmodified, as an application would use them. A line of JSON to stdout at the end.
import { JSDOM } from "jsdom";

const dom = new JSDOM("<!doctype html><div id=root></div>", { url: "http://page.example/" });
for (const name of ["window", "document", "HTMLElement", "Node", "sessionStorage", "localStorage"])
  globalThis[name] ??= name === "window" ? dom.window : dom.window[name];
console.error = console.warn = () => {}; // the clients report each cut there

const { createElement } = await import("react");
const { createRoot } = await import("react-dom/client");
const { Client } = await import("@langchain/langgraph-sdk");
const { useStream } = await import("@langchain/langgraph-sdk/react");
const { useStream: useThread } = await import("@langchain/react");

const { story, url, thread, text = "hi", resume, agent = "chat" } = JSON.parse(process.argv.at(-1));
const apiUrl = `${url}/v1/langgraph`;
const assistantId = "chat";
const client = new Client({ apiUrl });
const message = { type: "human", content: text, id: `m-${thread}` };
const input = { messages: [message] };
const streamMode = ["values", "messages-tuple"];
const asked = [];
const WAIT_MS = 120_000;

const until = async (isDone, state) => {
  const end = Date.now() + WAIT_MS;
  while (!isDone()) {
    if (Date.now() > end) throw new Error(`nothing came in time: ${JSON.stringify(state())}`);
    await new Promise((done) => setTimeout(done, 10));
  }
};
const plain = (messages) =>
  messages.map((one) => ({
    id: one.id,
    type: one.getType?.() ?? one.type,
    content: one.content,
    status: one.status,
    tool_calls: one.tool_calls,
  }));
// A component that holds what a hook returns; `seen` has every distinct number of messages and words.
const mounted = (hook, options) => {
  const held = { now: undefined, renders: 0, errors: [] };
  const Page = () => {
    held.now = hook(options);
    held.renders += 1;
    return null;
  };
  const root = createRoot(dom.window.document.getElementById("root"));
  root.render(createElement(Page));
  return { held, close: () => root.unmount() };
};

const stories = {
  // The client of the runs API: it joins the run again after its last event wherever the line breaks.
  async stream() {
    let run, values, last = "-1";
    const take = async (parts) => {
      for await (const part of parts) {
        if (part.id) last = part.id;
        if (part.event === "values") values = part.data;
        if (part.event === "error") throw new Error(JSON.stringify(part.data));
      }
    };
    const options = { input, streamMode, streamResumable: true, ifNotExists: "create", onRunCreated: (made) => (run = made.run_id) };
    let parts = client.runs.stream(thread, assistantId, options);
    for (let tries = 0; tries < 1000; tries += 1) {
      await take(parts).catch((error) => {
        if (!run || String(error).includes("UserInterrupt")) throw error;
      });
      if ((await client.runs.get(thread, run)).status === "success") break;
      parts = client.runs.joinStream(thread, run, { streamMode, lastEventId: last });
    }
    await take(client.runs.joinStream(thread, run, { streamMode, lastEventId: last }));
    return values.messages;
  },
  // The client of the thread protocol, which reads on by itself.
  async protocol() {
    const one = client.threads.stream(thread, { assistantId, maxReconnectAttempts: 100, reconnectDelayMs: () => 20 });
    await one.submitRun({ input });
    const { messages } = await one.output;
    await one.close();
    return messages;
  },
  // The hook of the SDK, on the runs API. It has no retry of its own: the page joins its run again.
  async hook() {
    const state = {};
    await client.threads.create({ threadId: thread, ifExists: "do_nothing" });
    const { held, close } = mounted(useStream, {
      client,
      assistantId,
      threadId: thread,
      onCreated: (run) => (state.run = run.run_id),
      onError: () => (state.failed = true),
    });
    await until(() => held.now && !held.now.isThreadLoading, () => held);
    held.now.submit(input, { streamMode, streamResumable: true, onDisconnect: "continue" });
    for (let tries = 0; tries < 1000; tries += 1) {
      await until(() => held.now.isLoading || state.failed, () => state);
      await until(() => !held.now.isLoading, () => plain(held.now.messages));
      if (!state.failed) break;
      state.failed = false;
      held.now.joinStream(state.run, undefined, { streamMode });
    }
    const messages = held.now.messages;
    close();
    return messages;
  },
  // The hook of @langchain/react, on the thread protocol.
  async thread() {
    const { held, close } = mounted(useThread, {
      apiUrl,
      assistantId,
      threadId: thread,
      maxReconnectAttempts: 100,
      reconnectDelayMs: () => 20,
    });
    await until(() => held.now && !held.now.isThreadLoading, () => held);
    await held.now.submit(input);
    await until(() => !held.now.isLoading, () => held);
    await new Promise((done) => setTimeout(done, 50)); // the hook writes its state in the next turn of the loop
    const messages = held.now.messages;
    close();
    return messages;
  },
  // A page that is opened on a thread that is there already.
  async opened() {
    const { held, close } = mounted(useThread, { apiUrl, assistantId, threadId: thread });
    await until(() => held.now && !held.now.isThreadLoading && held.now.messages.length > 0, () => held);
    const messages = held.now.messages;
    close();
    return messages;
  },
  // The hook of @langchain/react, in which a person decides about an interrupt.
  async decide() {
    const { held, close } = mounted(useThread, { apiUrl, assistantId: agent, threadId: thread });
    await until(() => held.now && !held.now.isThreadLoading, () => held);
    held.now.submit(input);
    await until(() => held.now.interrupt, () => plain(held.now.messages));
    asked.push(held.now.interrupt.value);
    await held.now.respond(resume);
    await until(() => !held.now.isLoading && held.now.messages.at(-1).getType() === "ai" && !held.now.interrupt, () => plain(held.now.messages));
    await new Promise((done) => setTimeout(done, 50));
    const messages = held.now.messages;
    close();
    return messages;
  },
};

const messages = await stories[story]();
process.stdout.write(JSON.stringify({ messages: plain(messages), asked }) + "\n");
process.exit(0);
