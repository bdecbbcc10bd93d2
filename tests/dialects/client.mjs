// The AI SDK with its OpenAI-compatible provider, as an application would use it. A line of JSON each to stdout.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";

const [baseURL, apiKey, story] = process.argv.slice(-3);
const provider = createOpenAICompatible({ name: "gateway", baseURL, apiKey, includeUsage: true });
const model = provider("m");
const say = (value) => process.stdout.write(JSON.stringify(value) + "\n");

const look = tool({
  description: "Look.",
  inputSchema: jsonSchema({ type: "object", properties: { at: { type: "string" } } }),
  execute: async ({ at }) => `a tree at ${at}`,
});

const stories = {
  async whole() {
    const { text, usage, finishReason } = await generateText({ model, prompt: "hi" });
    say({ text, finishReason, input: usage.inputTokens, output: usage.outputTokens });
  },
  async stream() {
    const { textStream, reasoningText, text } = streamText({ model, prompt: "hi" });
    let shown = "";
    for await (const words of textStream) shown += words;
    say({ shown, text: await text, reasoning: await reasoningText });
  },
  async tools() {
    const { text, steps } = await generateText({ model, prompt: "hi", tools: { look }, stopWhen: stepCountIs(3) });
    say({ text, results: steps.flatMap((step) => step.toolResults.map((result) => result.output)) });
  },
};

await stories[story]();
