/**
 * The chat page: which session is shown, what it is fed from, and what a person can do.
 *
 * One session is shown at a time, and one source feeds it: the stream of an own message while its turn runs, else
 * a follower. Both give the same records, which the transcript applies by event id, so that changing from one to
 * the other neither loses nor repeats anything.
 */

import { MidstreamError, TurnFailedError, connect, randomText } from "./client/midstream.js";
import { BASE, WRONG_SECRET, answered } from "./requests.js";
import { SessionList } from "./session_list.js";
import { Transcript } from "./transcript.js";
import { TurnView, element, textOf } from "./view.js";
import { visible } from "./visible.js";

/** Sessions with more records than this are opened from a snapshot instead of from their whole journal. */
const RECORDS_READ_MAX = 5000;
/** How often a page asks whether another one has begun the session that is shown. */
const LOOK_EVERY_MS = 2000;
/** The second click of a double click on Send comes within this time, where Stop has appeared. */
const DOUBLE_CLICK_MS = 700;
/** The event id before all others. */
const BEGINNING = "0-0";
const CUT_MS = 2500;
/** Shown while no agent that may continue the open turn is served (TURN-86, TURN-90). */
const HELD_TURN =
  "This turn waits: another agent began it, or its tools are not served any more. Serve that agent, stop the turn, or " +
  "continue it with the agent of now (Continue).";
/** Errors of a store that takes nothing now: someone has to free it. */
const OUTAGES = new Set(["store_busy", "store_full"]);
/** A connection made within this time is no news. */
const PATIENCE_MS = 250;
const TITLE_CHARS = 80;
const NEAR_END_PX = 80;
/** Records that change the list of sessions. */
const LISTED = new Set([
  "message_accepted",
  "turn_resumed",
  "turn_ended",
  "question_asked",
  "question_answered",
  "question_closed",
]);
const STRANGER =
  "This server does not know this browser. Run \u201cmidstream login\u201d beside it, and open the link it prints.";
/** Refusals that the same request would meet again. */
const FINAL = new Set(["never", "ask"]);
const UNSENT_BEFORE =
  "The message before has not reached the server yet. This one stays in the box: send it when that has arrived.";
const KEPT_HERE = "Kept here until the server has it";
/** Records that bring something to read. */
const READ = new Set(["delta", "message_accepted", "question_asked", "response_completed", "call_ended", "child_delta", "turn_ended"]);
/** Records with which a message is shown: as a turn, or in the queue. */
const SAID = new Set(["message_accepted", "message_queued"]);
const LOCKED =
  "There is nothing here that this browser can open. A session that was begun in another browser opens only there.";
/** In the place of what another tab does not let this one read. */
const HELD = Symbol("held");
const SUGGESTIONS = [
  "Tell me a long story about a river.",
  "Count from one to fifty, one number a line.",
  "Which tools do you have? Try one.",
];

const find = (id) => document.getElementById(id);

class Page {
  #client = null;
  #session = "";
  #visit = 0; // raised by every change of session: what belongs to an older visit is dropped
  #transcript = new Transcript();
  #views = new Map();
  #source = null;
  #isKnown = false; // the server has this session
  #isLost = false; // the server had it and has it no longer
  #isShut = false; // the server refuses to show it
  #isOpening = false; // what is known of it is being loaded
  #wakeLoad = () => {}; // ends the wait before the next try of loading it
  #lookedAt = 0; // when the server was last asked whether the session has begun
  #drafts = new Map(); // what stands in the box of other sessions
  #clickedAt = -Infinity; // when Send was clicked
  #hasNews = false; // something came that a reader further up has not seen
  #isLocked = false; // the server opens it to no secret that this browser has, or there is no such session
  #unborn = new Set(); // sessions made here in which nothing was said yet
  #pending = null; // {text, key, stream, node} of a message that is neither a turn nor in the queue yet
  #isStopping = false; // a stop was asked for and the turn has not ended
  #cuts = []; // this page's losses of the line, {from, to} in ms here
  #skewMs = -Infinity; // the server's clock minus this one: the way here only makes it look smaller
  #dirty = new Set();
  #isDrawing = false;
  #connection = { phase: "ended", retryAt: null };
  #trouble = ""; // the notice of the server's trouble that is shown
  #lightTimer = null;
  #sessions = new SessionList(() => ({ session: this.#session, isAsking: this.#transcript.asking.length > 0 }));
  #shownQueue = "";
  #resumable = null;
  #actions = {
    answer: (child, question, choice, more) =>
      this.#client.answer(child || this.#session, question, choice, more),
    stored: () => this.#client.unsent(this.#session), // a read waits for the writes before it
    resume: (turn) => (this.#isHeld(turn) ? this.#continueHeld(turn) : this.#resume(turn)),
  };

  async start() {
    await this.#logIn();
    this.#client = await connect({
      url: BASE,
      onstate: (connection, stream) => this.#heard(connection, stream),
    });
    if (!this.#client.isDurable)
      this.#tell(
        "This browser keeps nothing for pages: a message that is not sent yet would not survive a reload.",
      );
    this.#listen();
    for (const text of SUGGESTIONS) {
      const button = element("button", "quiet", text);
      button.type = "button";
      button.addEventListener("click", () => this.#suggest(text));
      find("suggestions").append(button);
    }
    await this.#open();
    await this.#tellStranger();
    this.#takeUp();
    setInterval(() => this.#tick(), 500);
  }

  /** Send the unsent words of other sessions, and of this one where another tab held them so far. */
  async #takeUp() {
    for (const stream of await this.#interrupted()) {
      if (stream.damage) stream.leave();
      else if (stream.session !== this.#session || this.#source !== null) stream.detach();
      else {
        this.#feedFrom(stream);
        this.#settlePending(stream);
      }
    }
  }

  async #interrupted() {
    for (;;) {
      try {
        return await this.#client.resumeInterrupted();
      } catch (error) {
        if (error.retry !== "later") throw error;
      }
    }
  }

  /** The link that the server printed brings a word that is good for one login; it must not stay in the address. */
  async #logIn() {
    const brought = new URLSearchParams(location.hash.slice(1));
    const login = brought.get("login");
    const session = encodeURIComponent(brought.get("open") ?? "");
    if (login !== null) {
      history.replaceState(null, "", session ? `#${session}` : location.pathname);
      const answer = await this.#postLogin({ login });
      if (answer.status !== 409) return;
      // Somebody else is logged in here: a link must not change that by itself.
      const { detail } = await answer.json();
      if (window.confirm(`${visible(detail)}.\n\nLog in with the link instead?`))
        await this.#postLogin({ login, replace: true });
    }
  }

  #postLogin(body) {
    return fetch(`${BASE}/v1/login`, {
      method: "POST",
      redirect: "manual",
      headers: { "content-type": "application/json" },
      body: JSON.stringify(body),
    });
  }

  async #tellStranger() {
    const known = await fetch(`${BASE}/v1/sessions?limit=1`, { cache: "no-store" }).catch(() => null);
    if (known?.status === 401) this.#tell(STRANGER);
  }

  // --- which session ---

  async #open() {
    const named = sessionIn(location.hash.slice(1));
    if (!named) {
      history.replaceState(null, "", `#${this.#newSession()}`);
      return this.#open();
    }
    const visit = (this.#visit += 1);
    this.#source?.detach();
    this.#source = null;
    this.#keepDraft(named);
    this.#session = named;
    this.#isKnown = this.#isLost = this.#isLocked = this.#isShut = false;
    this.#isOpening = true;
    this.#showPending(null);
    this.#reset(new Transcript());
    this.#showAll(); // from here on somebody may speak, also while the rest of this is under way
    this.#showLight();
    this.#sessions.refresh();
    const isNew = this.#unborn.has(named);
    const unsent = isNew ? null : await this.#client.unsent(named).catch(unlessHeld(HELD));
    if (visit !== this.#visit) return undefined;
    const loaded = isNew ? null : await this.#loadBehind(unsent, visit);
    if (visit !== this.#visit) return undefined;
    if (loaded !== null) {
      this.#source?.detach(); // spoke before the cursor was known: its events begin somewhere later
      this.#source = null;
      this.#isKnown = true;
      this.#reset(loaded);
    }
    const after = this.#isKnown ? this.#transcript.cursor : null;
    const streams =
      unsent === HELD ? [] : await this.#client.resumeInterrupted({ session: named, after }).catch(unlessHeld([]));
    // A message that was withdrawn while nobody looked has a stream, and no turn will ever be its own.
    const isWaited = ({ pendingText, key, damage }) =>
      damage || pendingText !== null || this.#transcript.isPartial || this.#transcript.hasStream(key);
    for (const stream of streams) if (!isWaited(stream)) stream.detach();
    const [own, ...others] = streams.filter((stream) => stream.isHeard);
    for (const other of others) other.detach();
    if (visit !== this.#visit) return own?.detach();
    if (own) this.#feedFrom(own);
    else if (this.#isKnown && this.#source === null) this.#feedFrom(this.#client.follow(named, after));
    this.#settlePending(own);
    this.#isOpening = false;
    this.#showAll();
    this.#scrollToEnd();
    if (this.#isLocked && this.#pending === null && this.#source === null) this.#tell(LOCKED);
    return undefined;
  }

  #newSession() {
    const session = `s-${randomText(12)}`;
    this.#unborn.add(session);
    return session;
  }

  #keepDraft(named) {
    if (!this.#session || this.#session === named) return;
    this.#drafts.set(this.#session, find("text").value);
    this.#write(this.#drafts.get(named) ?? "");
  }

  /** Another tab, or another person, may begin the session that is shown: then it is opened. */
  async #look() {
    const isIdle = this.#source === null && this.#pending === null && !this.#isKnown && !this.#isOpening;
    if (!isIdle || this.#isLost || this.#isLocked || this.#isShut) return;
    if (performance.now() - this.#lookedAt < LOOK_EVERY_MS) return;
    this.#lookedAt = performance.now();
    const visit = this.#visit;
    const answer = await this.#client.fetch(this.#session).catch(() => null);
    if (!answer?.ok || visit !== this.#visit || this.#source !== null) return;
    this.#unborn.delete(this.#session);
    this.#open();
  }

  /** Load the session; what was said in it and has not arrived is shown before the server is asked. */
  async #loadBehind(unsent, visit) {
    if (this.#pending === null && unsent !== HELD) this.#showPending(unsent);
    return this.#load(visit);
  }

  /** Return the session's transcript, or null where there is none yet. Tries until the server answers. */
  async #load(visit) {
    const session = this.#session;
    for (let wait = 500; visit === this.#visit; wait = Math.min(wait * 2, 8000)) {
      try {
        const snapshot = await answered(await this.#client.fetch(session));
        if (visit !== this.#visit) return null;
        if (snapshot === WRONG_SECRET) this.#isLocked = true;
        if (snapshot === null || snapshot === WRONG_SECRET) return null;
        if (Number(snapshot.event_id.split("-")[1]) > RECORDS_READ_MAX)
          return Transcript.fromSnapshot(snapshot);
        const transcript = new Transcript();
        const records = await answered(await this.#client.fetch(session, "/records"), "text");
        for (const line of records.split("\n")) {
          if (line) transcript.apply(JSON.parse(line));
        }
        return transcript;
      } catch (error) {
        if (visit !== this.#visit) return null;
        if (error instanceof MidstreamError && FINAL.has(error.retry)) return this.#shut(error);
        this.#connection = { phase: "waiting", retryAt: Date.now() + wait };
        this.#showLight();
        await new Promise((resolve) => {
          this.#wakeLoad = resolve;
          setTimeout(resolve, wait);
        });
      }
    }
    return null;
  }

  /** The server refuses to show the session, and will do so again. */
  #shut(error) {
    this.#isShut = true;
    this.#connection = { phase: "ended", retryAt: null };
    this.#showLight();
    const advice = {
      unauthorized: STRANGER,
      access: "You may not read this session. Log in as somebody who may, or choose another one.",
    };
    this.#tell(advice[error.code] ?? `${error.message} (${error.code}). Choose another session, or begin a new one.`);
    return null;
  }

  /** Make the next try at once. */
  #tryNow() {
    this.#client.wake();
    this.#wakeLoad();
    if (this.#isShut) this.#open();
  }

  #reset(transcript) {
    this.#transcript = transcript;
    this.#views.clear();
    this.#cuts = [];
    this.#hasNews = false;
    find("turns").style.minHeight = "";
    this.#resumable = null;
    if (this.#pending !== null && transcript.hasStream(this.#pending.key)) this.#showPending(null);
    find("turns").replaceChildren(...(this.#pending ? [this.#pending.node] : []));
    this.#tell("");
    for (const turn of transcript.turns.values()) this.#dirty.add(turn);
    this.#draw();
  }

  // --- what it is fed from ---

  async #feedFrom(source) {
    const visit = this.#visit;
    const before = this.#source;
    this.#source = source;
    if (before && before !== source) before.detach();
    this.#heard(source.connection, source);
    this.#showAll();
    let isFinal = false;
    const isCurrent = () => visit === this.#visit && this.#source === source;
    try {
      for await (const event of source) {
        if (!isCurrent()) return;
        if (event.type === "gone" && !event.hasSnapshot) return void this.#open();
        if (event.type === "snapshot") this.#reset(Transcript.fromSnapshot(event.session));
        if (source.damage && event.type === "snapshot")
          this.#tell("A message that was kept here cannot be read any more. It was not sent again: this is what the server has.");
        if (event.type === "record") this.#apply(event);
      }
    } catch (error) {
      if (!isCurrent()) return;
      if (!(error instanceof MidstreamError)) throw error;
      // A failed turn is shown with its words; a follower that is refused would be refused again.
      if (!(error instanceof TurnFailedError)) {
        this.#refused(error);
        isFinal = !source.key;
      }
    }
    if (!isCurrent()) return;
    if (source.key && this.#pending?.key === source.key) this.#showPending(null); // its turn is over
    this.#source = null;
    this.#sessions.refresh();
    if (this.#isKnown && !isFinal) {
      this.#feedFrom(this.#client.follow(this.#session, this.#transcript.cursor));
      return;
    }
    this.#showAll();
    this.#showLight();
  }

  #apply(event) {
    const { record } = event;
    this.#isKnown = true;
    const turn = this.#transcript.apply(event);
    if (record.at) this.#skewMs = Math.max(this.#skewMs, record.at * 1000 - Date.now());
    if (SAID.has(record.type) && record.stream && record.stream === this.#pending?.key) this.#showPending(null);
    if (turn !== null) this.#dirty.add(turn);
    this.#hasNews ||= READ.has(record.type);
    this.#draw();
    if (LISTED.has(record.type)) this.#sessions.refresh();
  }

  /** Tell a refusal, and give back what was not said. */
  #refused(error) {
    const unsaid = this.#pending?.text;
    this.#showPending(null);
    if (unsaid && !find("text").value) this.#write(unsaid);
    if (error.code === "session_not_found") {
      this.#isKnown = false;
      this.#isLost = true;
      for (const turn of this.#transcript.turns.values()) this.#dirty.add(turn);
      this.#draw();
      this.#tell(
        "The server no longer has this session. What you see is what this page had of it; begin a new one to go on.",
      );
    } else if (error.code === "wrong_secret") this.#tell(LOCKED);
    else if (error.code === "session_busy")
      this.#tell(`${error.message} Your message was not sent; it is back in the box.`);
    else if (error.code !== "stream_fenced") this.#tell(`${error.message} (${error.code})`);
    this.#scrollToEnd();
  }

  // --- what a person does ---

  #listen() {
    globalThis.addEventListener("hashchange", () => this.#open());
    globalThis.addEventListener("online", () => {
      this.#showLight();
      this.#wakeLoad();
    });
    document.addEventListener("visibilitychange", () => {
      if (document.hidden) this.#drawNow();
      else this.#tryNow();
    });
    globalThis.addEventListener("focus", () => this.#tryNow());
    find("retry").addEventListener("click", () => this.#tryNow());
    globalThis.addEventListener("offline", () => this.#showLight());
    find("new").addEventListener("click", () => {
      location.hash = this.#newSession();
      this.#showSidebar(false);
      find("text").focus();
    });
    find("menu").addEventListener("click", () =>
      this.#showSidebar(!document.body.classList.contains("has-sidebar")),
    );
    find("scrim").addEventListener("click", () => this.#showSidebar(false));
    find("sessions").addEventListener("click", () => this.#showSidebar(false));
    this.#sessions.start();
    find("cut").addEventListener("click", () => this.#client.cut(CUT_MS));
    find("send").addEventListener("click", ({ detail }) => (this.#clickedAt = detail ? performance.now() : -Infinity));
    find("stop").addEventListener("click", ({ detail }) => {
      // Stop appears where Send was: the second click of a double click is no wish to stop.
      const isDouble = detail > 1 || (detail > 0 && performance.now() - this.#clickedAt < DOUBLE_CLICK_MS);
      if (!isDouble) this.#stop();
      find("text").focus();
    });
    find("to-end").addEventListener("click", () => this.#scrollToEnd());
    find("scroller").addEventListener("scroll", () => this.#showWayDown(), { passive: true });
    find("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    find("text").addEventListener("input", () => {
      this.#fitComposer();
      this.#showAll();
    });
    find("text").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.#send();
    });
    document.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      if (document.body.classList.contains("has-sidebar")) this.#showSidebar(false);
      else this.#stop();
    });
  }

  #send() {
    const text = find("text").value;
    if (!text.trim() || this.#isLost || this.#isShut) return;
    if (this.#pending !== null) return this.#tell(UNSENT_BEFORE);
    this.#tell("");
    let stream;
    try {
      stream = this.#client.send(this.#session, text, {
        after: this.#isKnown ? this.#transcript.cursor : BEGINNING, // another tab may have begun it
      });
    } catch (error) {
      if (!(error instanceof MidstreamError)) throw error;
      this.#tell(error.message);
      return;
    }
    this.#unborn.delete(this.#session);
    this.#write("");
    this.#showPending({ text, key: stream.key, stream }, "Being kept here");
    this.#tellKept(stream);
    this.#tellRefusal(stream);
    this.#feedFrom(stream);
    this.#showAll();
    find("text").focus(); // Send is gone
    this.#scrollToEnd();
  }

  #stop() {
    if (!this.#isBusy()) return;
    this.#isStopping = find("stop").disabled = true;
    const turn = this.#transcript.running?.number ?? 0;
    const visit = this.#visit;
    this.#client.cancel(this.#session, turn).catch((error) => {
      if (visit !== this.#visit) return;
      this.#isStopping = false;
      this.#tell(error.message);
      this.#showAll();
    });
  }

  /** Go on with a turn that was interrupted or failed. */
  #resume(turn) {
    this.#tell("");
    this.#feedFrom(this.#client.resume(this.#session, { turn, after: this.#transcript.cursor }));
  }

  /** Whether the open turn waits until an agent with its tools is served (TURN-86, TURN-90). */
  #isHeld(turn) {
    return this.#connection.waitingOn === "agent" && turn === this.#transcript.running?.number;
  }

  #continueHeld(turn) {
    this.#client.continueHeld(this.#session, turn).then(
      () => {
        this.#connection = { ...this.#connection, waitingOn: "" }; // the next heartbeat says what it waits for now
        this.#tell("");
        this.#draw();
      },
      (error) => this.#tell(error.message),
    );
  }

  #withdraw(queued, button) {
    button.disabled = true;
    const visit = this.#visit;
    this.#client.withdraw(this.#session, queued.number).then(
      () => visit === this.#visit && !find("text").value && this.#write(textOf(queued.message)),
      (error) => {
        button.disabled = false;
        if (visit === this.#visit) this.#tell(error.message);
      },
    );
  }

  #suggest(text) {
    this.#write(text);
    find("text").focus();
  }

  #isBusy() {
    return !this.#isLost && (this.#pending !== null || this.#transcript.running !== null);
  }

  // --- what is shown ---

  /** Draw the turns that changed, once a frame however many words came. */
  #draw() {
    if (this.#isDrawing) return;
    this.#isDrawing = true;
    // A tab that nobody looks at gets no frames, and its title says that somebody is waited for.
    if (document.hidden) setTimeout(() => this.#drawNow());
    else requestAnimationFrame(() => this.#drawNow());
  }

  #drawNow() {
    if (!this.#isDrawing) return;
    this.#isDrawing = false;
    const wasAtEnd = this.#isAtEnd();
    const { style, offsetHeight } = find("turns");
    style.minHeight = wasAtEnd ? "" : `${offsetHeight}px`; // words that become void move no reader further up
    this.#markResumable();
    for (const turn of this.#dirty) this.#drawTurn(turn);
    this.#dirty.clear();
    this.#showAll();
    if (wasAtEnd) this.#scrollToEnd();
    else this.#showWayDown();
  }

  #drawTurn(turn) {
    if (this.#transcript.turns.get(turn.number) !== turn) return; // of the session shown before
    if (!this.#views.has(turn.number)) {
      const made = new TurnView(turn.number, this.#actions);
      this.#views.set(turn.number, made);
      find("turns").insertBefore(made.root, this.#pending?.node ?? null);
    }
    const skewMs = Number.isFinite(this.#skewMs) ? this.#skewMs : 0;
    const toServer = (ms) => (ms + skewMs) / 1000;
    const within = ({ from, to }) =>
      turn.startedAt !== null &&
      (to === null || toServer(to) >= turn.startedAt) &&
      (turn.endedAt === null || toServer(from) <= turn.endedAt);
    const cuts = this.#cuts
      .filter(within)
      .map(({ from, to }) => ({ from: toServer(from), to: to === null ? null : toServer(to) }));
    const canResume = turn === this.#transcript.resumable || this.#isHeld(turn.number);
    this.#views.get(turn.number).show(turn, cuts, toServer(Date.now()), canResume, this.#isLost);
  }

  /** Only the last turn can go on: what was it and no longer is must be drawn anew. */
  #markResumable() {
    const { resumable } = this.#transcript;
    for (const turn of [this.#resumable, resumable])
      if (turn !== null && this.#resumable !== resumable) this.#dirty.add(turn);
    this.#resumable = resumable;
  }

  #showQueue() {
    const queue = [...this.#transcript.queue.values()];
    const shown = JSON.stringify(queue.map((each) => each.number));
    if (shown === this.#shownQueue) return;
    this.#shownQueue = shown;
    find("queue").hidden = queue.length === 0;
    find("queued").replaceChildren(
      ...queue.map((each) => {
        const words = element("span", "name", textOf(each.message));
        words.dir = "auto";
        const button = element("button", "quiet", "Take back");
        button.type = "button";
        button.addEventListener("click", () => this.#withdraw(each, button));
        return element("li", "", words, button);
      }),
    );
  }

  #showAll() {
    this.#showQueue();
    const isBusy = this.#isBusy();
    const isCancelling = this.#transcript.running?.isCancelling ?? false;
    find("empty").hidden = this.#transcript.turns.size > 0 || this.#pending !== null;
    find("send").hidden = isBusy && !find("text").value.trim();
    find("stop").hidden = !isBusy;
    find("text").placeholder = isBusy ? "Say what comes next" : "Say something";
    this.#isStopping &&= isBusy;
    find("stop").disabled = this.#isStopping || isCancelling;
    find("cut").disabled = this.#source === null;
    find("text").disabled = find("send").disabled = this.#isLost || this.#isShut;
    find("turns").setAttribute("aria-busy", String(isBusy));
    const first = this.#transcript.turns.values().next().value;
    const title = textOf(first?.message).split("\n", 1)[0].slice(0, TITLE_CHARS);
    find("title").textContent = title || "New session";
    if (title) this.#sessions.entitle(this.#session, title);
    const asks = this.#transcript.asking.length > 0 ? "Waiting for you: " : "";
    document.title = title ? `${asks}${visible(title)} \u2013 midstream` : "midstream"; // nothing isolates it there
  }

  /** Show a message at once; it stays until the transcript has it, whatever becomes of the connection. */
  #showPending(message, state = KEPT_HERE) {
    this.#pending?.node.remove();
    this.#pending = null;
    if (find("notice").textContent === UNSENT_BEFORE) this.#tell("");
    if (message === null) return;
    const said = element("div", "said", message.text);
    said.dir = "auto";
    const node = element(
      "article",
      "turn pending",
      said,
      element("footer", "foot", state),
    );
    this.#pending = { ...message, node };
    find("turns").append(node);
  }

  /** Say that a reload keeps the message, once the browser has stored it: a reload before that loses it. */
  #tellKept(stream) {
    stream.settled.then(() => {
      if (this.#pending?.stream === stream) this.#pending.node.lastChild.textContent = KEPT_HERE;
    });
  }

  /** Show what `stream`, of before a reload, has not sent yet, unless the transcript has it all the same. */
  #settlePending(stream) {
    const unsent = stream?.pendingText ?? null;
    if (unsent !== null && !this.#transcript.hasStream(stream.key))
      this.#showPending({ text: unsent, key: stream.key, stream });
    if (this.#pending === null) return;
    const { key, stream: sending } = this.#pending;
    if (sending === null) return void this.#showPending(null); // another tab sends it
    this.#tellRefusal(sending);
    if (!this.#transcript.isPartial) return;
    // It does not know the streams of finished turns, and would not see that one of them was this one's.
    sending.accepted.then(
      () => this.#pending?.key === key && this.#showPending(null),
      () => {}, // `ended` tells it
    );
  }

  /** A stream that nobody reads any more may be refused too. */
  #tellRefusal(stream) {
    stream.ended.then((error) => {
      if (error && stream !== this.#source && stream.key === this.#pending?.key) this.#refused(error);
    });
  }

  #heard(connection, stream) {
    if (stream !== this.#source) return;
    this.#connection = connection;
    const open = this.#cuts.at(-1);
    if (connection.phase === "waiting" && (!open || open.to !== null)) {
      this.#cuts.push({ from: Date.now(), to: null });
    }
    if (connection.phase === "live" && open && open.to === null) {
      open.to = Date.now();
      for (const turn of this.#transcript.turns.values()) if (!turn.status) this.#dirty.add(turn);
      this.#draw();
    }
    this.#showTrouble(connection);
    this.#showLight();
  }

  /** Show why the server stores nothing now, such as a full disk, for as long as that is so. */
  #showTrouble({ trouble, waitingOn }) {
    let words = "";
    if (OUTAGES.has(trouble?.code)) words = `${trouble.message} (${trouble.code}). Nothing is lost: this goes on by itself.`;
    else if (waitingOn === "agent") words = HELD_TURN;
    const shown = find("notice").textContent;
    if (words ? shown !== words : shown && shown === this.#trouble) this.#tell(words);
    this.#trouble = words;
  }

  /** Green: live. Amber: on its way back, with the seconds to the next try. Grey: no network, or nothing to hear. */
  #showLight() {
    const { phase, retryAt } = this.#connection;
    clearTimeout(this.#lightTimer);
    let [state, text] = ["idle", "Ready"];
    if (this.#source === null && phase !== "waiting") [state, text] = ["idle", "Ready"];
    else if (phase === "live") [state, text] = ["live", "Live"];
    else if (!navigator.onLine) [state, text] = ["offline", "Offline"];
    else if (phase === "waiting") {
      const seconds = Math.max(0, Math.ceil((retryAt - Date.now()) / 1000));
      [state, text] = ["reconnecting", seconds > 0 ? `Reconnecting in ${seconds} s` : "Reconnecting"];
      this.#lightTimer = setTimeout(() => this.#showLight(), 200);
    } else if (phase === "connecting") {
      this.#lightTimer = setTimeout(() => this.#setLight("reconnecting", "Connecting"), PATIENCE_MS);
      return;
    } else return; // one source ended and the next begins
    this.#setLight(state, text);
  }

  #setLight(state, text) {
    const light = find("light");
    if (light.dataset.state !== state) light.dataset.state = state;
    find("retry").hidden = state !== "offline" && !text.startsWith("Reconnecting");
    if (find("light-text").textContent !== text) find("light-text").textContent = text;
  }

  #showSidebar(isShown) {
    document.body.classList.toggle("has-sidebar", isShown);
    find("scrim").hidden = !isShown;
    find("menu").setAttribute("aria-expanded", String(isShown));
  }

  #tell(words) {
    find("notice").textContent = words;
    find("notice").hidden = !words;
    if (words) find("notice").scrollIntoView({ block: "center" }); // never below the box one writes in
  }

  #write(text) {
    find("text").value = text;
    this.#fitComposer();
  }

  #fitComposer() {
    const box = find("text");
    box.style.height = "auto";
    box.style.height = `${box.scrollHeight}px`;
  }

  #isAtEnd() {
    const box = find("scroller");
    return box.scrollHeight - box.scrollTop - box.clientHeight < NEAR_END_PX;
  }

  #scrollToEnd() {
    find("scroller").scrollTop = find("scroller").scrollHeight;
    this.#showWayDown();
  }

  /** Show the button that leads to the end: only what has come meanwhile is new. */
  #showWayDown() {
    const isAtEnd = this.#isAtEnd();
    this.#hasNews &&= !isAtEnd;
    find("to-end").hidden = isAtEnd;
    find("to-end").textContent = this.#hasNews ? "New words below" : "To the end";
  }

  /** While a turn runs its clock and its band go on, whether or not words come. */
  #tick() {
    this.#look();
    const running = this.#transcript.running;
    if (running === null || this.#isLost || document.visibilityState !== "visible") return;
    this.#dirty.add(running);
    this.#draw();
  }
}

/** Return what answers `otherwise` where another tab holds this browser's database. */
function unlessHeld(otherwise) {
  return (error) => {
    if (error.retry === "later") return otherwise;
    throw error;
  };
}

/** Return the session that an address names; what is no encoding stands for itself. */
function sessionIn(fragment) {
  try {
    return decodeURIComponent(fragment);
  } catch {
    return fragment;
  }
}

await new Page().start();
