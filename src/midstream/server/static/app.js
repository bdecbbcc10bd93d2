/**
 * The chat page: the displayed session, the source of its events, and the actions of a person.
 *
 * The page displays one session at a time, from one source: the stream of an own message while its turn runs, else a
 * reader. Both deliver the same records, which the transcript applies by event id. So a change of the source neither loses
 * nor repeats an event.
 */

import { MidstreamError, TurnFailedError, connect, randomText } from "./client/midstream.js";
import { FINAL_RETRIES, WRONG_SECRET } from "./client/stream.js";
import { BASE, contentOf } from "./requests.js";
import { SessionList } from "./session_list.js";
import { Transcript } from "./transcript.js";
import { TurnView, element, textOf } from "./view.js";
import { visible } from "./visible.js";

/** Sessions with more records than this are opened from a snapshot instead of from their whole journal. */
const RECORDS_READ_MAX = 5000;
/** Interval of the requests whether another page has begun the displayed session. */
const CHECK_EVERY_MS = 2000;
/** Longest time from a click on Send to the second click of a double click, which hits Stop. */
const DOUBLE_CLICK_MS = 700;
/** The event id before all others. */
const BEGINNING = "0-0";
const CUT_MS = 2500;
/** Notice while no served agent may continue the open turn (TURN-86, TURN-90). */
const HELD_TURN =
  "This turn waits: another agent began it, or its tools are not served any more. Serve that agent, stop the turn, or " +
  "continue it with the agent that is served now (Continue).";
/** Codes of errors of a store that accepts no appends now. A person has to free it. */
const OUTAGES = new Set(["store_busy", "store_full"]);
/** Time after which a connection that is being made is displayed. */
const PATIENCE_MS = 250;
const TITLE_CHARS = 80;
const NEAR_END_PX = 80;
/** Types of records that change the list of sessions. */
const LISTED = new Set([
  "message_accepted",
  "turn_resumed",
  "turn_ended",
  "question_asked",
  "question_answered",
  "question_closed",
]);
const NOT_LOGGED_IN =
  "This server does not know this browser. Run \u201cmidstream login\u201d beside it, and open the link it prints.";
const UNSENT_BEFORE =
  "The previous message has not reached the server yet. This one stays in the box: send it when that has arrived.";
const KEPT_HERE = "Kept here until the server has it";
/** Types of records with something to read. */
const HAS_NEWS = new Set(["delta", "message_accepted", "question_asked", "response_completed", "call_ended", "child_delta", "turn_ended"]);
/** Types of records that display a message: as a turn, or in the queue. */
const SHOWS_MESSAGE = new Set(["message_accepted", "message_queued"]);
const LOCKED =
  "There is nothing here that this browser can open. A session that began in another browser opens only there.";
/** Stands for stored data that another tab blocks. */
const BLOCKED = Symbol("blocked");
const SUGGESTIONS = [
  "Tell me a long story about a river.",
  "Count from one to fifty, one number a line.",
  "Which tools do you have? Try one.",
];

const find = (id) => document.getElementById(id);

class Page {
  #client = null;
  #session = "";
  #visit = 0; // incremented by every change of session; results of an older visit are dropped
  #transcript = new Transcript();
  #views = new Map();
  #source = null;
  #isKnown = false; // the server has this session
  #isLost = false; // the server no longer has the session
  #isRefused = false; // the server refuses to return the session
  #isOpening = false; // the session is being loaded
  #wakeLoad = () => {}; // ends the pause before the next try to load the session
  #checkedAt = 0; // the time of the last request whether the session has begun
  #drafts = new Map(); // unsent texts in the input of other sessions
  #clickedAt = -Infinity; // the time of the last click on Send
  #hasNews = false; // new content is below the visible part
  #isLocked = false; // no secret of this browser opens the session, or there is no such session
  #empty = new Set(); // new sessions of this page without a message
  #pending = null; // {text, key, stream, node} of a message that is neither a turn nor in the queue
  #isStopping = false; // a cancel was sent and the turn has not ended
  #cuts = []; // lost connections of this page, {from, to} in ms of this clock
  #skewMs = -Infinity; // the server's clock minus this clock; the largest value is the best, as latency reduces it
  #dirty = new Set();
  #isDrawing = false;
  #connection = { phase: "ended", retryAt: null };
  #trouble = ""; // the displayed notice about the server's trouble
  #lightTimer = null;
  #sessions = new SessionList(() => ({ session: this.#session, isAsking: this.#transcript.asking.length > 0 }));
  #shownQueue = "";
  #resumable = null;
  #actions = {
    answer: (child, question, choice, more) =>
      this.#client.answer(child || this.#session, question, choice, more),
    whenStored: () => this.#client.findUnsent(this.#session), // a read waits for earlier writes
    resume: (turn) => (this.#isHeld(turn) ? this.#continueHeld(turn) : this.#resume(turn)),
  };

  async start() {
    await this.#logIn();
    this.#client = await connect({
      url: BASE,
      onstate: (connection, stream) => this.#showConnection(connection, stream),
    });
    if (!this.#client.isDurable)
      this.#showNotice(
        "This browser stores nothing for pages: an unsent message would not survive a reload.",
      );
    this.#listen();
    for (const text of SUGGESTIONS) {
      const button = element("button", "quiet", text);
      button.type = "button";
      button.addEventListener("click", () => this.#suggest(text));
      find("suggestions").append(button);
    }
    await this.#open();
    await this.#checkLogin();
    this.#resumeOthers();
    setInterval(() => this.#tick(), 500);
  }

  /** Send the unsent messages of other sessions, and those of this session that another tab had. */
  async #resumeOthers() {
    for (const stream of await this.#interrupted()) {
      if (stream.damage) stream.detach();
      else if (stream.session !== this.#session || this.#source !== null) stream.abandon();
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

  /** Log in with the token of the server's login link, and remove the token from the address. */
  async #logIn() {
    const parameters = new URLSearchParams(location.hash.slice(1));
    const login = parameters.get("login");
    const session = encodeURIComponent(parameters.get("open") ?? "");
    if (login !== null) {
      history.replaceState(null, "", session ? `#${session}` : location.pathname);
      const answer = await this.#postLogin({ login });
      if (answer.status !== 409) return;
      // Another principal is logged in here. Only the person may change that.
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

  async #checkLogin() {
    const response = await fetch(`${BASE}/v1/sessions?limit=1`, { cache: "no-store" }).catch(() => null);
    if (response?.status === 401) this.#showNotice(NOT_LOGGED_IN);
  }

  // --- the session ---

  async #open() {
    const named = sessionIn(location.hash.slice(1));
    if (!named) {
      history.replaceState(null, "", `#${this.#newSession()}`);
      return this.#open();
    }
    const visit = (this.#visit += 1);
    this.#source?.abandon();
    this.#source = null;
    this.#keepDraft(named);
    this.#session = named;
    this.#isKnown = this.#isLost = this.#isLocked = this.#isRefused = false;
    this.#isOpening = true;
    this.#showPending(null);
    this.#reset(new Transcript());
    this.#showAll(); // from here on a person may send, also while the rest of this method waits
    this.#showLight();
    this.#sessions.refresh();
    const isNew = this.#empty.has(named);
    const unsent = isNew ? null : await this.#client.findUnsent(named).catch(ifBlocked(BLOCKED));
    if (visit !== this.#visit) return undefined;
    const loaded = isNew ? null : await this.#loadBehind(unsent, visit);
    if (visit !== this.#visit) return undefined;
    if (loaded !== null) {
      this.#source?.abandon(); // it was sent before the cursor was known, so its events begin too late
      this.#source = null;
      this.#isKnown = true;
      this.#reset(loaded);
    }
    const after = this.#isKnown ? this.#transcript.cursor : null;
    const streams =
      unsent === BLOCKED ? [] : await this.#client.resumeInterrupted({ session: named, after }).catch(ifBlocked([]));
    // A message that was withdrawn while no page was open has a stream, and never gets a turn.
    const isWanted = ({ pendingText, key, damage }) =>
      damage || pendingText !== null || this.#transcript.isPartial || this.#transcript.hasStream(key);
    for (const stream of streams) if (!isWanted(stream)) stream.abandon();
    const [own, ...others] = streams.filter((stream) => stream.isActive);
    for (const other of others) other.abandon();
    if (visit !== this.#visit) return own?.abandon();
    if (own) this.#feedFrom(own);
    else if (this.#isKnown && this.#source === null) this.#feedFrom(this.#client.follow(named, after));
    this.#settlePending(own);
    this.#isOpening = false;
    this.#showAll();
    this.#scrollToEnd();
    if (this.#isLocked && this.#pending === null && this.#source === null) this.#showNotice(LOCKED);
    return undefined;
  }

  #newSession() {
    const session = `s-${randomText(12)}`;
    this.#empty.add(session);
    return session;
  }

  #keepDraft(named) {
    if (!this.#session || this.#session === named) return;
    this.#drafts.set(this.#session, find("text").value);
    this.#write(this.#drafts.get(named) ?? "");
  }

  /** Open the displayed session once another tab or another person has begun it. */
  async #checkForSession() {
    const isIdle = this.#source === null && this.#pending === null && !this.#isKnown && !this.#isOpening;
    if (!isIdle || this.#isLost || this.#isLocked || this.#isRefused) return;
    if (performance.now() - this.#checkedAt < CHECK_EVERY_MS) return;
    this.#checkedAt = performance.now();
    const visit = this.#visit;
    const answer = await this.#client.fetch(this.#session).catch(() => null);
    if (!answer?.ok || visit !== this.#visit || this.#source !== null) return;
    this.#empty.delete(this.#session);
    this.#open();
  }

  /** Display the unsent message, and then load the session. */
  async #loadBehind(unsent, visit) {
    if (this.#pending === null && unsent !== BLOCKED) this.#showPending(unsent);
    return this.#load(visit);
  }

  /** Return the transcript of the session, or null if there is none. Retries until the server responds. */
  async #load(visit) {
    const session = this.#session;
    for (let wait = 500; visit === this.#visit; wait = Math.min(wait * 2, 8000)) {
      try {
        const snapshot = await contentOf(await this.#client.fetch(session));
        if (visit !== this.#visit) return null;
        if (snapshot === WRONG_SECRET) this.#isLocked = true;
        if (snapshot === null || snapshot === WRONG_SECRET) return null;
        if (Number(snapshot.event_id.split("-")[1]) > RECORDS_READ_MAX)
          return Transcript.fromSnapshot(snapshot);
        const transcript = new Transcript();
        const records = await contentOf(await this.#client.fetch(session, "/records"), "text");
        for (const line of records.split("\n")) {
          if (line) transcript.apply(JSON.parse(line));
        }
        return transcript;
      } catch (error) {
        if (visit !== this.#visit) return null;
        if (error instanceof MidstreamError && FINAL_RETRIES.has(error.retry)) return this.#refuse(error);
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

  /** Display a final refusal of the server to return the session. */
  #refuse(error) {
    this.#isRefused = true;
    this.#connection = { phase: "ended", retryAt: null };
    this.#showLight();
    const advice = {
      unauthorized: NOT_LOGGED_IN,
      access: "You may not read this session. Log in as somebody who may, or choose another one.",
    };
    this.#showNotice(advice[error.code] ?? `${error.message} (${error.code}). Choose another session, or begin a new one.`);
    return null;
  }

  /** Make the next try at once. */
  #tryNow() {
    this.#client.wake();
    this.#wakeLoad();
    if (this.#isRefused) this.#open();
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
    this.#showNotice("");
    for (const turn of transcript.turns.values()) this.#dirty.add(turn);
    this.#draw();
  }

  // --- the source of its events ---

  async #feedFrom(source) {
    const visit = this.#visit;
    const before = this.#source;
    this.#source = source;
    if (before && before !== source) before.abandon();
    this.#showConnection(source.connection, source);
    this.#showAll();
    let isFinal = false;
    const isCurrent = () => visit === this.#visit && this.#source === source;
    try {
      for await (const event of source) {
        if (!isCurrent()) return;
        if (event.type === "gone" && !event.hasSnapshot) return void this.#open();
        if (event.type === "snapshot") this.#reset(Transcript.fromSnapshot(event.session));
        if (source.damage && event.type === "snapshot")
          this.#showNotice("A stored message cannot be read. It was not sent again. The page displays the session as the server has it.");
        if (event.type === "record") this.#apply(event);
      }
    } catch (error) {
      if (!isCurrent()) return;
      if (!(error instanceof MidstreamError)) throw error;
      // The transcript displays a failed turn. A reader that was refused is not started again.
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
    if (SHOWS_MESSAGE.has(record.type) && record.stream && record.stream === this.#pending?.key) this.#showPending(null);
    if (turn !== null) this.#dirty.add(turn);
    this.#hasNews ||= HAS_NEWS.has(record.type);
    this.#draw();
    if (LISTED.has(record.type)) this.#sessions.refresh();
  }

  /** Display a refusal, and put the unsent text back into the input. */
  #refused(error) {
    const unsent = this.#pending?.text;
    this.#showPending(null);
    if (unsent && !find("text").value) this.#write(unsent);
    if (error.code === "session_not_found") {
      this.#isKnown = false;
      this.#isLost = true;
      for (const turn of this.#transcript.turns.values()) this.#dirty.add(turn);
      this.#draw();
      this.#showNotice(
        "The server no longer has this session. The page displays what it had received. Begin a new session to continue.",
      );
    } else if (error.code === WRONG_SECRET) this.#showNotice(LOCKED);
    else if (error.code === "session_busy")
      this.#showNotice(`${error.message} Your message was not sent; it is back in the box.`);
    else if (error.code !== "stream_fenced") this.#showNotice(`${error.message} (${error.code})`);
    this.#scrollToEnd();
  }

  // --- the actions of a person ---

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
      // Stop appears where Send was. The second click of a double click must not stop the turn.
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
    if (!text.trim() || this.#isLost || this.#isRefused) return;
    if (this.#pending !== null) return this.#showNotice(UNSENT_BEFORE);
    this.#showNotice("");
    let stream;
    try {
      stream = this.#client.send(this.#session, text, {
        after: this.#isKnown ? this.#transcript.cursor : BEGINNING, // another tab may have begun it
      });
    } catch (error) {
      if (!(error instanceof MidstreamError)) throw error;
      this.#showNotice(error.message);
      return;
    }
    this.#empty.delete(this.#session);
    this.#write("");
    this.#showPending({ text, key: stream.key, stream }, "Being kept here");
    this.#watchStored(stream);
    this.#watchRefusal(stream);
    this.#feedFrom(stream);
    this.#showAll();
    find("text").focus(); // the Send button is hidden now
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
      this.#showNotice(error.message);
      this.#showAll();
    });
  }

  /** Resume a turn that was interrupted or failed. */
  #resume(turn) {
    this.#showNotice("");
    this.#feedFrom(this.#client.resume(this.#session, { turn, after: this.#transcript.cursor }));
  }

  /** Whether the open turn waits until an agent with its tools is served (TURN-86, TURN-90). */
  #isHeld(turn) {
    return this.#connection.waitingOn === "agent" && turn === this.#transcript.running?.number;
  }

  #continueHeld(turn) {
    this.#client.continueHeld(this.#session, turn).then(
      () => {
        this.#connection = { ...this.#connection, waitingOn: "" }; // the next heartbeat has what it waits for now
        this.#showNotice("");
        this.#draw();
      },
      (error) => this.#showNotice(error.message),
    );
  }

  #withdraw(queued, button) {
    button.disabled = true;
    const visit = this.#visit;
    this.#client.withdraw(this.#session, queued.number).then(
      () => visit === this.#visit && !find("text").value && this.#write(textOf(queued.message)),
      (error) => {
        button.disabled = false;
        if (visit === this.#visit) this.#showNotice(error.message);
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

  // --- the display ---

  /** Draw the turns that changed, at most once for each animation frame. */
  #draw() {
    if (this.#isDrawing) return;
    this.#isDrawing = true;
    // A hidden tab gets no animation frames, and its title must still change when the turn waits for a person.
    if (document.hidden) setTimeout(() => this.#drawNow());
    else requestAnimationFrame(() => this.#drawNow());
  }

  #drawNow() {
    if (!this.#isDrawing) return;
    this.#isDrawing = false;
    const wasAtEnd = this.#isAtEnd();
    const { style, offsetHeight } = find("turns");
    style.minHeight = wasAtEnd ? "" : `${offsetHeight}px`; // removed void words must not move the visible part
    this.#markResumable();
    for (const turn of this.#dirty) this.#drawTurn(turn);
    this.#dirty.clear();
    this.#showAll();
    if (wasAtEnd) this.#scrollToEnd();
    else this.#showWayDown();
  }

  #drawTurn(turn) {
    if (this.#transcript.turns.get(turn.number) !== turn) return; // a turn of another session
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

  /** Mark the turns to draw if another turn is resumable than before. Only the last turn can be. */
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
    find("text").disabled = find("send").disabled = this.#isLost || this.#isRefused;
    find("turns").setAttribute("aria-busy", String(isBusy));
    const first = this.#transcript.turns.values().next().value;
    const title = textOf(first?.message).split("\n", 1)[0].slice(0, TITLE_CHARS);
    find("title").textContent = title || "New session";
    if (title) this.#sessions.entitle(this.#session, title);
    const prefix = this.#transcript.asking.length > 0 ? "Waiting for you: " : "";
    document.title = title ? `${prefix}${visible(title)} \u2013 midstream` : "midstream"; // no markup isolates a title
  }

  /** Display a message at once. It stays until the transcript has it, also without a connection. */
  #showPending(message, state = KEPT_HERE) {
    this.#pending?.node.remove();
    this.#pending = null;
    if (find("notice").textContent === UNSENT_BEFORE) this.#showNotice("");
    if (message === null) return;
    const text = element("div", "said", message.text);
    text.dir = "auto";
    const node = element(
      "article",
      "turn pending",
      text,
      element("footer", "foot", state),
    );
    this.#pending = { ...message, node };
    find("turns").append(node);
  }

  /** Display that the message survives a reload, once the browser has stored it. */
  #watchStored(stream) {
    stream.settled.then(() => {
      if (this.#pending?.stream === stream) this.#pending.node.lastChild.textContent = KEPT_HERE;
    });
  }

  /** Display the unsent message of `stream`, from before a reload, unless the transcript has it. */
  #settlePending(stream) {
    const unsent = stream?.pendingText ?? null;
    if (unsent !== null && !this.#transcript.hasStream(stream.key))
      this.#showPending({ text: unsent, key: stream.key, stream });
    if (this.#pending === null) return;
    const { key, stream: sending } = this.#pending;
    if (sending === null) return void this.#showPending(null); // another tab sends it
    this.#watchRefusal(sending);
    if (!this.#transcript.isPartial) return;
    // A partial transcript has no streams of finished turns, so it may have the message without its stream.
    sending.accepted.then(
      () => this.#pending?.key === key && this.#showPending(null),
      () => {}, // `#watchRefusal` displays the error
    );
  }

  /** Display a refusal of a stream that is not the source any more. */
  #watchRefusal(stream) {
    stream.ended.then((error) => {
      if (error && stream !== this.#source && stream.key === this.#pending?.key) this.#refused(error);
    });
  }

  #showConnection(connection, stream) {
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

  /** Display why the server stores nothing now, such as a full disk, until it stores again. */
  #showTrouble({ trouble, waitingOn }) {
    let words = "";
    if (OUTAGES.has(trouble?.code)) words = `${trouble.message} (${trouble.code}). Nothing is lost: this goes on by itself.`;
    else if (waitingOn === "agent") words = HELD_TURN;
    const shown = find("notice").textContent;
    if (words ? shown !== words : shown && shown === this.#trouble) this.#showNotice(words);
    this.#trouble = words;
  }

  /** Display the connection: green is live; amber is reconnecting, with the seconds to the next try; grey is offline or idle. */
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
    } else return; // between two sources
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

  #showNotice(words) {
    find("notice").textContent = words;
    find("notice").hidden = !words;
    if (words) find("notice").scrollIntoView({ block: "center" }); // never below the input
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

  /** Display the button that scrolls to the end. Only content that came after scrolling up counts as new. */
  #showWayDown() {
    const isAtEnd = this.#isAtEnd();
    this.#hasNews &&= !isAtEnd;
    find("to-end").hidden = isAtEnd;
    find("to-end").textContent = this.#hasNews ? "New words below" : "To the end";
  }

  /** Draw the time and the band of a running turn, also without new events. */
  #tick() {
    this.#checkForSession();
    const running = this.#transcript.running;
    if (running === null || this.#isLost || document.visibilityState !== "visible") return;
    this.#dirty.add(running);
    this.#draw();
  }
}

/** Return an error handler that returns `otherwise` if another tab blocks the database. */
function ifBlocked(otherwise) {
  return (error) => {
    if (error.retry === "later") return otherwise;
    throw error;
  };
}

/** Return the session in a fragment of an address. An invalid encoding is used as it is. */
function sessionIn(fragment) {
  try {
    return decodeURIComponent(fragment);
  } catch {
    return fragment;
  }
}

await new Page().start();
