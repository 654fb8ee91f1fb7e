// Requests to the server this page came from, wherever it is mounted.

const ROOT = new URL("../", import.meta.url);
const KEY = "penstock.key";

export const url = (path) => new URL(path.replace(/^\//, ""), ROOT).href;
export const readKey = () => localStorage.getItem(KEY) ?? "";
export const writeKey = (key) => (key ? localStorage.setItem(KEY, key) : localStorage.removeItem(KEY));

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

// A request whose body is JSON already, with the key there is; whatever the answer.
export function send(path, { method = "GET", body, signal } = {}) {
  const headers = {};
  if (body !== undefined) headers["Content-Type"] = "application/json";
  if (readKey()) headers.Authorization = `Bearer ${readKey()}`;
  return fetch(url(path), { method, headers, body, signal });
}

export async function request(path, { method = "GET", body, signal } = {}) {
  let response;
  try {
    response = await send(path, { method, signal, body: body === undefined ? undefined : JSON.stringify(body) });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The server does not answer. Is it running?");
  }
  if (!response.ok) throw new ApiError(response.status, await reason(response));
  return response;
}

export const getJson = async (path) => (await request(path)).json();

// Tools that the server runs, and running one: whoever calls this has asked, or the tool's policy lets it run.
export const serverTools = () => getJson("tools");
export async function runTool(name, text) {
  const answer = await request("tools", { method: "POST", body: { tool: name, params: JSON.parse(text || "{}"), confirmed: true } });
  return (await answer.json()).plain_text_response;
}

async function reason(response) {
  const text = await response.text();
  try {
    return messageOf(JSON.parse(text)) ?? text;
  } catch {
    return text.slice(0, 300) || `The server answers ${response.status}.`;
  }
}

function messageOf(found) {
  return found?.error?.message ?? (typeof found?.error === "string" ? found.error : undefined);
}

async function* lines(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      const parts = value.split("\n"); // alone: a long line in small pieces is not looked through again and again
      parts[0] = rest + parts[0];
      rest = parts.pop();
      yield* parts;
    }
    if (rest) yield rest;
  } finally {
    reader.cancel().catch(() => {});
  }
}

// The JSON objects of server-sent events; comments tell what a request waits for.
export async function* events(response, onComment = () => {}) {
  for await (const line of lines(response)) {
    if (line.startsWith(":")) onComment(line.slice(1).trim());
    if (!line.startsWith("data:")) continue;
    const data = line.slice(5).trim();
    if (data === "[DONE]") continue; // the end of the body follows
    const event = JSON.parse(data);
    if (event.error) throw new ApiError(500, messageOf(event) ?? "The server could not go on.");
    yield event;
  }
}

// The JSON objects of a body of one object a line.
export async function* objects(response) {
  for await (const line of lines(response)) {
    if (!line.trim()) continue;
    const found = JSON.parse(line);
    if (found.error) throw new ApiError(500, messageOf(found) ?? String(found.error));
    yield found;
  }
}

// Prometheus' text: [{ name, labels, value }].
export function readMetrics(text) {
  const found = [];
  for (const line of text.split("\n")) {
    const match = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$/.exec(line);
    if (!match) continue;
    const labels = {};
    for (const [, label, value] of (match[2] ?? "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)) {
      labels[label] = value.replace(/\\(.)/g, (_, c) => (c === "n" ? "\n" : c));
    }
    found.push({ name: match[1], labels, value: Number(match[3]) });
  }
  return found;
}
