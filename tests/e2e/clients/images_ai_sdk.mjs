// The AI SDK of Vercel with images, through its client for Anthropic, in two generations.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { delimiter } from "node:path";
import * as newest from "ai";
import * as five from "ai-5";
import { createAnthropic as createNewest } from "@ai-sdk/anthropic";
import { createAnthropic as createFive } from "ai-5-anthropic";

const settings = { baseURL: process.env.HEADRACE_TEST_BASE_URL, apiKey: "unused" };
const pictures = process.env.HEADRACE_TEST_PICTURES.split(delimiter).map((path) => readFileSync(path));
const cases = [
  [pictures, process.env.HEADRACE_TEST_RIGHT],
  [pictures.toReversed(), process.env.HEADRACE_TEST_SWAPPED],
];

for (const [sdk, create] of [[newest, createNewest], [five, createFive]]) {
  const model = create(settings)(process.env.HEADRACE_TEST_MODEL);
  for (const [images, right] of cases) {
    const content = [
      ...images.map((image) => ({ type: "image", image, mediaType: "image/png" })),
      { type: "text", text: process.env.HEADRACE_TEST_QUESTION },
    ];
    const messages = [{ role: "user", content }];
    const answer = await sdk.generateText({ model, messages, temperature: 0, maxOutputTokens: 8, maxRetries: 0 });
    assert.equal(answer.text.trim(), right);
  }
}
