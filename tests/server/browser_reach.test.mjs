/** The first connection of a browser client has a limit; what no server may be sent is refused before anything is sent. */

import assert from "node:assert/strict";
import { test } from "node:test";

import { MidstreamError, connect } from "../../src/midstream/server/static/client/midstream.js";
import { CONNECT_WITHIN_MS } from "../../src/midstream/server/static/client/retries.js";
import { MemoryStorage } from "../../src/midstream/server/static/client/storage.js";
import { Stream } from "../../src/midstream/server/static/client/stream.js";
import { FIRST_FRAME_WITHIN_MS } from "../../src/midstream/server/static/client/transports.js";

const LIMITS = { reachWithinMs: 20_000 };
const WELCOME = '{"type":"welcome","stream":"k","event_id":"1-1","resume_from":"1-1","acked":0,"turn":0}';

function openedStream(stored = {}) {
  const stream = new Stream({ session: "s", key: "k", secret: "x", cursor: null, ...stored }, 0, LIMITS);
  stream.send("hi", 0);
  return stream;
}

/** Fail each connection until `to`; return when the stream ended, or null. */
function failing(stream, from, to) {
  for (let now = from; now <= to; now += 100) {
    if (stream.tick(now)) stream.endConnection(1, now, { error: new MidstreamError("connection_lost", "refused", "later") });
    if (stream.isConnectionWanted) stream.endConnection(1, now, { error: new MidstreamError("connection_lost", "refused", "later") });
    if (stream.phase === "ended") return now;
  }
  return null;
}

test("a server that was never reached is abandoned after the limit, and the message stays stored", () => {
  const stream = openedStream();
  assert.equal(failing(stream, 0, 60_000), 20_000);
  assert.equal(stream.error.code, "connection_lost");
  assert.match(stream.error.message, /^no connection to the server within 20 s \(last: refused\): check its address and scheme/);
  assert.equal(stream.take().writes.some(({ op }) => op === "delete"), false);
});

test("a connection without any answer is abandoned after the limit too", () => {
  const stream = openedStream();
  stream.tick(0);
  assert.equal(stream.phase, "connecting");
  stream.beginConnection(0);
  assert.equal(stream.dueAt, 20_000);
  stream.tick(20_000);
  assert.equal(stream.error.code, "connection_lost");
});

test("a connection has time for the next transport after a handshake that was not answered", () => {
  const stream = openedStream();
  stream.tick(0);
  assert.equal(stream.tick(CONNECT_WITHIN_MS + FIRST_FRAME_WITHIN_MS), false);
  assert.equal(stream.phase, "connecting");
});

test("a server that was reached once is retried for as long as the patience lasts", () => {
  const stream = openedStream();
  stream.tick(0);
  stream.beginConnection(0);
  stream.receive(WELCOME, 0);
  stream.endConnection(1, 0);
  assert.equal(failing(stream, 0, 600_000), null);
  assert.equal(stream.isReconnecting, true);
});

test("a stream of an earlier page has no such limit", () => {
  const stream = new Stream({ session: "s", key: "k", secret: "x", life: 0, acked: 1, nextSeqno: 1 }, 0, LIMITS);
  assert.equal(failing(stream, 0, 600_000), null);
});

test("time in which the page slept does not count", () => {
  const stream = openedStream();
  stream.tick(0);
  stream.tick(50_000, true);
  assert.notEqual(stream.phase, "ended");
  assert.equal(failing(stream, 50_000, 100_000), 70_000);
});

test("a text with a lone surrogate, and a value that is no text, is refused before anything is stored or sent", async () => {
  const storage = new MemoryStorage();
  let sockets = 0;
  const makeSocket = () => {
    sockets += 1;
    return { close() {}, send() {} };
  };
  const client = await connect({ url: "http://x", storage, makeSocket });
  const usage = { code: "usage", message: /Nothing was sent/ };
  for (const text of ["\ud800", "a\udc00b", "\udc00\ud800"]) {
    assert.throws(() => client.send("s", text), usage);
    await assert.rejects(client.ask("s", text), usage);
    await assert.rejects(client.answer("s", { turn: 1, response: 1, call_id: "c", digest: "" }, "respond", { text }), usage);
    assert.throws(() => client.send(text, "hi"), usage);
  }
  for (const text of [undefined, null, 7, {}]) assert.throws(() => client.send("s", text), usage);
  for (const begin of [() => client.send("", "hi"), () => client.follow("")])
    assert.throws(begin, { code: "usage", message: /at least one character/ });
  await new Promise(setImmediate);
  assert.equal(sockets, 0);
  assert.deepEqual(await storage.load(), { streams: [], secrets: [], commands: [] });
  client.send("s", "whole: \u{1f600}");
  client.close();
});
