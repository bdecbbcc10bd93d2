// A client of @agentclientprotocol/sdk: it starts the agent, kills it in the middle of a turn, loads the session, and
// continues. Prints its state at the end as JSON.
import { spawn } from "node:child_process";
import { Readable, Writable } from "node:stream";
import * as acp from "@agentclientprotocol/sdk";

const { command, env, cwd, kill, choice } = JSON.parse(process.argv.at(-1));
const { methods } = acp;
let shown = [];
let permissions = 0;
let noteUpdate = () => {};

const editor = acp
  .client({ name: "editor" })
  .onNotification(methods.client.session.update, ({ params }) => {
    shown.push(params.update);
    noteUpdate();
  })
  .onRequest(methods.client.session.requestPermission, ({ params }) => {
    permissions += 1;
    const option = params.options.find((each) => each.kind === choice);
    return { outcome: { outcome: "selected", optionId: option.optionId } };
  });

async function run(work) {
  const agent = spawn(command[0], command.slice(1), { cwd, env, stdio: ["pipe", "pipe", "inherit"] });
  const ended = new Promise((resolve) => agent.once("exit", resolve));
  const stream = acp.ndJsonStream(Writable.toWeb(agent.stdin), Readable.toWeb(agent.stdout));
  try {
    return await editor.connectWith(stream, async (peer) => {
      const greeting = await peer.request(methods.agent.initialize, { protocolVersion: 1, clientCapabilities: {} });
      return work(peer, agent, greeting);
    });
  } finally {
    agent.stdin.end();
    await ended;
  }
}

const prompt = (sessionId, text) => ({
  sessionId,
  prompt: [{ type: "text", text }],
  _meta: { "midstream/key": "the only one" },
});

let sessionId;
try {
  await run(async (peer, agent) => {
    ({ sessionId } = await peer.request(methods.agent.session.new, { cwd, mcpServers: [] }));
    const answer = peer.request(methods.agent.session.prompt, prompt(sessionId, "turn 0;"));
    while (shown.length < kill) await Promise.race([answer, new Promise((resolve) => (noteUpdate = resolve))]);
    agent.kill("SIGKILL");
    await answer;
  });
} catch {} // the line broke with the agent
const seen = shown.length;
shown = [];
const result = await run(async (peer, _agent, greeting) => {
  await peer.request(methods.agent.session.load, { sessionId, cwd, mcpServers: [] });
  const answer = await peer.request(methods.agent.session.prompt, prompt(sessionId, "turn 0;"));
  const { sessions } = await peer.request(methods.agent.session.list, { cwd });
  const later = shown;
  shown = [];
  await peer.request(methods.agent.session.load, { sessionId, cwd, mcpServers: [] });
  const again = shown;
  await peer.request(methods.agent.session.delete, { sessionId });
  const left = (await peer.request(methods.agent.session.list, { cwd })).sessions;
  return { answer, greeting, sessions, later, again, left };
});
console.log(JSON.stringify({ ...result, seen, permissions, sessionId }));
