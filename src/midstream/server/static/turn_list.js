/** The displayed turns, with the lost connections of this page and the way to the end. */

import { TurnView, find } from "./view.js";

const NEAR_END_PX = 80;
/** Types of records with something to read. */
const READABLE = new Set(["delta", "message_accepted", "question_asked", "response_completed", "call_ended", "child_delta", "turn_ended"]);

export class TurnList {
  #page;
  #views = new Map();
  #dirty = new Set();
  #isDrawing = false;
  #resumable = null;
  #cuts = []; // lost connections of this page, {from, to} in ms of this clock
  #skewMs = -Infinity; // the server's clock minus this clock; the largest value is the best, as latency reduces it
  #hasNewText = false; // new content is below the visible part

  /**
   * @param page `shown()` returns what is displayed: `{transcript, heldTurn, pendingNode, isLost}`; `drawn()` is called after
   *   each drawing; `actions` are those of a person, see `TurnView`.
   */
  constructor(page) {
    this.#page = page;
    find("to-end").addEventListener("click", () => this.scrollToEnd());
    find("scroller").addEventListener("scroll", () => this.#showWayDown(), { passive: true });
  }

  /** Display another transcript. */
  reset() {
    const { pendingNode } = this.#page.shown();
    this.#views.clear();
    this.#cuts = [];
    this.#hasNewText = false;
    this.#resumable = null;
    find("turns").style.minHeight = "";
    find("turns").replaceChildren(...(pendingNode ? [pendingNode] : []));
    this.drawAll();
  }

  /** Draw a turn after an event. */
  noteRecord(record, turn) {
    if (record.at) this.#skewMs = Math.max(this.#skewMs, record.at * 1000 - Date.now());
    this.#hasNewText ||= READABLE.has(record.type);
    this.draw(turn);
  }

  /** Display where the connection was lost. */
  notePhase(phase) {
    const open = this.#cuts.at(-1);
    if (phase === "waiting" && (!open || open.to !== null)) this.#cuts.push({ from: Date.now(), to: null });
    if (phase !== "live" || !open || open.to !== null) return;
    open.to = Date.now();
    this.drawAll((turn) => !turn.status);
  }

  drawAll(isWanted = () => true) {
    for (const turn of this.#page.shown().transcript.turns.values()) if (isWanted(turn)) this.#dirty.add(turn);
    this.draw();
  }

  /** Draw a turn and those that changed, at most once for each animation frame. */
  draw(turn = null) {
    if (turn !== null) this.#dirty.add(turn);
    if (this.#isDrawing) return;
    this.#isDrawing = true;
    // A hidden tab gets no animation frames, and its title must still change when the turn waits for a person.
    if (document.hidden) setTimeout(() => this.drawNow());
    else requestAnimationFrame(() => this.drawNow());
  }

  drawNow() {
    if (!this.#isDrawing) return;
    this.#isDrawing = false;
    const wasAtEnd = this.#isAtEnd();
    const { style, offsetHeight } = find("turns");
    style.minHeight = wasAtEnd ? "" : `${offsetHeight}px`; // removed void text must not move the visible part
    const { resumable } = this.#page.shown().transcript; // only the last turn can be
    if (resumable !== this.#resumable) for (const turn of [this.#resumable, resumable]) if (turn !== null) this.#dirty.add(turn);
    this.#resumable = resumable;
    for (const turn of this.#dirty) this.#drawTurn(turn);
    this.#dirty.clear();
    this.#page.drawn();
    if (wasAtEnd) this.scrollToEnd();
    else this.#showWayDown();
  }

  #drawTurn(turn) {
    const { transcript, heldTurn, pendingNode, isLost } = this.#page.shown();
    if (transcript.turns.get(turn.number) !== turn) return; // a turn of another session
    if (!this.#views.has(turn.number)) {
      const created = new TurnView(turn.number, this.#page.actions);
      this.#views.set(turn.number, created);
      find("turns").insertBefore(created.root, pendingNode);
    }
    const skewMs = Number.isFinite(this.#skewMs) ? this.#skewMs : 0;
    const toServer = (ms) => (ms === null ? null : (ms + skewMs) / 1000);
    const cuts = this.#cuts
      .map(({ from, to }) => ({ from: toServer(from), to: toServer(to) }))
      .filter(({ to }) => turn.startedAt !== null && (to === null || to >= turn.startedAt))
      .filter(({ from }) => turn.endedAt === null || from <= turn.endedAt);
    const canResume = turn === transcript.resumable || turn.number === heldTurn;
    this.#views.get(turn.number).show(turn, cuts, toServer(Date.now()), canResume, isLost);
  }

  #isAtEnd() {
    const box = find("scroller");
    return box.scrollHeight - box.scrollTop - box.clientHeight < NEAR_END_PX;
  }

  scrollToEnd() {
    find("scroller").scrollTop = find("scroller").scrollHeight;
    this.#showWayDown();
  }

  /** Display the button that scrolls to the end. Only content that came after scrolling up counts as new. */
  #showWayDown() {
    const isAtEnd = this.#isAtEnd();
    this.#hasNewText &&= !isAtEnd;
    find("to-end").hidden = isAtEnd;
    find("to-end").textContent = this.#hasNewText ? "New text below" : "To the end";
  }
}
