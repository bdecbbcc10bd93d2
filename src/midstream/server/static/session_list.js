/** The list of sessions beside the transcript: its pages, its search, and which session waits for a person. */

import { OPEN } from "./client/stream.js";
import { ask } from "./requests.js";
import { element, statusWord } from "./view.js";

const LIST_EVERY_MS = 15_000;
/** Sessions that each press of “Older sessions” adds. */
const LISTED_PER_PAGE = 50;
/** Between a key in the search and its answer. */
const SEARCH_AFTER_MS = 150;
/** How a session is listed of which its time says more than its status. */
const TELLS_NO_MORE = new Set(["completed", ""]);
/** With fewer sessions there is nothing to search. */
const SEARCHED_MIN = 8;
/** Stands in the id of every sub-agent's session, behind that of the session that called it. */
const CHILD_MARK = "::";

const find = (id) => document.getElementById(id);

/** Shows the list, and keeps it up to date while the page is looked at. */
export class SessionList {
  #shown;
  #titles = new Map(); // of the sessions that were shown here: a server that encrypts them keeps none
  #pages = 1;
  #listings = 0; // raised by every listing: an older one that comes later is dropped
  #searchTimer = null;

  /** @param shown Returns `{session, isAsking}` of the session that the page shows now. */
  constructor(shown) {
    this.#shown = shown;
  }

  /** Begin to listen to its search and its button, and to list again and again. */
  start() {
    find("more").addEventListener("click", () => {
      this.#pages += 1;
      this.refresh();
    });
    find("search").addEventListener("input", () => {
      this.#pages = 1;
      clearTimeout(this.#searchTimer);
      this.#searchTimer = setTimeout(() => this.refresh(), SEARCH_AFTER_MS);
    });
    setInterval(() => document.visibilityState === "visible" && this.refresh(), LIST_EVERY_MS);
  }

  /** Use this title where the server has none. */
  entitle(session, title) {
    this.#titles.set(session, title);
  }

  /** Ask the server, and show what it answers. */
  async refresh() {
    const listing = (this.#listings += 1);
    const words = find("search").value.trim();
    let page;
    let waiting;
    try {
      [page, waiting] = await Promise.all([listed(words, this.#pages), ask("/v1/questions")]);
    } catch {
      return; // the list of before stands; the light tells
    }
    if (listing !== this.#listings) return;
    const asking = new Set(waiting.questions.map((question) => question.session.split(CHILD_MARK, 1)[0]));
    const lines = page.sessions.map((session) => this.#line(session, asking));
    const focused = document.activeElement?.closest("#sessions a")?.hash;
    find("sessions").replaceChildren(...lines);
    if (focused) lines.map((line) => line.firstChild).find((link) => link.hash === focused)?.focus({ preventScroll: true });
    find("more").hidden = page.next === null;
    find("search").hidden = !words && page.next === null && lines.length < SEARCHED_MIN;
    find("sessions-none").hidden = !words || lines.length > 0;
    find("sessions-empty").hidden = lines.length > 0 || words !== "";
  }

  #line(session, asking) {
    const shown = this.#shown();
    const name = session.title || this.#titles.get(session.id) || "Untitled";
    const link = element("a", "", element("bdi", "name", name));
    link.href = `#${encodeURIComponent(session.id)}`;
    const isShown = session.id === shown.session;
    const isAsking = asking.has(session.id) || (isShown && shown.isAsking);
    const isOpen = OPEN.has(session.status);
    const status = isAsking && isOpen ? "waiting" : session.status;
    const when = element("span", "when", isOpen || !TELLS_NO_MORE.has(status) ? statusWord(status) : ago(session.updated_at));
    when.title = `${statusWord(status)}, changed ${new Date(session.updated_at * 1000).toLocaleString()}`;
    link.append(when);
    if (isShown) link.setAttribute("aria-current", "page");
    return element("li", isAsking ? `${session.status} asking` : session.status, link);
  }
}

/** Return the sessions of the first pages of the list, last changed first, in which `words` are found. */
async function listed(words, pages) {
  const sessions = new Map(); // by id: one that changes meanwhile is listed once
  let next = `?${new URLSearchParams({ limit: LISTED_PER_PAGE, children: 0, q: words })}`;
  for (let page = 0; page < pages && next !== null; page += 1) {
    const found = await ask(`/v1/sessions${next}`);
    for (const session of found.sessions) if (!sessions.has(session.id)) sessions.set(session.id, session);
    next = found.next;
  }
  return { sessions: [...sessions.values()], next };
}

function ago(seconds) {
  const passed = Date.now() / 1000 - seconds;
  if (passed < 60) return "now";
  if (passed < 3600) return `${Math.floor(passed / 60)} min`;
  if (passed < 86_400) return `${Math.floor(passed / 3600)} h`;
  return new Date(seconds * 1000).toLocaleDateString(undefined, { month: "short", day: "numeric" });
}
