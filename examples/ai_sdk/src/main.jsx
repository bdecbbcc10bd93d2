import { createRoot } from "react-dom/client";
import { Chat } from "./chat.jsx";

// The id of the chat is the id of its session. It is in the address, so that a reload and a second tab show the same chat.
const id = location.hash.slice(1) || crypto.randomUUID();
location.hash = id;

const response = await fetch(`/v1/chat/${id}/messages`);
const { messages } = await response.json();
createRoot(document.getElementById("chat")).render(<Chat id={id} messages={messages} />);
