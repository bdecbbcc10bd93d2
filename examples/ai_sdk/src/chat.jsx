import { useChat } from "@ai-sdk/react";
import { DefaultChatTransport, isToolUIPart, lastAssistantMessageIsCompleteWithApprovalResponses } from "ai";
import { useEffect, useState } from "react";

const transport = new DefaultChatTransport({ api: "/v1/chat" });
const RETRY_MS = 500;

export function Chat({ id, messages: earlier }) {
  const [isCut, setIsCut] = useState(false);
  const { messages, sendMessage, status, error, resumeStream, addToolApprovalResponse } = useChat({
    id,
    messages: earlier,
    transport,
    resume: true, // a running answer is read from its beginning
    sendAutomaticallyWhen: lastAssistantMessageIsCompleteWithApprovalResponses,
    onFinish: ({ isDisconnect }) => setIsCut(isDisconnect),
  });
  // After a lost connection the answer continues at the server. Read it again until it has ended.
  useEffect(() => {
    if (!isCut || status !== "error") return;
    const timer = setTimeout(resumeStream, RETRY_MS);
    return () => clearTimeout(timer);
  }, [isCut, status, error, resumeStream]);

  const [input, setInput] = useState("");
  const isBusy = status === "submitted" || status === "streaming";
  const send = (event) => {
    event.preventDefault();
    sendMessage({ text: input });
    setInput("");
  };
  // A closed stream does not cancel the turn. This request cancels it.
  const stop = () => fetch(`/v1/sessions/${id}/cancel`, { method: "POST", headers: { "x-midstream": "1" } });
  return (
    <>
      {messages.map((message) => (
        <article key={message.id} className={message.role}>
          {message.parts.map((part, number) => (
            <Part key={number} part={part} decide={addToolApprovalResponse} />
          ))}
        </article>
      ))}
      {error && <p role="alert">{isCut ? "Reconnecting" : error.message}</p>}
      <form onSubmit={send}>
        <input value={input} onChange={(event) => setInput(event.target.value)} placeholder="Message" />
        <button type="submit" disabled={isBusy || !input}>Send</button>
        <button type="button" disabled={!isBusy} onClick={stop}>Stop</button>
      </form>
    </>
  );
}

function Part({ part, decide }) {
  if (part.type === "text") return <p>{part.text}</p>;
  if (part.type === "reasoning") return <p className="reasoning">{part.text}</p>;
  if (part.type === "source-url") return <a href={part.url}>{part.title ?? part.url}</a>;
  if (!isToolUIPart(part)) return null;
  return (
    <div className="tool">
      {part.type.replace("tool-", "")} {JSON.stringify(part.input)}: {part.errorText ?? JSON.stringify(part.output) ?? part.state}
      {part.state === "approval-requested" &&
        [true, false].map((approved) => (
          <button key={String(approved)} onClick={() => decide({ id: part.approval.id, approved })}>
            {approved ? "Allow" : "Deny"}
          </button>
        ))}
    </div>
  );
}
