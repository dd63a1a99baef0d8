// ollama for Node: chat, generate, streams, tools, formats, models, errors.
import assert from "node:assert/strict";
import { Ollama } from "ollama";

const model = process.env.HEADRACE_TEST_MODEL;
const client = new Ollama({ host: process.env.HEADRACE_TEST_BASE_URL.replace(/\/v1$/, "") });
const messages = [{ role: "user", content: "What is the capital of France?" }];
const options = { temperature: 0, num_predict: 16 };

assert((await client.list()).models.some((one) => one.name === model));
assert((await client.ps()).models.some((one) => one.name === model));
assert((await client.show({ model })).capabilities.includes("completion"));
assert.match((await client.version()).version, /^\d+\.\d+\.\d+$/);

const answer = await client.chat({ model, messages, options });
assert.match(answer.message.content, /Paris/);
assert(answer.total_duration >= answer.eval_duration && answer.eval_duration > 0);
let text = "";
for await (const part of await client.chat({ model, messages, options, stream: true })) text += part.message.content;
assert.equal(text, answer.message.content);

const first = await client.generate({ model, prompt: messages[0].content, options });
assert.equal(first.response, text);
let more = "";
for await (const part of await client.generate({ model, prompt: "And of Italy?", context: first.context, options, stream: true })) {
  more += part.response;
}
assert(more);

const format = { type: "object", properties: { sure: { type: "boolean" } }, required: ["sure"], additionalProperties: false };
const held = await client.chat({ model, messages, format, options: { temperature: 0, num_predict: 32 } });
assert.equal(typeof JSON.parse(held.message.content).sure, "boolean");
const tools = [{ type: "function", function: { name: "get_weather", description: "The weather", parameters: { type: "object", properties: { city: { type: "string" } } } } }];
const called = await client.chat({ model, messages, tools, options });
assert(called.message.content || called.message.tool_calls);

assert.equal((await client.pull({ model })).status, "success");
const statuses = [];
for await (const part of await client.pull({ model, stream: true })) statuses.push(part.status);
assert.equal(statuses.at(-1), "success");
await assert.rejects(client.pull({ model: "no-such-model" }), /does not exist/);
await assert.rejects(client.embed({ model, input: "hi" }), /not embeddings/);
await assert.rejects(client.chat({ model, messages: [{ ...messages[0], images: ["AAAA"] }] }), /images/);
