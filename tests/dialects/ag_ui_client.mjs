// AG-UI's client, unmodified, as an application would use it. A line of JSON to stdout at the end.
import { HttpAgent, runHttpRequest, transformHttpEventStream } from "@ag-ui/client";

const { story, url, id, text = "hi", headers = {}, tools = [], approve = true, args, words = [] } = JSON.parse(process.argv.at(-1));
console.error = console.warn = () => {}; // the client reports each cut there
process.on("unhandledRejection", () => {}); // after a cut the client does not handle the rejection of its reader
const seen = { events: [], errors: [], finishes: 0, interrupts: [], calls: [] };

// A fetch for HttpAgent that reads on after the last event wherever a line breaks.
async function resumingFetch(url, init) {
  let last = "";
  let isOver = false;
  const open = () => fetch(url, { ...init, headers: { ...init.headers, ...(last && { "last-event-id": last }) } });
  const first = await open();
  if (!first.ok) return first;
  async function* blocks() {
    for (let answer = first; !isOver; answer = await open().catch(() => null)) {
      if (answer && !answer.ok && answer.status < 500) throw new Error(`HTTP ${answer.status}`);
      const isAgain = last !== "";
      let rest = "";
      try {
        for await (const piece of answer.body.pipeThrough(new TextDecoderStream())) {
          const found = (rest + piece).split("\n\n");
          rest = found.pop();
          for (const block of found) {
            const [, eventId] = /^id: (.*)$/m.exec(block) ?? [];
            if (isAgain && !eventId) continue; // it only repeats what is there
            last = eventId ?? last;
            isOver ||= /"type":"RUN_(FINISHED|ERROR)"/.test(block);
            yield new TextEncoder().encode(`${block}\n\n`);
          }
        }
      } catch (error) {
        if (init.signal?.aborted) throw error;
      }
      if (!isOver) await new Promise((done) => setTimeout(done, 20));
    }
  }
  return new Response(ReadableStream.from(blocks()), { headers: first.headers });
}

// An agent whose connectAgent() follows the thread.
class ConnectedAgent extends HttpAgent {
  connect(input) {
    return transformHttpEventStream(runHttpRequest(() => this.fetch(`${this.url}/connect`, this.requestInit(input))));
  }
}

const agentWith = (more = {}) => {
  const agent = new ConnectedAgent({ url: `${url}/v1/ag-ui`, threadId: id, headers, ...more });
  agent.subscribe({
    onEvent: ({ event }) => void seen.events.push(event.type),
    onRunFinishedEvent: ({ event }) => {
      seen.finishes += 1;
      seen.interrupts = event.outcome?.interrupts ?? [];
      seen.calls = event.outcome?.pendingToolCallIds ?? [];
    },
    onRunErrorEvent: ({ event }) => void seen.errors.push(event.message),
  });
  return agent;
};
const addMessage = (agent) => agent.addMessage({ id: `user-${id}`, role: "user", content: text });

const stories = {
  // One message, read on from the last event after each cut.
  async run() {
    const agent = agentWith({ fetch: resumingFetch });
    addMessage(agent);
    await agent.runAgent({ runId: `run-${id}` });
    return agent;
  },
  // One message, and connectAgent() after each cut.
  async connect() {
    const agent = agentWith();
    addMessage(agent);
    await agent.runAgent({ runId: `run-${id}` }).catch(() => {});
    for (let tries = 0; !seen.finishes && !seen.errors.length && tries < 2000; tries += 1) {
      await agent.connectAgent().catch(() => {});
      await new Promise((done) => setTimeout(done, 20));
    }
    return agent;
  },
  // A page that is opened while a run is under way, and connectAgent() after each cut.
  async follow() {
    const agent = agentWith();
    for (let tries = 0; !seen.finishes && !seen.errors.length && tries < 2000; tries += 1) {
      await agent.connectAgent().catch(() => {});
      await new Promise((done) => setTimeout(done, 20));
    }
    return agent;
  },
  // A page that is opened later.
  async open() {
    const agent = agentWith();
    await agent.connectAgent();
    return agent;
  },
  // Tools of the client, each run with the results of the one before.
  async client() {
    const agent = agentWith({ fetch: resumingFetch });
    addMessage(agent);
    for (let run = 0; run === 0 || seen.calls.length; run += 1) {
      for (const call of seen.calls)
        agent.addMessage({ id: `result-${call}`, role: "tool", toolCallId: call, content: `ran ${call}` });
      await agent.runAgent({ runId: `run-${id}-${run}`, tools });
    }
    return agent;
  },
  // A decision about each interrupt.
  async people() {
    const agent = agentWith({ fetch: resumingFetch });
    addMessage(agent);
    await agent.runAgent({ runId: `run-${id}-0` });
    for (let run = 1; seen.interrupts.length; run += 1) {
      const decision = { approved: approve, ...(args && { editedArgs: args }) };
      const payload = (interrupt) => (interrupt.reason === "input_required" ? words.shift() : decision);
      const resume = seen.interrupts.map((interrupt) => ({ interruptId: interrupt.id, status: "resolved", payload: payload(interrupt) }));
      await agent.runAgent({ runId: `run-${id}-${run}`, resume });
    }
    return agent;
  },
};

const agent = await stories[story]();
process.stdout.write(`${JSON.stringify({ ...seen, messages: agent.messages })}\n`, () => process.exit(0));
