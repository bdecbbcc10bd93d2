/** Web Locks of the browser: locks that all tabs of an origin share. */

/** Whether this browser has Web Locks. */
export function hasLocks() {
  return Boolean(globalThis.navigator?.locks);
}

/** Acquire a lock; the browser releases it when the tab dies. Return a function that releases it, or null if another tab has it. */
export function acquireLock(name, options) {
  return new Promise((resolve) => {
    const hold = (lock) => (lock === null ? resolve(null) : new Promise((release) => resolve(release)));
    navigator.locks.request(name, options, hold).catch(() => resolve(null));
  });
}
