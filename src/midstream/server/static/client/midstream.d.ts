/** Types of midstream.js. Instants are milliseconds since 1970 in this file, seconds since 1970 in records. */

export type Retry = "never" | "later" | "now" | "ask";

/** What a server refused, or what went wrong here. Match on `code`, which is stable. */
export class MidstreamError extends Error {
  readonly code: string;
  readonly retry: Retry;
  readonly retryAfterS: number | null;
}

/** A turn ended without a whole answer. What had finished is kept in the session, and the next message may come. */
export class TurnFailedError extends MidstreamError {
  readonly code: "turn_failed";
  readonly status: "failed" | "cancelled" | "interrupted" | "withdrawn";
  /** The code of the error that ended the turn, or "". */
  readonly cause: string;
  /** The text that had come. */
  readonly transcript: string;
  /** The turn's number; 0 where it has none: the message was withdrawn. */
  readonly turn: number;
  /** Whether `client.resume(session, { turn })` can go on with it: it failed, or was interrupted. */
  readonly isResumable: boolean;
}

export interface TextPart {
  type: "text";
  text: string;
}
export interface ThinkingPart {
  type: "thinking";
  text: string;
  signature?: string;
}
export interface FilePart {
  type: "file";
  media_type: string;
  data?: string;
  url?: string;
  name?: string;
}
/** A tool request; `arguments` is JSON text exactly as the model wrote it, also when it is broken. */
export interface CallPart {
  type: "call";
  id: string;
  name: string;
  arguments?: string;
}
/** A tool that the upstream runs itself: to be shown, never to be run. Without `outcome` it still runs. */
export interface UpstreamCallPart {
  type: "upstream_call";
  id: string;
  name: string;
  arguments?: string;
  content?: string;
  outcome?: "ok" | "error" | "cancelled" | "denied" | "unknown";
}
export interface ToolResult {
  call_id: string;
  content: string;
  outcome?: "ok" | "error" | "cancelled" | "denied" | "unknown";
  /** Where `content` is only the beginning: the digest by which `GET …/blobs/{digest}` has the whole. */
  blob?: string;
  /** Bytes of the whole, in UTF-8. */
  size?: number;
}
export interface Response {
  parts: (TextPart | ThinkingPart | CallPart | UpstreamCallPart)[];
  finish?: "stop" | "calls" | "length" | "filter" | "interrupted";
  model?: string;
  usage?: { input_tokens?: number; output_tokens?: number; cached_tokens?: number; cache_write_tokens?: number };
}

export type QuestionKind = "approval" | "question" | "doubt";
/** `allow` or `deny` an approval, `respond` to a question; of a call in doubt `happened`, `rerun`, `skip`. */
export type Choice = "allow" | "deny" | "respond" | "happened" | "rerun" | "skip";
/** What an answer must name; a `question_asked` record has it. */
export interface Asked {
  turn: number;
  response: number;
  call_id: string;
  digest: string;
}

/** What the journal holds. Kinds that are not listed may come from a newer server: ignore them. */
export type JournalRecord =
  | { type: "epoch_started"; epoch: number; owner: string; at: number; version: number }
  | { type: "stream_opened"; stream: string; secret_digest: string; connection?: number }
  /** A newer connection of the client has it, whichever server it came to. */
  | { type: "stream_taken"; stream: string; connection: number }
  | { type: "command_accepted"; stream: string; seqno: number; digest: string }
  | {
      type: "message_accepted";
      turn: number;
      message: { type?: "user"; parts: (TextPart | FilePart)[] };
      at: number;
      stream?: string;
      queued?: number;
    }
  /** It came while a turn ran, and opens one of its own when those before it have ended. */
  | {
      type: "message_queued";
      number: number;
      message: { type?: "user"; parts: (TextPart | FilePart)[] };
      at: number;
      stream?: string;
    }
  | { type: "message_withdrawn"; number: number; at: number; stream?: string }
  /** A client application sent its whole conversation again; `tail` is what is new of it. */
  | {
      type: "transcript_accepted";
      turn: number;
      response: number;
      at: number;
      request: { id: string };
      keep?: number;
      tail?: unknown[];
    }
  /** A turn that was interrupted or had failed goes on; `response` is the one that comes next. */
  | { type: "turn_resumed"; turn: number; response: number; at: number; stream?: string }
  /** The model is asked; what earlier attempts said of this response is void. */
  | { type: "attempt_started"; turn: number; response: number; attempt: number; at: number; not_before?: number }
  | {
      type: "delta";
      turn: number;
      response: number;
      attempt: number;
      part: number;
      kind: "text" | "thinking";
      text: string;
      /** The part is a tool that the upstream runs: told when it starts, and once more, whole, when it has ended. */
      call?: UpstreamCallPart;
    }
  | {
      type: "attempt_failed";
      turn: number;
      response: number;
      attempt: number;
      code: string;
      message: string;
      at: number;
    }
  /** The provider keeps this attempt's response, whoever listens. */
  | { type: "attempt_resumable"; turn: number; response: number; attempt: number; token: string }
  /** A cut attempt goes on where it stopped: its words stand, and only what is new follows. */
  | {
      type: "attempt_continued";
      turn: number;
      response: number;
      attempt: number;
      number: number;
      at: number;
      not_before?: number;
    }
  /** Nothing came for longer than usual, and it is still waited for; then either progress, or another ending. */
  | {
      type: "stall_noticed" | "stall_ended";
      turn: number;
      response: number;
      waiting_for: "first_token" | "between_tokens" | "tool";
      silent_s: number;
      at: number;
      call_id?: string;
    }
  /** The conversation was too long: the model is shown nothing of its first `cut` entries any more. */
  | { type: "history_compacted"; turn: number; response: number; cut: number; at: number }
  /** The tools that come and go (those of MCP servers) are others than the session's readers were told last. */
  /** What a pool made of the request, and how it goes on: once more where a fresh agent takes a failed one's place. */
  | {
      type: "reuse_decided";
      turn: number;
      response: number;
      attempt: number;
      judgement: {
        kind: string;
        why: string;
        way: string;
        field?: string;
        index?: number;
        common?: number;
        new?: number;
        rebuilt?: string;
      };
      at: number;
    }
  | { type: "tools_changed"; turn: number; at: number; added?: string[]; removed?: string[]; unreachable?: string[] }
  | { type: "response_completed"; turn: number; response: number; attempt: number; body: Response; at: number }
  /** `arguments` where a person changed the model's. */
  | { type: "call_started"; turn: number; response: number; call_id: string; run: number; at: number; arguments?: string }
  | { type: "call_progressed"; turn: number; response: number; call_id: string; run: number; text: string; at: number }
  /** A record of the session `child`, which does the work of a call; of nested sub-agents again a `child_delta`. */
  | {
      type: "child_delta";
      turn: number;
      response: number;
      call_id: string;
      child: string;
      position: number;
      record: JournalRecord;
    }
  /** Its owner died without an outcome, and somebody is being asked whether it happened. */
  | { type: "call_in_doubt"; turn: number; response: number; call_id: string; at: number }
  /** With `attempt`: an upstream's agent wants leave in the middle of its answer; `name` and `arguments` are its own. */
  | (Asked & {
      type: "question_asked";
      kind: QuestionKind;
      at: number;
      text?: string;
      expires_at?: number;
      attempt?: number;
      name?: string;
      arguments?: string;
      is_fixed?: boolean;
      repeats?: string;
    })
  /** A question of an upstream's agent that nobody needs to answer any more. */
  | {
      type: "question_closed";
      turn: number;
      response: number;
      call_id: string;
      why: "expired" | "withdrawn";
      at: number;
    }
  /** What was decided about such a question is used up; the agent hears it next. */
  | { type: "answer_used"; turn: number; response: number; attempt: number; call_id: string; at: number }
  | (Asked & {
      type: "question_answered";
      kind: QuestionKind;
      choice: Choice;
      at: number;
      text?: string;
      arguments?: string;
      by?: string;
    })
  /** What a call gave after it was closed as unknown. */
  | { type: "result_arrived_late"; turn: number; response: number; result: ToolResult; at: number }
  | { type: "call_ended"; turn: number; response: number; result: ToolResult; at: number }
  /** In the place of an outcome whose record cannot be read any more. */
  | { type: "outcome_damaged"; turn: number; response: number; call_id: string }
  | { type: "step_committed"; turn: number; response: number }
  | { type: "cancel_requested"; turn: number; at: number; deadline_at: number }
  | {
      type: "turn_ended";
      turn: number;
      status: "completed" | "cancelled" | "failed" | "interrupted";
      at: number;
      code?: string;
      message?: string;
    };

/**
 * What the answer of the turn is after an event. `transcript` holds each word once: what a cut attempt said goes when the next
 * attempt says something else. The texts of two responses are two paragraphs; thinking and what sub-agents write are not in it. Of a
 * turn whose beginning the stream did not bring (`follow`, or resumed at a cursor), it holds what came since.
 */
export interface AnswerSoFar {
  /** The whole text so far: put it in the place of what is shown. */
  readonly transcript: string;
  /** What was shown of this answer does not stand: show `transcript` in its place. Where false, appending `text` does it. */
  readonly replaces: boolean;
  /** The words that this event adds to what was shown; "" where it adds none. */
  readonly text: string;
}
/** A record at its place: applied once, in order, without gap. */
export interface RecordEvent extends AnswerSoFar {
  type: "record";
  id: string;
  record: JournalRecord;
}
/** What was shown after `id` is not on the journal's line: forget it; the events that follow come after `id`. */
export interface GoneEvent extends AnswerSoFar {
  type: "gone";
  id: string;
  reason: string;
  /** A snapshot follows, which replaces everything: there is nothing to do before it. */
  hasSnapshot: boolean;
}
/** What a session is doing, or how its last turn ended; "" before the first turn. */
export type SessionStatus =
  | ""
  | "running"
  | "waiting"
  | "locked"
  | "completed"
  | "cancelled"
  | "failed"
  | "interrupted";
/** A session at one event: what `GET /v1/sessions/{id}` answers. */
export interface Snapshot {
  session: string;
  event_id: string;
  status: SessionStatus;
  /** "nothing", "model", "tool", "client" or "person". */
  waiting_on: string;
  turns: number;
  /** How the last turn ended; "" before the first end. */
  last: string;
  history: unknown[];
  running: unknown | null;
  queue: unknown[];
  is_resumable: boolean;
  /** How many of the oldest entries of the history there was no room for. */
  left_out: number;
}
/** The session as it was at `id`, as `GET /v1/sessions/{id}` answers it: put it in the place of all you have of it. */
export interface SnapshotEvent extends AnswerSoFar {
  type: "snapshot";
  id: string;
  session: Snapshot;
  /** The stream's turn by then, 0 while it has none; null for a reader. `transcript` is the answer of this turn only. */
  turn: number | null;
}
/** What was said in an earlier life cannot be read any more, and was not sent again; a snapshot of the session follows. */
export interface LostEvent extends AnswerSoFar {
  type: "lost";
  id: string;
  reason: string;
}
export type StreamEvent = RecordEvent | GoneEvent | SnapshotEvent | LostEvent;

export interface Connection {
  session: string;
  phase: "waiting" | "connecting" | "live" | "ended";
  /** When the next try is due, while `phase` is "waiting". */
  retryAt: number | null;
  /** What the last heartbeat said the turn waits for: model, tool, client, person, nothing; "" before the first. */
  waitingOn: string;
  /** A connection was lost and is being made anew. Never where the server is degraded. */
  isReconnecting: boolean;
  /** For a minute nothing happened while the turn waits for a model, a tool or a client. Nothing is cut. */
  isStalled: boolean;
  /** What the server last said it cannot do now (a full disk, draining), until something gets through again. */
  trouble: MidstreamError | null;
}

/**
 * One stream over as many connections as it takes.
 *
 * Iterating ends with the turn (never, when it only follows). It throws `MidstreamError` where the server refused for good, and
 * `TurnFailedError` after the last event of a turn that failed, was stopped or interrupted, or whose message was withdrawn. An event counts as seen when the loop asks for the next. Leaving the loop says that this page wants no more
 * of it (`detach`): the turn goes on, and nothing of it is kept here.
 */
export class LiveStream implements AsyncIterable<StreamEvent> {
  readonly session: string;
  /** "" for a follower. */
  readonly key: string;
  /** The turn this stream opened or resumed; 0 while unknown. */
  readonly turn: number;
  /** The last event the loop has finished with. */
  readonly cursor: string | null;
  /** The message that is not acknowledged yet. */
  readonly pendingText: string | null;
  /** What is wrong with what was kept of it: it begins with a `LostEvent`. "" where nothing is. */
  readonly damage: string;
  /** The server said that it cannot resume: nothing is kept and nothing is retried. */
  readonly isDegraded: boolean;
  /** Everything that was said is in the server's journal. */
  readonly isAcknowledged: boolean;
  readonly isHeard: boolean;
  /** Whether its message waits for the turns before it. */
  readonly isQueued: boolean;
  readonly connection: Connection;
  /** Events that came and that the loop has not asked for, the oldest first. Looking at them handles none. */
  readonly unread: StreamEvent[];
  /** Resolves when all that is due now is written down, sent and delivered. */
  readonly settled: Promise<void>;
  /** Resolves when the first command is in the server's journal; rejects if it never will be. */
  readonly accepted: Promise<void>;
  /** Resolves at the end with the error that caused it, or null. */
  readonly ended: Promise<MidstreamError | null>;
  /**
   * Read what is left, to the end of the turn, and return its whole answer. Rejects with `TurnFailedError` where the turn did not
   * complete. After a loop over the stream it returns the same answer, or rejects, at once.
   */
  answer(): Promise<string>;
  /** Stop the turn; resolves when it has ended. */
  abort(): Promise<void>;
  /** Hear no more of it. What was sent still arrives. */
  detach(): void;
  /** Close the connection as a lost network would; `forMs` keeps it away for that long. */
  cut(forMs?: number): void;
  /** Try at once, or prove that the connection lives. */
  wake(): void;
  /** Have no connection until `goOn`. */
  rest(): void;
  goOn(): void;
  /** Let go of everything here and keep what is written down for `resumeInterrupted`. */
  leave(): void;
  [Symbol.asyncIterator](): AsyncGenerator<StreamEvent, void, undefined>;
}

/** What an application decides about its streams. */
export interface ClientSettings {
  /**
   * Whether streams are kept in the browser's database, so that another page can go on. Where not, a new stream lives and dies
   * with its page; it survives lost connections all the same. What was kept before stays, and is resumed when it is on again.
   * Default: true.
   */
  isRecoveryOn: boolean;
  /** Seconds (7200, at most a year) after which a stream that nobody touched is cleared instead of resumed. */
  lookBackS: number;
  /** Seconds (7200) without a working connection after which a stream ends with `connection_lost`. */
  patienceS: number;
  /**
   * Seconds (20) for the first connection to a server; then a stream ends with `connection_lost`. Its message stays stored. There is no
   * limit where the server was reached before: by this client, by the page that began the stream, or when it delivered the page.
   */
  reachWithinS: number;
  /** Seconds (60) without an event, while the turn waits for a machine, after which `connection.isStalled`. */
  stallAfterS: number;
}

export class Client {
  /**
   * Others may be put in their place at any time, for streams that begin, or are resumed, from then on; what is left out is
   * as by default. Throws "usage" where there is no such one, or it is out of its bounds; then nothing has changed.
   */
  get settings(): Readonly<ClientSettings>;
  set settings(given: Partial<ClientSettings>);
  /** Whether an unsent message survives a reload; false where the browser refuses IndexedDB. */
  readonly isDurable: boolean;
  /**
   * Say something; events begin after `after`, or with this stream. While a turn runs, the message waits for its end,
   * or is refused where `whenBusy` is "refuse". With `cancelAfterS` (up to an hour) the turn is stopped where the
   * connection is lost, and not made again, for so many seconds. Throws, and sends nothing, if the message outgrows a frame, is no string
   * or has a lone surrogate ("usage").
   */
  send(
    session: string,
    text: string,
    options?: { after?: string | null; whenBusy?: "queue" | "refuse"; cancelAfterS?: number | null },
  ): LiveStream;
  /**
   * Say something and return the whole answer, each word once, whatever broke meanwhile. Rejects with `TurnFailedError`
   * where the turn ended otherwise, and with the `MidstreamError` that a server refused the message with.
   */
  ask(
    session: string,
    text: string,
    options?: { whenBusy?: "queue" | "refuse"; cancelAfterS?: number | null },
  ): Promise<string>;
  /** Go on with the last turn, which was interrupted or failed; `turn` resumes that one and no other. */
  resume(session: string, options?: { turn?: number; after?: string | null }): LiveStream;
  /**
   * Continue a running turn that the server holds because its agent or its tools changed (`waitingOn` is "agent"), with
   * the agent that is served now. `turn` 0 is whichever runs. Resolves when that is in the journal.
   */
  continueHeld(session: string, turn?: number): Promise<void>;
  /**
   * Answer an open question of a call; for one of a sub-agent, `session` is the `child` of the `child_delta` that told
   * of it. Resolves when the answer is in the journal; rejects with `question_closed` where somebody was first.
   */
  answer(
    session: string,
    question: Asked,
    choice: Choice,
    more?: { text?: string; argumentsJson?: string | null },
  ): Promise<void>;
  /** Withdraw a queued message, or all of them. */
  withdraw(session: string, number?: number): Promise<void>;
  /**
   * Follow a session: events after `after`, or from now on. `word` is from another client's `letLook`, where the session is
   * encrypted under that one's secret.
   */
  follow(session: string, after?: string | null, options?: { word?: string }): LiveStream;
  /** Stop the session's turn, whoever began it: `turn`, or whichever runs. */
  cancel(session: string, turn?: number): Promise<void>;
  /**
   * Take up what a reload or a crash interrupted, and clear what is older than the look-back (of the settings, or `lookBackS`)
   * or a part of nothing, unless another tab holds it; events begin at the stored cursor, or `after`. One whose words cannot
   * be read any more begins with a `LostEvent`. Where recovery is off there are none. Throws "storage" with `retry` "later", and has done nothing, where
   * another tab hangs with its hand on the database for 5 s.
   */
  resumeInterrupted(options?: {
    session?: string;
    after?: string | null;
    lookBackS?: number;
  }): Promise<LiveStream[]>;
  /**
   * The first message kept here for a session that no server has acknowledged, and this page's stream that sends it, if
   * any. Asking sends nothing. Throws as `resumeInterrupted`.
   */
  unsent(session: string): Promise<{ key: string; text: string; stream: LiveStream | null } | null>;
  /**
   * Ask the server about a session: `fetch` of `/v1/sessions/{session}{path}` (such as "/records"), with the session's secret
   * and the `headers` of `connect`.
   */
  fetch(
    session: string,
    path?: string,
    options?: Omit<RequestInit, "headers"> & { headers?: Record<string, string> },
  ): Promise<Response>;
  /**
   * What opens a session, where the server encrypts it under its client's secret; drawn if there is none, and kept unless the
   * server said that it has no use for one. For another client of the same person, which is told it by `keepSecret`. It is not
   * to be logged, or sent anywhere else.
   */
  secret(session: string): Promise<string>;
  /** Use this secret for a session from now on; other tabs do with their next connection. */
  keepSecret(session: string, secret: string): Promise<void>;
  /**
   * Let another secret open a session, and the one so far no more; resolves when the server has it on disk. Where it is cut
   * short, both are shown until it is called again, and one of them opens the session.
   */
  changeSecret(session: string): Promise<void>;
  /**
   * Keep and show the secret of a session no more: where no other client has it, nobody opens that ever again. For sessions
   * that were deleted too: a copy of the server's whole store from before still has what the secret opens.
   */
  discardSecret(session: string): Promise<void>;
  /** A word with which anybody may look at a session, and no more, for `forS` (3600) seconds: see `follow`. */
  letLook(session: string, options?: { forS?: number }): Promise<string>;
  /** Let none of the words for a session be good any more. */
  withdrawViewers(session: string): Promise<void>;
  /** Cut every connection as a lost network would. */
  cut(forMs?: number): void;
  /** Try every waiting connection at once, and prove the others. */
  wake(): void;
  /** Have no connection until `goOn`; other tabs may take up what this one leaves. The page's lifecycle does both. */
  rest(): void;
  goOn(): Promise<void>;
  /** Let go of every stream; what is written down stays for `resumeInterrupted`. */
  close(): void;
}

export type Transport = "websocket" | "sse" | "poll";

export interface ConnectOptions {
  /**
   * Of the server, without `/v1`: an address, or a path of the page's own server; default: where the page came from. `connect`
   * throws "usage" for anything else.
   */
  url?: string;
  onstate?: (connection: Connection, stream: LiveStream) => void;
  /** What is kept, and for how long what is waited for; `Client.settings` changes it later. */
  settings?: Partial<ClientSettings>;
  /**
   * Iterates over a stream that an earlier page left, from its first event. Called for each of them before `connect` resolves, all at the same time
   * (later, where another tab has its hand on the database). What it throws, or rejects with, is an `unhandledrejection` of the
   * page. Without it nothing is resumed but by `Client.resumeInterrupted`.
   */
  oninterrupted?: (stream: LiveStream) => void | Promise<void>;
  /**
   * How frames are carried; default "auto": the first that gets through, which is remembered for this server. Every one
   * brings the same events.
   */
  transport?: "auto" | Transport;
  /**
   * What shows who asks, such as `authorization`, for a page of another site, which the server has to allow. It is sent
   * with each request; a WebSocket, which can show nothing, is opened by a ticket that is asked for with it.
   */
  headers?: () => Record<string, string> | Promise<Record<string, string>>;
  /** Makes the sockets; then no other transport is tried. */
  makeSocket?: (address: string) => WebSocketLike;
  /** Whether tabs that follow the same session share one connection; default: true, where the browser can. */
  isShared?: boolean;
}

/** What is used of a WebSocket. One that ends may say why: `onclose({ error })`. */
export interface WebSocketLike {
  onopen: ((event?: unknown) => void) | null;
  onmessage: ((event: { data: string }) => void) | null;
  onclose: ((event?: { error?: MidstreamError | null }) => void) | null;
  send(frame: string): void;
  close(): void;
}

/**
 * Open each connection by a ticket, which is asked for with these headers (such as `authorization`) right before.
 * With `action` "read" it can only look.
 */
export function ticketed(
  headers: () => Record<string, string> | Promise<Record<string, string>>,
  options?: { action?: "speak" | "read" },
): (address: string) => WebSocketLike;

export function connect(options?: ConnectOptions): Promise<Client>;
/** Fold the events of a session, in order, into the text of the answer; the streams of a client do it for their events. */
export class AnswerText {
  take(event: { type: "record"; record: JournalRecord } | { type: string }): AnswerSoFar;
}
/** Random bytes as base64url. */
export function randomText(bytes: number): string;
export function parseEventId(text: string): { epoch: number; position: number };
export const LOOK_BACK_MS: number;
export const PROTOCOL_VERSION: 1;
