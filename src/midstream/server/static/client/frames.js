/** Constants of the protocol, event ids, and the frames of a client that never change. */

import { MidstreamError } from "./errors.js";

export const PROTOCOL_VERSION = 1;
/** Values that hold until a welcome has others. */
export const HEARTBEAT_S = 10;
export const IN_FLIGHT_MAX = 64;
export const FRAME_BYTES_MAX = 1024 * 1024;
export const CLOSE_FRAME = '{"type":"close"}';
export const PING_FRAME = '{"type":"ping"}';
/** The types of frames of a server, besides "error". */
export const SERVER_FRAMES = new Set(["welcome", "ack", "events", "gone", "snapshot", "heartbeat"]);
/** The statuses of a session with an open turn. */
export const OPEN_STATUSES = new Set(["running", "waiting", "locked"]);

/** Parse an event id such as "3-17", or throw. "0" is the same as "0-0", the beginning. */
export function parseEventId(text) {
  if (text === "0") return { epoch: 0, position: 0 };
  const match = /^(\d{1,19})-(\d{1,19})$/.exec(text);
  if (!match) throw new MidstreamError("malformed_frame", `the event id is '${text}'; expected one such as '3-17'`);
  return { epoch: Number(match[1]), position: Number(match[2]) };
}

export function formatEventId(at) {
  return at && `${at.epoch}-${at.position}`;
}

/** Return a parsed frame, or null if it is malformed. */
export function parseFrame(frame) {
  try {
    return JSON.parse(frame);
  } catch {
    return null;
  }
}
