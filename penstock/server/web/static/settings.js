// What a conversation is answered with: system prompt, sampling, tools, a schema.

import { html, useState } from "./vendor/preact.js";
import { serverTools } from "./api.js";

const FIELDS = [
  ["temperature", "Temperature", { min: 0, max: 2, step: 0.1 }],
  ["top_p", "Top p", { min: 0.01, max: 1, step: 0.01 }],
  ["top_k", "Top k", { min: 0, step: 1 }],
  ["min_p", "Min p", { min: 0, max: 1, step: 0.01 }],
  ["max_tokens", "Most tokens", { min: 1, step: 1 }],
  ["seed", "Seed", { step: 1 }],
  ["presence_penalty", "Presence penalty", { min: -2, max: 2, step: 0.1 }],
  ["frequency_penalty", "Frequency penalty", { min: -2, max: 2, step: 0.1 }],
  ["repetition_penalty", "Repetition penalty", { min: 0.1, max: 2, step: 0.05 }],
];

export function isJson(text, list) {
  if (!text?.trim()) return true;
  try {
    const found = JSON.parse(text);
    return typeof found === "object" && found !== null && Array.isArray(found) === list;
  } catch {
    return false;
  }
}

export function Settings({ conversation, onChange }) {
  const { settings } = conversation;
  const [problem, setProblem] = useState("");
  const addTools = async (event) => {
    event.preventDefault();
    try {
      const found = await serverTools();
      const known = conversation.tools.trim() ? JSON.parse(conversation.tools) : [];
      const own = known.filter((tool) => !found.some((one) => one.tool === (tool.function ?? tool).name));
      const tools = JSON.stringify([...own, ...found.map((one) => one.definition)], null, 1);
      onChange({ tools, served: Object.fromEntries(found.map((one) => [one.tool, one.policy])) });
      setProblem(found.length ? "" : "The server has no tools to give.");
    } catch (error) {
      setProblem(error.message);
    }
  };
  const set = (name) => (event) => onChange({ settings: { ...settings, [name]: event.target.value } });
  return html`
    <section class="settings" aria-label="Settings of this conversation">
      <label>System prompt <textarea rows="3" value=${conversation.system} onInput=${(e) => onChange({ system: e.target.value })}></textarea></label>
      <div class="grid">
        ${FIELDS.map(([name, text, limits]) => html`
          <label>${text} <input type="number" name=${name} placeholder="model's" value=${settings[name] ?? ""} onInput=${set(name)} ...${limits} /></label>`)}
        <label>Thinking
          <select value=${settings.thinking ?? ""} onChange=${set("thinking")}>
            <option value="">model's</option><option value="on">on</option><option value="off">off</option>
          </select>
        </label>
      </div>
      <label>Stop at (one a line) <textarea rows="2" value=${settings.stop ?? ""} onInput=${set("stop")}></textarea></label>
      <label>Tools (a JSON list of functions)
        <textarea rows="3" class="code" aria-invalid=${!isJson(conversation.tools, true)} value=${conversation.tools} onInput=${(e) => onChange({ tools: e.target.value })} placeholder=${'[{"name": "…", "parameters": {…}}]'}></textarea>
      </label>
      <button type="button" onClick=${addTools}>Add the server's tools</button>
      ${problem ? html`<p class="error" role="alert">${problem}</p>` : null}
      <label>Answer follows a JSON schema
        <textarea rows="3" class="code" aria-invalid=${!isJson(settings.schema, false)} value=${settings.schema ?? ""} onInput=${set("schema")}></textarea>
      </label>
    </section>`;
}
