// The page: conversations, models, engine; and the key, if the server wants one.

import { ApiError, getJson, readKey, writeKey } from "./api.js";
import { Chat } from "./chat.js";
import { Engine } from "./engine.js";
import { Models } from "./models.js";
import { stopAll } from "./runs.js";
import { allConversations, newConversation, newId, removeConversation, saveConversation } from "./store.js";
import { html, render, useEffect, useRef, useState } from "./vendor/preact.js";

const VIEWS = [["chat", "Chat"], ["models", "Models"], ["engine", "Engine"]];
const here = () => VIEWS.some(([view]) => location.hash === `#${view}`) ? location.hash.slice(1) : "chat";

function App() {
  const [view, setView] = useState(here());
  const [conversations, setConversations] = useState([]);
  const [current, setCurrent] = useState(newConversation());
  const [server, setServer] = useState({ models: [], many: false, locked: false, problem: "" });
  const [told, announce] = useNotices();
  const [, again] = useState(0);
  const connect = async () => setServer(await reach());
  useEffect(() => {
    const moved = () => setView(here());
    addEventListener("hashchange", moved);
    connect();
    allConversations().then(setConversations, () => announce("This browser keeps no conversations (private window?).", true));
    return () => removeEventListener("hashchange", moved);
  }, []);
  useEffect(() => {
    if (view === "chat") connect();
  }, [view]);

  const changed = () => {
    setConversations((old) => (old.includes(current) || !current.messages.root.chosen ? old : [current, ...old]));
    again((number) => number + 1);
  };
  const begin = () => {
    setCurrent(newConversation(current.models));
    location.hash = "#chat";
  };
  const drop = async (conversation) => {
    if (!confirm(`Delete “${conversation.title}”?`)) return;
    stopAll(conversation);
    await removeConversation(conversation.id);
    setConversations((old) => old.filter((one) => one !== conversation));
    if (conversation === current) begin();
  };
  const bring = async (file) => {
    try {
      const kept = JSON.parse(await file.text());
      if (kept.messages?.root?.role !== "root" || typeof kept.title !== "string") throw new Error();
      const found = { ...newConversation(), ...kept, id: newId() };
      await saveConversation(found);
      setConversations((old) => [found, ...old]);
      setCurrent(found);
    } catch {
      announce(`${file.name} is no conversation that this page exported.`, true);
    }
  };
  return html`
    <a class="skip" href="#main">Skip to the content</a>
    <header class="top">
      <h1>Penstock</h1>
      <nav aria-label="Views">${VIEWS.map(([name, text]) => html`<a href=${`#${name}`} aria-current=${view === name ? "page" : undefined}>${text}</a>`)}<a href="docs">API</a></nav>
      <${Key} locked=${server.locked} onChange=${connect} />
    </header>
    ${server.problem ? html`<p class="error banner" role="alert">${server.problem} <button class="small" onClick=${connect}>Try again</button></p>` : null}
    <div class="body">
      ${view === "chat" ? html`<${History} conversations=${conversations} current=${current} onOpen=${setCurrent} onNew=${begin} onDrop=${drop} onBring=${bring} />` : null}
      <main id="main" tabindex="-1">
        ${view === "chat" ? html`<${Chat} key=${current.id} conversation=${current} models=${server.models} onChange=${changed} announce=${announce} />` : null}
        ${view === "models" ? html`<${Models} key=${server.many} many=${server.many} announce=${announce} />` : null}
        ${view === "engine" ? html`<${Engine} />` : null}
      </main>
    </div>
    <div class="notices" role="status" aria-live="polite">${told.map(({ id, text, wrong }) => html`<p key=${id} class=${wrong ? "error" : ""}>${text}</p>`)}</div>`;
}

// What the server is: its models, and whether it has a library of them.
async function reach() {
  try {
    const { data } = await getJson("v1/models");
    return { models: data, many: data.some(({ state }) => state !== undefined) || !data.length, locked: false, problem: "" };
  } catch (error) {
    const locked = error instanceof ApiError && error.status === 401;
    return { models: [], many: false, locked, problem: locked ? "" : error.message };
  }
}

function useNotices() {
  const [told, setTold] = useState([]);
  const announce = (text, wrong = false) => {
    const id = newId();
    setTold((old) => [...old.slice(-2), { id, text, wrong }]);
    setTimeout(() => setTold((old) => old.filter((one) => one.id !== id)), wrong ? 8000 : 3000);
  };
  return [told, announce];
}

function Key({ locked, onChange }) {
  const [open, setOpen] = useState(false);
  const [key, setKey] = useState(readKey());
  const input = useRef(null);
  useEffect(() => {
    if (locked || open) input.current?.focus();
  }, [locked, open]);
  const send = (event) => {
    event.preventDefault();
    writeKey(key.trim());
    setOpen(false);
    onChange();
  };
  if (!locked && !open) return html`<button class="small" onClick=${() => setOpen(true)}>Key</button>`;
  return html`
    <form class="key" onSubmit=${send}>
      <label>${locked ? "This server needs an API key" : "API key"} <input ref=${input} type="password" autocomplete="off" value=${key} onInput=${(e) => setKey(e.target.value)} /></label>
      <button>Keep</button>
    </form>`;
}

function History({ conversations, current, onOpen, onNew, onDrop, onBring }) {
  const [open, setOpen] = useState(false);
  const [wanted, setWanted] = useState("");
  const bring = async (event) => {
    const [file] = event.target.files;
    if (file) await onBring(file);
    event.target.value = "";
  };
  const matches = conversations.filter(({ title }) => title.toLowerCase().includes(wanted.toLowerCase()));
  return html`
    <aside class=${open ? "history open" : "history"} aria-label="Conversations">
      <button class="toggle" aria-expanded=${open} onClick=${() => setOpen(!open)}>Conversations</button>
      <div class="list">
        <button class="primary" onClick=${onNew}>New conversation</button>
        <input type="search" aria-label="Search conversations" placeholder="Search" value=${wanted} onInput=${(e) => setWanted(e.target.value)} />
        <ul>
          ${matches.map((one) => html`
            <li key=${one.id}>
              <button class="open" aria-current=${one === current ? "true" : undefined} onClick=${() => (onOpen(one), setOpen(false))}>${one.title}</button>
              <button class="small" aria-label=${`Delete ${one.title}`} onClick=${() => onDrop(one)}>×</button>
            </li>`)}
        </ul>
        <label class="bring">Import <input type="file" accept=".json,application/json" onChange=${bring} /></label>
      </div>
    </aside>`;
}

const place = document.getElementById("app");
place.replaceChildren(); // what stood there until now would stay beside it
render(html`<${App} />`, place);
