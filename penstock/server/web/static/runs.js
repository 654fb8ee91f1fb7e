// Answers in progress: each is one streamed request, whose pieces go into a message.

import { ApiError, events, request } from "./api.js";
import { addMessage, forApi, saveConversation } from "./store.js";

const SAVE_MS = 1000;
const running = new Map(); // message id → AbortController

export const isRunning = (id) => running.has(id);
export const stop = (id) => running.get(id)?.abort();
export const stopAll = (conversation) => Object.keys(conversation.messages).forEach(stop);

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty"];

export function bodyOf(conversation, parent, model) {
  const { settings } = conversation;
  const body = { model, messages: forApi(conversation, parent), stream: true, stream_options: { include_usage: true } };
  for (const name of NUMBERS) if (settings[name] !== undefined && settings[name] !== "") body[name] = Number(settings[name]);
  if (settings.stop) body.stop = settings.stop.split("\n").filter(Boolean);
  if (settings.thinking) body.chat_template_kwargs = { enable_thinking: settings.thinking === "on" };
  if (settings.schema) body.response_format = { type: "json_schema", json_schema: { name: "answer", schema: JSON.parse(settings.schema) } };
  if (conversation.tools.trim()) body.tools = JSON.parse(conversation.tools).map(asTool);
  return body;
}

const asTool = (tool) => (tool.type === "function" && tool.function ? tool : { type: "function", function: tool });

// Begins an answer of `model` to the message `parent`; `changed` is called whenever there is more of it.
export function answer(conversation, parent, model, changed, turn) {
  const message = addMessage(conversation, parent, { role: "assistant", model, content: "", reasoning: "", calls: [], turn });
  const control = new AbortController();
  running.set(message.id, control);
  const timing = { model, began: performance.now(), at: Date.now(), first: null, ended: null, tokens: 0, cached: 0, prompt: 0 };
  const ended = stream(conversation, message, model, parent, control.signal, timing, changed)
    .catch((error) => {
      if (error.name === "AbortError") message.finish = "stopped";
      else {
        message.error = error.message;
        message.status = error instanceof ApiError ? error.status : undefined;
      }
    })
    .finally(async () => {
      timing.ended = performance.now();
      timing.outcome = message.error ? "error" : message.finish;
      message.timing = { ...timing };
      message.done = true;
      running.delete(message.id);
      changed();
      await saveConversation(conversation);
    });
  changed();
  return { message, ended };
}

async function stream(conversation, message, model, parent, signal, timing, changed) {
  const body = bodyOf(conversation, parent, model);
  const response = await request("v1/chat/completions", { method: "POST", body, signal });
  let saved = performance.now();
  const waiting = (comment) => {
    message.waiting = comment || message.waiting;
    changed();
  };
  for await (const event of events(response, waiting)) {
    const choice = event.choices?.[0];
    if (choice) {
      take(message, choice.delta ?? {});
      if (timing.first === null && (message.content || message.reasoning || message.calls.length)) timing.first = performance.now();
      if (choice.finish_reason) message.finish = choice.finish_reason;
    }
    if (event.usage) {
      timing.tokens = event.usage.completion_tokens;
      timing.prompt = event.usage.prompt_tokens;
      timing.cached = event.usage.prompt_tokens_details?.cached_tokens ?? 0;
    }
    changed();
    if (performance.now() - saved > SAVE_MS) {
      saved = performance.now();
      saveConversation(conversation);
    }
  }
}

function take(message, delta) {
  message.content += delta.content ?? "";
  message.reasoning += delta.reasoning_content ?? delta.reasoning ?? "";
  for (const { index, id, function: called } of delta.tool_calls ?? []) {
    const call = (message.calls[index] ??= { id, name: "", text: "" });
    if (id) call.id = id;
    call.name += called?.name ?? "";
    call.text += called?.arguments ?? "";
  }
}
