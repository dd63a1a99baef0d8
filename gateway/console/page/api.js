// The gateway, as the console uses it.

const KEY = "headrace.key";
const BROKEN = "The connection broke before the answer was complete";

/** An answer that is an error. `status` is 0 when there was no answer. */
export class ApiError extends Error {
  constructor(status, message, retryAfterS) {
    super(message);
    this.status = status;
    this.retryAfterS = retryAfterS;
  }
}

let onUnauthorized = () => {};

/** Have `listener` called whenever the gateway wants an API key; it is told whether the request carried one. */
export function whenUnauthorized(listener) {
  onUnauthorized = listener;
}

/** Remember the API key for as long as the tab lives. */
export function useKey(key) {
  sessionStorage.setItem(KEY, key);
}

async function request(path, options = {}) {
  const headers = { ...options.headers };
  const key = sessionStorage.getItem(KEY);
  if (key) headers.Authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(path, { cache: "no-store", ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The gateway does not answer");
  }
  if (!response.ok) throw await refusal(response, Boolean(key));
  return response;
}

async function refusal(response, hadKey) {
  let message = `The gateway answered ${response.status}.`;
  try {
    message = (await response.json()).error.message ?? message;
  } catch {
    // Something before the gateway answered, in a shape of its own.
  }
  if (response.status === 401) {
    onUnauthorized(hadKey);
    message = hadKey ? "The gateway does not know this key" : "The gateway asks for an API key";
  }
  return new ApiError(response.status, message, Number(response.headers.get("retry-after")) || undefined);
}

/**
 * The models that can chat, by name: the `state` of each and the `problem` with it, the model that an alias stands for
 * (`root`), whether what they read `isKnown` (one that was never loaded tells nothing), and the limits of `images`, null for
 * those that read text only.
 */
export async function listModels() {
  const answer = await (await request("v1/models")).json();
  const models = answer.data.filter((model) => model.task === "generate");
  return new Map(
    models.map(({ id, architecture, images, state, problem, root }) => [
      id,
      { isKnown: architecture !== null, images: readsImages(architecture) ? images : null, state, problem, root },
    ]),
  );
}

/** The sampling fields of the gateway, with their ranges and meanings. */
export async function samplingFields() {
  return (await request("console/fields", { cache: "no-cache" })).json();
}

function readsImages(architecture) {
  return Boolean(architecture?.input_modalities.includes("image"));
}

/** What runs, and what the gateway measured in its intervals of `lengthS` from number `since` on, of one model if it is named. */
export async function fleet({ since, lengthS, model }) {
  const query = new URLSearchParams({ since, interval_s: lengthS, ...(model ? { model } : {}) });
  return (await request(`console/fleet?${query}`)).json();
}

/** The chunks of a streamed chat. Throws an ApiError, also when one comes in the middle of the stream. */
export async function* streamChat(body, signal) {
  const response = await request("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(500, chunk.error.message);
    yield chunk;
  }
  throw new ApiError(0, BROKEN);
}

/** The data of server-sent events; comments are skipped. */
export async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const lines = part.split("\n").filter((line) => line.startsWith("data:"));
        if (lines.length) yield lines.map((line) => line.slice(5).trimStart()).join("\n");
      }
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, BROKEN);
  } finally {
    reader.cancel().catch(() => {});
  }
}
