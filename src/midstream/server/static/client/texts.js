/** Check of the texts that are sent. */

import { MidstreamError } from "./errors.js";

/** Half of a surrogate pair. UTF-8 cannot encode it. */
const LONE_SURROGATE = /\p{Surrogate}/u;

/** Throw if a text, or a text of a payload, has a lone surrogate. The server would receive another text. */
export function refuseBrokenText(value) {
  if (typeof value === "object" && value !== null) Object.values(value).forEach(refuseBrokenText);
  if (typeof value !== "string") return;
  const at = value.search(LONE_SURROGATE);
  if (at < 0) return;
  throw new MidstreamError("usage", `the text has a lone surrogate at index ${at}: half of a character. Nothing was sent`);
}
