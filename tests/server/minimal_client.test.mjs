/** The pauses of the client of `examples/minimal_client` at a server that is not there. */

import assert from "node:assert/strict";
import { test } from "node:test";

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
