/**
 * The client for `midstream conformance --client`: requests and answers are JSON lines on stdin and stdout.
 *
 *     midstream conformance --transport websocket --client "node --experimental-websocket subject.mjs"
 */
import { createInterface } from "node:readline";

import { Checkpoint } from "./checkpoint.mjs";
import { Stream } from "./stream.mjs";

/** A clock that advances on request to the next timer. */
const clock = {
  time: 0,
  timers: new Map(),
  now: () => clock.time,
  set(act, ms) {
    const timer = Symbol("timer");
    clock.timers.set(timer, { act, at: clock.time + ms });
    if (ms === 0) setImmediate(() => clock.fire(timer));
    return timer;
  },
  clear: (timer) => clock.timers.delete(timer),
  fire(timer) {
    const { act } = clock.timers.get(timer) ?? {};
    clock.timers.delete(timer);
    act?.();
  },
  advance() {
    const [timer, next] = [...clock.timers].sort(([, one], [, other]) => one.at - other.at)[0] ?? [];
    if (next === undefined) return;
    clock.time = Math.max(clock.time, next.at);
    clock.fire(timer);
  },
};

/** The numbers of frames received in this process, and sent on the newest connection. */
const frames = { frames_received: 0, frames_sent: 0 };
globalThis.WebSocket = class extends WebSocket {
  constructor(address) {
    super(address);
    frames.frames_sent = 0;
    this.addEventListener("message", () => (frames.frames_received += 1));
  }
  send(text) {
    frames.frames_sent += 1;
    super.send(text);
  }
};

const events = [];
let stream;
let setup;

function run(kept) {
  const onevents = (received) => events.push(...received.map(({ id, gone }) => (gone ? "gone" : id)));
  stream = new Stream(setup.url, setup.checkpoint, kept, { onevents, clock, chance: () => 0.5 });
}

const methods = {
  begin({ url, session, folder }) {
    setup = { url, session, checkpoint: new Checkpoint(folder) };
  },
  resume(request) {
    methods.begin(request);
    run(setup.checkpoint.load());
  },
  submit({ payload }) {
    if (payload.type === "cancel") stream.cancel();
    else run(setup.checkpoint.begin(setup.session, payload));
  },
  detach: () => stream.detach(),
  mark_handled: ({ event_id }) => stream.handled(event_id),
  advance_clock: () => clock.advance(),
  async read_state() {
    await new Promise(setImmediate);
    const { phase, code, failures, isDegraded, checkpoint, kept } = stream;
    return {
      phase: phase === "opening" ? "connecting" : phase,
      code,
      delivered: events,
      is_acknowledged: kept.acked === kept.next_seqno,
      is_reconnecting: failures > 0 && phase !== "live" && phase !== "ended",
      is_degraded: isDegraded,
      has_checkpoint: checkpoint.isThere,
      ...frames,
    };
  },
};

for await (const line of createInterface({ input: process.stdin })) {
  const request = JSON.parse(line);
  console.log(JSON.stringify((await methods[request.method](request)) ?? {}));
}
process.exit();
