// Verdicts of the AI SDK on histories: one JSON list of model messages a line in, one verdict a line out.
//
// A verdict is {refused, received}: the error of the SDK, or null, and the prompt that the model
// received. The model is the SDK's own mock, so this process sends nothing.

import { createInterface } from "node:readline";

import { generateText, modelMessageSchema } from "ai";
import { MockLanguageModelV4 } from "ai/test";

globalThis.AI_SDK_LOG_WARNINGS = false;

const answer = {
  content: [{ type: "text", text: "answer" }],
  finishReason: { unified: "stop", raw: undefined },
  usage: {
    inputTokens: { total: 1, noCache: 1, cacheRead: 0, cacheWrite: 0 },
    outputTokens: { total: 1, text: 1, reasoning: 0 },
  },
  warnings: [],
};

async function verdict(messages) {
  // Up to version 6 generateText checked this schema itself; since then only the types do.
  for (const [at, message] of messages.entries()) {
    const read = modelMessageSchema.safeParse(message);
    if (!read.success) return { refused: `message ${at}: ${read.error.message.slice(0, 300)}`, received: null };
  }
  const model = new MockLanguageModelV4({ doGenerate: async () => answer });
  try {
    // Histories are stored by a server that trusts its own system prompts.
    await generateText({ model, messages, allowSystemInMessages: true, maxRetries: 0 });
  } catch (error) {
    return { refused: `${error.name}: ${error.message}`, received: null };
  }
  return { refused: null, received: model.doGenerateCalls[0].prompt };
}

for await (const line of createInterface({ input: process.stdin })) {
  console.log(JSON.stringify(await verdict(JSON.parse(line))));
}
