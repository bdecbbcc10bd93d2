/** The client of `examples/minimal_client`: its pauses at a server that is not there, and the secrets that it keeps. */

import assert from "node:assert/strict";
import fs from "node:fs";
import os from "node:os";
import { join } from "node:path";
import { test } from "node:test";

import { Checkpoint } from "../../examples/minimal_client/checkpoint.mjs";
import { Stream } from "../../examples/minimal_client/stream.mjs";

const KEPT = { session: "s", stream: "k", cursor: null, unacked: {}, next_seqno: 0, acked: 0, connection: 0 };
const CHECKPOINT = { isThere: false, save() {}, remove() {} };

/** Let every connection fail at once; return the pauses before the next ones, one for each chance behind the first. */
function pauses(chances) {
  const asked = [];
  const clock = { time: 0, now: () => clock.time, clear() {}, set: (act, ms) => Object.assign(clock, { act, ms }) };
  let socket;
  globalThis.WebSocket = class {
    constructor() {
      socket = this;
    }
    close() {}
  };
  const left = [...chances];
  new Stream("http://x", CHECKPOINT, { ...KEPT }, { onevents() {}, clock, chance: () => left.shift() });
  for (let lost = 0; lost <= chances.length; lost += 1) {
    clock.act(); // connect
    socket.onclose();
    asked.push(clock.ms);
    clock.time += clock.ms;
  }
  return asked;
}

test("the first reconnect is immediate, later ones follow after at most 30 s", () => {
  assert.deepEqual(pauses([1, 1, 1, 1, 1, 1, 1]), [0, 1000, 1000, 2000, 4000, 8000, 16_000, 30_000]);
});

test("no pause is longer than the outage, also after short random ones", () => {
  assert.equal(pauses([0.05, 0.05, 0.05, 0.05, 0.05, 1]).at(-1), 1000);
});

function temporaryFolder(t) {
  const folder = fs.mkdtempSync(join(os.tmpdir(), "minimal-"));
  t.after(() => fs.rmSync(folder, { recursive: true }));
  return folder;
}

/** Send one message to a server that accepts it and ends its turn; return the `open` of the client. */
function askOnce(folder, welcome) {
  const checkpoint = new Checkpoint(folder);
  const sent = [];
  let socket;
  globalThis.WebSocket = class {
    constructor() {
      socket = this;
    }
    send(text) {
      sent.push(JSON.parse(text));
    }
    close() {}
  };
  const clock = { now: () => 0, clear() {}, set: (act) => (clock.act = act) };
  const stream = new Stream("http://x", checkpoint, checkpoint.begin("s", { type: "send", parts: [] }), {
    onevents: (events) => stream.handled(events.at(-1).id),
    clock,
  });
  clock.act(); // connect
  socket.onopen();
  const receive = (frame) => socket.onmessage({ data: JSON.stringify(frame) });
  receive({ type: "welcome", stream: sent[0].stream, event_id: "0-0", resume_from: "0-0", ...welcome });
  const records = [
    { type: "stream_opened", stream: sent[0].stream },
    { type: "command_accepted", stream: sent[0].stream, seqno: 0 },
    { type: "message_accepted", stream: sent[0].stream, turn: 1 },
    { type: "turn_ended", turn: 1, status: "completed" },
  ];
  receive({ type: "events", events: records.map((record, at) => ({ id: `1-${at + 1}`, record })) });
  assert.deepEqual([stream.phase, stream.code, checkpoint.isThere], ["ended", null, false]);
  return sent[0];
}

test("the secret of an encrypted session outlives its stream, and opens the next one", (t) => {
  const folder = temporaryFolder(t);
  const [first, second] = [1, 2].map(() => askOnce(folder, { is_encrypted: true }));
  assert.deepEqual(fs.readdirSync(folder), ["session-secret"]);
  assert.equal(first.secret, second.secret);
  assert.notEqual(first.stream, second.stream);
});

test("no secret is left of a session that is not encrypted under it", (t) => {
  const folder = temporaryFolder(t);
  const [first, second] = [1, 2].map(() => askOnce(folder, {}));
  assert.deepEqual(fs.readdirSync(folder), []);
  assert.notEqual(first.secret, second.secret);
});

test("an ack of a single command does not end the count of lost connections while an earlier one is not acknowledged", () => {
  const sent = [];
  let socket;
  globalThis.WebSocket = class {
    constructor() {
      socket = this;
    }
    send(text) {
      sent.push(text);
    }
    close() {}
  };
  const clock = { now: () => 0, clear() {}, set: (act) => (clock.act = act) };
  const kept = { ...KEPT, key: "k", promised: null, known: null, unacked: { 0: "{}", 1: "{}" }, next_seqno: 2 };
  const checkpoint = { ...CHECKPOINT, noteEncryption() {} };
  const stream = new Stream("http://x", checkpoint, kept, { onevents() {}, clock, chance: () => 0 });
  const failures = [];
  const receive = (frame) => {
    socket.onmessage({ data: JSON.stringify(frame) });
    failures.push(stream.failures);
  };
  clock.act();
  socket.onclose();
  clock.act();
  socket.onopen();
  receive({ type: "welcome", event_id: "0-0", resume_from: "0-0" });
  receive({ type: "ack", seqno: 1, is_single: true });
  receive({ type: "ack", seqno: 0, is_single: true });
  assert.deepEqual(failures, [1, 1, 0]);
});
