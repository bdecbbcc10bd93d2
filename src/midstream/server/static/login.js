/** The login of this browser, by the token of the server's login link. */

import { BASE } from "./requests.js";
import { visible } from "./visible.js";

export const NOT_LOGGED_IN =
  "This browser is not logged in. Run \u201cmidstream login\u201d beside it, and open the link it prints.";

/** Log in with the token of the server's login link, and remove the token from the address. */
export async function logIn() {
  const parameters = new URLSearchParams(location.hash.slice(1));
  const login = parameters.get("login");
  const session = encodeURIComponent(parameters.get("open") ?? "");
  if (login === null) return;
  history.replaceState(null, "", session ? `#${session}` : location.pathname);
  const answer = await postLogin({ login });
  if (answer.status !== 409) return;
  // Another principal is logged in here. Only the person may change that.
  const { detail } = await answer.json();
  if (window.confirm(`${visible(detail)}.\n\nLog in with the link instead?`)) await postLogin({ login, replace: true });
}

/** Return whether this browser is logged in; true if the server does not respond. */
export async function isLoggedIn() {
  const response = await fetch(`${BASE}/v1/sessions?limit=1`, { cache: "no-store" }).catch(() => null);
  return response?.status !== 401;
}

function postLogin(body) {
  const headers = { "content-type": "application/json" };
  return fetch(`${BASE}/v1/login`, { method: "POST", redirect: "manual", headers, body: JSON.stringify(body) });
}
