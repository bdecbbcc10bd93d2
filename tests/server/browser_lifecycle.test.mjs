/** Effects of browsers and laptops on the time of a page: throttled, frozen, asleep. No browser, and no waiting. */

import assert from "node:assert/strict";
import { test } from "node:test";

import { createSleepDetector } from "../../src/midstream/server/static/client/lifecycle.js";
import { HttpConnection } from "../../src/midstream/server/static/client/http.js";
import { connect } from "../../src/midstream/server/static/client/midstream.js";
import { MemoryStorage } from "../../src/midstream/server/static/client/storage.js";

const MINUTE = 60_000;
const PING = '{"type":"ping"}';

/** A clock whose timers fire when `fire` is called. */
class Clock {
  ms = 0;
  #timers = new Map();

  now = () => this.ms;

  set = (act, wait) => {
    const timer = {};
    this.#timers.set(timer, { act, at: this.ms + wait });
    return timer;
  };

  clear = (timer) => this.#timers.delete(timer);

  fire() {
    for (const [timer, { act, at }] of [...this.#timers]) {
      if (at > this.ms || !this.#timers.delete(timer)) continue;
      act();
    }
  }
}

/** A page that follows a session, and all its connections. */
class Page {
  clock = new Clock();
  lines = [];
  isServerUp = true;

  async open() {
    const { clock } = this;
    const makeSocket = () => this.#line();
    const storage = new MemoryStorage();
    this.client = await connect({ url: "http://x", makeSocket, storage, clock, wall: clock.now, chance: () => 0 });
    this.stream = this.client.follow("s", "1-1");
    await this.settle();
    return this;
  }

  get line() {
    return this.lines.at(-1);
  }

  #line() {
    const line = { sent: [], isClosed: false, send: (frame) => line.sent.push(frame), close: () => (line.isClosed = true) };
    this.lines.push(line);
    queueMicrotask(() => {
      if (!this.isServerUp) return line.onclose?.({});
      line.onopen?.({});
      return this.receive({ type: "welcome", event_id: "1-1", resume_from: "1-1", acked: 0 });
    });
    return line;
  }

  receive(frame) {
    if (this.isServerUp) this.line.onmessage?.({ data: JSON.stringify(frame) });
  }

  beat() {
    this.receive({ type: "heartbeat", event_id: "1-1", waiting_on: "nothing" });
  }

  async settle() {
    for (let turns = 0; turns < 3; turns += 1) {
      await new Promise(setImmediate);
      await this.stream.settled;
    }
  }

  get pings() {
    return this.line.sent.filter((frame) => frame === PING).length;
  }
}

test("an hour in the background, with timers once a minute, is no stall and costs no connection", async () => {
  const page = await new Page().open();
  for (let second = 1; second <= 3600; second += 1) {
    page.clock.ms += 1000;
    if (second % 10 === 0) page.beat();
    if (second % 60 === 0) page.clock.fire();
  }
  await page.settle();
  assert.equal(page.lines.length, 1);
  assert.equal(page.pings, 0);
  assert.equal(page.stream.connection.phase, "live");
});

test("a server that dies meanwhile is noticed, and requested at most once with each timer", async () => {
  const page = await new Page().open();
  page.isServerUp = false;
  for (let minute = 1; minute <= 30; minute += 1) {
    page.clock.ms += MINUTE;
    page.clock.fire();
    await page.settle();
  }
  assert.equal(page.lines[0].isClosed, true);
  assert.equal(page.lines.length > 5 && page.lines.length <= 1 + 30 + 1, true, `${page.lines.length} lines`);
  page.isServerUp = true;
  page.client.wake();
  await page.settle();
  assert.equal(page.stream.connection.phase, "live");
});

test("after sleep the connection gets a ping before its silence is judged", async () => {
  const page = await new Page().open();
  page.clock.ms += 8 * 60 * MINUTE;
  page.clock.fire(); // the timer is there before what came meanwhile
  await page.settle();
  assert.deepEqual([page.lines.length, page.pings], [1, 1]);
  page.beat();
  await page.settle();
  assert.deepEqual([page.lines.length, page.stream.connection.phase], [1, "live"]);
});

test("a connection that died during sleep is dropped when nothing answers, and replaced at once", async () => {
  const page = await new Page().open();
  page.clock.ms += 8 * 60 * MINUTE;
  page.clock.fire();
  await page.settle();
  page.clock.ms += 4999;
  page.clock.fire();
  assert.equal(page.lines.length, 1);
  page.clock.ms += 1;
  page.clock.fire();
  await page.settle();
  assert.deepEqual([page.lines[0].isClosed, page.lines.length], [true, 2]);
  assert.equal(page.stream.connection.phase, "live");
});

test("all events that wake a page at the same time cause one ping, or one attempt", async () => {
  const page = await new Page().open();
  for (let times = 0; times < 10; times += 1) page.client.wake();
  await page.settle();
  assert.deepEqual([page.lines.length, page.pings], [1, 1]);

  page.isServerUp = false;
  page.line.onclose({});
  await page.settle();
  const tried = page.lines.length;
  for (let times = 0; times < 10; times += 1) {
    page.client.wake();
    await page.settle();
  }
  assert.equal(page.lines.length - tried, 1);
});

test("a suspended page has no connection and no timer, and continues once", async () => {
  const page = await new Page().open();
  page.client.disconnect();
  page.client.disconnect();
  await page.settle();
  assert.equal(page.line.isClosed, true);
  assert.equal(page.stream.connection.retryAt, null);
  page.clock.ms += MINUTE;
  page.clock.fire();
  page.client.wake();
  await page.settle();
  assert.equal(page.lines.length, 1);
  await Promise.all([page.client.reconnect(), page.client.reconnect()]);
  await page.settle();
  assert.deepEqual([page.lines.length, page.stream.connection.phase], [2, "live"]);
});

test("sleep is detected by differing clocks or the lateness of a visible page, and nothing else", () => {
  const now = { wall: 0, own: 0 };
  let isHidden = false;
  const slept = createSleepDetector({ wall: () => now.wall, own: () => now.own, isHidden: () => isHidden });
  const after = (wall, own) => {
    now.wall += wall;
    now.own += own;
    return slept();
  };
  assert.equal(after(5000, 5000), false);
  assert.equal(after(3_600_000, 5000), true); // its own clock stood still
  assert.equal(after(5000, 5000), false);
  assert.equal(after(3_600_000, 3_600_000), true); // its own clock went on
  assert.equal(after(-MINUTE, 5000), true); // the wall's was set
  isHidden = true;
  assert.equal(after(MINUTE, MINUTE), false); // throttled
  assert.equal(after(3_600_000, 5000), true);
});

test("a turn without output for a minute has stalled, once, and never because the page slept", async () => {
  const page = await new Page().open();
  page.stream.detach();
  page.stream = page.client.send("s", "hi");
  await page.settle();
  const stalled = () => page.stream.connection.isStalled;
  const waits = () => page.receive({ type: "heartbeat", event_id: "1-1", waiting_on: "model" });
  page.receive({ type: "ack", seqno: 0 });
  for (let beats = 1; beats <= 5; beats += 1) {
    page.clock.ms += 10_000;
    waits();
    page.clock.fire();
  }
  assert.equal(stalled(), false);
  page.clock.ms += 9000;
  waits();
  page.clock.ms += 1000;
  page.clock.fire();
  assert.equal(stalled(), true);
  page.receive({ type: "events", events: [{ id: "1-2", record: { type: "stream_opened", stream: page.stream.key } }] });
  assert.equal(stalled(), false);
  page.clock.ms += 8 * 60 * MINUTE;
  page.clock.fire();
  assert.equal(stalled(), false);
  assert.equal(page.lines.length, 2);
});

test("the server's reports of a silence do not end it", async () => {
  const page = await new Page().open();
  page.stream.detach();
  page.stream = page.client.send("s", "hi");
  await page.settle();
  const stalled = () => page.stream.connection.isStalled;
  const noticed = (number) => {
    const record = { type: "stall_noticed", turn: 1, response: 1, waiting_for: "first_token", silent_s: 30, at: 0 };
    page.receive({ type: "events", events: [{ id: `1-${number}`, record }] });
  };
  page.receive({ type: "ack", seqno: 0 });
  for (let beats = 1; beats <= 6; beats += 1) {
    page.clock.ms += 9500;
    page.receive({ type: "heartbeat", event_id: "1-1", waiting_on: "model" });
    if (beats === 3) noticed(2);
    page.clock.fire();
  }
  assert.equal(stalled(), false);
  page.clock.ms += 3000;
  page.clock.fire();
  assert.equal(stalled(), true);
  noticed(3);
  assert.equal(stalled(), true);
});

test("a command over plain HTTP carries the number of its connection, and a reader's carries none", async (context) => {
  for (const [opening, number] of [
    [{ type: "open", stream: "k", secret: "s", next_seqno: 0, connection: 16777218 }, "16777218"],
    [{ type: "open", event_id: "1-1" }, undefined],
  ]) {
    const asked = Promise.withResolvers?.() ?? withResolvers();
    context.mock.method(globalThis, "fetch", async (address, { headers }) => {
      if (address.endsWith("/commands")) asked.resolve(headers);
      const polled = { frames: [{ type: "welcome", resume_from: "1-1" }], more: address.endsWith("n=0") };
      return address.endsWith("/commands") ? new Response(null, { status: 204 }) : Response.json(polled);
    });
    const line = new HttpConnection("http://x/v1/sessions/s", "poll");
    line.send(JSON.stringify(opening));
    line.send(PING);
    assert.equal((await asked.promise)["x-idempotency-connection"], number);
    line.close();
  }
});

function withResolvers() {
  const deferred = {};
  deferred.promise = new Promise((resolve) => (deferred.resolve = resolve));
  return deferred;
}
