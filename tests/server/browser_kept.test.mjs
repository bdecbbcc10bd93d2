/** The browser client's storage across a reload, and its published names. */

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";

import { MidstreamError, connect } from "../../src/midstream/server/static/client/midstream.js";
import { MemoryStorage } from "../../src/midstream/server/static/client/storage.js";
import { Stream } from "../../src/midstream/server/static/client/stream.js";

const NOW = 1_000_000;
const END = { id: "1-10", record: { type: "turn_ended", turn: 3, status: "completed", at: 2 } };

function open(stream) {
  stream.tick(stream.deadlineAt);
  stream.beginConnection(NOW);
}

// --- damaged storage ------------------------------------------------------------------------------------------------

/** Send a message without a server, damage its stored rows, and return the next page's client and its sent frames. */
async function afterDamage(damage, lost = {}) {
  const storage = new MemoryStorage();
  const dead = await connect({ url: "http://x", storage, makeSocket: () => ({ close() {}, send() {} }) });
  await dead.send("s", "hello").settled;
  dead.close();
  const { streams, secrets, commands } = await storage.load();
  await storage.apply(damage({ streams, secrets, commands }));
  const sent = [];
  const makeSocket = () => {
    const receive = (frame) => queueMicrotask(() => line.onmessage?.({ data: JSON.stringify(frame) }));
    const line = {
      close() {},
      send(text) {
        sent.push(JSON.parse(text));
        if (sent.length > 1) return;
        receive({ type: "welcome", event_id: "1-9", resume_from: "1-9", status: "running" });
        receive({ type: "snapshot", event_id: "1-9", session: { status: "running" } });
        receive({ type: "events", events: [END, { ...END, id: "1-11" }] });
      },
    };
    queueMicrotask(() => line.onopen?.({}));
    return line;
  };
  Object.assign(storage, lost);
  return { client: await connect({ url: "http://x", storage, makeSocket }), storage, sent };
}

test("unreadable commands are never skipped: that is reported, with the current session", async () => {
  for (const frame of [undefined, "{", '{"type":"command","seqno":7}']) {
    const damage = ({ commands: [command] }) =>
      frame ? [{ op: "command", value: { ...command, frame } }] : [{ op: "acked", key: command.key, accepted: 1 }];
    const { client, storage, sent } = await afterDamage(damage);
    assert.equal(await client.findUnsent("s"), null);
    const [stream] = await client.resumeInterrupted();
    const delivered = [];
    for await (const event of stream) delivered.push(event.type === "record" ? event.id : event.type);
    assert.deepEqual(delivered, ["lost", "snapshot", "1-10"]);
    assert.match(stream.damage, /^command 0 /);
    assert.deepEqual([sent[0].snapshots, sent[0].stream, sent.length], ["begin", undefined, 2]);
    assert.equal(sent[1].type, "close");
    assert.deepEqual(await storage.load(), { streams: [], secrets: [], commands: [] });
  }
});

test("a stream with a lost secret, its own and its session's, is shown in the same way", async () => {
  const { client } = await afterDamage(
    ({ streams: [stream], commands: [command] }) => [
      { op: "delete", key: stream.key },
      { op: "stream", value: stream },
      { op: "command", value: command },
    ],
    { updateSecret: async () => null },
  );
  const [stream] = await client.resumeInterrupted();
  assert.equal(stream.damage, "its secret is gone");
  const delivered = [];
  for await (const { type } of stream) delivered.push(type);
  assert.deepEqual(delivered, ["lost", "snapshot", "record"]);
});

test("numbers of connections continue above those of the page before, and are stored first", async () => {
  const first = new Stream({ session: "s", key: "k", secret: "x" }, NOW);
  first.send("hi", NOW);
  open(first);
  const [opened] = first.take().frames;
  const next = new Stream({ ...first.record(), secret: "x", commands: [] }, NOW);
  const [{ op, value }] = next.take().writes;
  open(next);
  const [reopened] = next.take().frames;
  assert.deepEqual([op, value.life, JSON.parse(opened).connection], ["stream", 1, 1]);
  assert.equal(JSON.parse(reopened).connection > 2 ** 24, true);
});

// --- the secrets of sessions ----------------------------------------------------------------------------------------

/**
 * Connect without a response: `opened` resolves to the first frame of the first connection. Or connect to a server
 * that responds with `answer` to the first frame of each connection.
 */
async function silent(t, storage, { url = "http://x", answer = () => [] } = {}) {
  const openings = [];
  let noteOpened;
  const opened = new Promise((resolve) => (noteOpened = resolve));
  const makeSocket = () => {
    let isFirst = true;
    const line = {
      close() {},
      send(text) {
        if (isFirst) openings.push(JSON.parse(text));
        noteOpened(openings[0]);
        const frames = isFirst ? answer(openings.at(-1)) : [];
        isFirst = false;
        for (const frame of frames) queueMicrotask(() => line.onmessage?.({ data: JSON.stringify(frame) }));
      },
    };
    queueMicrotask(() => line.onopen?.({}));
    return line;
  };
  const client = await connect({ url, storage, makeSocket });
  t.after(() => client.close());
  return { client, opened, openings };
}

/** Wait until a condition is true, for a bounded number of turns of the loop. */
async function until(condition) {
  for (let turns = 0; !(await condition()); turns += 1) {
    assert.ok(turns < 1000);
    await new Promise(setImmediate);
  }
}

const storedSecretOf = (storage, session) => storage.updateSecret("http://x", session, (stored) => stored);
const WELCOME = { type: "welcome", event_id: "1-9", resume_from: "1-9", acked: 0, status: "completed" };

test("a session has one secret, whichever tab needs it first, for its streams, readers and sub-agents", async (t) => {
  const storage = new MemoryStorage();
  const [one, other] = [await silent(t, storage), await silent(t, storage)];
  const [secret, same] = await Promise.all([one.client.secret("s"), other.client.secret("s")]);
  assert.equal(secret, same);
  assert.equal(Buffer.from(secret, "base64url").length, 32);
  assert.equal(await other.client.secret("s::child"), secret);
  assert.notEqual(await other.client.secret("t"), secret);
  assert.notEqual(await (await silent(t, storage, { url: "http://y" })).client.secret("s"), secret);
  one.client.send("s", "hello");
  other.client.follow("s::child");
  for (const { opened } of [one, other]) assert.equal((await opened).secret, secret);
});

test("a reader presents the stored secret, or a viewer token in its place, and creates none", async (t) => {
  const storage = new MemoryStorage();
  const [one, other] = [await silent(t, storage), await silent(t, storage)];
  one.client.follow("s");
  assert.equal("secret" in (await one.opened), false);
  other.client.follow("s", "0-0", { viewerToken: "viewer-1" });
  assert.equal((await other.opened).secret, "viewer-1");
  assert.equal(await storage.updateSecret("http://x", "s", (stored) => stored), null);
});

/** Store a stream as a page stored it before sessions had secrets, or without its secret. */
async function storedBefore(writes) {
  const storage = new MemoryStorage();
  const stream = new Stream({ session: "s", key: "k" });
  stream.send("hello", 0);
  const [command, { value }] = stream.take().writes;
  await storage.apply([command, { op: "stream", value: { ...value, url: "http://x", touchedAt: Date.now() } }, ...writes]);
  return storage;
}

test("a stream that began with its own secret keeps it, and presents the session's beside it", async (t) => {
  const storage = await storedBefore([{ op: "secret", value: { key: "k", secret: "own" } }]);
  const first = await silent(t, storage);
  await first.client.resumeInterrupted();
  const { secret, old_secret } = await first.opened;
  assert.deepEqual([secret, old_secret], ["own", undefined]);
  first.client.close();
  const second = await silent(t, storage);
  await second.client.keepSecret("s", "given");
  await second.client.resumeInterrupted();
  const opened = await second.opened;
  assert.deepEqual([opened.secret, opened.old_secret], ["given", "own"]);
});

test("a stream whose page died before it stored the secret continues with the session's", async (t) => {
  const storage = await storedBefore([]);
  const { client, opened } = await silent(t, storage);
  await client.keepSecret("s", "given");
  const [stream] = await client.resumeInterrupted();
  assert.equal(stream.damage, "");
  assert.equal((await opened).secret, "given");
});

test("a session's secret is stored where the server encrypts the session under it, and nowhere else", async (t) => {
  for (const is_encrypted of [true, false]) {
    const storage = new MemoryStorage();
    const { client, openings } = await silent(t, storage, { answer: () => [{ ...WELCOME, is_encrypted }] });
    const stream = client.send("s", "hello");
    await until(() => stream.connection.phase === "live");
    const kept = await storedSecretOf(storage, "s");
    assert.equal(kept?.secret, is_encrypted ? openings[0].secret : undefined);
    client.send("s::child", "and more");
    await until(() => openings.length === 2);
    assert.equal(openings[1].secret === openings[0].secret, is_encrypted);
    assert.deepEqual(await storedSecretOf(storage, "s"), kept);
    const { streams, secrets } = await storage.load();
    assert.deepEqual([streams.length, secrets.map(({ secret }) => secret)], [2, openings.map(({ secret }) => secret)]);
    assert.equal((await client.secret("s")) === openings[0].secret, is_encrypted);
    await client.keepSecret("s", "given");
    assert.equal((await storedSecretOf(storage, "s")).secret, "given");
    await client.discardSecret("s");
    assert.equal((await storedSecretOf(storage, "s"))?.secret, undefined);
  }
});

test("a session that needed no secret, and begins again where it needs one, is not lost", async (t) => {
  const storage = new MemoryStorage();
  let is_encrypted = false;
  const { client, openings } = await silent(t, storage, { answer: () => [{ ...WELCOME, is_encrypted }] });
  const first = client.send("s", "hello");
  await until(() => first.connection.phase === "live");
  await until(async () => (await storedSecretOf(storage, "s")) === null);
  is_encrypted = true;
  const again = client.send("s", "hello again");
  await until(() => again.connection.phase === "live");
  const { secret } = openings.at(-1);
  await until(async () => (await storedSecretOf(storage, "s"))?.secret === secret);
  assert.equal(await client.secret("s"), secret);
});

test("a secret changed by another tab is presented with the next connection of every tab", async (t) => {
  const storage = new MemoryStorage();
  const { client, openings } = await silent(t, storage, { answer: () => [{ ...WELCOME, is_encrypted: true }] });
  const live = [client.send("s", "hello"), client.follow("s", "1-1")];
  await until(() => live.every(({ connection }) => connection.phase === "live"));
  const [{ secret: before }] = openings;
  const other = await silent(t, storage);
  await other.client.keepSecret("s", "changed");
  client.cut();
  await until(() => openings.length === 4);
  const shown = openings.slice(2).sort((one, another) => (one.stream ? -1 : another.stream ? 1 : 0));
  assert.deepEqual(shown.map(({ secret, old_secret }) => [secret, old_secret]), [["changed", before], ["changed", undefined]]);
});

test("a stream whose secret was changed while it was presented continues, and one without another secret ends", async (t) => {
  const storage = new MemoryStorage();
  const refusal = { type: "error", code: "wrong_secret", message: "no", retry: "never" };
  let isChanged = false;
  const answer = ({ secret }) => {
    if (secret === "right") return [{ ...WELCOME, is_encrypted: true }];
    if (!isChanged) storage.updateSecret("http://x", "s", () => ({ secret: "right" }));
    isChanged = true;
    return [refusal];
  };
  const { client, openings } = await silent(t, storage, { answer });
  await client.keepSecret("s", "former");
  const stream = client.send("s", "hello");
  await until(() => stream.connection.phase === "live");
  await client.keepSecret("s", "wrong");
  for (const another of [client.send("s", "hello"), client.follow("s")]) assert.equal((await another.ended).code, "wrong_secret");
  const word = client.follow("s", null, { viewerToken: "expired" });
  assert.equal((await word.ended).code, "wrong_secret");
  assert.deepEqual(openings.map(({ secret }) => secret), ["former", "right", "wrong", "wrong", "expired"]);
});

// --- settings of an application -------------------------------------------------------------------------------------

test("while recovery is off nothing of a stream is stored, and it can be switched while the client runs", async (t) => {
  const storage = new MemoryStorage();
  const { client, openings } = await silent(t, storage, { answer: () => [{ ...WELCOME, is_encrypted: true }] });
  const kept = client.send("kept", "hi");
  await kept.settled;
  client.settings = { isRecoveryOn: false };
  const unkept = client.send("unkept", "hi");
  await until(() => unkept.connection.phase === "live");
  client.cut();
  await until(() => openings.length === 4 && unkept.connection.phase === "live");
  assert.equal(unkept.pendingText, "hi");
  const { streams, secrets, commands } = await storage.load();
  for (const rows of [streams, secrets, commands]) assert.deepEqual(rows.map(({ key }) => key), [kept.key]);
  assert.equal((await storedSecretOf(storage, "unkept")).secret, await client.secret("unkept"), "what opens the session stays");
  client.close();
  const next = await silent(t, storage);
  next.client.settings = { isRecoveryOn: false, lookBackS: 0 };
  assert.deepEqual(await next.client.resumeInterrupted(), []);
  next.client.settings = {};
  assert.deepEqual((await next.client.resumeInterrupted()).map(({ session }) => session), ["kept"]);
});

test("streams older than the look-back are cleared, and orphans are", async (t) => {
  const storage = await storedBefore([{ op: "secret", value: { key: "k", secret: "own" } }]);
  await storage.apply([{ op: "command", value: { key: "orphan", seqno: 0, frame: "{}" } }]);
  const left = async (options) => {
    const { client } = await silent(t, storage);
    const found = await client.resumeInterrupted(options);
    client.close();
    return found.length;
  };
  const { streams: [stream] } = await storage.load();
  await storage.apply([{ op: "stream", value: { ...stream, touchedAt: Date.now() - 7_300_000 } }]);
  assert.equal(await left({ lookBackS: 10_000 }), 1);
  assert.deepEqual((await storage.load()).commands.map(({ key }) => key), ["k"]);
  await storage.apply([{ op: "stream", value: { ...stream, touchedAt: Date.now() - 7_300_000 } }]);
  assert.equal(await left(), 0);
  assert.deepEqual(await storage.load(), { streams: [], secrets: [], commands: [] });
});

test("settings out of their bounds are refused, and change nothing", async (t) => {
  const { client } = await silent(t, new MemoryStorage());
  const before = client.settings;
  assert.deepEqual(before, { isRecoveryOn: true, lookBackS: 7200, patienceS: 7200, reachWithinS: 20, stallAfterS: 60 });
  const wrong = [{ isRecoveryOn: 1 }, { lookBackS: -1 }, { lookBackS: 1e9 }, { patienceS: -1 }, { reachWithinS: 0 }, { stallAfterS: 0 }, { stall: 1 }];
  for (const each of wrong) assert.throws(() => (client.settings = each), { code: "usage" });
  await assert.rejects(connect({ url: "http://x", storage: new MemoryStorage(), settings: { lookBackS: NaN } }), { code: "usage" });
  assert.equal(client.settings, before);
});

test("patience and the stall budget apply to streams that begin after the change", async () => {
  const clock = { ms: 0, now: () => clock.ms, set: () => null, clear() {} };
  const settings = { patienceS: 1, stallAfterS: 5 };
  const lines = [];
  const makeSocket = () => {
    const line = { close() {}, send() {} };
    lines.push(line);
    queueMicrotask(() => line.onopen?.({}));
    return line;
  };
  const client = await connect({ url: "http://x", storage: new MemoryStorage(), clock, makeSocket, settings });
  const stream = client.send("s", "hi");
  await until(() => lines.length === 1);
  stream.cut();
  clock.ms = 2000;
  stream.wake();
  await until(() => lines.length === 2);
  stream.cut();
  assert.equal((await stream.ended).code, "connection_lost");
  client.close();
});

test("streams of an earlier page are resumed at the start, all at the same time, and a failure stops no other", async (t) => {
  const storage = new MemoryStorage();
  const { client } = await silent(t, storage);
  for (const session of ["s1", "s2", "s3"]) await client.send(session, `hi, ${session}`).settled;
  client.close();
  const [unhandled, others] = [[], process.listeners("unhandledRejection")];
  process.removeAllListeners("unhandledRejection");
  process.on("unhandledRejection", (error) => unhandled.push(error.message));
  const taken = [];
  const oninterrupted = (stream) => {
    taken.push(`${stream.session}: ${stream.pendingText}`);
    if (stream.session === "s1") throw new Error("the page's");
    return stream.ended; // continues while the next streams are reported
  };
  const makeSocket = () => ({ close() {}, send() {} });
  const next = await connect({ url: "http://x", storage, makeSocket, oninterrupted });
  assert.deepEqual(taken.sort(), ["s1: hi, s1", "s2: hi, s2", "s3: hi, s3"]);
  assert.deepEqual(await next.resumeInterrupted(), []);
  await until(() => unhandled.length > 0);
  process.removeAllListeners("unhandledRejection");
  for (const other of others) process.on("unhandledRejection", other);
  assert.deepEqual(unhandled, ["the page's"]);
  next.close();
  const off = await connect({ url: "http://x", storage, makeSocket, settings: { isRecoveryOn: false }, oninterrupted });
  assert.equal(taken.length, 3);
  off.close();
});

test("while another tab holds the stored streams only resumption waits, and then they are resumed", async (t) => {
  const storage = new MemoryStorage();
  const { client } = await silent(t, storage);
  await client.send("s", "hello").settled;
  client.close();
  let isHeld = true;
  const held = (read) => async (...asked) => {
    await new Promise(setImmediate);
    if (isHeld) throw new MidstreamError("storage", "another tab holds it", "later");
    return read(...asked);
  };
  storage.load = held(storage.load.bind(storage));
  storage.updateSecret = held(storage.updateSecret.bind(storage));
  const taken = [];
  const makeSocket = () => {
    const line = { close() {}, send: (text) => openings.push(JSON.parse(text)) };
    queueMicrotask(() => line.onopen?.({}));
    return line;
  };
  const openings = [];
  const next = await connect({ url: "http://x", storage, makeSocket, oninterrupted: (stream) => taken.push(stream.session) });
  t.after(() => next.close());
  const stream = next.send("new", "hi");
  await assert.rejects(next.findUnsent("s"), { code: "storage", retry: "later" });
  assert.deepEqual([taken, openings, stream.connection.phase], [[], [], "connecting"]);
  isHeld = false;
  await until(() => taken.length === 1 && openings.length >= 2);
  assert.deepEqual(taken, ["s"]);
});

// --- published names ------------------------------------------------------------------------------------------------

const declared = readFileSync(new URL("../../src/midstream/server/static/client/midstream.d.ts", import.meta.url), "utf8");

/** The members that a class of midstream.d.ts declares. */
function declaredOf(name) {
  const body = declared.split(`export class ${name} `)[1].split("\n}\n")[0];
  const names = [...body.matchAll(/^ {2}(?:readonly |get |set )?(\w+)[(:]/gm)].map(([, member]) => member);
  return new Set(names);
}

test("every declared name exists, and every existing name is declared", async () => {
  const exported = await import("../../src/midstream/server/static/client/midstream.js");
  const values = [...declared.matchAll(/^export (?:class|function|const) (\w+)/gm)].map(([, name]) => name);
  assert.deepEqual(values.sort(), Object.keys(exported).sort());
  const client = await connect({ url: "http://x", storage: new MemoryStorage(), makeSocket: () => ({ close() {}, send() {} }) });
  for (const [name, one] of [["Client", client], ["LiveStream", client.follow("s")]]) {
    const found = [...Object.getOwnPropertyNames(Object.getPrototypeOf(one)), ...Object.keys(one)];
    const there = found.filter((member) => !["constructor", "showSecrets", "endWith"].includes(member));
    assert.deepEqual(there.sort(), [...declaredOf(name)].sort());
    if (name === "LiveStream") {
      const [, state] = /interface Connection \{([^}]*)\}/.exec(declared);
      const members = [...state.matchAll(/^ {2}(\w+):/gm)].map(([, member]) => member);
      assert.deepEqual(Object.keys(one.connection).sort(), members.sort());
    }
  }
  client.close();
});
