/**
 * What a browser does to a page, told to its client: it is looked at, the network is back, it is frozen or put aside and
 * comes back, the machine slept.
 *
 * In the background timers fire once a minute, and sockets are heard all the same: nothing is owed there. A machine that
 * slept is told by two clocks: the wall's went on, a page's own may have stood still.
 */

/** How often the clocks are compared. */
const LOOK_EVERY_MS = 5000;
/** Clocks that differ by more, or a look that comes later: the machine slept. */
const SLEPT_MS = 5000;

/** Tell a client (`wake`, `rest`, `goOn`, `close`) what becomes of its page, as long as the page lives. */
export function whileAlive(client) {
  addEventListener("online", () => client.wake());
  addEventListener("pagehide", (event) => (event.persisted ? client.rest() : client.close()));
  addEventListener("pageshow", (event) => event.persisted && client.goOn());
  document.addEventListener("freeze", () => client.rest());
  document.addEventListener("resume", () => client.goOn());
  document.addEventListener("visibilitychange", () => document.visibilityState === "visible" && client.wake());
  const look = sleepTeller({ wall: Date.now, own: () => performance.now(), isHidden: () => document.hidden });
  setInterval(() => look() && client.wake(), LOOK_EVERY_MS);
}

/** Return what says, asked again and again, whether the machine slept since it was asked before. */
export function sleepTeller({ wall, own, isHidden }) {
  let before = { wall: wall(), own: own() };
  return () => {
    const now = { wall: wall(), own: own() };
    const passed = { wall: now.wall - before.wall, own: now.own - before.own };
    before = now;
    // A clock that was set looks like sleep too, and costs one ping. A late timer says nothing of a hidden page.
    const isLate = !isHidden() && passed.own > LOOK_EVERY_MS + SLEPT_MS;
    return isLate || Math.abs(passed.wall - passed.own) > SLEPT_MS;
  };
}
