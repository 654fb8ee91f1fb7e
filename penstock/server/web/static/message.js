// One message of a conversation, and what can be done with it.

import { html, useEffect, useState } from "./vendor/preact.js";
import { runTool } from "./api.js";
import { Markdown } from "./markdown.js";
import { isRunning } from "./runs.js";
import { siblings } from "./store.js";

export function Message({ conversation, message, actions }) {
  const [editing, setEditing] = useState(false);
  if (editing) {
    const send = (text) => (setEditing(false), actions.edit(message, text));
    return html`<${Editor} text=${message.content} onSend=${send} onCancel=${() => setEditing(false)} />`;
  }
  const kind = message.role === "assistant" ? message.model : message.role === "tool" ? "Result of a tool" : "You";
  return html`
    <article class=${`message ${message.role}`} aria-label=${kind} data-id=${message.id}>
      <header><strong>${kind}</strong></header>
      <${Body} message=${message} actions=${actions} served=${conversation.served ?? {}} />
      <footer>
        ${message.role === "assistant" ? html`<${Facts} message=${message} />` : null}
        <${Branches} conversation=${conversation} message=${message} onChoose=${actions.choose} />
        <${Actions} message=${message} actions=${actions} onEdit=${() => setEditing(true)} />
      </footer>
    </article>`;
}

function Body({ message, actions, served }) {
  const running = isRunning(message.id);
  if (message.role !== "assistant") {
    return html`
      ${(message.images ?? []).map((image) => html`<img class="attached" src=${image} alt="attached image" />`)}
      ${(message.files ?? []).map((file) => html`<p class="file">${file.name}, ${file.text.length.toLocaleString()} characters</p>`)}
      <div class="plain">${message.content}</div>`;
  }
  const empty = !message.content && !message.reasoning && !message.calls.length;
  return html`
    ${message.reasoning ? html`<details class="reasoning"><summary>${running && !message.content ? "Thinking…" : "Thoughts"}</summary><${Markdown} text=${message.reasoning} /></details>` : null}
    ${message.content ? html`<${Markdown} text=${message.content} />` : null}
    ${message.calls.map((call) => html`<${Call} message=${message} call=${call} actions=${actions} running=${running} policy=${served[call.name]} />`)}
    ${running && empty ? html`<p class="waiting" role="status">${message.waiting ?? "Waiting for the first token…"}</p>` : null}
    ${!running && !message.done ? html`<p class="note">This answer was cut off when the page was left.</p>` : null}
    ${message.finish === "length" ? html`<p class="note">Cut at the limit of tokens.</p>` : null}
    ${message.finish === "stopped" ? html`<p class="note">Stopped.</p>` : null}
    ${message.error ? html`<p class="error" role="alert">${message.error}</p>` : null}`;
}

function Call({ message, call, actions, running, policy }) {
  const [result, setResult] = useState("");
  let shown = call.text;
  try {
    shown = JSON.stringify(JSON.parse(call.text), null, 2);
  } catch {
    // its end has not come yet
  }
  const send = (event) => {
    event.preventDefault();
    actions.giveResult(message, call, result);
  };
  const [asking, setAsking] = useState("");
  const run = async () => {
    setAsking("Running on the server…");
    try {
      actions.giveResult(message, call, await runTool(call.name, call.text));
      setAsking("");
    } catch (error) {
      setAsking(error.message);
    }
  };
  const alone = !running && policy === "allow" && message.done && !message.chosen && !message.error && message.finish === "tool_calls" && actions.mayRun(message);
  useEffect(() => {
    if (alone) run();
  }, [alone]);
  return html`
    <section class="call" aria-label=${`Call of the tool ${call.name}`}>
      <h3>${call.name}</h3>
      <pre tabindex="0">${shown}</pre>
      ${running || !policy ? null : html`<button onClick=${run}>Run on the server</button>`}
      ${asking ? html`<p role="status">${asking}</p>` : null}
      ${running ? null : html`
        <form onSubmit=${send}>
          <label>Result <textarea rows="2" value=${result} onInput=${(e) => setResult(e.target.value)}></textarea></label>
          <button>Send result</button>
        </form>`}
    </section>`;
}

function Facts({ message }) {
  const timing = message.timing;
  if (!timing || !timing.tokens) return null;
  const seconds = (timing.ended - (timing.first ?? timing.began)) / 1000;
  const facts = [`${timing.tokens} tokens`];
  if (timing.tokens > 1 && seconds > 0) facts.push(`${((timing.tokens - 1) / seconds).toFixed(1)} tokens/s`);
  if (timing.first !== null) facts.push(`first after ${((timing.first - timing.began) / 1000).toFixed(2)} s`);
  if (timing.cached) facts.push(`${timing.cached} of ${timing.prompt} prompt tokens from the cache`);
  return html`<span class="facts">${facts.join(" · ")}</span>`;
}

function Branches({ conversation, message, onChoose }) {
  const all = siblings(conversation, message).filter((one) => !message.turn || one.turn !== message.turn || one.id === message.id);
  if (all.length < 2) return null;
  const at = all.findIndex((one) => one.id === message.id);
  const button = (text, label, to) =>
    html`<button class="small" aria-label=${label} disabled=${!all[to]} onClick=${() => onChoose(all[to])}>${text}</button>`;
  return html`<span class="branches">${button("‹", "Former version", at - 1)} ${at + 1} of ${all.length} ${button("›", "Next version", at + 1)}</span>`;
}

function Actions({ message, actions, onEdit }) {
  if (isRunning(message.id)) return html`<button class="small" onClick=${() => actions.stop(message)}>Stop</button>`;
  return html`
    <span class="actions">
      ${message.role === "user" ? html`<button class="small" onClick=${onEdit}>Edit</button>` : null}
      ${message.role === "assistant" ? html`<button class="small" onClick=${() => actions.again(message)}>Again</button>` : null}
      <button class="small" onClick=${() => navigator.clipboard?.writeText(message.content)}>Copy</button>
      <button class="small" onClick=${() => actions.remove(message)}>Delete</button>
    </span>`;
}

function Editor({ text, onSend, onCancel }) {
  const [value, setValue] = useState(text);
  const send = (event) => (event.preventDefault(), onSend(value));
  return html`
    <form class="editor" onSubmit=${send}>
      <textarea aria-label="Edited message" rows="4" value=${value} onInput=${(e) => setValue(e.target.value)}></textarea>
      <button>Send</button> <button type="button" onClick=${onCancel}>Cancel</button>
    </form>`;
}
