/**
 * The chat page: the displayed session, the source of its events, and the actions of a person.
 *
 * The page displays one session at a time, from one source: the stream of an own message while its turn runs, else a
 * reader. Both deliver the same records, which the transcript applies by event id. So a change of the source neither loses
 * nor repeats an event.
 */

import { MidstreamError, TurnFailedError, connect, randomText } from "./client/midstream.js";
import { FINAL_RETRIES, WRONG_SECRET } from "./client/errors.js";
import { Composer } from "./composer.js";
import { ConnectionLight } from "./connection_light.js";
import { NOT_LOGGED_IN, isLoggedIn, logIn } from "./login.js";
import { MessageQueue } from "./message_queue.js";
import { BASE, contentOf } from "./requests.js";
import { SessionList } from "./session_list.js";
import { Transcript } from "./transcript.js";
import { TurnList } from "./turn_list.js";
import { element, find, textOf } from "./view.js";
import { visible } from "./visible.js";

/** Sessions with more records than this are opened from a snapshot instead of from their whole journal. */
const RECORDS_READ_MAX = 5000;
/** Interval of the requests whether another page has begun the displayed session. */
const CHECK_EVERY_MS = 2000;
/** The event id before all others. */
const BEGINNING = "0-0";
const CUT_MS = 2500;
/** Notice while no served agent may continue the open turn (TURN-86, TURN-90). */
const HELD_TURN =
  "This turn waits: another agent began it, or its tools are not served any more. Serve that agent, stop the turn, or " +
  "continue it with the agent that is served now (Continue).";
/** Codes of errors of a store that accepts no appends now. A person has to free it. */
const OUTAGES = new Set(["store_busy", "store_full"]);
const TITLE_CHARS = 80;
/** Types of records that change the list of sessions. */
const LISTED = new Set(["message_accepted", "turn_resumed", "turn_ended", "question_asked", "question_answered", "question_closed"]);
/** Types of records that display a message: as a turn, or in the queue. */
const SHOWS_MESSAGE = new Set(["message_accepted", "message_queued"]);
const UNSENT_BEFORE =
  "The previous message has not reached the server yet. This one stays in the box: send it when that has arrived.";
const KEPT_HERE = "Kept here until the server has it";
const LOCKED =
  "There is nothing here that this browser can open. A session that began in another browser opens only there.";
/** Stands for stored data that another tab blocks. */
const BLOCKED = Symbol("blocked");
const SUGGESTIONS = [
  "Tell me a long story about a river.",
  "Count from one to fifty, one number a line.",
  "Which tools do you have? Try one.",
];

class Page {
  #client = null;
  #session = "";
  #visit = 0; // incremented by every change of session; results of an older visit are dropped
  #standing = "new"; // of the session: "known" to the server, "lost" there, "refused", or "locked" for this browser
  #transcript = new Transcript();
  #source = null;
  #waitingOn = ""; // of the connection of the source
  #isOpening = false; // the session is being loaded
  #wakeLoad = () => {}; // ends the pause before the next try to load the session
  #checkedAt = 0; // the time of the last request whether the session has begun
  #empty = new Set(); // new sessions of this page without a message
  #pending = null; // {text, key, stream, node} of a message that is neither a turn nor in the queue
  #isStopping = false; // a cancel was sent and the turn has not ended
  #trouble = ""; // the displayed notice about the server's trouble
  #composer = new Composer();
  #light = new ConnectionLight(() => this.#source !== null);
  #queue = new MessageQueue((queued, button) => this.#withdraw(queued, button));
  #sessions = new SessionList(() => ({ session: this.#session, isAsking: this.#transcript.asking.length > 0 }));
  #turns = new TurnList({
    shown: () => ({
      transcript: this.#transcript,
      heldTurn: this.#heldTurn,
      pendingNode: this.#pending?.node ?? null,
      isLost: this.#standing === "lost",
    }),
    drawn: () => this.#showAll(),
    actions: {
      answer: (child, question, choice, more) => this.#client.answer(child || this.#session, question, choice, more),
      whenStored: () => this.#client.findUnsent(this.#session), // a read waits for earlier writes
      resume: (turn) => (turn === this.#heldTurn ? this.#continueHeld(turn) : this.#resume(turn)),
    },
  });

  async start() {
    await logIn();
    this.#client = await connect({ url: BASE, onstate: (connection, stream) => this.#showConnection(connection, stream) });
    if (!this.#client.isDurable)
      this.#showNotice("This browser stores nothing for pages: an unsent message would not survive a reload.");
    this.#listen();
    for (const text of SUGGESTIONS) {
      const button = element("button", "quiet", text);
      button.type = "button";
      button.addEventListener("click", () => {
        this.#composer.write(text);
        this.#composer.focus();
      });
      find("suggestions").append(button);
    }
    await this.#open();
    if (!(await isLoggedIn())) this.#showNotice(NOT_LOGGED_IN);
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
    this.#composer.switchDraft(this.#session, named);
    this.#session = named;
    this.#standing = "new";
    this.#isOpening = true;
    this.#showPending(null);
    this.#reset(new Transcript());
    this.#showAll(); // from here on a person may send, also while the rest of this method waits
    this.#light.show();
    this.#sessions.refresh();
    const isNew = this.#empty.has(named);
    const unsent = isNew ? null : await this.#client.findUnsent(named).catch(ifBlocked(BLOCKED));
    if (visit !== this.#visit) return undefined;
    if (!isNew && this.#pending === null && unsent !== BLOCKED) this.#showPending(unsent);
    const loaded = isNew ? null : await this.#load(visit);
    if (visit !== this.#visit) return undefined;
    if (loaded !== null) {
      this.#source?.abandon(); // it was sent before the cursor was known, so its events begin too late
      this.#source = null;
      this.#standing = "known";
      this.#reset(loaded);
    }
    const after = this.#standing === "known" ? this.#transcript.cursor : null;
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
    else if (this.#standing === "known" && this.#source === null) this.#feedFrom(this.#client.follow(named, after));
    this.#settlePending(own);
    this.#isOpening = false;
    this.#showAll();
    this.#turns.scrollToEnd();
    if (this.#standing === "locked" && this.#pending === null && this.#source === null) this.#showNotice(LOCKED);
    return undefined;
  }

  #newSession() {
    const session = `s-${randomText(12)}`;
    this.#empty.add(session);
    return session;
  }

  /** Open the displayed session once another tab or another person has begun it. */
  async #checkForSession() {
    if (this.#source !== null || this.#pending !== null || this.#standing !== "new" || this.#isOpening) return;
    if (performance.now() - this.#checkedAt < CHECK_EVERY_MS) return;
    this.#checkedAt = performance.now();
    const visit = this.#visit;
    const answer = await this.#client.fetch(this.#session).catch(() => null);
    if (!answer?.ok || visit !== this.#visit || this.#source !== null) return;
    this.#empty.delete(this.#session);
    this.#open();
  }

  /** Return the transcript of the session, or null if there is none. Retries until the server responds. */
  async #load(visit) {
    const session = this.#session;
    for (let wait = 500; visit === this.#visit; wait = Math.min(wait * 2, 8000)) {
      try {
        const snapshot = await contentOf(await this.#client.fetch(session));
        if (visit !== this.#visit) return null;
        if (snapshot === WRONG_SECRET && this.#standing === "new") this.#standing = "locked";
        if (snapshot === null || snapshot === WRONG_SECRET) return null;
        if (Number(snapshot.event_id.split("-")[1]) > RECORDS_READ_MAX) return Transcript.fromSnapshot(snapshot);
        const transcript = new Transcript();
        const records = await contentOf(await this.#client.fetch(session, "/records"), "text");
        for (const line of records.split("\n")) if (line) transcript.apply(JSON.parse(line));
        return transcript;
      } catch (error) {
        if (visit !== this.#visit) return null;
        if (error instanceof MidstreamError && FINAL_RETRIES.has(error.retry)) return this.#refuse(error);
        this.#light.show({ phase: "waiting", retryAt: Date.now() + wait });
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
    this.#standing = "refused";
    this.#light.show({ phase: "ended", retryAt: null });
    const advice = {
      unauthorized: NOT_LOGGED_IN,
      access: "You may not read this session. Log in as a person who may, or choose another session.",
    };
    this.#showNotice(advice[error.code] ?? `${error.message} (${error.code}). Choose another session, or begin a new one.`);
    return null;
  }

  /** Make the next try at once. */
  #tryNow() {
    this.#client.wake();
    this.#wakeLoad();
    if (this.#standing === "refused") this.#open();
  }

  #reset(transcript) {
    this.#transcript = transcript;
    if (this.#pending !== null && transcript.hasStream(this.#pending.key)) this.#showPending(null);
    this.#showNotice("");
    this.#turns.reset();
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
    if (this.#standing === "known" && !isFinal)
      return void this.#feedFrom(this.#client.follow(this.#session, this.#transcript.cursor));
    this.#showAll();
    this.#light.show();
  }

  #apply(event) {
    const { record } = event;
    if (this.#standing !== "refused") this.#standing = "known";
    const turn = this.#transcript.apply(event);
    if (SHOWS_MESSAGE.has(record.type) && record.stream && record.stream === this.#pending?.key) this.#showPending(null);
    this.#turns.noteRecord(record, turn);
    if (LISTED.has(record.type)) this.#sessions.refresh();
  }

  /** Display a refusal, and put the unsent text back into the input. */
  #refused(error) {
    const unsent = this.#pending?.text;
    this.#showPending(null);
    if (unsent && !this.#composer.text) this.#composer.write(unsent);
    if (error.code === "session_not_found") {
      this.#standing = "lost";
      this.#turns.drawAll();
      this.#showNotice("The server no longer has this session. The page displays what it had received. Begin a new session to continue.");
    } else if (error.code === WRONG_SECRET) this.#showNotice(LOCKED);
    else if (error.code === "session_busy")
      this.#showNotice(`${error.message} Your message was not sent; it is back in the box.`);
    else if (error.code !== "stream_fenced") this.#showNotice(`${error.message} (${error.code})`);
    this.#turns.scrollToEnd();
  }

  // --- the actions of a person ---

  #listen() {
    globalThis.addEventListener("hashchange", () => this.#open());
    globalThis.addEventListener("online", () => {
      this.#light.show();
      this.#wakeLoad();
    });
    document.addEventListener("visibilitychange", () => {
      if (document.hidden) this.#turns.drawNow();
      else this.#tryNow();
    });
    globalThis.addEventListener("focus", () => this.#tryNow());
    find("retry").addEventListener("click", () => this.#tryNow());
    globalThis.addEventListener("offline", () => this.#light.show());
    find("new").addEventListener("click", () => {
      location.hash = this.#newSession();
      this.#showSidebar(false);
      this.#composer.focus();
    });
    find("menu").addEventListener("click", () => this.#showSidebar(!document.body.classList.contains("has-sidebar")));
    find("scrim").addEventListener("click", () => this.#showSidebar(false));
    find("sessions").addEventListener("click", () => this.#showSidebar(false));
    this.#sessions.start();
    find("cut").addEventListener("click", () => this.#client.cut(CUT_MS));
    this.#composer.listen({ send: () => this.#send(), stop: () => this.#stop(), changed: () => this.#showAll() });
    document.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      if (document.body.classList.contains("has-sidebar")) this.#showSidebar(false);
      else this.#stop();
    });
  }

  #send() {
    const { text } = this.#composer;
    if (!text.trim() || this.#isClosed) return;
    if (this.#pending !== null) return this.#showNotice(UNSENT_BEFORE);
    this.#showNotice("");
    let stream;
    try {
      const after = this.#standing === "known" ? this.#transcript.cursor : BEGINNING; // another tab may have begun it
      stream = this.#client.send(this.#session, text, { after });
    } catch (error) {
      if (!(error instanceof MidstreamError)) throw error;
      this.#showNotice(error.message);
      return;
    }
    this.#empty.delete(this.#session);
    this.#composer.write("");
    this.#showPending({ text, key: stream.key, stream }, "Being kept here");
    stream.settled.then(() => {
      // Only now the message survives a reload.
      if (this.#pending?.stream === stream) this.#pending.node.lastChild.textContent = KEPT_HERE;
    });
    this.#watchRefusal(stream);
    this.#feedFrom(stream);
    this.#showAll();
    this.#composer.focus(); // the Send button is hidden now
    this.#turns.scrollToEnd();
  }

  #stop() {
    if (!this.#isBusy) return;
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

  /** The number of the open turn if it waits until an agent with its tools is served (TURN-86, TURN-90). */
  get #heldTurn() { return this.#waitingOn === "agent" ? this.#transcript.running?.number : undefined; }

  #continueHeld(turn) {
    this.#client.continueHeld(this.#session, turn).then(
      () => {
        this.#waitingOn = ""; // the next heartbeat has what it waits for now
        this.#showNotice("");
        this.#turns.draw();
      },
      (error) => this.#showNotice(error.message),
    );
  }

  #withdraw(queued, button) {
    button.disabled = true;
    const visit = this.#visit;
    this.#client.withdraw(this.#session, queued.number).then(
      () => visit === this.#visit && !this.#composer.text && this.#composer.write(textOf(queued.message)),
      (error) => {
        button.disabled = false;
        if (visit === this.#visit) this.#showNotice(error.message);
      },
    );
  }

  get #isBusy() { return this.#standing !== "lost" && (this.#pending !== null || this.#transcript.running !== null); }
  get #isClosed() { return this.#standing === "lost" || this.#standing === "refused"; }

  // --- the display ---

  #showAll() {
    this.#queue.show(this.#transcript);
    const isBusy = this.#isBusy;
    const isCancelling = this.#transcript.running?.isCancelling ?? false;
    find("empty").hidden = this.#transcript.turns.size > 0 || this.#pending !== null;
    this.#isStopping &&= isBusy;
    this.#composer.show(isBusy, this.#isStopping || isCancelling, this.#isClosed);
    find("cut").disabled = this.#source === null;
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
    const text = element("div", "message", message.text);
    text.dir = "auto";
    this.#pending = { ...message, node: element("article", "turn pending", text, element("footer", "foot", state)) };
    find("turns").append(this.#pending.node);
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
    this.#waitingOn = connection.waitingOn;
    this.#turns.notePhase(connection.phase);
    this.#showTrouble(connection);
    this.#light.show(connection);
  }

  /** Display why the server stores nothing now, such as a full disk, until it stores again. */
  #showTrouble({ trouble, waitingOn }) {
    let text = "";
    if (OUTAGES.has(trouble?.code)) text = `${trouble.message} (${trouble.code}). Nothing is lost: the turn continues by itself.`;
    else if (waitingOn === "agent") text = HELD_TURN;
    const shown = find("notice").textContent;
    if (text ? shown !== text : shown && shown === this.#trouble) this.#showNotice(text);
    this.#trouble = text;
  }

  #showSidebar(isShown) {
    document.body.classList.toggle("has-sidebar", isShown);
    find("scrim").hidden = !isShown;
    find("menu").setAttribute("aria-expanded", String(isShown));
  }

  #showNotice(text) {
    find("notice").textContent = text;
    find("notice").hidden = !text;
    if (text) find("notice").scrollIntoView({ block: "center" }); // never below the input
  }

  /** Draw the time and the band of a running turn, also without new events. */
  #tick() {
    this.#checkForSession();
    const running = this.#transcript.running;
    if (running === null || this.#standing === "lost" || document.visibilityState !== "visible") return;
    this.#turns.draw(running);
  }
}

/** Return an error handler that returns `otherwise` if another tab blocks the database. */
const ifBlocked = (otherwise) => (error) => {
  if (error.retry !== "later") throw error;
  return otherwise;
};

/** Return the session in a fragment of an address. An invalid encoding is used as it is. */
function sessionIn(fragment) {
  try {
    return decodeURIComponent(fragment);
  } catch {
    return fragment;
  }
}

await new Page().start();
