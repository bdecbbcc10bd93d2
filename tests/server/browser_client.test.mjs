/** The browser client without a browser: its pure core step by step, its shell against a small server in memory. */

import assert from "node:assert/strict";
import { test } from "node:test";

import { MidstreamError, connect, parseEventId, randomText } from "../../src/midstream/server/static/client/midstream.js";
import { LOOK_BACK_MS, MemoryStorage, sortInterrupted } from "../../src/midstream/server/static/client/storage.js";
import { restoreCommands } from "../../src/midstream/server/static/client/command_outbox.js";
import { refusalOf } from "../../src/midstream/server/static/client/connections.js";
import { backoffMs } from "../../src/midstream/server/static/client/link.js";
import { SharedConnection } from "../../src/midstream/server/static/client/shared.js";
import { Stream } from "../../src/midstream/server/static/client/stream.js";

const NOW = 1_000_000;

const welcome = (more = {}) =>
  JSON.stringify({
    type: "welcome",
    stream: "k",
    event_id: "1-1",
    resume_from: "1-1",
    acked: 0,
    turn: 0,
    ...more,
  });

const events = (...pairs) =>
  JSON.stringify({ type: "events", events: pairs.map(([id, record]) => ({ id, record })) });

const delta = (text) => ({ type: "delta", turn: 1, response: 1, attempt: 1, part: 0, kind: "text", text });
const accepted = (stream = "k") => ({
  type: "message_accepted",
  turn: 1,
  message: { parts: [] },
  at: 1,
  stream,
});
const ended = { type: "turn_ended", turn: 1, status: "completed", at: 2 };

/** A stream that sent "hi" and received a welcome. */
function openedStream(stored = {}, greeting = welcome()) {
  const stream = new Stream({ session: "s", key: "k", secret: "x", cursor: null, ...stored }, NOW);
  stream.send("hi", NOW);
  const written = stream.take().writes;
  open(stream);
  const opening = stream.take().frames;
  stream.receive(greeting, NOW);
  return { stream, written, opening };
}

function open(stream, now = NOW) {
  stream.tick(Math.max(now, stream.deadlineAt));
  stream.beginConnection(now);
}

function textsOf(taken) {
  return taken.events.map((event) => event.record?.text);
}

test("a command is stored before any frame carries it", () => {
  const { stream, written, opening } = openedStream();
  assert.deepEqual(written[0], { op: "secret", value: { key: "k", secret: "x" } });
  const command = written.find((write) => write.op === "command");
  assert.equal(
    command.value.frame,
    '{"type":"command","seqno":0,"payload":{"type":"send","parts":[{"type":"text","text":"hi"}]}}',
  );
  assert.deepEqual([JSON.parse(opening[0]).type, ...opening.slice(1)], ["open", command.value.frame]);
  assert.deepEqual(stream.take().frames, []);
  assert.equal(JSON.stringify(stream.record()).includes("secret"), false);
});

test("playback after a reconnect sends exactly the same strings, and only the unacknowledged ones", () => {
  const { stream } = openedStream();
  stream.abort(0, NOW);
  const [abort] = stream.take().frames;
  stream.receive('{"type":"ack","seqno":0}', NOW);
  stream.endConnection(0, NOW);
  open(stream);
  assert.deepEqual(stream.take().frames.slice(1), [abort]);
  stream.receive(welcome({ acked: 1 }), NOW);
  assert.deepEqual(stream.take().frames, []);
});

test("stopping twice is stopping once, also in the next life", () => {
  const { stream, written } = openedStream();
  stream.abort(0, NOW);
  stream.abort(0, NOW);
  const commands = [...written, ...stream.take().writes].filter(({ op }) => op === "command").map(({ value }) => value);
  assert.equal(commands.length, 2);
  const next = new Stream({ ...stream.record(), secret: "x", commands }, NOW);
  next.abort(0, NOW);
  assert.equal(next.nextSeqno, 2);
});

test("a command with a lost ack is dropped when the welcome counts it", () => {
  const { stream } = openedStream({}, welcome({ acked: 1, turn: 1, turn_status: "running", status: "running" }));
  const taken = stream.take();
  assert.deepEqual(taken.frames, []);
  assert.deepEqual(
    taken.writes.map((write) => write.op),
    ["acked", "stream"],
  );
  assert.equal(stream.isAcknowledged, true);
});

/** A stream with the start time of epoch 1, which has its message. */
function streamWithEpoch() {
  const { stream } = openedStream({}, welcome({ began_at: 10.5 }));
  const opened = { type: "stream_opened", stream: "k", secret_digest: "d" };
  const taken = { type: "command_accepted", stream: "k", seqno: 0, digest: "d" };
  stream.receive(events(["1-2", opened], ["1-3", taken], ["1-4", accepted()]), NOW);
  return stream;
}

test("the start of the newest epoch is stored, and another start reveals a rolled-back server", () => {
  const kept = streamWithEpoch().record();
  assert.deepEqual(kept.known, { epoch: 1, beganAt: 10.5 });
  for (const [began_at, code] of [
    [10.5, undefined],
    [null, undefined],
    [11, "events_lost"],
  ]) {
    const stream = new Stream({ ...kept, cursor: "1-4", secret: "x", commands: [] }, NOW);
    open(stream);
    stream.receive(welcome({ event_id: "1-9", resume_from: "1-4", acked: 1, turn: 1, began_at }), NOW);
    assert.equal(stream.error?.code, code);
    assert.equal(stream.isStored, true);
  }
});

test("another start of an epoch among the events reveals it too, and a server without a start time is trusted", () => {
  const epoch = (number, at) => ({ type: "epoch_started", epoch: number, owner: "x", at });
  const first = streamWithEpoch();
  first.receive(events(["2-5", epoch(2, 20)]), NOW);
  assert.deepEqual(first.record().known, { epoch: 2, beganAt: 20 });
  for (const [at, code] of [
    [20, undefined],
    [21, "events_lost"],
    [undefined, undefined],
  ]) {
    const stream = new Stream({ ...first.record(), cursor: "1-4", secret: "x", commands: [] }, NOW);
    open(stream);
    stream.receive(welcome({ event_id: "2-9", resume_from: "1-4", acked: 1, turn: 1, began_at: 10.5 }), NOW);
    stream.receive(events(["2-5", epoch(2, at)]), NOW);
    assert.equal(stream.error?.code, code);
    assert.deepEqual(stream.record().known, { epoch: 2, beganAt: 20 });
  }
});

test("acks are cumulative and may repeat", () => {
  const { stream } = openedStream();
  stream.abort(0, NOW);
  stream.receive('{"type":"ack","seqno":1}', NOW);
  stream.receive('{"type":"ack","seqno":0}', NOW);
  assert.equal(stream.isAcknowledged, true);
  assert.equal(stream.acked, 2);
});

test("acks of single commands make room for the next ones, and hide no command whose ack is due", () => {
  const { stream } = openedStream({}, welcome({ in_flight_max: 2 }));
  for (const number of [1, 2]) stream.withdraw(number, NOW);
  const sent = () => stream.take().frames.map((frame) => JSON.parse(frame).seqno);
  assert.deepEqual(sent(), [1]);
  stream.receive('{"type":"ack","seqno":1,"is_single":true}', NOW);
  assert.deepEqual(sent(), [2]);
  stream.receive('{"type":"ack","seqno":2}', NOW);
  stream.withdraw(3, NOW);
  assert.deepEqual(sent(), [3]);
  const isBroken = () => stream.receive('{"type":"heartbeat","event_id":"1-1"}', NOW);
  assert.deepEqual([isBroken(), isBroken(), isBroken()], [false, false, true]);
});

test("a new stream claims no commands, so that a server without it accepts it", () => {
  const { opening } = openedStream({ cursor: "1-7" });
  assert.deepEqual(JSON.parse(opening[0]), {
    type: "open",
    version: 1,
    event_id: "1-7",
    snapshots: "gone",
    stream: "k",
    secret: "x",
    next_seqno: 0,
    connection: 1,
  });
});

test("events are applied once, by id, however often they arrive", () => {
  const { stream } = openedStream();
  stream.take();
  stream.receive(events(["1-2", accepted()], ["1-3", delta("a")]), NOW);
  stream.receive(events(["1-2", accepted()], ["1-3", delta("a")], ["1-4", delta("b")]), NOW);
  assert.deepEqual(textsOf(stream.take()), [undefined, "a", "b"]);
  assert.equal(stream.cursor, "1-4");
});

test("a gap in the positions causes a reconnect, and nothing after the gap is applied", () => {
  const { stream } = openedStream();
  stream.take();
  assert.equal(stream.receive(events(["1-2", accepted()], ["1-4", delta("b")]), NOW), true);
  assert.equal(stream.take().events.length, 1);
  assert.equal(stream.cursor, "1-2");
});

test("an old position under a new epoch is no duplicate but another timeline", () => {
  const { stream } = openedStream();
  stream.receive(events(["1-2", accepted()]), NOW);
  assert.equal(stream.receive(events(["2-2", delta("x")]), NOW), true);
});

test("gone moves the cursor back with an event, and later events are applied from there", () => {
  const { stream } = openedStream(
    { cursor: "1-9" },
    welcome({ resume_from: "0-0", event_id: "2-2", turn_status: "completed", status: "completed", turn: 1, acked: 1 }),
  );
  assert.equal(stream.phase, "live");
  stream.receive('{"type":"gone","resume_from":"0-0","reason":"not on the line"}', NOW);
  stream.receive(events(["2-1", { type: "epoch_started", epoch: 2, at: 1 }]), NOW);
  const [gone, first] = stream.take().events;
  assert.deepEqual(gone, { type: "gone", id: "0-0", reason: "not on the line", hasSnapshot: false });
  assert.equal(first.id, "2-1");
});

test("a snapshot replaces all earlier events, and later ones are applied after it", () => {
  const { stream } = openedStream({ cursor: "1-2" }, welcome({ resume_from: "1-7", event_id: "1-9", acked: 1 }));
  stream.receive('{"type":"gone","resume_from":"1-7","reason":"not kept","oldest":8,"has_snapshot":true}', NOW);
  stream.receive('{"type":"snapshot","event_id":"1-7","session":{"turns":1}}', NOW);
  stream.receive(events(["1-8", delta("x")]), NOW);
  const [gone, snapshot, next] = stream.take().events;
  assert.equal(gone.hasSnapshot, true);
  assert.deepEqual(snapshot, { type: "snapshot", id: "1-7", session: { turns: 1 }, turn: null });
  assert.equal(next.id, "1-8");
  assert.equal(stream.phase, "live");
});

test("a snapshot without a session changes nothing and ends the connection", () => {
  for (const session of [undefined, null, 5]) {
    const { stream } = openedStream();
    stream.take();
    assert.equal(stream.receive(JSON.stringify({ type: "snapshot", event_id: "1-7", session }), NOW), true);
    assert.deepEqual(stream.take().events, []);
    assert.equal(stream.cursor, "1-1");
  }
});

test("an event that cannot be read ends its stream, and the stream is kept", async () => {
  const response = { type: "response_completed", turn: 1, response: 1, at: 1 };
  const unreadable = [events(["1-2", accepted("KEY")], ["1-3", response]), '{"type":"snapshot","event_id":"1-9","session":{"turns":1,"history":5}}'];
  for (const text of unreadable) {
    const server = new SmallServer();
    server.accept = (socket, { seqno }) => {
      server.sendFrame(socket, { type: "ack", seqno });
      server.sendFrame(socket, JSON.parse(text.replace("KEY", socket.stream)));
    };
    const storage = new MemoryStorage();
    const client = await connect({ url: "http://x", makeSocket: () => server.socket(), transport: "websocket", storage });
    await assert.rejects(client.ask("s", "hello"), { code: "record_undecodable" });
    assert.equal((await storage.load()).streams.length, 1);
  }
});

test("a stream whose turn had ended at the snapshot ends with it, and not before", () => {
  const { stream } = openedStream(
    { cursor: "1-2" },
    welcome({ resume_from: "1-9", event_id: "1-9", turn_status: "completed", status: "completed", turn: 1, acked: 1 }),
  );
  stream.receive('{"type":"gone","resume_from":"1-9","reason":"not kept","oldest":10,"has_snapshot":true}', NOW);
  assert.equal(stream.phase, "live");
  stream.receive('{"type":"snapshot","event_id":"1-9","session":{},"is_over":true}', NOW);
  assert.equal(stream.phase, "ended");
  stream.markHandled();
  assert.deepEqual(stream.take().writes.at(-1), { op: "delete", key: "k" });
});

test("the end of its own turn ends the stream, which is deleted when it was handled", () => {
  const { stream } = openedStream();
  stream.receive('{"type":"ack","seqno":0}', NOW);
  stream.take();
  stream.receive(events(["1-2", accepted()], ["1-3", ended], ["1-4", delta("of another turn")]), NOW);
  const taken = stream.take();
  assert.equal(stream.phase, "ended");
  assert.equal(stream.error, null);
  assert.deepEqual(
    taken.events.map((event) => event.id),
    ["1-2", "1-3"],
  );
  assert.deepEqual(taken.frames, ['{"type":"close"}']);
  assert.equal(
    taken.writes.some((write) => write.op === "delete"),
    false,
  );
  stream.markHandled();
  assert.deepEqual(stream.take().writes, [{ op: "delete", key: "k" }]);
});

test("a stream resumed after the end of its turn ends at once", () => {
  const kept = { session: "s", key: "k", secret: "x", cursor: "1-5", acked: 1, nextSeqno: 1, turn: 1 };
  const stream = new Stream(kept, NOW);
  open(stream);
  stream.receive(welcome({ acked: 1, turn: 1, turn_status: "completed", status: "completed", event_id: "1-5", resume_from: "1-5" }), NOW);
  assert.equal(stream.phase, "ended");
  assert.equal(stream.error, null);
});

test("a stream whose turn was over when it was resumed ends with the events of that moment, whatever runs now", () => {
  const kept = { session: "s", key: "k", secret: "x", cursor: "1-5", acked: 1, nextSeqno: 1, turn: 1 };
  const stream = new Stream(kept, NOW);
  open(stream);
  const now = { acked: 1, turn: 1, turn_status: "completed", status: "running", event_id: "1-6", resume_from: "1-5" };
  stream.receive(welcome(now), NOW);
  assert.equal(stream.phase, "live");
  stream.receive(events(["1-6", { ...delta("x"), turn: 2 }]), NOW);
  assert.equal(stream.phase, "ended");
});

test("another client's turn on the same session does not end the stream", () => {
  const { stream } = openedStream();
  stream.receive(events(["1-2", { ...ended, turn: 7 }]), NOW);
  assert.equal(stream.phase, "live");
});

test("permanent refusals end the stream with their code", () => {
  for (const code of ["session_busy", "unauthorized", "stream_fenced", "malformed_frame"]) {
    const { stream } = openedStream();
    stream.receive(
      JSON.stringify({
        type: "error",
        code,
        message: "no",
        retry: code === "session_busy" ? "later" : "never",
      }),
      NOW,
    );
    assert.equal(stream.phase, "ended");
    assert.equal(stream.error.code, code);
    const isDeleted = stream.take().writes.some((write) => write.op === "delete");
    assert.equal(isDeleted, !["stream_fenced", "unauthorized"].includes(code));
  }
});

test("a refused secret is not presented again, and another one is", () => {
  const refusal = { type: "error", code: "wrong_secret", message: "no", retry: "never" };
  const onALine = (stream) => stream.receive(JSON.stringify(refusal), NOW) && stream.endConnection(0, NOW);
  const overHttp = (stream) => stream.endConnection(0, NOW, { error: new MidstreamError("wrong_secret", "no") });
  for (const refused of [onALine, overHttp]) {
    const { stream } = openedStream();
    refused(stream);
    assert.deepEqual([stream.phase, stream.deadlineAt], ["waiting", NOW]);
    stream.showSecrets({ secret: "y" }, NOW);
    stream.take();
    open(stream);
    const { secret, old_secret } = JSON.parse(stream.take().frames[0]);
    assert.deepEqual([secret, old_secret], ["y", "x"]);
    refused(stream);
    stream.showSecrets({ secret: "y" }, NOW);
    assert.deepEqual([stream.phase, stream.error.code], ["ended", "wrong_secret"]);
    assert.deepEqual(stream.take().writes.at(-1), { op: "delete", key: "k" });
  }
});

test("a changed secret that is refused, too, ends the stream; a welcome in between makes the next refusal a first one", () => {
  for (const isAccepted of [false, true]) {
    const { stream } = openedStream();
    for (const secret of ["y", "z"]) {
      stream.endConnection(0, NOW, { error: new MidstreamError("wrong_secret", "no") });
      if (stream.phase === "ended") break;
      stream.showSecrets({ secret }, NOW);
      open(stream);
      if (isAccepted) stream.receive(welcome({ acked: 0 }), NOW);
    }
    assert.equal(stream.phase, isAccepted ? "live" : "ended");
    assert.equal(stream.error?.code, isAccepted ? undefined : "wrong_secret");
  }
});

test("a draining server is retried, and not before its delay", () => {
  const { stream } = openedStream();
  const refusal = { type: "error", code: "draining", message: "bye", retry: "later", retry_after_s: 3 };
  assert.equal(stream.receive(JSON.stringify(refusal), NOW), true);
  stream.endConnection(0.5, NOW);
  assert.equal(stream.phase, "waiting");
  assert.equal(stream.deadlineAt, NOW + 3000);
});

test("a stopped turn is followed for no longer than half a minute, once the server has the stop", () => {
  const { stream } = openedStream();
  stream.abort(0, NOW);
  const failAt = (now) => {
    open(stream, now);
    stream.endConnection(0, now);
  };
  for (const after of [0, 31_000]) failAt(NOW + after);
  assert.equal(stream.phase, "waiting"); // the stop has not arrived: it is sent until it has
  open(stream, NOW + 32_000);
  stream.receive(welcome({ acked: 2, turn: 1, turn_status: "running" }), NOW + 32_000);
  stream.endConnection(0, NOW + 33_000);
  for (const after of [33_000, 34_000, 36_000, 40_000, 48_000]) failAt(NOW + after);
  assert.deepEqual([stream.phase, stream.deadlineAt], ["waiting", NOW + 63_000]); // the last try, and not one at 64_000
  failAt(NOW + 63_000);
  assert.deepEqual([stream.phase, stream.error.code, stream.isStored], ["ended", "connection_lost", true]);
});

test("a stop waits for the next attempt only for the delay that the server requested", () => {
  for (const [askedMs, dueMs] of [
    [0, 0],
    [5000, 5000],
  ]) {
    const { stream } = openedStream();
    let now = NOW;
    for (let lost = 0; lost < 5; lost += 1) {
      stream.endConnection(0, now, { notBefore: now + askedMs });
      open(stream, now);
      now += 10_000;
    }
    stream.endConnection(0, now, { notBefore: now + askedMs });
    assert.equal(stream.deadlineAt, now + 16_000);
    stream.abort(0, now);
    assert.equal(stream.deadlineAt, now + dueMs);
  }
});

test("a degraded server is reported once and never retried", () => {
  const { stream } = openedStream({}, welcome({ is_degraded: true, reason: "memory only" }));
  assert.equal(
    stream.take().writes.some((write) => write.op === "delete"),
    true,
  );
  stream.abort(0, NOW);
  assert.deepEqual(stream.take().writes, []);
  stream.endConnection(0, NOW);
  assert.equal(stream.error.code, "connection_lost");
});

test("a server that lost acknowledged commands is a lost stream, not a silent new one", () => {
  const stream = new Stream(
    { session: "s", key: "k", secret: "x", cursor: "1-5", acked: 1, nextSeqno: 1, turn: 1 },
    NOW,
  );
  open(stream);
  stream.receive(welcome({ acked: 0, turn: 0, resume_from: "1-5" }), NOW);
  assert.equal(stream.error.code, "stream_not_found");
});

test("three silent heartbeats are a dead connection; a ping shortens the wait", () => {
  const { stream } = openedStream({}, welcome({ heartbeat_s: 2, acked: 1 }));
  assert.equal(stream.tick(NOW + 5999), false);
  assert.equal(stream.tick(NOW + 6000), true);
  stream.wake(NOW);
  assert.deepEqual(stream.take().frames.at(-1), '{"type":"ping"}');
  assert.equal(stream.tick(NOW + 5000), true);
  stream.receive('{"type":"heartbeat","event_id":"1-1"}', NOW + 4000);
  assert.equal(stream.tick(NOW + 5000), false);
});

test("a heartbeat that is ahead twice means a lost event", () => {
  const { stream } = openedStream();
  assert.equal(stream.receive('{"type":"heartbeat","event_id":"1-2"}', NOW), false);
  assert.equal(stream.receive('{"type":"heartbeat","event_id":"1-2"}', NOW), true);
});

test("the first reconnect is immediate, later ones wait up to 1, 2, 4 .. 30 s, progress starts over", () => {
  assert.deepEqual(
    [0, 1, 2, 3, 6, 99].map((failures) => backoffMs(failures, 0)),
    [0, 1000, 2000, 4000, 30000, 30000],
  );
  assert.equal(backoffMs(3, 0.75), 1000);
  const { stream } = openedStream();
  stream.endConnection(0, NOW);
  assert.equal(stream.deadlineAt, NOW);
  open(stream);
  stream.endConnection(0, NOW);
  assert.equal(stream.deadlineAt, NOW + 1000);
  stream.wake(NOW);
  assert.equal(stream.deadlineAt, NOW);
  open(stream);
  stream.receive(welcome(), NOW);
  stream.receive(events(["1-2", accepted()]), NOW);
  stream.endConnection(0, NOW);
  assert.equal(stream.deadlineAt, NOW);
});

test("no pause is longer than the outage, also after short random ones", () => {
  const { stream } = openedStream();
  let now = NOW;
  for (let failures = 0; failures < 6; failures += 1) {
    stream.endConnection(0.95, now); // all within a quarter of a second
    now = stream.deadlineAt;
    open(stream, now);
  }
  assert.ok(now < NOW + 300);
  stream.endConnection(0, now);
  assert.equal(stream.deadlineAt, now + 1000);
});

test("receive does not throw for any input", () => {
  const noise = [
    "",
    "{",
    "null",
    "[]",
    "7",
    '{"type":"events"}',
    '{"type":"events","events":[{}]}',
    '{"type":"new"}',
    '{"type":"events","events":[{"id":"1-2"}]}',
    '{"type":"welcome"}',
    '{"type":"gone"}',
    '{"type":"heartbeat"}',
  ];
  for (const text of noise) openedStream().stream.receive(text, NOW);
  assert.throws(() => parseEventId("3"));
  assert.deepEqual(parseEventId("0"), parseEventId("0-0"));
});

test("a message larger than a frame is refused without any change", () => {
  const stream = new Stream({ session: "s", key: "k" }, NOW);
  assert.throws(() => stream.send("é".repeat(600_000), NOW), { code: "frame_too_large" });
  assert.equal(stream.isAcknowledged, true);
  assert.deepEqual(stream.take().writes, []);
});

test("a stream beyond the look-back, or an incomplete one, is deleted", () => {
  const fresh = { key: "a", acked: 1, nextSeqno: 1, touchedAt: NOW };
  const old = { ...fresh, key: "b", touchedAt: NOW - LOOK_BACK_MS - 1 };
  const empty = { ...fresh, key: "c", acked: 0, nextSeqno: 0 };
  const command = { key: "d", seqno: 0, frame: "{}" };
  const streams = [fresh, old, empty];
  const secrets = ["a", "b", "c", "f"].map((key) => ({ key, secret: "x" }));
  const { interrupted, orphans } = sortInterrupted({ streams, secrets, commands: [command] }, NOW);
  assert.deepEqual(
    interrupted.map((stream) => stream.key),
    ["a"],
  );
  assert.deepEqual(orphans.sort(), ["b", "c", "d", "f"]);
});

// --- the shell against a server in memory -----------------------------------------------------------------------

/** A correct server of one session, whose sockets can be cut at any message. */
class SmallServer {
  journal = [{ type: "epoch_started", epoch: 1, at: 0 }];
  received = [];
  streams = new Map();
  sockets = new Set();
  cutAfter = () => Infinity;
  words = [..."the quick brown fox jumps over the lazy dog"];

  socket() {
    const server = this;
    const socket = {
      budget: server.cutAfter(),
      send: (text) => queueMicrotask(() => server.sockets.has(socket) && server.take(socket, text)),
      close: () => server.sockets.delete(socket),
    };
    this.sockets.add(socket);
    setImmediate(() => socket.onopen?.());
    return socket;
  }

  take(socket, text) {
    const frame = JSON.parse(text);
    if (frame.type === "open") this.welcome(socket, frame);
    if (frame.type === "close") this.sockets.delete(socket);
    if (frame.type === "command") this.accept(socket, frame, text);
  }

  welcome(socket, { stream, event_id }) {
    const known = this.streams.get(stream);
    socket.stream = stream;
    socket.at = event_id ? parseEventId(event_id).position : (known?.since ?? this.journal.length);
    const isIdle = this.journal.at(-1).type === "turn_ended" || this.journal.length === 1;
    this.sendFrame(socket, {
      type: "welcome",
      stream: stream ?? "",
      event_id: `1-${this.journal.length}`,
      resume_from: `1-${socket.at}`,
      acked: known ? 1 : 0,
      turn: known ? 1 : 0,
      turn_status: known ? (isIdle ? "completed" : "running") : "",
      status: isIdle ? "completed" : "running",
    });
    this.publish();
  }

  accept(socket, frame, text) {
    this.received.push(text);
    if (!this.streams.has(socket.stream)) {
      this.streams.set(socket.stream, { since: this.journal.length });
      this.journal.push({
        type: "message_accepted",
        turn: 1,
        message: { parts: [] },
        at: 1,
        stream: socket.stream,
      });
      this.streamWord();
    }
    this.sendFrame(socket, { type: "ack", seqno: frame.seqno });
    this.publish();
  }

  streamWord() {
    const word = this.words.shift();
    this.journal.push(
      word === undefined ? { type: "turn_ended", turn: 1, status: "completed", at: 2 } : delta(word),
    );
    if (word !== undefined) setImmediate(() => this.streamWord());
    this.publish();
  }

  publish() {
    for (const socket of this.sockets) {
      while (socket.at !== undefined && socket.at < this.journal.length && this.sockets.has(socket)) {
        const event = { id: `1-${socket.at + 1}`, record: this.journal[socket.at] };
        socket.at += 1;
        this.sendFrame(socket, { type: "events", events: [event] });
      }
    }
  }

  sendFrame(socket, frame) {
    if (!this.sockets.has(socket)) return;
    if (socket.budget-- <= 0) {
      this.sockets.delete(socket);
      queueMicrotask(() => socket.onclose?.());
      return;
    }
    const text = JSON.stringify(frame);
    queueMicrotask(() => socket.onmessage?.({ data: text }));
  }
}

function clientOf(server, more = {}) {
  return connect({ url: "http://x", makeSocket: () => server.socket(), chance: () => 0.9999, ...more });
}

function seeded(seed) {
  let state = seed;
  return () => (state = (state * 1103515245 + 12345) % 2147483648) / 2147483648;
}

test("a turn arrives complete and once, wherever the connection is cut", async () => {
  for (let seed = 1; seed <= 60; seed += 1) {
    const chance = seeded(seed);
    const server = new SmallServer();
    const storage = new MemoryStorage();
    server.cutAfter = () => Math.floor(chance() * 9);
    const client = await clientOf(server, { storage });
    const ids = [];
    for await (const event of client.send("s", "hello")) ids.push(event.id);
    const all = server.journal.slice(1).map((_, index) => `1-${index + 2}`);
    assert.equal(server.journal.at(-1).type, "turn_ended", `seed ${seed}`);
    assert.deepEqual(ids, all, `seed ${seed}`);
    assert.equal(new Set(server.received).size, 1, `seed ${seed}: one string, however often it was sent`);
    assert.deepEqual(await storage.load(), { streams: [], secrets: [], commands: [] });
  }
});

test("nothing is sent before it is stored", async () => {
  const server = new SmallServer();
  const storage = new MemoryStorage();
  const order = [];
  const apply = storage.apply.bind(storage);
  storage.apply = async (writes) => {
    await new Promise(setImmediate);
    await apply(writes);
    order.push(...writes.map((write) => write.op));
  };
  const accept = server.accept.bind(server);
  server.accept = (socket, frame, text) => {
    order.push("received");
    accept(socket, frame, text);
  };
  const client = await clientOf(server, { storage });
  const stream = client.send("s", "hello");
  await stream.accepted;
  assert.deepEqual(order.slice(0, 4), ["command", "stream", "secret", "received"]);
  client.close();
});

test("a message that was stored but never sent is sent by the next page", async () => {
  const storage = new MemoryStorage();
  const dead = { makeSocket: () => ({ close() {}, send() {} }) };
  const first = await connect({ url: "http://x", storage, ...dead });
  first.send("s", "hello");
  await new Promise(setImmediate);
  first.close();

  const server = new SmallServer();
  const second = await clientOf(server, { storage });
  assert.equal((await second.findUnsent("s")).text, "hello");
  assert.equal((await second.findUnsent("s")).stream, null);
  assert.equal(await second.findUnsent("t"), null);
  const [stream, ...others] = await second.resumeInterrupted({ session: "s" });
  assert.equal((await second.findUnsent("s")).stream, stream);
  assert.deepEqual(others, []);
  assert.equal(stream.pendingText, "hello");
  const texts = [];
  for await (const { record } of stream) if (record.type === "delta") texts.push(record.text);
  assert.equal(texts.join(""), "the quick brown fox jumps over the lazy dog");
  assert.equal(await second.findUnsent("s"), null);
});

test("the page after a reload continues after the last event it had shown", async () => {
  const server = new SmallServer();
  const storage = new MemoryStorage();
  const first = await clientOf(server, { storage });
  const seen = [];
  for await (const event of first.send("s", "hello")) {
    seen.push(event.id);
    if (seen.length === 10) {
      // The browser dies while the tenth event is being shown.
      await new Promise(setImmediate);
      first.close();
      break;
    }
  }
  const second = await clientOf(server, { storage });
  const [stream] = await second.resumeInterrupted();
  const next = [];
  for await (const event of stream) next.push(event.id);
  const all = server.journal.slice(1).map((_, index) => `1-${index + 2}`);
  assert.equal(
    next[0],
    seen.at(-1),
    "the event that was being shown comes again: the page may not have shown it",
  );
  assert.deepEqual(next, all.slice(9));
});

test("leaving the loop detaches: the message still arrives and nothing is stored", async () => {
  const server = new SmallServer();
  const storage = new MemoryStorage();
  const client = await clientOf(server, { storage });
  const stream = client.send("s", "hello");
  stream.abandon();
  await stream.accepted;
  assert.equal(await stream.ended, null);
  assert.equal(server.received.length, 1);
  assert.deepEqual(await storage.load(), { streams: [], secrets: [], commands: [] });
});

test("a failing storage ends the stream before anything is sent", async () => {
  const server = new SmallServer();
  const storage = {
    isDurable: true,
    apply: () => Promise.reject(new Error("quota")),
    load: async () => ({}),
  };
  const client = await clientOf(server, { storage });
  const stream = client.send("s", "hello");
  await assert.rejects(stream.accepted, { code: "storage" });
  assert.deepEqual(server.received, []);
});

test("a cut is reported, waits for the requested delay, and the stream continues", async () => {
  const server = new SmallServer();
  const phases = [];
  const client = await clientOf(server, {
    onstate: ({ phase }) => phases.at(-1) === phase || phases.push(phase),
  });
  const texts = [];
  for await (const { record } of client.send("s", "hello")) {
    if (record.type === "delta") texts.push(record.text);
    if (texts.length === 5) client.cut(20);
  }
  assert.equal(texts.join(""), "the quick brown fox jumps over the lazy dog");
  assert.deepEqual(phases, ["connecting", "live", "waiting", "connecting", "live", "ended"]);
});

test("a follower receives the events of other clients, and stops when its loop is left", async () => {
  const server = new SmallServer();
  const client = await clientOf(server);
  const follower = client.follow("s", "1-1");
  const speaker = client.send("s", "hello");
  const types = [];
  for await (const { record } of follower) {
    types.push(record.type);
    if (record.type === "turn_ended") break;
  }
  assert.equal(types.length, server.journal.length - 1);
  assert.equal(await follower.ended, null);
  speaker.detach();
});

test("a slow reader holds its position and no memory: the rest is requested later", async () => {
  const server = new SmallServer();
  for (let number = 0; number < 20_000; number += 1) server.journal.push(delta(`${number} `));
  server.sendFrame = (socket, frame) => setImmediate(() => socket.onmessage?.({ data: JSON.stringify(frame) }));
  let sockets = 0;
  const makeSocket = () => {
    sockets += 1;
    return server.socket();
  };
  const client = await clientOf(server, { makeSocket });
  const ids = [];
  for await (const event of client.follow("s", "1-1")) {
    if (ids.length === 0) for (let turns = 0; turns < 10; turns += 1) await new Promise(setImmediate);
    ids.push(parseEventId(event.id).position);
    if (ids.length === 20_000) break;
  }
  assert.deepEqual(
    ids,
    Array.from({ length: 20_000 }, (_, index) => index + 2),
  );
  assert.equal(sockets > 1, true);
});

test("a message that is too large for the server or a proxy is sent once", async () => {
  const server = new SmallServer();
  let sent = 0;
  server.accept = (socket) => {
    sent += 1;
    server.sockets.delete(socket);
    socket.onclose({ code: 1009 });
  };
  const client = await clientOf(server, { storage: new MemoryStorage() });
  await assert.rejects(client.ask("s", "hello"), { code: "frame_too_large", retry: "never" });
  assert.equal(sent, 1);
  client.close();
});

test("a server has one address, and an invalid one is refused at once", async () => {
  const addressed = { "https://host/agents/": "wss://host/agents", "ws://host:1": "ws://host:1", "HTTP://host/?x#y": "ws://host" };
  for (const [url, base] of Object.entries(addressed)) {
    const made = [];
    const makeSocket = (address) => (made.push(address), { close() {}, send() {} });
    const client = await connect({ url, makeSocket, storage: new MemoryStorage() });
    await client.follow("s").settled;
    assert.deepEqual(made, [`${base}/v1/sessions/s/stream`]);
    client.close();
  }
  for (const url of ["localhost:8000", "ftp://host", "/agents", "http://", "http://host:99999"])
    await assert.rejects(connect({ url, storage: new MemoryStorage() }), { code: "usage" });
});

test("keys and secrets are random and long enough", () => {
  assert.equal(Buffer.from(randomText(32), "base64url").length, 32);
  assert.notEqual(randomText(16), randomText(16));
});

// --- questions --------------------------------------------------------------------------------------------------

function payloadOf(first) {
  const stream = new Stream({ session: "s", key: "k", secret: "x", cursor: null }, NOW);
  first(stream);
  return JSON.parse(stream.take().writes.find(({ op }) => op === "command").value.frame).payload;
}

test("answers, resumes and withdrawals have their form on the wire", () => {
  const answer = { turn: 1, response: 2, call_id: "c", digest: "d", choice: "allow", arguments: "{}" };
  assert.deepEqual(payloadOf((stream) => stream.answer(answer, NOW)), { type: "answer", ...answer });
  assert.deepEqual(payloadOf((stream) => stream.resume(0, NOW)), { type: "resume" });
  assert.deepEqual(payloadOf((stream) => stream.resume(4, NOW)), { type: "resume", turn: 4 });
  assert.deepEqual(payloadOf((stream) => stream.withdraw(0, NOW)), { type: "withdraw" });
  assert.deepEqual(payloadOf((stream) => stream.withdraw(2, NOW)), { type: "withdraw", number: 2 });
  assert.equal(payloadOf((stream) => stream.send("hi", NOW, "refuse")).when_busy, "refuse");
});

test("an answer names the call of its question, and no other", async () => {
  const server = new SmallServer();
  const client = await clientOf(server);
  const question = { type: "question_asked", turn: 1, response: 1, call_id: "c", digest: "d", kind: "approval", at: 1 };
  await client.answer("s", question, "deny", { text: "too much" });
  assert.deepEqual(JSON.parse(server.received[0]).payload, {
    type: "answer",
    turn: 1,
    response: 1,
    call_id: "c",
    digest: "d",
    choice: "deny",
    text: "too much",
  });
  client.close();
});

test("a refused answer rejects with the server's code", async () => {
  const server = new SmallServer();
  server.accept = (socket, frame) =>
    server.sendFrame(socket, { type: "error", code: "question_closed", message: "late", seqno: frame.seqno });
  const client = await clientOf(server);
  const answering = client.answer("s", { turn: 1, response: 1, call_id: "c", digest: "d" }, "allow");
  await assert.rejects(answering, (error) => error.code === "question_closed");
  client.close();
});

test("the stream of a queued message lives until its own turn has ended", () => {
  const { stream } = openedStream();
  const queued = { type: "message_queued", number: 1, message: { parts: [] }, at: 1, stream: "k" };
  stream.receive(events(["1-2", queued], ["1-3", ended], ["1-4", { ...accepted(), turn: 2 }]), NOW);
  assert.deepEqual([stream.phase, stream.turn], ["live", 2]);
  stream.receive(events(["1-5", { ...ended, turn: 2 }]), NOW);
  assert.deepEqual([stream.phase, stream.error], ["ended", null]);
});

test("a stop reaches the turn of another client past a queued message of one's own", async () => {
  class Queueing extends SmallServer {
    commands = [];
    accept(socket, { seqno, payload }) {
      this.commands.push([socket.stream, payload.type]);
      this.streams.set(socket.stream, { since: this.journal.length });
      const queued = { type: "message_queued", number: 1, message: { parts: [] }, at: 1, stream: socket.stream };
      if (payload.type === "send") this.journal.push(queued);
      this.sendFrame(socket, { type: "ack", seqno });
      this.publish();
    }
  }
  const server = new Queueing();
  const client = await clientOf(server);
  const mine = client.send("s", "and then")[Symbol.asyncIterator]();
  await mine.next();
  await client.cancel("s");
  const [[sendStream, first], [stopStream, second], ...more] = server.commands;
  assert.deepEqual([first, second, more], ["send", "cancel", []]);
  assert.notEqual(sendStream, stopStream);
  client.close();
});

test("a withdrawn message ends its stream, and another one does not", () => {
  const { stream } = openedStream();
  const withdrawn = { type: "message_withdrawn", number: 1, at: 1 };
  stream.receive(events(["1-2", { ...withdrawn, stream: "other" }]), NOW);
  assert.equal(stream.phase, "live");
  stream.receive(events(["1-3", { ...withdrawn, stream: "k" }]), NOW);
  assert.deepEqual([stream.phase, stream.error], ["ended", null]);
});

test("a stream that resumes a turn follows that turn", () => {
  const stream = new Stream({ session: "s", key: "k", secret: "x", cursor: "1-1" }, NOW);
  stream.resume(0, NOW);
  open(stream);
  stream.receive(welcome(), NOW);
  stream.receive(events(["1-2", { type: "turn_resumed", turn: 7, response: 2, at: 1, stream: "k" }]), NOW);
  assert.equal(stream.turn, 7);
  stream.receive(events(["1-3", { ...ended, turn: 7 }]), NOW);
  assert.equal(stream.phase, "ended");
});

test("a tab that is due a snapshot keeps its own connection until the snapshot has arrived", async () => {
  const held = Object.getOwnPropertyDescriptor(globalThis, "navigator");
  const locks = { request: () => new Promise(() => {}) }; // another tab leads
  Object.defineProperty(globalThis, "navigator", { value: { locks }, configurable: true });
  const leader = new BroadcastChannel("midstream ws://x/shared");
  try {
    const socket = { send() {}, isClosed: false, close() { this.isClosed = true; } };
    const shared = new SharedConnection("ws://x/shared", () => socket);
    shared.send('{"type":"open","event_id":"1-2","snapshots":"gone"}');
    const probe = new BroadcastChannel("midstream ws://x/shared");
    const received = new Promise((resolve) => (probe.onmessage = resolve));
    leader.postMessage({ at: 7 });
    await received;
    probe.close();
    const receive = (frame) => socket.onmessage({ data: JSON.stringify(frame) });
    receive({ type: "welcome", resume_from: "1-7", event_id: "1-7" });
    receive({ type: "gone", resume_from: "1-7", has_snapshot: true });
    assert.equal(socket.isClosed, false);
    receive({ type: "snapshot", event_id: "1-7", session: {} });
    assert.equal(socket.isClosed, true);
    shared.close();
  } finally {
    leader.close();
    Object.defineProperty(globalThis, "navigator", held ?? { value: undefined, configurable: true });
  }
});

test("a response of a foreign program is judged by its status, and a server's own by its code", async () => {
  const ours = (code, more) => JSON.stringify({ type: `urn:midstream:error:${code}`, code, ...more });
  const foreign = '{"code":"UNAVAILABLE","detail":"no healthy upstream"}';
  const cases = [
    [503, ours("draining", { retry: "later", retry_after_s: 2 }), "draining", "later", 2],
    [500, ours("internal", { retry: "later" }), "internal", "later", null],
    [503, foreign, "connection_lost", "later", 7],
    [521, "web server is down", "connection_lost", "later", 7],
    [501, "", "protocol", "never", null],
    [404, foreign, "not_found", "never", null],
  ];
  for (const [status, body, ...expected] of cases) {
    const { code, retry, retryAfterS } = await refusalOf(new Response(body, { status, headers: { "retry-after": "7" } }));
    assert.deepEqual([code, retry, retryAfterS], expected);
  }
});

test("an error page in the place of a known server is retried, and for an unknown server it is reported", async () => {
  const missing = await refusalOf(new Response("404 page not found", { status: 404 }));
  const stranger = new Stream({ session: "s", key: "k", secret: "x", cursor: null }, NOW);
  open(stranger);
  stranger.endConnection(0, NOW, { error: missing });
  assert.deepEqual([stranger.phase, stranger.error.code], ["ended", "not_found"]);
  const kept = new Stream({ session: "s", key: "k", secret: "x", cursor: "1-1", life: 0 }, NOW);
  for (const stream of [openedStream().stream, kept]) {
    open(stream);
    stream.endConnection(0, NOW, { error: missing });
    assert.deepEqual([stream.phase, stream.trouble.code], ["waiting", "not_found"]);
    open(stream);
    stream.endConnection(0, NOW, { error: await refusalOf(new Response("", { status: 403 })) });
    assert.deepEqual([stream.phase, stream.error.code], ["ended", "access"]);
  }
});

test("an error page in the place of a server that this client has reached is retried, for its next stream too", async () => {
  const server = new SmallServer();
  const missing = await refusalOf(new Response("404 page not found", { status: 404 }));
  let pages = 0;
  const makeSocket = () => {
    if (pages === 0) return server.socket();
    pages -= 1;
    const socket = { close() {}, send() {} };
    queueMicrotask(() => socket.onclose?.({ error: missing }));
    return socket;
  };
  const client = await connect({ url: "http://x", makeSocket, transport: "websocket", storage: new MemoryStorage() });
  for await (const event of client.send("s", "hello")) assert.ok(event);
  pages = 1;
  const reader = client.follow("s", "0-0");
  for await (const event of reader) if (event.record.type === "turn_ended") break;
  assert.equal(pages, 0);
  client.close();
});

// --- bugs of the server -----------------------------------------------------------------------------------------

test("a bug of the server ends the stream at once, over each transport, and the stream is kept", () => {
  const frame = { type: "error", code: "internal", message: "a bug", retry: "never" };
  for (const meet of [
    (stream) => stream.receive(JSON.stringify(frame), NOW),
    (stream) => stream.endConnection(0, NOW, { error: new MidstreamError("internal", "a bug", "never") }),
  ]) {
    const { stream } = openedStream();
    meet(stream);
    assert.deepEqual([stream.phase, stream.error.code, stream.error.message], ["ended", "internal", "a bug"]);
    assert.equal(stream.isStored, true);
  }
});

test("a stall budget below the heartbeat interval is kept: the reason of the wait is requested", () => {
  for (const [waiting_on, isStalled] of [["tool", true], ["person", false]]) {
    const kept = { session: "s", key: "k", secret: "x", cursor: null };
    const stream = new Stream(kept, NOW, { stallAfterMs: 3000 });
    stream.send("hi", NOW);
    open(stream);
    stream.receive(welcome(), NOW);
    stream.take();
    assert.equal(stream.dueAt, NOW + 3000);
    stream.tick(NOW + 3000);
    stream.tick(NOW + 3001);
    assert.deepEqual(stream.take().frames, ['{"type":"ping"}']);
    assert.equal(stream.isStalled, false);
    stream.receive(JSON.stringify({ type: "heartbeat", event_id: "1-1", waiting_on }), NOW + 3100);
    assert.equal(stream.isStalled, isStalled);
  }
});

test("a lost command costs only its content: an outcome of no call takes its number, unless the server has the command", () => {
  const kept = { session: "s", key: "k", secret: "x", cursor: "1-3", life: 0, turn: 1, acked: 1, nextSeqno: 3 };
  const abort = { seqno: 2, frame: '{"type":"command","seqno":2,"payload":{"type":"cancel"}}' };
  for (const lost of [[], [{ seqno: 1, frame: "{" }]]) {
    for (const [acked, sent] of [[1, [1, 2]], [2, [2]], [3, []]]) {
      const whole = restoreCommands({ ...kept, commands: [...lost, abort] });
      assert.equal(whole.damage, "");
      const stream = new Stream(whole, NOW);
      stream.take();
      open(stream);
      assert.equal(stream.take().frames.length, 1, "the open alone");
      const now = { event_id: "1-3", resume_from: "1-3", acked, turn: 1, turn_status: "running", status: "running" };
      stream.receive(welcome(now), NOW);
      const frames = stream.take().frames.map((frame) => JSON.parse(frame));
      assert.deepEqual(frames.map(({ seqno }) => seqno), sent);
      if (acked === 1) assert.deepEqual(frames[0].payload.turn, 0);
      assert.equal(stream.phase, "live");
    }
  }
  assert.match(restoreCommands({ ...kept, cursor: null, acked: 0, nextSeqno: 1, commands: [] }).damage, /^command 0 is missing/);
});
