// Clients of the AI SDK, unmodified, as an application would use them. A line of JSON to stdout at the end.
import { Chat } from "@ai-sdk/react";
import { WorkflowChatTransport } from "@ai-sdk/workflow/client";
import {
  DefaultChatTransport,
  lastAssistantMessageIsCompleteWithApprovalResponses,
  lastAssistantMessageIsCompleteWithToolCalls,
} from "ai";

const { story, url, id, text = "hi", headers = {}, tools, messages = [], words = [], gone = 0 } = JSON.parse(process.argv.at(-1));
const api = `${url}/v1/chat`;
console.error = () => {}; // the transport reports each cut there
const seen = { finishes: 0, disconnects: 0, errors: [], data: [], calls: [] };

const workflow = () =>
  new WorkflowChatTransport({
    api,
    maxConsecutiveErrors: Infinity,
    prepareSendMessagesRequest: ({ id, messages, trigger, messageId }) => ({
      body: { id, messages, trigger, messageId, tools },
      headers: { "content-type": "application/json", ...headers },
    }),
    prepareReconnectToStreamRequest: ({ api }) => ({ api, headers }),
  });
const standard = () => new DefaultChatTransport({ api, headers, body: tools && { tools } });

const chat = (transport, more = {}) =>
  new Chat({
    id,
    transport,
    messages,
    onError: (error) => seen.errors.push(String(error)),
    onData: (part) => seen.data.push(part),
    onFinish: ({ isDisconnect }) => ((seen.finishes += 1), (seen.disconnects += isDisconnect)),
    ...more,
  });
const settled = async (one, isDone) => {
  const end = Date.now() + 60_000;
  while (!(one.status === "ready" && isDone(one.lastMessage))) {
    if (Date.now() > end || (one.status === "error" && !settled.isRetried)) throw new Error(`${one.status}: ${JSON.stringify([one.lastMessage, seen])}`);
    await new Promise((done) => setTimeout(done, 10));
  }
};
const hasText = (message) => message?.role === "assistant" && message.parts.at(-1)?.type === "text";

const isOpen = (part) =>
  part.state === "approval-requested" || (part.type === "tool-ask_user" && part.state === "input-available");
const isComplete = (chat) =>
  lastAssistantMessageIsCompleteWithApprovalResponses(chat) || lastAssistantMessageIsCompleteWithToolCalls(chat);
// Answer each open question and approval: questions with the next text, approvals with a yes.
const answerAll = async (one, pick = (open) => open, send = () => {}) => {
  for (seen.asked = []; ; ) {
    await settled(one, (message) => hasText(message) || message?.parts.some(isOpen));
    const open = one.lastMessage.parts.filter(isOpen);
    if (!open.length) return one;
    seen.asked.push(open);
    for (const part of pick(open)) {
      if (part.approval) await one.addToolApprovalResponse({ id: part.approval.id, approved: true });
      else await one.addToolOutput({ tool: "ask_user", toolCallId: part.toolCallId, output: words.shift() });
    }
    await send();
  }
};

const stories = {
  // One message through the transport that reads on from its chunk.
  async workflow() {
    const one = chat(workflow());
    await one.sendMessage({ text });
    return one;
  },
  // One message through the standard transport, and a replay after each cut, as `useChat` requests it.
  async standard() {
    const one = chat(standard());
    await one.sendMessage({ text });
    for (let tries = 0; one.status === "error" && tries < 1000; tries += 1) await one.resumeStream();
    return one;
  },
  // A page that is opened, as by `useChat({ resume: true })`, and a replay after each cut.
  async resume() {
    const one = chat(standard());
    await one.resumeStream();
    for (let tries = 0; one.status === "error" && tries < 1000; tries += 1) await one.resumeStream();
    return one;
  },
  async regenerate() {
    const one = chat(standard());
    await one.sendMessage({ text });
    const first = one.lastMessage.id;
    await one.regenerate();
    const second = one.lastMessage.id;
    await one.regenerate();
    seen.ids = [first, second, one.lastMessage.id];
    await one.sendMessage({ text: "again" });
    return one;
  },
  async client() {
    const one = chat(standard(), {
      sendAutomaticallyWhen: lastAssistantMessageIsCompleteWithToolCalls,
      onToolCall: ({ toolCall }) => {
        seen.calls.push(toolCall.toolName);
        void one.addToolOutput({ tool: toolCall.toolName, toolCallId: toolCall.toolCallId, output: { at: toolCall.input.at, sees: "a tree" } });
      },
    });
    await one.sendMessage({ text });
    await settled(one, hasText);
    return one;
  },
  async approve(approved = true) {
    const one = chat(standard(), { sendAutomaticallyWhen: lastAssistantMessageIsCompleteWithApprovalResponses });
    await one.sendMessage({ text });
    const part = one.lastMessage.parts.find((each) => each.state === "approval-requested");
    seen.asked = part;
    await one.addToolApprovalResponse({ id: part.approval.id, approved, reason: "as you like" });
    await settled(one, hasText);
    return one;
  },
  deny: () => stories.approve(false),
  async people(pick) {
    const one = chat(standard(), { sendAutomaticallyWhen: isComplete });
    await one.sendMessage({ text });
    return answerAll(one, pick);
  },
  // The last question is answered first.
  reversed: () => stories.people((open) => open.toReversed()),
  // One answer in each request.
  async alone() {
    const one = chat(standard());
    await one.sendMessage({ text });
    return answerAll(one, (open) => open.slice(0, 1), () => one.sendMessage());
  },
  // A page that is opened again, and reads again after each cut.
  async reopened() {
    const one = chat(standard(), { sendAutomaticallyWhen: isComplete });
    const reading = setInterval(() => one.status === "error" && void one.resumeStream(), 200);
    await one.resumeStream();
    settled.isRetried = true;
    await answerAll(one);
    clearInterval(reading);
    return one;
  },
};

const one = await stories[story]();
process.stdout.write(JSON.stringify({ messages: one.messages, status: one.status, ...seen }) + "\n");
process.exit(0);
