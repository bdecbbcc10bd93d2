// The AI SDK with its OpenAI-compatible provider, as an application would use it. Prints one line of JSON.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";

const [baseURL, apiKey, story] = process.argv.slice(-3);
const provider = createOpenAICompatible({ name: "gateway", baseURL, apiKey, includeUsage: true });
const model = provider("m");
const printLine = (value) => process.stdout.write(JSON.stringify(value) + "\n");

const look = tool({
  description: "Look.",
  inputSchema: jsonSchema({ type: "object", properties: { at: { type: "string" } } }),
  execute: async ({ at }) => `a tree at ${at}`,
});

const stories = {
  async whole() {
    const { text, usage, finishReason } = await generateText({ model, prompt: "hi" });
    printLine({ text, finishReason, input: usage.inputTokens, output: usage.outputTokens });
  },
  async stream() {
    const { textStream, reasoningText, text } = streamText({ model, prompt: "hi" });
    let shown = "";
    for await (const text of textStream) shown += text;
    printLine({ shown, text: await text, reasoning: await reasoningText });
  },
  async tools() {
    const { text, steps } = await generateText({ model, prompt: "hi", tools: { look }, stopWhen: stepCountIs(3) });
    printLine({ text, results: steps.flatMap((step) => step.toolResults.map((result) => result.output)) });
  },
};

await stories[story]();
