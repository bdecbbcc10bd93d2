/** Types of midstream.js. Instants are milliseconds since 1970 in this file, seconds since 1970 in records. */

export type Retry = "never" | "later" | "now" | "ask";

/** A refusal of the server, or an error of the client. Match on `code`, which is stable. */
export class MidstreamError extends Error {
  readonly code: string;
  readonly retry: Retry;
  readonly retryAfterS: number | null;
}

/** A turn ended without a whole answer. Its finished steps stay in the session, which accepts the next message. */
export class TurnFailedError extends MidstreamError {
  readonly code: "turn_failed";
  readonly status: "failed" | "cancelled" | "interrupted" | "withdrawn";
  /** The code of the error that ended the turn, or "". */
  readonly cause: string;
  /** The text of the answer so far. */
  readonly transcript: string;
  /** The number of the turn; 0 if the message was withdrawn before its turn began. */
  readonly turn: number;
  /** Whether `client.resume(session, { turn })` can continue the turn: it failed or was interrupted. */
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
/** A tool call; `arguments` is JSON text exactly as the model returned it, also if it is invalid. */
export interface CallPart {
  type: "call";
  id: string;
  name: string;
  arguments?: string;
}
/** A call of a tool that the upstream runs itself. Display it, and do not run it. Without `outcome` it still runs. */
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
  /** The digest of the whole result if `content` is only its beginning: `GET …/blobs/{digest}` returns it. */
  blob?: string;
  /** Bytes of the whole result, in UTF-8. */
  size?: number;
}
export interface Response {
  parts: (TextPart | ThinkingPart | CallPart | UpstreamCallPart)[];
  finish?: "stop" | "calls" | "length" | "filter" | "interrupted";
  model?: string;
  usage?: { input_tokens?: number; output_tokens?: number; cached_tokens?: number; cache_write_tokens?: number };
}

export type QuestionKind = "approval" | "question" | "doubt";
/** `allow` or `deny` for an approval, `respond` for a question; `happened`, `rerun` or `skip` for a call in doubt. */
export type Choice = "allow" | "deny" | "respond" | "happened" | "rerun" | "skip";
/** The identity of a question, which an answer repeats. A `question_asked` record has it. */
export interface QuestionReference {
  turn: number;
  response: number;
  call_id: string;
  digest: string;
}

/** A record of a journal. A newer server may send other types: ignore them. */
export type JournalRecord =
  | { type: "epoch_started"; epoch: number; owner: string; at: number; version: number }
  | { type: "stream_opened"; stream: string; secret_digest: string; connection?: number }
  /** A newer connection of the client, at any server, carries the stream. */
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
  /** A message that came while a turn ran. Its turn begins after the turns before it. */
  | {
      type: "message_queued";
      number: number;
      message: { type?: "user"; parts: (TextPart | FilePart)[] };
      at: number;
      stream?: string;
    }
  | { type: "message_withdrawn"; number: number; at: number; stream?: string }
  /** A client application sent its whole conversation again; `tail` has the new messages. */
  | {
      type: "transcript_accepted";
      turn: number;
      response: number;
      at: number;
      request: { id: string };
      keep?: number;
      tail?: unknown[];
    }
  /** A turn that was interrupted or had failed continues; `response` is the number of the next response. */
  | { type: "turn_resumed"; turn: number; response: number; at: number; stream?: string }
  /** An attempt begins; the text of earlier attempts at this response is void. */
  | { type: "attempt_started"; turn: number; response: number; attempt: number; at: number; not_before?: number }
  | {
      type: "delta";
      turn: number;
      response: number;
      attempt: number;
      part: number;
      kind: "text" | "thinking";
      text: string;
      /** The part is a tool call of the upstream: sent when the tool starts, and again, complete, when it has ended. */
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
  /** The provider stores the response of this attempt, so that an interrupted attempt can continue. */
  | { type: "attempt_resumable"; turn: number; response: number; attempt: number; token: string }
  /** An interrupted attempt continues where it stopped. Its text stays valid, and only new text follows. */
  | {
      type: "attempt_continued";
      turn: number;
      response: number;
      attempt: number;
      number: number;
      at: number;
      not_before?: number;
    }
  /** A stall: a silence of the model or a tool beyond its budget. It ends with progress, or with an error of its own. */
  | {
      type: "stall_noticed" | "stall_ended";
      turn: number;
      response: number;
      waiting_for: "first_token" | "between_tokens" | "tool";
      silent_s: number;
      at: number;
      call_id?: string;
    }
  /** The conversation was too long: the model no longer receives its first `cut` entries. */
  | { type: "history_compacted"; turn: number; response: number; cut: number; at: number }
  /** The decision of a pool about a request. A second one follows if a fresh agent replaces a failed one. */
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
  /** The tools of MCP servers changed. */
  | { type: "tools_changed"; turn: number; at: number; added?: string[]; removed?: string[]; unreachable?: string[] }
  | { type: "response_completed"; turn: number; response: number; attempt: number; body: Response; at: number }
  /** A run begins. It has `arguments` if a person changed those of the model. */
  | { type: "call_started"; turn: number; response: number; call_id: string; run: number; at: number; arguments?: string }
  | { type: "call_progressed"; turn: number; response: number; call_id: string; run: number; text: string; at: number }
  /** A record of `child`, the session of a sub-agent. For a nested sub-agent the record is again a `child_delta`. */
  | {
      type: "child_delta";
      turn: number;
      response: number;
      call_id: string;
      child: string;
      position: number;
      record: JournalRecord;
    }
  /** The process that ran the call died before its outcome was recorded. A person is asked whether it took effect. */
  | { type: "call_in_doubt"; turn: number; response: number; call_id: string; at: number }
  /** A question to a person. With `attempt` an upstream agent requests permission; `name` and `arguments` are its own. */
  | (QuestionReference & {
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
  /** A question of an upstream agent was closed without an answer. */
  | {
      type: "question_closed";
      turn: number;
      response: number;
      call_id: string;
      why: "expired" | "withdrawn";
      at: number;
    }
  /** The answer to a question of an upstream agent is sent to the agent next. It is not used again. */
  | { type: "answer_used"; turn: number; response: number; attempt: number; call_id: string; at: number }
  | (QuestionReference & {
      type: "question_answered";
      kind: QuestionKind;
      choice: Choice;
      at: number;
      text?: string;
      arguments?: string;
      by?: string;
    })
  /** The result of a call that was closed with an unknown outcome. */
  | { type: "result_arrived_late"; turn: number; response: number; result: ToolResult; at: number }
  | { type: "call_ended"; turn: number; response: number; result: ToolResult; at: number }
  /** Replaces a record of an outcome that cannot be read. */
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
 * The answer of the turn after an event. `transcript` has each word once: the text of an interrupted attempt is removed when
 * the next attempt differs. The texts of two responses are two paragraphs. Thinking and the text of sub-agents are not
 * included. If the stream begins within the turn (`follow`, or resumed at a cursor), `transcript` begins there too.
 */
export interface AnswerSoFar {
  /** The whole text so far. It replaces the displayed text. */
  readonly transcript: string;
  /** Whether the displayed text is no longer valid: display `transcript` instead. If false, `text` can be appended. */
  readonly replaces: boolean;
  /** The text that this event adds, or "". */
  readonly text: string;
}
/** A record with its event id. Records are delivered once, in order, without gap. */
export interface RecordEvent extends AnswerSoFar {
  type: "record";
  id: string;
  record: JournalRecord;
}
/** The events after `id` are no longer in the journal. Discard them; the next events follow `id`. */
export interface GoneEvent extends AnswerSoFar {
  type: "gone";
  id: string;
  reason: string;
  /** Whether a snapshot follows, which replaces everything. Do nothing before it. */
  hasSnapshot: boolean;
}
/** The state of a session's open turn, or how its last turn ended; "" before the first turn. */
export type SessionStatus =
  | ""
  | "running"
  | "waiting"
  | "locked"
  | "completed"
  | "cancelled"
  | "failed"
  | "interrupted";
/** A session at one event, as `GET /v1/sessions/{id}` returns it. */
export interface Snapshot {
  session: string;
  event_id: string;
  status: SessionStatus;
  /** "nothing", "model", "tool", "client" or "person". */
  waiting_on: string;
  turns: number;
  /** How the last turn ended; "" before the first turn has ended. */
  last: string;
  history: unknown[];
  running: unknown | null;
  queue: unknown[];
  is_resumable: boolean;
  /** The number of the oldest entries of the history that are left out, for lack of room. */
  left_out: number;
}
/** The session at the event `id`. It replaces all earlier state of the session. */
export interface SnapshotEvent extends AnswerSoFar {
  type: "snapshot";
  id: string;
  session: Snapshot;
  /** The turn of the stream at `id`: 0 before it begins, null for a reader. `transcript` is the answer of this turn. */
  turn: number | null;
}
/** The stored commands of an earlier page cannot be read, and were not sent again. A snapshot of the session follows. */
export interface LostEvent extends AnswerSoFar {
  type: "lost";
  id: string;
  reason: string;
}
export type StreamEvent = RecordEvent | GoneEvent | SnapshotEvent | LostEvent;

export interface Connection {
  session: string;
  phase: "waiting" | "connecting" | "live" | "ended";
  /** The time of the next try, while `phase` is "waiting". */
  retryAt: number | null;
  /** What the turn waited for at the last heartbeat: model, tool, client, person, agent, nothing; "" before the first. */
  waitingOn: string;
  /** Whether a lost connection is being made again. Never true at a degraded server. */
  isReconnecting: boolean;
  /** Whether no event came for a minute, while the turn waits for a model, a tool or a client. Nothing is cancelled. */
  isStalled: boolean;
  /** The last temporary refusal (a full disk, draining), until an event or an ack comes again. */
  trouble: MidstreamError | null;
}

/**
 * One stream, over as many connections as necessary.
 *
 * A loop over the stream ends with the turn; a loop over the stream of a reader never ends. It throws `MidstreamError` after
 * a final refusal of the server. It throws `TurnFailedError` after the last event of a turn that failed, was cancelled or
 * interrupted, or whose message was withdrawn. An event counts as handled when the loop requests the next one. A loop that
 * is left early abandons the stream (`abandon`): the turn continues, and nothing is stored here.
 */
export class LiveStream implements AsyncIterable<StreamEvent> {
  readonly session: string;
  /** The stream key; "" for a reader. */
  readonly key: string;
  /** The turn that this stream began or resumed; 0 before it begins. */
  readonly turn: number;
  /** The last event that the loop has handled. */
  readonly cursor: string | null;
  /** The text of the unacknowledged message, or null. */
  readonly pendingText: string | null;
  /** The damage of the stored stream, which then begins with a `LostEvent`; "" if there is none. */
  readonly damage: string;
  /** Whether the server cannot resume the stream: nothing is stored and nothing is retried. */
  readonly isDegraded: boolean;
  /** Whether all commands are in the server's journal. */
  readonly isAcknowledged: boolean;
  /** Whether the stream still delivers events: it has neither ended nor been abandoned. */
  readonly isActive: boolean;
  /** Whether its message waits for the turns before it. */
  readonly isQueued: boolean;
  readonly connection: Connection;
  /** Received events that the loop has not requested, the oldest first. Reading this property handles none of them. */
  readonly unread: StreamEvent[];
  /** Resolves when everything that is due now is stored, sent and delivered. */
  readonly settled: Promise<void>;
  /** Resolves when the first command is in the server's journal; rejects if the stream ends before. */
  readonly accepted: Promise<void>;
  /** Resolves at the end of the stream, with its error or null. */
  readonly ended: Promise<MidstreamError | null>;
  /**
   * Read to the end of the turn and return its whole answer. Rejects with `TurnFailedError` if the turn does not complete.
   * After a loop over the stream the result is the same, at once.
   */
  answer(): Promise<string>;
  /** Cancel the turn; resolves when it has ended. */
  abort(): Promise<void>;
  /** Deliver no more events, and store nothing once all commands are acknowledged. The turn continues. */
  abandon(): void;
  /** Close the connection, like a lost network. None is made again for `forMs`. */
  cut(forMs?: number): void;
  /** Connect at once, or test the open connection. */
  wake(): void;
  /** Close the connection until `reconnect`. */
  disconnect(): void;
  reconnect(): void;
  /** Close everything in this page, and keep the stored state for `resumeInterrupted`. */
  detach(): void;
  [Symbol.asyncIterator](): AsyncGenerator<StreamEvent, void, undefined>;
}

/** The settings of a client. */
export interface ClientSettings {
  /**
   * Whether streams are stored in the browser's database, so that another page can resume them. If false, a new stream ends
   * with its page, and still survives lost connections. Streams that were stored before stay, and can be resumed when it is
   * true again. Default: true.
   */
  isRecoveryOn: boolean;
  /** Seconds (7200, at most a year) since the last write after which a stored stream is deleted instead of resumed. */
  lookBackS: number;
  /** Seconds (7200) without a working connection after which a stream ends with `connection_lost`. */
  patienceS: number;
  /**
   * Seconds (20) for the first connection to a server; then a stream ends with `connection_lost`. Its message stays stored.
   * There is no limit for a server that was reached before: by this client, by the page that began the stream, or by the
   * browser that loaded the page from it.
   */
  reachWithinS: number;
  /** Seconds (60) without an event, while the turn waits for a machine, after which `connection.isStalled` is true. */
  stallAfterS: number;
}

export class Client {
  /**
   * The settings for streams that begin, or are resumed, from now on. Assign new ones at any time; settings that are left out
   * get their defaults. Throws "usage", and changes nothing, if a setting is unknown or out of bounds.
   */
  get settings(): Readonly<ClientSettings>;
  set settings(given: Partial<ClientSettings>);
  /** Whether an unsent message survives a reload; false if the browser refuses IndexedDB. */
  readonly isDurable: boolean;
  /**
   * Send a message. Events begin after `after`, by default with this stream. While another turn runs, the message waits for
   * its end; with `whenBusy` "refuse" it is refused. With `cancelAfterS` (up to an hour) the server cancels the turn after
   * that many seconds without a connection. Throws, and sends nothing, if the message is too large for a frame
   * ("frame_too_large"), is not a string, or has a lone surrogate ("usage").
   */
  send(
    session: string,
    text: string,
    options?: { after?: string | null; whenBusy?: "queue" | "refuse"; cancelAfterS?: number | null },
  ): LiveStream;
  /**
   * Send a message and return the whole answer, each word once, also after lost connections. Rejects with `TurnFailedError`
   * if the turn does not complete, and with the server's `MidstreamError` if it refuses the message.
   */
  ask(
    session: string,
    text: string,
    options?: { whenBusy?: "queue" | "refuse"; cancelAfterS?: number | null },
  ): Promise<string>;
  /** Resume the last turn, which was interrupted or failed; with `turn` only if it has this number. */
  resume(session: string, options?: { turn?: number; after?: string | null }): LiveStream;
  /**
   * Continue a running turn that the server holds because its agent or its tools changed (`waitingOn` is "agent"), with
   * the agent that is served now. `turn` 0 is the turn that runs. Resolves when the request is in the journal.
   */
  continueHeld(session: string, turn?: number): Promise<void>;
  /**
   * Answer an open question. For a question of a sub-agent, `session` is the `child` of the `child_delta` with the question.
   * Resolves when the answer is in the journal; rejects with `question_closed` if it was answered before.
   */
  answer(
    session: string,
    question: QuestionReference,
    choice: Choice,
    more?: { text?: string; argumentsJson?: string | null },
  ): Promise<void>;
  /** Withdraw a queued message, or all of them. */
  withdraw(session: string, number?: number): Promise<void>;
  /**
   * Follow a session: read the events after `after`, or from now on. `viewerToken` is a token from `createViewerToken` of another
   * client, under whose secret the session is encrypted.
   */
  follow(session: string, after?: string | null, options?: { viewerToken?: string }): LiveStream;
  /** Cancel `turn`, or the turn that runs, of any client. */
  cancel(session: string, turn?: number): Promise<void>;
  /**
   * Resume the streams that a reload or a crash interrupted. Delete streams older than the look-back (`lookBackS`, or that of
   * the settings) and rows without a stream, unless another tab holds them. Events begin after the stored cursor, or after
   * `after`. A stream whose commands cannot be read begins with a `LostEvent`. With recovery off, nothing is resumed or
   * deleted. Throws "storage" with `retry` "later", and has done nothing, if another tab blocks the database for 5 s.
   */
  resumeInterrupted(options?: {
    session?: string;
    after?: string | null;
    lookBackS?: number;
  }): Promise<LiveStream[]>;
  /**
   * Return the first stored message for a session that no server has acknowledged, with the stream of this page that sends
   * it, or null. This call sends nothing. Throws as `resumeInterrupted` does.
   */
  findUnsent(session: string): Promise<{ key: string; text: string; stream: LiveStream | null } | null>;
  /**
   * Request `/v1/sessions/{session}{path}` (such as "/records") with `fetch`, the session's secret and the `headers` of
   * `connect`.
   */
  fetch(
    session: string,
    path?: string,
    options?: Omit<RequestInit, "headers"> & { headers?: Record<string, string> },
  ): Promise<Response>;
  /**
   * Return the secret that opens a session if the server encrypts the session under it. It is for `keepSecret` of another
   * client of the same person. A session without a secret gets one, which is stored unless the server does not use it. Do not
   * log the secret, and do not send it to other receivers.
   */
  secret(session: string): Promise<string>;
  /** Store this secret of a session and use it from now on. Other tabs use it from their next connection on. */
  keepSecret(session: string, secret: string): Promise<void>;
  /**
   * Replace the secret of a session; resolves when the server has the new one on disk. If the call is interrupted, this
   * client sends both secrets until the next call, and one of them opens the session.
   */
  changeSecret(session: string): Promise<void>;
  /**
   * Delete the secret of a session. If no other client has the secret, the session can never be opened again. Call it for
   * deleted sessions too: an older copy of the server's store may still have the encrypted session.
   */
  discardSecret(session: string): Promise<void>;
  /** Return a viewer token: for `forS` (3600) seconds every holder can read the session (`follow`), and do nothing else. */
  createViewerToken(session: string, options?: { forS?: number }): Promise<string>;
  /** Invalidate all viewer tokens for a session. */
  revokeViewerTokens(session: string): Promise<void>;
  /** Close every connection, like a lost network. None is made again for `forMs`. */
  cut(forMs?: number): void;
  /** Make every waiting connection at once, and test the open ones. */
  wake(): void;
  /** Close all connections until `reconnect`. Other tabs may resume the streams. The page's lifecycle calls both. */
  disconnect(): void;
  reconnect(): Promise<void>;
  /** Detach every stream. Stored streams stay for `resumeInterrupted`. */
  close(): void;
}

export type Transport = "websocket" | "sse" | "poll";

export interface ConnectOptions {
  /**
   * The address of the server, without `/v1`, or a path at the server of the page. Default: the server of the page. `connect`
   * throws "usage" for any other value.
   */
  url?: string;
  onstate?: (connection: Connection, stream: LiveStream) => void;
  /** The settings at the beginning. Change them later with `Client.settings`. */
  settings?: Partial<ClientSettings>;
  /**
   * Iterates over an interrupted stream of an earlier page, from its first event. It is called for each such stream before
   * `connect` resolves, concurrently; later if another tab blocks the database. Its errors are an `unhandledrejection` of the
   * page. Without it, only `Client.resumeInterrupted` resumes streams.
   */
  oninterrupted?: (stream: LiveStream) => void | Promise<void>;
  /**
   * The transport of the frames. Default "auto": the first one that works, which is stored for this server. All transports
   * deliver the same events.
   */
  transport?: "auto" | Transport;
  /**
   * Headers that authenticate the page, such as `authorization`. A page of another origin needs them, and the server must
   * allow the origin. They are sent with each request. A WebSocket sends no headers: it opens with a ticket, which is
   * requested with them.
   */
  headers?: () => Record<string, string> | Promise<Record<string, string>>;
  /** Makes the WebSockets; then no other transport is tried. */
  makeSocket?: (address: string) => WebSocketLike;
  /** Whether tabs that follow the same session share one connection. Default: true, if the browser supports it. */
  isShared?: boolean;
}

/** The used interface of a WebSocket. A socket that ends may report the reason: `onclose({ error })`. */
export interface WebSocketLike {
  onopen: ((event?: unknown) => void) | null;
  onmessage: ((event: { data: string }) => void) | null;
  onclose: ((event?: { error?: MidstreamError | null }) => void) | null;
  send(frame: string): void;
  close(): void;
}

/**
 * Return a `makeSocket` that requests a ticket with these headers (such as `authorization`) before each WebSocket. With
 * `action` "read" the ticket permits reading only.
 */
export function createTicketSocketFactory(
  headers: () => Record<string, string> | Promise<Record<string, string>>,
  options?: { action?: "send" | "read" },
): (address: string) => WebSocketLike;

export function connect(options?: ConnectOptions): Promise<Client>;
/** Folds the events of a session, in order, into the text of the answer. The streams of a client do it for their events. */
export class AnswerText {
  take(event: { type: "record"; record: JournalRecord } | { type: string }): AnswerSoFar;
}
/** Random bytes as base64url. */
export function randomText(bytes: number): string;
/** Parse an event id such as "3-17", or throw. */
export function parseEventId(text: string): { epoch: number; position: number };
export const LOOK_BACK_MS: number;
export const PROTOCOL_VERSION: 1;
