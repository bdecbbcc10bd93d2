/** What the page shows is a fold of records; these are its rules. */

import assert from "node:assert/strict";
import { test } from "node:test";

import { Transcript } from "../../src/midstream/server/static/transcript.js";

const said = { type: "message_accepted", turn: 1, message: { parts: [{ type: "text", text: "hi" }] }, at: 1 };
const asked = (attempt, reply = 1) => ({ type: "attempt_started", turn: 1, reply, attempt, at: attempt });
const delta = (text, attempt = 1, kind = "text", part = 0) => ({
  type: "delta",
  turn: 1,
  reply: 1,
  attempt,
  part,
  kind,
  text,
});
const call = { type: "call", id: "c1", name: "look", arguments: '{"at":1}' };
const replied = (...parts) => ({
  type: "reply_completed",
  turn: 1,
  reply: 1,
  attempt: 1,
  body: { parts },
  at: 5,
});

function told(...records) {
  const transcript = new Transcript("1-1");
  records.forEach((record, index) => transcript.apply({ id: `1-${index + 2}`, record }));
  return transcript;
}

const replyOf = (transcript) => transcript.turns.get(1).replies.get(1);
const textOf = (transcript) =>
  replyOf(transcript)
    .parts.map((part) => part.text)
    .join("");

test("words gather in their parts", () => {
  const transcript = told(
    said,
    asked(1),
    delta("so", 1, "thinking"),
    delta("He", 1, "text", 1),
    delta("llo", 1, "text", 1),
  );
  assert.deepEqual(replyOf(transcript).parts, [
    { kind: "thinking", text: "so" },
    { kind: "text", text: "Hello" },
  ]);
  assert.equal(transcript.running.number, 1);
});

test("an event that was applied before changes nothing", () => {
  const transcript = told(said, asked(1), delta("a"));
  assert.equal(transcript.apply({ id: "1-4", record: delta("a") }), null);
  assert.equal(textOf(transcript), "a");
});

test("another attempt voids what the earlier one said, and says that it did", () => {
  const transcript = told(said, asked(1), delta("half of a sen"), asked(2), delta("The whole", 2));
  assert.equal(textOf(transcript), "The whole");
  assert.equal(replyOf(transcript).voided, 1);
  assert.deepEqual(
    transcript.turns.get(1).marks.map((mark) => mark.kind),
    ["repeat"],
  );
});

test("an attempt that goes on keeps its words and is asked for again", () => {
  const failed = { type: "attempt_failed", turn: 1, reply: 1, attempt: 1, code: "model_cut", message: "cut", at: 2 };
  const goesOn = { type: "attempt_continued", turn: 1, reply: 1, attempt: 1, number: 1, at: 3, not_before: 4 };
  const silence = { type: "stall_noticed", turn: 1, reply: 1, waiting_for: "between_tokens", silent_s: 15, at: 3 };
  const transcript = told(said, asked(1), delta("Half a "), failed, goesOn, silence, delta("word"));
  assert.equal(textOf(transcript), "Half a word");
  const reply = replyOf(transcript);
  assert.deepEqual([reply.failure, reply.voided, reply.notBefore], [null, 0, 4]);
});

test("a late word of a void attempt is not shown", () => {
  assert.equal(textOf(told(said, asked(1), asked(2), delta("late", 1), delta("new", 2))), "new");
});

test("a whole reply replaces what was streamed, and its calls are planned", () => {
  const transcript = told(said, asked(1), delta("Loo"), replied({ type: "text", text: "Look:" }, call));
  assert.equal(textOf(transcript), "Look:");
  assert.equal(replyOf(transcript).calls.get("c1").state, "planned");
});

test("a call goes planned, running, and ends as its result says", () => {
  for (const outcome of [undefined, "error", "unknown", "cancelled"]) {
    const transcript = told(said, asked(1), replied(call), {
      type: "call_started",
      turn: 1,
      reply: 1,
      call_id: "c1",
      run: 1,
      at: 6,
    });
    assert.equal(replyOf(transcript).calls.get("c1").state, "running");
    const result = { call_id: "c1", content: "42", ...(outcome && { outcome }) };
    transcript.applyRecord({ type: "call_ended", turn: 1, reply: 1, result, at: 7 });
    const { state, content } = replyOf(transcript).calls.get("c1");
    assert.deepEqual([state, content], [outcome ?? "ok", "42"]);
  }
});

test("the end of a turn has its status, and a new owner in the middle leaves a mark", () => {
  const transcript = told(said, asked(1), { type: "epoch_started", epoch: 2, at: 3 }, asked(2));
  assert.deepEqual(
    transcript.turns.get(1).marks.map((mark) => mark.kind),
    ["owner", "repeat"],
  );
  transcript.applyRecord({
    type: "turn_ended",
    turn: 1,
    status: "failed",
    code: "model_rejected",
    message: "no",
    at: 9,
  });
  assert.equal(transcript.running, null);
  assert.deepEqual(
    [transcript.turns.get(1).status, transcript.turns.get(1).code],
    ["failed", "model_rejected"],
  );
});

test("a record of a kind this page does not know is passed over", () => {
  assert.equal(told(said, { type: "moon_rose", turn: 1 }, { type: "tide" }).cursor, "1-4");
});
