/** Rules of the page's transcript, a fold of records. */

import assert from "node:assert/strict";
import { test } from "node:test";

import { Transcript } from "../../src/midstream/server/static/transcript.js";
import { indented } from "../../src/midstream/server/static/view.js";

const accepted = { type: "message_accepted", turn: 1, message: { parts: [{ type: "text", text: "hi" }] }, at: 1 };
const attempt = (number, response = 1) => ({ type: "attempt_started", turn: 1, response, attempt: number, at: number });
const delta = (text, attempt = 1, kind = "text", part = 0) => ({
  type: "delta",
  turn: 1,
  response: 1,
  attempt,
  part,
  kind,
  text,
});
const call = { type: "call", id: "c1", name: "look", arguments: '{"at":1}' };
const responded = (...parts) => ({
  type: "response_completed",
  turn: 1,
  response: 1,
  attempt: 1,
  body: { parts },
  at: 5,
});

function transcriptOf(...records) {
  const transcript = new Transcript("1-1");
  records.forEach((record, index) => transcript.apply({ id: `1-${index + 2}`, record }));
  return transcript;
}

const responseOf = (transcript) => transcript.turns.get(1).responses.get(1);
const textOf = (transcript) =>
  responseOf(transcript)
    .parts.map((part) => part.text)
    .join("");

test("text deltas are collected in their parts", () => {
  const transcript = transcriptOf(
    accepted,
    attempt(1),
    delta("so", 1, "thinking"),
    delta("He", 1, "text", 1),
    delta("llo", 1, "text", 1),
  );
  assert.deepEqual(responseOf(transcript).parts, [
    { kind: "thinking", text: "so" },
    { kind: "text", text: "Hello" },
  ]);
  assert.equal(transcript.running.number, 1);
});

test("an upstream call is shown within the text and ends where it started", () => {
  const ran = { type: "upstream_call", id: "u", name: "grep", arguments: "{}", content: "line 1", outcome: "ok" };
  const begun = { ...delta("", 1, "thinking", 1), call: { type: "upstream_call", id: "u", name: "grep" } };
  const parts = [delta("so"), begun, delta("found", 1, "text", 2)];
  const shown = { kind: "elsewhere", name: "grep", arguments: "{}" };

  const running = transcriptOf(accepted, attempt(1), ...parts);
  assert.deepEqual(responseOf(running).parts[1], { ...shown, text: "", state: "running" });
  const ended = transcriptOf(accepted, attempt(1), ...parts, { ...begun, call: ran });
  assert.deepEqual(responseOf(ended).parts[1], { ...shown, text: "line 1", state: "ok" });
  const whole = transcriptOf(accepted, attempt(1), ...parts, responded({ type: "text", text: "so" }, ran));
  assert.deepEqual(responseOf(whole).parts, [
    { kind: "text", text: "so" },
    { ...shown, text: "line 1", state: "ok" },
  ]);
  assert.equal(responseOf(whole).calls.size, 0);
});

test("an event that was applied before changes nothing", () => {
  const transcript = transcriptOf(accepted, attempt(1), delta("a"));
  assert.equal(transcript.apply({ id: "1-4", record: delta("a") }), null);
  assert.equal(textOf(transcript), "a");
});

test("a new attempt voids the output of the earlier one, and reports it", () => {
  const transcript = transcriptOf(accepted, attempt(1), delta("half of a sen"), attempt(2), delta("The whole", 2));
  assert.equal(textOf(transcript), "The whole");
  assert.equal(responseOf(transcript).voided, 1);
  assert.deepEqual(
    transcript.turns.get(1).marks.map((mark) => mark.kind),
    ["repeat"],
  );
});

test("a continued attempt keeps its text and is requested again", () => {
  const failed = { type: "attempt_failed", turn: 1, response: 1, attempt: 1, code: "model_cut", message: "cut", at: 2 };
  const continued = { type: "attempt_continued", turn: 1, response: 1, attempt: 1, number: 1, at: 3, not_before: 4 };
  const silence = { type: "stall_noticed", turn: 1, response: 1, waiting_for: "between_tokens", silent_s: 15, at: 3 };
  const transcript = transcriptOf(accepted, attempt(1), delta("Half a "), failed, continued, silence, delta("word"));
  assert.equal(textOf(transcript), "Half a word");
  const response = responseOf(transcript);
  assert.deepEqual([response.failure, response.voided, response.notBefore], [null, 0, 4]);
});

test("a late delta of a void attempt is not shown", () => {
  assert.equal(textOf(transcriptOf(accepted, attempt(1), attempt(2), delta("late", 1), delta("new", 2))), "new");
});

test("a complete response replaces the streamed one, and its calls are planned", () => {
  const transcript = transcriptOf(accepted, attempt(1), delta("Loo"), responded({ type: "text", text: "Look:" }, call));
  assert.equal(textOf(transcript), "Look:");
  assert.equal(responseOf(transcript).calls.get("c1").state, "planned");
});

test("a call is planned, running, and ends with the outcome of its result", () => {
  for (const outcome of [undefined, "error", "unknown", "cancelled"]) {
    const transcript = transcriptOf(accepted, attempt(1), responded(call), {
      type: "call_started",
      turn: 1,
      response: 1,
      call_id: "c1",
      run: 1,
      at: 6,
    });
    assert.equal(responseOf(transcript).calls.get("c1").state, "running");
    const result = { call_id: "c1", content: "42", ...(outcome && { outcome }) };
    transcript.applyRecord({ type: "call_ended", turn: 1, response: 1, result, at: 7 });
    const { state, content } = responseOf(transcript).calls.get("c1");
    assert.deepEqual([state, content], [outcome ?? "ok", "42"]);
  }
});

test("the end of a turn has its status, and a new node in the middle leaves a mark", () => {
  const transcript = transcriptOf(accepted, attempt(1), { type: "epoch_started", epoch: 2, at: 3 }, attempt(2));
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

test("a record of an unknown kind is skipped", () => {
  assert.equal(transcriptOf(accepted, { type: "moon_rose", turn: 1 }, { type: "tide" }).cursor, "1-4");
});

// --- questions, queues and sub-agents ---

const question = (kind = "approval", more = {}) => ({
  type: "question_asked",
  turn: 1,
  response: 1,
  call_id: "c1",
  kind,
  digest: "d",
  at: 6,
  ...more,
});
const questionAnswer = (choice, more = {}) => ({ ...question(), type: "question_answered", choice, ...more });
const started = (more = {}) => ({ type: "call_started", turn: 1, response: 1, call_id: "c1", run: 1, at: 7, ...more });
const ended = (status, code) => ({ type: "turn_ended", turn: 1, status, code, at: 9 });
const callIn = (transcript) => responseOf(transcript).calls.get("c1");

test("a question is open from its record to its answer, and an allowed call runs with the arguments of the person", () => {
  const transcript = transcriptOf(accepted, attempt(1), responded(call), question("approval", { text: "Sure?", expires_at: 60 }));
  assert.equal(callIn(transcript).state, "asking");
  assert.deepEqual(callIn(transcript).question, {
    turn: 1,
    response: 1,
    call_id: "c1",
    kind: "approval",
    digest: "d",
    text: "Sure?",
    expiresAt: 60,
    isFixed: false,
    choices: ["allow", "deny"],
  });
  assert.deepEqual(
    transcript.asking.map(({ session, call }) => [session, call.id]),
    [["", "c1"]],
  );
  transcript.applyRecord(questionAnswer("allow", { arguments: '{"at":2}', by: "ann" }));
  assert.deepEqual([callIn(transcript).state, callIn(transcript).question], ["planned", null]);
  assert.deepEqual(callIn(transcript).answer, { choice: "allow", text: "", by: "ann" });
  transcript.applyRecord(started({ arguments: '{"at":2}' }));
  assert.deepEqual([callIn(transcript).state, callIn(transcript).edited], ["running", '{"at":2}']);
  assert.deepEqual(transcript.asking, []);
});

test("a question without an answer in time closes with its call", () => {
  const result = { call_id: "c1", content: "nobody", outcome: "cancelled" };
  const transcript = transcriptOf(accepted, attempt(1), responded(call), question(), {
    type: "call_ended",
    turn: 1,
    response: 1,
    result,
    at: 8,
  });
  assert.deepEqual([callIn(transcript).state, callIn(transcript).question], ["cancelled", null]);
});

test("a call in doubt asks a person, and a late result is kept beside the reported one", () => {
  const doubted = { type: "call_in_doubt", turn: 1, response: 1, call_id: "c1", at: 8 };
  const transcript = transcriptOf(accepted, attempt(1), responded(call), started(), doubted, question("doubt"));
  assert.deepEqual(callIn(transcript).question.choices, ["happened", "rerun", "skip"]);
  transcript.applyRecord(questionAnswer("skip", { kind: "doubt" }));
  assert.equal(callIn(transcript).state, "doubt");
  const unknown = { call_id: "c1", content: "?", outcome: "unknown" };
  transcript.applyRecord({ type: "call_ended", turn: 1, response: 1, result: unknown, at: 9 });
  const late = { call_id: "c1", content: "it flies" };
  transcript.applyRecord({ type: "result_arrived_late", turn: 1, response: 1, result: late, at: 10 });
  assert.deepEqual([callIn(transcript).content, callIn(transcript).late.content], ["?", "it flies"]);
});

test("progress is the newest report of a running call", () => {
  const progressed = (text) => ({ type: "call_progressed", turn: 1, response: 1, call_id: "c1", run: 1, text, at: 8 });
  const transcript = transcriptOf(accepted, attempt(1), responded(call), started(), progressed("10 %"), progressed("90 %"));
  assert.equal(callIn(transcript).progress, "90 %");
});

test("messages wait in order until their turn or until they are withdrawn", () => {
  const queued = (number) => ({ type: "message_queued", number, message: { parts: [] }, at: 3, stream: `k${number}` });
  const transcript = transcriptOf(accepted, attempt(1), queued(1), queued(2));
  assert.deepEqual([...transcript.queue.keys()], [1, 2]);
  assert.equal(transcript.hasStream("k2"), true);
  transcript.applyRecord({ type: "message_withdrawn", number: 1, at: 4 });
  assert.deepEqual([...transcript.queue.keys()], [2]);
  transcript.applyRecord(ended("completed"));
  transcript.applyRecord({ ...accepted, turn: 2, queued: 2, stream: "k2" });
  assert.deepEqual([...transcript.queue.keys()], []);
  assert.deepEqual([transcript.hasStream("k1"), transcript.hasStream("k2")], [false, true]);
});

test("the last turn can resume where it was interrupted or failed, and then it runs", () => {
  for (const [status, code, isLeft] of [
    ["interrupted", "", true],
    ["failed", "model_rejected", true],
    ["failed", "model_calls_max", false],
    ["completed", "", false],
    ["cancelled", "", false],
  ]) {
    const transcript = transcriptOf(accepted, attempt(1), ended(status, code));
    assert.equal(transcript.resumable !== null, isLeft, `${status} ${code}`);
  }
  const transcript = transcriptOf(accepted, attempt(1), ended("failed", "model_rejected"));
  transcript.applyRecord({ type: "turn_resumed", turn: 1, response: 1, at: 12, stream: "k" });
  assert.equal(transcript.resumable, null);
  assert.equal(transcript.running.number, 1);
  assert.deepEqual([transcript.running.code, transcript.hasStream("k")], ["", true]);
});

test("records of a sub-agent are folded below its call, and its question is answered in its session", () => {
  const child = (record, name = "s::1.1.0") => ({
    type: "child_delta",
    turn: 1,
    response: 1,
    call_id: "c1",
    child: name,
    position: 2,
    record,
  });
  const transcript = transcriptOf(accepted, attempt(1), responded(call), started());
  for (const record of [accepted, attempt(1), delta("I look"), responded({ type: "text", text: "I look." }, call), question()])
    transcript.applyRecord(child(record));
  const { work } = callIn(transcript);
  assert.equal(work.session, "s::1.1.0");
  assert.equal(textOf(work.transcript), "I look.");
  assert.deepEqual(
    transcript.asking.map(({ session }) => session),
    ["s::1.1.0"],
  );
  transcript.applyRecord(child(questionAnswer("allow")));
  transcript.applyRecord(child(started()));
  transcript.applyRecord(child(child(accepted, "s::1.1.0::1.1.0")));
  transcript.applyRecord(child(child(attempt(1), "s::1.1.0::1.1.0")));
  transcript.applyRecord(child(child(responded(call), "s::1.1.0::1.1.0")));
  transcript.applyRecord(child(child(question(), "s::1.1.0::1.1.0")));
  assert.deepEqual(
    transcript.asking.map(({ session }) => session),
    ["s::1.1.0::1.1.0"],
  );
});

test("a reader sees the added and removed tools, and that the older part is no longer shown to the model", () => {
  const changed = (more) => ({ type: "tools_changed", turn: 1, at: 3, ...more });
  const transcript = transcriptOf(
    accepted,
    attempt(1),
    changed({ added: ["a", "b"], unreachable: ["mail"] }),
    changed({}),
    { type: "history_compacted", turn: 1, response: 1, cut: 3, at: 4 },
  );
  assert.deepEqual(responseOf(transcript).notes, [
    "Tools added: a, b.",
    "Tool servers that cannot be reached: mail.",
    "All tools can be reached again.",
    "Longer than the model can read: it is shown no more of the older part.",
  ]);
});

const permission = (more = {}) =>
  question("approval", { call_id: "leave-1", attempt: 1, name: "Bash", arguments: '{"a":1}', is_fixed: true, ...more });
const permissionIn = (transcript) => responseOf(transcript).calls.get("leave-1");

test("a permission of an upstream agent is a question within the response, until it is answered or closed", () => {
  const transcript = transcriptOf(accepted, attempt(1), permission());
  const { name, arguments: shown, state, question } = permissionIn(transcript);
  assert.deepEqual([name, shown, state, question.isFixed], ["Bash", '{"a":1}', "asking", true]);
  assert.equal(transcript.asking.length, 1);
  transcript.applyRecord(questionAnswer("allow", { call_id: "leave-1" }));
  assert.deepEqual([permissionIn(transcript).state, transcript.asking.length], ["allowed", 0]);
  for (const [why, after] of [
    ["withdrawn", "cancelled"],
    ["expired", "denied"],
  ]) {
    const closing = transcriptOf(accepted, attempt(1), permission());
    closing.applyRecord({ type: "question_closed", turn: 1, response: 1, call_id: "leave-1", why, at: 8 });
    assert.deepEqual([permissionIn(closing).state, closing.asking.length], [after, 0]);
  }
});

test("a snapshot in the middle of a response has the permission that its agent requests", () => {
  const transcript = Transcript.fromSnapshot({
    event_id: "1-9",
    turns: 1,
    last: "",
    history: [{ type: "user", parts: [] }],
    running: { turn: 1, response: 1, attempt: 1, output: { parts: [{ type: "text", text: "so" }] }, questions: [permission()] },
  });
  assert.equal(permissionIn(transcript).question.call_id, "leave-1");
  assert.equal(responseOf(transcript).parts[0].text, "so");
});

test("a snapshot has its open questions and its queue", () => {
  const transcript = Transcript.fromSnapshot({
    event_id: "1-9",
    turns: 1,
    last: "",
    history: [{ type: "user", parts: [] }],
    running: {
      turn: 1,
      response: 1,
      output: { parts: [call, { ...call, id: "c2" }] },
      calls: [
        { call, site: "server", status: "asking", question: { kind: "approval", digest: "d", choices: [] } },
        { call: { ...call, id: "c2" }, site: "server", status: "in doubt" },
      ],
    },
    queue: [{ number: 3, message: { parts: [] }, at: 5 }],
  });
  assert.deepEqual([callIn(transcript).state, callIn(transcript).question.call_id], ["asking", "c1"]);
  assert.equal(responseOf(transcript).calls.get("c2").state, "doubt");
  assert.deepEqual([...transcript.queue.keys()], [3]);
  assert.equal(transcript.isPartial, true);
});

test("arguments are set on separate lines only where that loses nothing", () => {
  assert.equal(indented('{"a": [1, "b c"]}'), '{\n  "a": [\n    1,\n    "b c"\n  ]\n}');
  for (const exact of ['{"sum":12345678901234567890}', '{"to":"ann","to":"eve"}', '{"a":1.50}', "no json", "7"])
    assert.equal(indented(exact), exact);
});

test("a pruned journal starts with the whole conversation, and the next turn follows it", () => {
  const user = (text) => ({ type: "user", parts: [{ type: "text", text }] });
  const answer = (text) => ({ type: "step", response: { parts: [{ type: "text", text }] } });
  const goOn = user("[The turn was interrupted here. Go on where you stopped.]");
  const history = { entries: [user("one"), answer("1"), user("two"), answer("2"), goOn, answer("3")] };
  const state = { history, turns: 2, turn: { type: "idle" }, queue: [], last_turn: { status: "cancelled" } };
  const transcript = new Transcript();
  transcript.apply({ id: "1-40", record: { type: "journal_pruned", state, at: 9 } });
  assert.deepEqual([...transcript.turns.keys()], [1, 2]);
  assert.deepEqual([...transcript.turns.values()].map((turn) => turn.status), ["completed", "cancelled"]);
  assert.equal(transcript.turns.get(2).responses.size, 2);
  assert.equal(transcript.isPartial, true);
  transcript.apply({ id: "1-41", record: { ...accepted, turn: 3 } });
  assert.deepEqual([transcript.running.number, transcript.cursor], [3, "1-41"]);
});
