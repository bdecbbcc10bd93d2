/** HTTP requests of the page to its server. */

import { refusalOf } from "./client/connections.js";
import { WRONG_SECRET } from "./client/errors.js";

/** The address of the server of this page. */
export const BASE = new URL("..", import.meta.url).href.replace(/\/+$/, "");
/** Request a path; return the content of the response, or null if it does not exist. */
export async function request(path) {
  return contentOf(await fetch(BASE + path, { cache: "no-store" }));
}

/** Return the content of a response; null if it does not exist, `WRONG_SECRET` if this browser has no secret that opens it. */
export async function contentOf(response, kind = "json") {
  if (response.status === 404) return null;
  if (response.ok) return response[kind]();
  const refusal = await refusalOf(response);
  if (refusal.code === WRONG_SECRET) return WRONG_SECRET;
  throw refusal;
}
