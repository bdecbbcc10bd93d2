/** What the browser client keeps over a reload, and what it publishes. */

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";

import { connect } from "../../src/midstream/server/static/client/midstream.js";
import { MemoryStorage } from "../../src/midstream/server/static/client/storage.js";
import { Stream } from "../../src/midstream/server/static/client/stream.js";

const NOW = 1_000_000;
const END = { id: "1-10", record: { type: "turn_ended", turn: 3, status: "completed", at: 2 } };

function open(stream) {
  stream.tick(stream.deadlineAt);
  stream.opened(NOW);
}

// --- what was kept -------------------------------------------------------------------------------------------------

/** Send a message to nobody, harm what was kept of it, and return the next page's client and its lines. */
async function afterHarm(harm, lost = {}) {
  const storage = new MemoryStorage();
  const dead = await connect({ url: "http://x", storage, makeSocket: () => ({ close() {}, send() {} }) });
  await dead.send("s", "hello").settled;
  dead.close();
  const { streams, secrets, chunks } = await storage.load();
  await storage.apply(harm({ streams, secrets, chunks }));
  const said = [];
  const makeSocket = () => {
    const hear = (frame) => queueMicrotask(() => line.onmessage?.({ data: JSON.stringify(frame) }));
    const line = {
      close() {},
      send(text) {
        said.push(JSON.parse(text));
        if (said.length > 1) return;
        hear({ type: "welcome", event_id: "1-9", resume_from: "1-9", status: "model" });
        hear({ type: "snapshot", event_id: "1-9", session: { status: "model" } });
        hear({ type: "events", events: [END, { ...END, id: "1-11" }] });
      },
    };
    queueMicrotask(() => line.onopen?.({}));
    return line;
  };
  Object.assign(storage, lost);
  return { client: await connect({ url: "http://x", storage, makeSocket }), storage, said };
}

test("chunks that cannot be read any more are never skipped: that is told, with the session as it is", async () => {
  for (const frame of [undefined, "{", '{"type":"chunk","seqno":7}']) {
    const harm = ({ chunks: [chunk] }) =>
      frame ? [{ op: "chunk", value: { ...chunk, frame } }] : [{ op: "acked", key: chunk.key, accepted: 1 }];
    const { client, storage, said } = await afterHarm(harm);
    assert.equal(await client.unsent("s"), null);
    const [stream] = await client.resumeInterrupted();
    const told = [];
    for await (const event of stream) told.push(event.type === "record" ? event.id : event.type);
    assert.deepEqual(told, ["lost", "snapshot", "1-10"]);
    assert.match(stream.damage, /^chunk 0 /);
    assert.deepEqual([said[0].snapshots, said[0].stream, said.length], ["begin", undefined, 2]);
    assert.equal(said[1].type, "close");
    assert.deepEqual(await storage.load(), { streams: [], secrets: [], chunks: [] });
  }
});

test("a stream whose secret is gone, and its session's, is shown in the same way", async () => {
  const { client } = await afterHarm(
    ({ streams: [stream], chunks: [chunk] }) => [
      { op: "forget", key: stream.key },
      { op: "stream", value: stream },
      { op: "chunk", value: chunk },
    ],
    { sessionSecret: async () => null },
  );
  const [stream] = await client.resumeInterrupted();
  assert.equal(stream.damage, "its secret is gone");
  const told = [];
  for await (const { type } of stream) told.push(type);
  assert.deepEqual(told, ["lost", "snapshot", "record"]);
});

test("numbers of connections go on above those of the page before, and are written down first", async () => {
  const first = new Stream({ session: "s", key: "k", secret: "x" }, NOW);
  first.say("hi", NOW);
  open(first);
  const [opened] = first.take().frames;
  const next = new Stream({ ...first.record(), secret: "x", chunks: [] }, NOW);
  const [{ op, value }] = next.take().writes;
  open(next);
  const [reopened] = next.take().frames;
  assert.deepEqual([op, value.life, JSON.parse(opened).connection], ["stream", 1, 1]);
  assert.equal(JSON.parse(reopened).connection > 2 ** 24, true);
});

// --- the secrets of sessions ---------------------------------------------------------------------------------------

/** Connect to nobody for as long as a test takes; `opened` gives what the first connection was opened with. */
async function silent(t, storage, url = "http://x") {
  let told;
  const opened = new Promise((resolve) => (told = resolve));
  const makeSocket = () => {
    const line = { close() {}, send: (frame) => told(JSON.parse(frame)) };
    queueMicrotask(() => line.onopen?.({}));
    return line;
  };
  const client = await connect({ url, storage, makeSocket });
  t.after(() => client.close());
  return { client, opened };
}

test("a session has one secret, whichever tab asks first, for its streams, readers and sub-agents", async (t) => {
  const storage = new MemoryStorage();
  const [one, other] = [await silent(t, storage), await silent(t, storage)];
  const [secret, same] = await Promise.all([one.client.secret("s"), other.client.secret("s")]);
  assert.equal(secret, same);
  assert.equal(Buffer.from(secret, "base64url").length, 32);
  assert.equal(await other.client.secret("s::child"), secret);
  assert.notEqual(await other.client.secret("t"), secret);
  assert.notEqual(await (await silent(t, storage, "http://y")).client.secret("s"), secret);
  one.client.send("s", "hello");
  other.client.follow("s::child");
  for (const { opened } of [one, other]) assert.equal((await opened).secret, secret);
});

test("a reader shows what is known, or a word in its place, and draws nothing", async (t) => {
  const storage = new MemoryStorage();
  const [one, other] = [await silent(t, storage), await silent(t, storage)];
  one.client.follow("s");
  assert.equal("secret" in (await one.opened), false);
  other.client.follow("s", "0-0", { word: "viewer-1" });
  assert.equal((await other.opened).secret, "viewer-1");
  assert.equal(await storage.sessionSecret("http://x", "s", (kept) => kept), null);
});

/** Keep a stream as a page of before sessions had secrets left it, or without its secret. */
async function leftBehind(writes) {
  const storage = new MemoryStorage();
  const stream = new Stream({ session: "s", key: "k" });
  stream.say("hello", 0);
  const [chunk, { value }] = stream.take().writes;
  await storage.apply([chunk, { op: "stream", value: { ...value, url: "http://x", touchedAt: Date.now() } }, ...writes]);
  return storage;
}

test("a stream that began with a secret of its own keeps it, and shows the session's beside it", async (t) => {
  const storage = await leftBehind([{ op: "secret", value: { key: "k", secret: "own" } }]);
  const first = await silent(t, storage);
  await first.client.resumeInterrupted();
  const { secret, old_secret } = await first.opened;
  assert.deepEqual([secret, old_secret, await first.client.secret("s")], ["own", undefined, "own"]);
  first.client.close();
  const second = await silent(t, storage);
  await second.client.keepSecret("s", "told");
  await second.client.resumeInterrupted();
  const opened = await second.opened;
  assert.deepEqual([opened.secret, opened.old_secret], ["told", "own"]);
});

test("a page that died before it kept its stream's secret goes on by the session's", async (t) => {
  const storage = await leftBehind([]);
  const { client, opened } = await silent(t, storage);
  await client.keepSecret("s", "told");
  const [stream] = await client.resumeInterrupted();
  assert.equal(stream.damage, "");
  assert.equal((await opened).secret, "told");
});

// --- what is published ---------------------------------------------------------------------------------------------

const declared = readFileSync(new URL("../../src/midstream/server/static/client/midstream.d.ts", import.meta.url), "utf8");

/** The members that a class of midstream.d.ts declares. */
function declaredOf(name) {
  const body = declared.split(`export class ${name} `)[1].split("\n}\n")[0];
  const names = [...body.matchAll(/^ {2}(?:readonly )?(\w+)[(:]/gm)].map(([, member]) => member);
  return new Set(names);
}

test("what is declared is there, and what is there is declared", async () => {
  const exported = await import("../../src/midstream/server/static/client/midstream.js");
  const values = [...declared.matchAll(/^export (?:class|function|const) (\w+)/gm)].map(([, name]) => name);
  assert.deepEqual(values.sort(), Object.keys(exported).sort());
  const client = await connect({ url: "http://x", storage: new MemoryStorage(), makeSocket: () => ({ close() {}, send() {} }) });
  for (const [name, one] of [["Client", client], ["LiveStream", client.follow("s")]]) {
    const found = [...Object.getOwnPropertyNames(Object.getPrototypeOf(one)), ...Object.keys(one)];
    const there = found.filter((member) => !["constructor", "unlock", "yieldTo"].includes(member));
    assert.deepEqual(there.sort(), [...declaredOf(name)].sort());
    if (name === "LiveStream") {
      const [, state] = /interface Connection \{([^}]*)\}/.exec(declared);
      const members = [...state.matchAll(/^ {2}(\w+):/gm)].map(([, member]) => member);
      assert.deepEqual(Object.keys(one.connection).sort(), members.sort());
    }
  }
  client.close();
});
