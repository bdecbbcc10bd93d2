/** Texts as they may be sent. */

import { MidstreamError } from "./stream.js";

/** A half of a surrogate pair: UTF-8 has no bytes for it. */
const LONE_SURROGATE = /\p{Surrogate}/u;

/** Throw where a text, or one of a payload, has a lone surrogate: it would arrive as another text. */
export function refuseBrokenText(value) {
  if (typeof value === "object" && value !== null) Object.values(value).forEach(refuseBrokenText);
  if (typeof value !== "string") return;
  const at = value.search(LONE_SURROGATE);
  if (at < 0) return;
  throw new MidstreamError("usage", `the text has a lone surrogate at index ${at}: half of a character. Nothing was sent`);
}
