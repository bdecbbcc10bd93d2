/** What an application decides about its streams, and may change while it runs: see `ClientSettings` in midstream.d.ts. */

import { LOOK_BACK_MS } from "./storage.js";
import { MidstreamError, PATIENCE_MS, REACH_WITHIN_MS, STALL_AFTER_MS } from "./stream.js";

const LOOK_BACK_S_MAX = 366 * 24 * 3600;
const DEFAULTS = {
  isRecoveryOn: true,
  lookBackS: LOOK_BACK_MS / 1000,
  patienceS: PATIENCE_MS / 1000,
  reachWithinS: REACH_WITHIN_MS / 1000,
  stallAfterS: STALL_AFTER_MS / 1000,
};

/** Return all settings, where these were given; throw where there is no such one, or it is out of its bounds. */
export function settingsOf(given) {
  const settings = Object.freeze({ ...DEFAULTS, ...given });
  const unknown = Object.keys(settings).filter((name) => !(name in DEFAULTS));
  if (unknown.length > 0) throw new MidstreamError("usage", `there is no setting ${unknown.join(", ")}`);
  const { isRecoveryOn, lookBackS, patienceS, reachWithinS, stallAfterS } = settings;
  if (typeof isRecoveryOn !== "boolean") throw new MidstreamError("usage", "recovery is on (true) or off (false)");
  if (!(lookBackS >= 0 && lookBackS <= LOOK_BACK_S_MAX))
    throw new MidstreamError("usage", `a look-back has 0 to ${LOOK_BACK_S_MAX} seconds`);
  if (!(patienceS >= 0)) throw new MidstreamError("usage", "patience has at least 0 seconds");
  if (!(reachWithinS > 0)) throw new MidstreamError("usage", "a first connection takes more than 0 seconds");
  if (!(stallAfterS > 0)) throw new MidstreamError("usage", "a turn stands still after more than 0 seconds");
  return settings;
}
