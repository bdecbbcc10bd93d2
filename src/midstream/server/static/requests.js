/** Plain requests of the page to its server. */

import { refusalOf } from "./client/lines.js";

/** The address under which the server of this page is. */
export const BASE = new URL("..", import.meta.url).href.replace(/\/+$/, "");
/** Stands in the place of what the server opens to no secret that this browser has. */
export const WRONG_SECRET = "wrong_secret";

/** Ask the server; null where there is no such thing. */
export async function ask(path) {
  return answered(await fetch(BASE + path, { cache: "no-store" }));
}

/** Return what an answer says; null where there is no such thing, `WRONG_SECRET` where the session is locked. */
export async function answered(response, kind = "json") {
  if (response.status === 404) return null;
  if (response.ok) return response[kind]();
  const refusal = await refusalOf(response);
  if (refusal.code === WRONG_SECRET) return WRONG_SECRET;
  throw refusal;
}
