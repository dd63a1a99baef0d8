// openai for Node: chat, stream, tools, structured parse, legacy completions, models, responses.
import assert from "node:assert/strict";
import OpenAI from "openai";

const model = process.env.HEADRACE_TEST_MODEL;
const client = new OpenAI({ baseURL: process.env.HEADRACE_TEST_BASE_URL, apiKey: "unused", maxRetries: 0 });
const messages = [{ role: "user", content: "What is the capital of France?" }];

const models = await client.models.list();
assert(models.data.some((one) => one.id === model));

const answer = await client.chat.completions.create({ model, messages, temperature: 0, max_tokens: 16 });
const text = answer.choices[0].message.content;
assert.match(text, /Paris/);

const stream = client.chat.completions.stream({ model, messages, temperature: 0, max_tokens: 16 });
assert.equal(await stream.finalContent(), text);

const tool = {
  type: "function",
  function: {
    name: "get_weather",
    parameters: { type: "object", properties: { city: { enum: ["Paris", "Rome"] } }, required: ["city"] },
  },
};
const asked = { model, messages, tools: [tool], tool_choice: "required", parallel_tool_calls: false, temperature: 0, max_tokens: 64 };
const called = await client.chat.completions.create(asked);
assert.equal(called.choices[0].finish_reason, "tool_calls");
const [call] = called.choices[0].message.tool_calls;
assert.equal(call.function.name, "get_weather");
const streamed = await client.chat.completions.stream(asked).finalChatCompletion();
assert.equal(streamed.choices[0].message.tool_calls[0].function.arguments, call.function.arguments);

const schema = { type: "object", properties: { sure: { type: "boolean" } }, required: ["sure"], additionalProperties: false };
const parsed = await client.chat.completions.parse({
  model,
  messages,
  max_tokens: 32,
  response_format: { type: "json_schema", json_schema: { name: "verdict", strict: true, schema } },
});
assert.equal(typeof JSON.parse(parsed.choices[0].message.content).sure, "boolean");

const completed = await client.completions.create({ model, prompt: "The capital of France is", temperature: 0, max_tokens: 4, logprobs: 1 });
assert.match(completed.choices[0].text, /Paris/);
assert.equal(completed.choices[0].logprobs.token_logprobs.length, 4);

await assert.rejects(client.chat.completions.create({ model: "no-such-model", messages }), OpenAI.NotFoundError);

const response = await client.responses.create({ model, input: messages, temperature: 0, max_output_tokens: 16 });
assert.equal(response.output_text, text);
let deltas = "";
for await (const event of client.responses.stream({ model, input: messages, temperature: 0, max_output_tokens: 16 })) {
  if (event.type === "response.output_text.delta") deltas += event.delta;
}
assert.equal(deltas, text);
const next = await client.responses.create({ model, input: "And of Italy?", previous_response_id: response.id, max_output_tokens: 8 });
assert.equal((await client.responses.inputItems.list(next.id)).data.length, 3);
await client.responses.delete(response.id);
await assert.rejects(client.responses.retrieve(response.id), OpenAI.NotFoundError);
