// A client of @agentclientprotocol/sdk: it starts the agent, kills it in the middle of a turn, loads the session, and
// goes on. What it has at its end is printed as JSON.
import { spawn } from "node:child_process";
import { Readable, Writable } from "node:stream";
import * as acp from "@agentclientprotocol/sdk";

const { command, env, cwd, kill, choice } = JSON.parse(process.argv.at(-1));
const { methods } = acp;
let shown = [];
let permissions = 0;
let came = () => {};

const editor = acp
  .client({ name: "editor" })
  .onNotification(methods.client.session.update, ({ params }) => {
    shown.push(params.update);
    came();
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
    const asked = peer.request(methods.agent.session.prompt, prompt(sessionId, "turn 0;"));
    while (shown.length < kill) await Promise.race([asked, new Promise((resolve) => (came = resolve))]);
    agent.kill("SIGKILL");
    await asked;
  });
} catch {} // the line broke with the agent
const seen = shown.length;
shown = [];
const told = await run(async (peer, _agent, greeting) => {
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
console.log(JSON.stringify({ ...told, seen, permissions, sessionId }));
