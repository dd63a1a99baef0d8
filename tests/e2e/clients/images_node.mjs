// openai and ollama for Node with images: parts of chats and of Responses; files, bytes and base64.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { delimiter } from "node:path";
import { Ollama } from "ollama";
import OpenAI from "openai";

const model = process.env.HEADRACE_TEST_MODEL;
const baseURL = process.env.HEADRACE_TEST_BASE_URL;
const text = process.env.HEADRACE_TEST_QUESTION;
const paths = process.env.HEADRACE_TEST_PICTURES.split(delimiter);
const openai = new OpenAI({ baseURL, apiKey: "unused", maxRetries: 0 });
const ollama = new Ollama({ host: baseURL.replace(/\/v1$/, "") });

for (const [files, right] of [
  [paths, process.env.HEADRACE_TEST_RIGHT],
  [paths.toReversed(), process.env.HEADRACE_TEST_SWAPPED],
]) {
  const base64 = files.map((path) => readFileSync(path).toString("base64"));
  const urls = base64.map((data) => `data:image/png;base64,${data}`);

  const parts = urls.map((url) => ({ type: "image_url", image_url: { url } }));
  const messages = [{ role: "user", content: [...parts, { type: "text", text }] }];
  const chat = await openai.chat.completions.create({ model, messages, temperature: 0, max_tokens: 8 });
  assert.equal(chat.choices[0].message.content.trim(), right);

  const inputs = urls.map((image_url) => ({ type: "input_image", image_url, detail: "auto" }));
  const input = [{ role: "user", content: [...inputs, { type: "input_text", text }] }];
  const response = await openai.responses.create({ model, input, temperature: 0, max_output_tokens: 8 });
  assert.equal(response.output_text.trim(), right);

  for (const images of [files, files.map((path) => new Uint8Array(readFileSync(path))), base64]) {
    const options = { temperature: 0, num_predict: 8 };
    const answer = await ollama.chat({ model, messages: [{ role: "user", content: text, images }], options });
    assert.equal(answer.message.content.trim(), right);
  }
}
