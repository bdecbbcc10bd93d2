/** The list of sessions beside the transcript: its pages, its search, and the sessions that wait for a person. */

import { rootOf } from "./client/secrets.js";
import { OPEN_STATUSES } from "./client/frames.js";
import { request } from "./requests.js";
import { element, find, statusLabel } from "./view.js";

const LIST_EVERY_MS = 15_000;
/** Sessions that each click on “Older sessions” adds. */
const LISTED_PER_PAGE = 50;
/** Delay from a key in the search to the request. */
const SEARCH_AFTER_MS = 150;
/** Statuses that are not displayed: the time is displayed instead. */
const UNDISPLAYED = new Set(["completed", ""]);
/** The search is hidden with fewer sessions. */
const SEARCHED_MIN = 8;

/** Displays the list, and updates it while the page is visible. */
export class SessionList {
  #shown;
  #titles = new Map(); // titles of sessions displayed here; a server that encrypts them has none
  #pages = 1;
  #listings = 0; // incremented by every request; the results of older requests are dropped
  #searchTimer = null;

  /** @param shown A function that returns `{session, isAsking}` of the displayed session. */
  constructor(shown) {
    this.#shown = shown;
  }

  /** Add the event handlers of the search and the button, and start the periodic update. */
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

  /** Use this title if the server has none. */
  entitle(session, title) {
    this.#titles.set(session, title);
  }

  /** Request the list, and display it. */
  async refresh() {
    const listing = (this.#listings += 1);
    const query = find("search").value.trim();
    let page;
    let waiting;
    try {
      [page, waiting] = await Promise.all([readPages(query, this.#pages), request("/v1/questions")]);
    } catch {
      return; // the earlier list stays; the light displays the failure
    }
    if (listing !== this.#listings) return;
    const asking = new Set(waiting.questions.map((question) => rootOf(question.session)));
    const items = page.sessions.map((session) => this.#item(session, asking));
    const focused = document.activeElement?.closest("#sessions a")?.hash;
    find("sessions").replaceChildren(...items);
    if (focused) items.map((item) => item.firstChild).find((link) => link.hash === focused)?.focus({ preventScroll: true });
    find("more").hidden = page.next === null;
    find("search").hidden = !query && page.next === null && items.length < SEARCHED_MIN;
    find("sessions-none").hidden = !query || items.length > 0;
    find("sessions-empty").hidden = items.length > 0 || query !== "";
  }

  #item(session, asking) {
    const shown = this.#shown();
    const name = session.title || this.#titles.get(session.id) || "Untitled";
    const link = element("a", "", element("bdi", "name", name));
    link.href = `#${encodeURIComponent(session.id)}`;
    const isShown = session.id === shown.session;
    const isAsking = asking.has(session.id) || (isShown && shown.isAsking);
    const isOpen = OPEN_STATUSES.has(session.status);
    const status = isAsking && isOpen ? "waiting" : session.status;
    const when = element("span", "when", isOpen || !UNDISPLAYED.has(status) ? statusLabel(status) : ago(session.updated_at));
    when.title = `${statusLabel(status)}, changed ${new Date(session.updated_at * 1000).toLocaleString()}`;
    link.append(when);
    if (isShown) link.setAttribute("aria-current", "page");
    return element("li", isAsking ? `${session.status} asking` : session.status, link);
  }
}

/** Return the sessions that match `query`, from the first pages of the list, last changed first. */
async function readPages(query, pages) {
  const sessions = new Map(); // by id, as a session that changes meanwhile is on two pages
  let next = `?${new URLSearchParams({ limit: LISTED_PER_PAGE, children: 0, q: query })}`;
  for (let page = 0; page < pages && next !== null; page += 1) {
    const found = await request(`/v1/sessions${next}`);
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
