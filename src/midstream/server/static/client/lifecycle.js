/**
 * Lifecycle of a page: visible, frozen, in the back/forward cache, network back, machine awake again.
 *
 * In the background, timers fire once a minute, and sockets still receive frames. So the background needs no handling.
 * Two clocks detect a machine that slept: the wall clock continues, and the monotonic clock of a page may stop.
 */

/** How often the clocks are compared. */
const CHECK_EVERY_MS = 5000;
/** The machine slept if the clocks differ by more, or if a check is later than this. */
const SLEPT_MS = 5000;

/** Call `wake`, `disconnect`, `reconnect` and `close` of a client as the state of the page changes. */
export function bindToPage(client) {
  addEventListener("online", () => client.wake());
  addEventListener("pagehide", (event) => (event.persisted ? client.disconnect() : client.close()));
  addEventListener("pageshow", (event) => event.persisted && client.reconnect());
  document.addEventListener("freeze", () => client.disconnect());
  document.addEventListener("resume", () => client.reconnect());
  document.addEventListener("visibilitychange", () => document.visibilityState === "visible" && client.wake());
  const hasSlept = createSleepDetector({ wall: Date.now, own: () => performance.now(), isHidden: () => document.hidden });
  setInterval(() => hasSlept() && client.wake(), CHECK_EVERY_MS);
}

/** Return a function for repeated calls: it returns whether the machine slept since its last call. */
export function createSleepDetector({ wall, own, isHidden }) {
  let before = { wall: wall(), own: own() };
  return () => {
    const now = { wall: wall(), own: own() };
    const passed = { wall: now.wall - before.wall, own: now.own - before.own };
    before = now;
    // A change of the clock counts as sleep too, and costs one ping. On a hidden page timers are late anyway.
    const isLate = !isHidden() && passed.own > CHECK_EVERY_MS + SLEPT_MS;
    return isLate || Math.abs(passed.wall - passed.own) > SLEPT_MS;
  };
}
