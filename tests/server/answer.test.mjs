/** The answer after each event: each word once; only text that differs is replaced. */

import assert from "node:assert/strict";
import { test } from "node:test";

import { AnswerText, completedText } from "../../src/midstream/server/static/client/answer.js";

const begun = { type: "message_accepted", turn: 1 };
const attempt = (number, response = 1) => ({ type: "attempt_started", turn: 1, response, attempt: number });
const delta = (text, more = {}) => ({ type: "delta", turn: 1, response: 1, kind: "text", text, ...more });
const textPart = (text) => ({ type: "text", text });
const whole = (...parts) => ({ type: "response_completed", turn: 1, response: 1, body: { parts } });
const ended = (status = "completed", more = {}) => ({ type: "turn_ended", turn: 1, status, ...more });
const event = (record) => ({ type: "record", id: "1-1", record });

/** Fold records; return each [text, replaces, transcript], after a check against a simple reader. */
function answersOf(...records) {
  const answer = new AnswerText();
  let shown = "";
  return records.map((record) => {
    const { text, replaces, transcript } = answer.take(record.id ? record : event(record));
    if (record.type === "message_accepted") shown = "";
    shown = replaces ? transcript : shown + text;
    assert.equal(shown, transcript);
    return [text, replaces, transcript];
  });
}

const lastOf = (...records) => answersOf(...records).at(-1);

test("text deltas are concatenated, and thinking is not part of the answer", () => {
  const thought = delta("hm", { kind: "thinking" });
  assert.deepEqual(answersOf(begun, attempt(1), thought, delta("a"), delta("b"), whole(textPart("ab")), ended()).slice(2), [
    ["", false, ""],
    ["a", false, "a"],
    ["b", false, "ab"],
    ["", false, "ab"],
    ["", false, "ab"],
  ]);
});

test("text that a new attempt repeats is not added again, and the rest follows it", () => {
  assert.deepEqual(
    answersOf(begun, attempt(1), delta("one "), delta("two "), attempt(2), delta("one two "), delta("three")).slice(4),
    [
      ["", false, "one two "],
      ["", false, "one two "],
      ["three", false, "one two three"],
    ],
  );
  assert.deepEqual(lastOf(begun, attempt(1), delta("ab"), attempt(2), delta("a"), delta("bc")), ["c", false, "abc"]);
});

test("the first different word replaces the text of the failed attempt", () => {
  const cut = [begun, attempt(1), delta("one "), delta("two "), attempt(2), delta("one ")];
  assert.deepEqual(lastOf(...cut, delta("more")), ["one more", true, "one more"]);
  assert.deepEqual(lastOf(...cut, attempt(3), delta("zero")), ["zero", true, "zero"]);
});

test("a shorter new attempt leaves nothing of the failed one", () => {
  const cut = [begun, attempt(1), delta("one "), delta("two"), attempt(2), delta("one ")];
  assert.deepEqual(lastOf(...cut, whole(textPart("one "))), ["one ", true, "one "]);
  assert.deepEqual(lastOf(...cut, ended("cancelled")), ["one ", true, "one "]);
  assert.deepEqual(lastOf(begun, attempt(1), delta("a"), attempt(2), ended("failed")), ["", true, ""]);
});

test("a continued attempt keeps its text", () => {
  const continued = { type: "attempt_continued", turn: 1, response: 1, attempt: 1, number: 1 };
  assert.deepEqual(lastOf(begun, attempt(1), delta("a"), continued, delta("b")), ["b", false, "ab"]);
});

test("two responses are two paragraphs, and a cut second one leaves the first", () => {
  const first = [begun, attempt(1), delta("look"), whole(textPart("look"), { type: "call", id: "c", name: "n" })];
  assert.deepEqual(lastOf(...first, attempt(1, 2), delta("found")), ["\n\nfound", false, "look\n\nfound"]);
  assert.deepEqual(lastOf(...first, attempt(1, 2), delta("fo"), attempt(2, 2), delta("found")), [
    "und",
    false,
    "look\n\nfound",
  ]);
  assert.deepEqual(lastOf(...first, attempt(1, 2), delta("x"), attempt(2, 2), delta("found")).slice(1), [
    true,
    "look\n\nfound",
  ]);
});

test("an upstream call separates the texts around it, live and complete", () => {
  const call = { type: "upstream_call", id: "u", name: "grep" };
  const live = [begun, attempt(1), delta("a"), delta("", { call, kind: "thinking" }), delta("b")];
  assert.deepEqual(lastOf(...live, whole(textPart("a"), call, textPart("b"))), ["", false, "a\n\nb"]);
});

test("a reader that joins in the middle has the whole response when it is complete", () => {
  assert.deepEqual(lastOf(delta("two"), whole(textPart("one two"))), ["one two", true, "one two"]);
});

test("a snapshot whose newest turn is another one has no text of the answer", () => {
  const reader = new AnswerText();
  const session = { turns: 2, history: [{ type: "step", response: { parts: [{ type: "text", text: "of another" }] } }] };
  const of = (turn) => reader.take({ type: "snapshot", id: "1-9", session, turn });
  assert.deepEqual([of(0), of(1)], Array(2).fill({ text: "", replaces: true, transcript: "" }));
  assert.deepEqual([of(2).transcript, of(null).transcript], ["of another", "of another"]);
});

test("a snapshot has the answer so far, and the next turn starts empty", () => {
  const user = (text) => ({ type: "user", parts: [textPart(text)] });
  const step = { type: "step", response: { parts: [textPart("first")] } };
  const session = { history: [user("hi"), step], running: { output: { parts: [textPart("sec")] } } };
  const gone = { type: "gone", id: "1-1", hasSnapshot: true };
  const shown = { type: "snapshot", id: "1-9", session };
  assert.deepEqual(lastOf(begun, delta("x"), gone), ["", true, ""]);
  assert.deepEqual(lastOf(begun, delta("x"), gone, shown).slice(1), [true, "first\n\nsec"]);
  assert.deepEqual(lastOf(shown, delta("ond")), ["ond", false, "first\n\nsecond"]);
  assert.deepEqual(lastOf(shown, begun), ["", false, ""]);
  assert.deepEqual(lastOf({ ...shown, session: { history: [user("hi"), step, user("more")] } }).slice(1), [true, ""]);
});

test("only a completed turn has an answer; every other end throws its reason", () => {
  const last = (record) => ({ ...event(record), transcript: "so far" });
  assert.equal(completedText("s", last(ended())), "so far");
  const failed = last(ended("failed", { code: "model_rejected", message: "no such model" }));
  assert.throws(() => completedText("s", failed), {
    name: "TurnFailedError",
    code: "turn_failed",
    status: "failed",
    cause: "model_rejected",
    transcript: "so far",
    message: "turn 1 of session 's' was not completed (failed): no such model [model_rejected]",
  });
  assert.throws(() => completedText("s", last(ended("cancelled"))), { code: "turn_failed", status: "cancelled" });
  const withdrawn = last({ type: "message_withdrawn", number: 2 });
  assert.throws(() => completedText("s", withdrawn), { code: "turn_failed", status: "withdrawn" });
  const snapshot = { type: "snapshot", transcript: "so far", session: { last: "interrupted" } };
  assert.throws(() => completedText("s", snapshot), { code: "turn_failed", status: "interrupted" });
  assert.equal(completedText("s", { ...snapshot, session: { last: "completed" } }), "so far");
  for (const cut of [null, last(delta("x"))]) assert.throws(() => completedText("s", cut), { code: "connection_lost" });
});
