/** Settings of a client, which an application may change at any time: see `ClientSettings` in midstream.d.ts. */

import { MidstreamError } from "./errors.js";
import { PATIENCE_MS, REACH_WITHIN_MS } from "./link.js";
import { LOOK_BACK_MS } from "./storage.js";
import { STALL_AFTER_MS } from "./turn_silence.js";

const LOOK_BACK_S_MAX = 366 * 24 * 3600;
const DEFAULTS = {
  isRecoveryOn: true,
  lookBackS: LOOK_BACK_MS / 1000,
  patienceS: PATIENCE_MS / 1000,
  reachWithinS: REACH_WITHIN_MS / 1000,
  stallAfterS: STALL_AFTER_MS / 1000,
};

/** Return all settings, with defaults for those that are not given; throw if one is unknown or out of bounds. */
export function settingsOf(given) {
  const settings = Object.freeze({ ...DEFAULTS, ...given });
  const unknown = Object.keys(settings).filter((name) => !(name in DEFAULTS));
  if (unknown.length > 0) throw new MidstreamError("usage", `unknown setting ${unknown.join(", ")}; expected ${Object.keys(DEFAULTS).join(", ")}`);
  const { isRecoveryOn, lookBackS, patienceS, reachWithinS, stallAfterS } = settings;
  if (typeof isRecoveryOn !== "boolean") throw new MidstreamError("usage", `isRecoveryOn is ${isRecoveryOn}; expected true or false`);
  if (!(lookBackS >= 0 && lookBackS <= LOOK_BACK_S_MAX))
    throw new MidstreamError("usage", `lookBackS is ${lookBackS}; expected 0 to ${LOOK_BACK_S_MAX}`);
  if (!(patienceS >= 0)) throw new MidstreamError("usage", `patienceS is ${patienceS}; expected at least 0`);
  if (!(reachWithinS > 0)) throw new MidstreamError("usage", `reachWithinS is ${reachWithinS}; expected more than 0`);
  if (!(stallAfterS > 0)) throw new MidstreamError("usage", `stallAfterS is ${stallAfterS}; expected more than 0`);
  return settings;
}
