// The AI SDK of Vercel with its client for Anthropic, in two generations: text, stream, tools, structured output.
import assert from "node:assert/strict";
import * as newest from "ai";
import * as five from "ai-5";
import { createAnthropic as createNewest } from "@ai-sdk/anthropic";
import { createAnthropic as createFive } from "ai-5-anthropic";

const settings = { baseURL: process.env.HEADRACE_TEST_BASE_URL, apiKey: "unused" };
const question = "What is the capital of France?";

for (const [sdk, create] of [[newest, createNewest], [five, createFive]]) {
  const model = create(settings)(process.env.HEADRACE_TEST_MODEL);
  const asked = { model, prompt: question, temperature: 0, maxOutputTokens: 24, maxRetries: 0 };

  const answer = await sdk.generateText({ ...asked, system: "You answer briefly." });
  assert.match(answer.text, /Paris/);
  assert(answer.usage.outputTokens <= 24);

  const streamed = sdk.streamText({ ...asked, system: "You answer briefly." });
  let text = "";
  for await (const part of streamed.textStream) text += part;
  assert.equal(text, answer.text);
  assert.equal((await streamed.usage).outputTokens, answer.usage.outputTokens);

  const weather = sdk.tool({
    description: "The weather in a city",
    inputSchema: sdk.jsonSchema({
      type: "object",
      properties: { city: { type: "string", enum: ["Paris", "Rome"] } },
      required: ["city"],
      additionalProperties: false,
    }),
    execute: async ({ city }) => `Rain in ${city}.`,
  });
  const steps = await sdk.generateText({
    ...asked,
    prompt: "How is the weather in Paris?",
    maxOutputTokens: 64,
    tools: { weather },
    providerOptions: { anthropic: { disableParallelToolUse: true } },
    stopWhen: sdk.stepCountIs(2),
    prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" }),
  });
  assert.equal(steps.steps.length, 2);
  assert.match(steps.steps[0].toolResults[0].output, /^Rain in (Paris|Rome)\.$/);

  const schema = sdk.jsonSchema({
    type: "object",
    properties: { sure: { type: "boolean" } },
    required: ["sure"],
    additionalProperties: false,
  });
  const found = await sdk.generateObject({ ...asked, maxOutputTokens: 64, schema });
  assert.equal(typeof found.object.sure, "boolean");

  const image = { type: "image", image: "aGVsbG8=", mediaType: "image/png" };
  const messages = [{ role: "user", content: [image] }];
  await assert.rejects(sdk.generateText({ model, messages, maxRetries: 0 }), /reads text only/);
  await assert.rejects(sdk.generateText({ ...asked, prompt: "the ".repeat(9000) }), /^AI_APICallError: prompt is too long: \d+ tokens > \d+ maximum$/);
}
