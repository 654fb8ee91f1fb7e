// The conversation on the screen.

import { html, useEffect, useRef, useState } from "./vendor/preact.js";
import { Composer } from "./composer.js";
import { Message } from "./message.js";
import { answer, isRunning, stop, stopAll } from "./runs.js";
import { Settings, isJson } from "./settings.js";
import { addMessage, asMarkdown, choose, newId, removeMessage, saveConversation, shownPath, siblings } from "./store.js";

const MOST_RUNS = 16; // of tools between two questions, without anybody being asked

const SLOWEST_MS = 400; // between two looks at a long answer that comes in

// Calls `work` soon, and not again before a multiple of what it took: a long answer is rendered less often.
export function paced(work) {
  let timer = null;
  let took = 0;
  return () => {
    timer ??= setTimeout(() => {
      timer = null;
      const began = performance.now();
      work();
      took = performance.now() - began;
    }, Math.min(30 + 5 * took, SLOWEST_MS));
  };
}

export function Chat({ conversation, models, onChange, announce }) {
  const [open, setOpen] = useState(false);
  const changed = useRef(null);
  changed.current ??= paced(() => onChange());
  const end = useRef(null);
  const shown = shownPath(conversation);
  const busy = Object.keys(conversation.messages).some(isRunning);
  const size = shown.reduce((sum, message) => sum + (message.content?.length ?? 0) + (message.reasoning?.length ?? 0), 0);
  useEffect(() => {
    const page = document.scrollingElement;
    const near = page.scrollHeight - page.scrollTop - page.clientHeight < 240;
    if (near) end.current?.scrollIntoView({ block: "end" });
  }, [size, shown.length]);

  const chosen = conversation.models.length ? conversation.models : models.slice(0, 1).map(({ id }) => id);
  const ask = (parent, names = chosen) => {
    const problem = !isJson(conversation.tools, true) ? "Tools" : !isJson(conversation.settings.schema, false) ? "The schema" : null;
    if (problem) return announce(`${problem} cannot be read as JSON: see the settings.`, true);
    const turn = names.length > 1 ? newId() : undefined;
    const runs = names.map((name) => answer(conversation, parent, name, changed.current, turn));
    if (runs.length > 1) choose(conversation, runs[0].message);
    for (const { message, ended } of runs) ended.then(() => announce(message.error ? "The answer failed." : `${message.model} has answered.`));
    onChange();
  };
  const send = (message) => {
    const parent = shown.at(-1)?.id ?? "root";
    if (parent === "root") conversation.title = titleOf(message);
    ask(addMessage(conversation, parent, { role: "user", ...message }).id);
  };
  const update = (work) => {
    work();
    saveConversation(conversation);
    onChange();
  };
  const actions = {
    stop: (message) => stop(message.id),
    choose: (message) => update(() => choose(conversation, message)),
    again: (message) => ask(message.parent, [message.model]),
    remove: (message) => update(() => (stop(message.id), removeMessage(conversation, message))),
    edit: (message, content) => ask(addMessage(conversation, message.parent, { role: "user", content, images: message.images, files: message.files }).id),
    // Whether tools may run unasked for this answer: a model that calls on and on is stopped by a person's say.
    mayRun: (message) => {
      const before = shownPath(conversation);
      const turn = before.slice(before.findLastIndex((one) => one.role === "user") + 1, before.indexOf(message));
      return turn.filter((one) => one.role === "tool").length < MOST_RUNS;
    },
    giveResult: (message, call, content) => {
      let last = message;
      while (last.chosen && conversation.messages[last.chosen].role === "tool") last = conversation.messages[last.chosen];
      const added = addMessage(conversation, last.id, { role: "tool", call: call.id, content });
      const behind = shownPath(conversation);
      const given = new Set(behind.slice(behind.indexOf(message)).filter((one) => one.role === "tool").map((one) => one.call));
      if (message.calls.every(({ id }) => given.has(id))) ask(added.id, [message.model]);
      else update(() => {});
    },
  };
  const settingsChanged = (change) => update(() => Object.assign(conversation, change));
  const seeing = models.filter(({ id }) => chosen.includes(id)).every((model) => model.vision);
  return html`
    <div class="chat">
      <div class="bar">
        <${ModelPicker} models=${models} chosen=${chosen} onChange=${(names) => settingsChanged({ models: names })} />
        <button aria-expanded=${open} onClick=${() => setOpen(!open)}>Settings</button>
        <button onClick=${() => save(`${conversation.title}.md`, asMarkdown(conversation), "text/markdown")}>Export text</button>
        <button onClick=${() => save(`${conversation.title}.json`, JSON.stringify(conversation), "application/json")}>Export JSON</button>
      </div>
      ${open ? html`<${Settings} conversation=${conversation} onChange=${settingsChanged} />` : null}
      <div class="messages" role="log" aria-live="off" aria-label="Conversation">
        ${shown.length ? null : html`<p class="empty">Ask something. Conversations stay in this browser.</p>`}
        ${shown.map((message) => html`<${Turn} key=${message.turn ?? message.id} conversation=${conversation} message=${message} actions=${actions} />`)}
        <div ref=${end}></div>
      </div>
      <${Composer} busy=${busy} images=${seeing} onSend=${send} onStop=${() => stopAll(conversation)} />
    </div>`;
}

// A message, or the answers that several models gave to the same one, side by side.
function Turn({ conversation, message, actions }) {
  if (!message.turn) return html`<${Message} conversation=${conversation} message=${message} actions=${actions} />`;
  const all = siblings(conversation, message).filter((one) => one.turn === message.turn);
  return html`
    <div class="columns">
      ${all.map((one) => html`
        <div key=${one.id} class=${one.id === message.id ? "column chosen" : "column"}>
          <${Message} conversation=${conversation} message=${one} actions=${actions} />
          <label class="goes-on"><input type="radio" name=${message.turn} checked=${one.id === message.id} onChange=${() => actions.choose(one)} /> goes on from here</label>
        </div>`)}
    </div>`;
}

function ModelPicker({ models, chosen, onChange }) {
  const set = (at, name) => onChange(chosen.map((old, number) => (number === at ? name : old)));
  return html`
    <span class="models">
      ${chosen.map((name, at) => html`
        <select aria-label=${at ? `Model ${at + 1}` : "Model"} value=${name} onChange=${(e) => set(at, e.target.value)}>
          ${models.some(({ id }) => id === name) ? null : html`<option value=${name}>${name}</option>`}
          ${models.map(({ id }) => html`<option value=${id}>${id}</option>`)}
        </select>
        ${chosen.length > 1 ? html`<button class="small" aria-label=${`Without ${name}`} onClick=${() => onChange(chosen.filter((_, number) => number !== at))}>×</button>` : null}`)}
      <button class="small" aria-label="Ask another model too" disabled=${!models.length || chosen.length >= 4} onClick=${() => onChange([...chosen, models[chosen.length % models.length].id])}>Compare</button>
    </span>`;
}

const titleOf = ({ content, files }) => (content.trim() || files?.[0]?.name || "Image").split("\n")[0].slice(0, 60);

export function save(name, text, type) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name.replace(/[^\p{L}\p{N} ._-]/gu, "_");
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
