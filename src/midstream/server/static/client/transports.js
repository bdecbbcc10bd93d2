/**
 * Which transport a page takes to its server: tried in turn, and remembered for a while.
 *
 * A WebSocket costs least, so it is tried first. Where it is refused, or nothing comes through, server-sent events are
 * tried, and then long polls, which get through wherever a page does. A browser does not tell a page why a WebSocket
 * was not made: two that were lost give the next transport its turn, and once that works the server is asked for a
 * WebSocket that says one word; only where that is not made either was it plainly refused. While a server answers
 * nothing at all, nothing is learnt: a restart is no reason to do without WebSockets.
 */

import { HttpLine } from "./http.js";
import { BrokenLine, letGo, lostLine } from "./lines.js";
import { MidstreamError } from "./stream.js";
import { ticketed } from "./ticket.js";

/** The transports, the best first. */
export const TRANSPORTS = ["websocket", "sse", "poll"];
/** For the first frame of a connection that was made; a server says `welcome` at once. */
const FIRST_FRAME_WITHIN_MS = 5000;
/** For a WebSocket to be made. */
const CONNECT_WITHIN_MS = 8000;
/** Connections in a row that may be lost before their first frame until the next transport is tried. */
const LOST_MAX = 2;
/** For how long a transport is remembered where something in between plainly does not let a better one through. */
const REMEMBERED_MS = 24 * 60 * 60 * 1000;
/** For how long where the better ones were only lost, as in any bad network. */
const REMEMBERED_DOUBTFUL_MS = 10 * 60 * 1000;

/** What is answered in the place of a server that is not there, or not ready. */
const AWAY = new Set([502, 503, 504]);

/** How one page reaches its server. */
export class Ways {
  #url;
  #fixed;
  #headers;
  #makeSocket;
  #means;
  #first = { transport: TRANSPORTS[0], until: 0 };
  #doubted = null; // the one to begin with because those before it were lost, until it has worked
  #lostInARow = 0;

  /** @param means What `LiveStream` has: `{clock, wall, storage}`. */
  constructor({ url, transport, headers, makeSocket }, means) {
    this.#url = url;
    this.#headers = headers;
    this.#makeSocket = makeSocket ?? (headers ? ticketed(headers) : (address) => new WebSocket(address));
    this.#fixed = makeSocket ? TRANSPORTS[0] : transport === "auto" ? null : transport;
    this.#means = means;
  }

  /** Return a line to a session, by the transport that works. */
  dial(session) {
    return this.#fixed ? this.open(this.#fixed, session) : new Trial(this, session, this.#means.clock);
  }

  /** Return a line to a session by one transport. */
  open(transport, session) {
    const address = `${this.#url}/v1/sessions/${encodeURIComponent(session)}`;
    try {
      if (transport === "websocket") return this.#makeSocket(`${address.replace(/^http/, "ws")}/stream`);
      return new HttpLine(address, transport, this.#headers ?? undefined);
    } catch (error) {
      // There are none here (an old Node), or not from this page to there (https to http): the next one may do.
      const refusal = new MidstreamError("usage", `no ${transport} can be made from here to there (${error.name})`);
      return new BrokenLine(Object.assign(refusal, { isForeign: true }));
    }
  }

  /** Return the transports in the order in which they are to be tried. */
  async order() {
    const now = this.#means.wall();
    const isBelieved = ({ until }) => now < until && until <= now + REMEMBERED_MS; // else a clock was wrong
    if (!isBelieved(this.#first)) {
      const known = await this.#means.storage.worked(this.#url).catch(() => null);
      const isOfUse = known !== null && isBelieved(known) && TRANSPORTS.includes(known.transport);
      const until = now + REMEMBERED_DOUBTFUL_MS;
      this.#first = isOfUse ? known : { transport: TRANSPORTS[0], until };
    }
    const at = TRANSPORTS.indexOf(this.#doubted ?? this.#first.transport);
    return [...TRANSPORTS.slice(at), ...TRANSPORTS.slice(0, at)];
  }

  /** Begin with this one from now on, and remember it for as long as the reason is good. */
  async worked(transport) {
    this.#lostInARow = 0;
    const isDoubtful = transport === this.#doubted;
    this.#doubted = null;
    if (transport === this.#first.transport) return;
    const isSure = !isDoubtful || (!this.#headers && (await this.#isRefused())); // no ticket opens the probe
    const until = this.#means.wall() + (isSure ? REMEMBERED_MS : REMEMBERED_DOUBTFUL_MS);
    this.#first = { transport, until };
    const kept = transport === TRANSPORTS[0] ? null : this.#first;
    await this.#means.storage.remember(this.#url, kept).catch(() => {}); // the next page searches again
  }

  /**
   * A line was lost before its first frame: after some in a row the next transport has its turn. That nothing answers,
   * whatever is asked, says nothing of a transport (STREAM-108).
   */
  async lost(transport) {
    if (!(await this.isThere())) return;
    this.#lostInARow += 1;
    if (this.#lostInARow < LOST_MAX) return;
    this.#lostInARow = 0;
    this.#doubted = TRANSPORTS[(TRANSPORTS.indexOf(transport) + 1) % TRANSPORTS.length];
  }

  /** Whether a server answers a plain request now, whatever it answers. */
  async isThere() {
    try {
      const headers = (await this.#headers?.()) ?? {};
      const signal = AbortSignal.timeout(FIRST_FRAME_WITHIN_MS);
      const answer = await fetch(`${this.#url}/v1/probe/poll`, { cache: "no-store", redirect: "manual", headers, signal });
      return !AWAY.has(answer.status);
    } catch {
      return false;
    }
  }

  /** Whether a WebSocket is not made while the server answers otherwise. */
  #isRefused() {
    return new Promise((resolve) => {
      const socket = new WebSocket(`${this.#url.replace(/^http/, "ws")}/v1/probe/stream`);
      const settle = (isRefused) => {
        this.#means.clock.clear(timer);
        letGo(socket);
        resolve(isRefused);
      };
      const timer = this.#means.clock.set(() => settle(true), FIRST_FRAME_WITHIN_MS);
      socket.onmessage = () => settle(false);
      socket.onclose = () => settle(true);
    });
  }
}

/**
 * A line that finds its transport: what is said is said again over the next one, until a frame comes. The server takes
 * each command once, so that saying it twice is harmless (STREAM-12).
 */
class Trial {
  onopen = null;
  onmessage = null;
  onclose = null;
  onheard = null;
  #ways;
  #session;
  #clock;
  #order = [];
  #line = null;
  #isUp = false; // that line may be spoken to
  #said = [];
  #isOpen = false; // whoever owns this knows that there is a line
  #isSettled = false;
  #isOver = false;
  #refusal = null;
  #timer = null;

  constructor(ways, session, clock) {
    this.#ways = ways;
    this.#session = session;
    this.#clock = clock;
    ways.order().then((order) => {
      this.#order = order;
      this.#next();
    });
  }

  send(frame) {
    if (!this.#isSettled) this.#said.push(frame);
    if (this.#isUp) this.#line.send(frame);
  }

  close() {
    this.onopen = this.onmessage = this.onclose = this.onheard = null;
    this.#end(null);
  }

  #next() {
    if (this.#isOver) return;
    const [transport] = this.#order;
    const line = this.#ways.open(transport, this.#session);
    this.#line = line;
    const silent = () => this.#change(lostLine(`nothing came over ${transport}`), true);
    this.#within(CONNECT_WITHIN_MS, async () => {
      const isSwallowed = await this.#ways.isThere(); // STREAM-109
      if (this.#line === line && !this.#isUp) this.#change(lostLine(`${transport} cannot be reached`), isSwallowed);
    });
    line.onopen = () => {
      this.#isUp = true;
      this.#within(FIRST_FRAME_WITHIN_MS, silent);
      for (const frame of this.#said) line.send(frame);
      if (!this.#isOpen) this.onopen?.({});
      this.#isOpen = true;
    };
    line.onheard = () => this.onheard?.({});
    line.onmessage = ({ data }) => {
      if (!this.#isSettled) this.#settle(transport);
      this.onmessage?.({ data });
    };
    line.onclose = (event) => this.#change(event?.error ?? lostLine("the connection broke"));
  }

  #settle(transport) {
    this.#clock.clear(this.#timer);
    this.#isSettled = true;
    this.#said = [];
    this.#ways.worked(transport);
  }

  /** A line is of no use: go on to the next transport where something in between may be why, else end. */
  #change(error, isSilent = false) {
    if (this.#isOver) return;
    letGo(this.#line);
    this.#line = null;
    this.#isUp = false;
    if (this.#isSettled) return void this.#end(error);
    if (!isSilent && !error.isForeign) {
      if (error.code === "connection_lost") this.#ways.lost(this.#order[0]);
      return void this.#end(error);
    }
    this.#refusal ??= error;
    this.#order.shift();
    if (this.#order.length === 0) this.#end(this.#refusal);
    else this.#next();
  }

  #within(milliseconds, act) {
    this.#clock.clear(this.#timer);
    this.#timer = this.#clock.set(act, milliseconds);
  }

  #end(error) {
    if (this.#isOver) return;
    this.#isOver = true;
    this.#clock.clear(this.#timer);
    letGo(this.#line);
    this.#line = null;
    this.#isUp = false;
    this.onclose?.({ error });
  }
}
