// The API's own description as a page: routes by group, every field of their bodies, and a place to try each.

import { ApiError, getJson, readKey, send as ask, writeKey } from "./api.js";
import { html, render, useEffect, useMemo, useRef, useState } from "./vendor/preact.js";

const OTHERS = "Others";
const LONGEST_SHOWN = 200_000; // characters of an answer

function Docs() {
  const [about, setAbout] = useState(null);
  const [problem, setProblem] = useState(null);
  const [wanted, setWanted] = useState("");
  const read = async () => {
    try {
      setAbout(await getJson("openapi.json"));
      setProblem(null);
    } catch (error) {
      setProblem(error);
    }
  };
  useEffect(() => void read(), []);
  const groups = useMemo(() => grouped(about, wanted.toLowerCase()), [about, wanted]);
  const locked = problem instanceof ApiError && problem.status === 401;
  return html`
    <a class="skip" href="#main">Skip to the content</a>
    <header class="top">
      <h1>Penstock API ${about?.info.version}</h1>
      <nav aria-label="Pages"><a href="./">Chat</a><a href="openapi.json">openapi.json</a></nav>
      <${Key} onChange=${read} locked=${locked} />
    </header>
    ${problem && !locked ? html`<p class="error banner" role="alert">${problem.message}</p>` : null}
    <div class="body">
      <aside class="history open" aria-label="Routes"><div class="list">
        <input type="search" aria-label="Search routes and fields" placeholder="Search routes and fields" value=${wanted} onInput=${(e) => setWanted(e.target.value)} />
        ${groups.map(([group, routes]) => html`<strong>${group}</strong><ul>${routes.map((route) => html`<li><a href=${`#${route.id}`}><code>${route.path}</code></a></li>`)}</ul>`)}
      </div></aside>
      <main id="main" tabindex="-1">
        <p>${about?.info.description}</p>
        ${groups.map(([group, routes]) => html`<section aria-label=${group}><h2>${group}</h2>${routes.map((route) => html`<${Route} key=${route.id} about=${about} route=${route} />`)}</section>`)}
        ${about && !groups.length ? html`<p>No route or field has that in its name.</p>` : null}
      </main>
    </div>`;
}

function grouped(about, wanted) {
  const groups = new Map();
  for (const [path, operations] of Object.entries(about?.paths ?? {})) {
    for (const [method, operation] of Object.entries(operations)) {
      const body = bodyOf(about, operation);
      const names = [path, operation.summary ?? "", ...Object.keys(body?.properties ?? {})];
      if (wanted && !names.some((name) => name.toLowerCase().includes(wanted))) continue;
      const group = operation.tags?.[0] ?? OTHERS;
      if (!groups.has(group)) groups.set(group, []);
      groups.get(group).push({ id: `${method}${path.replace(/[^\w]+/g, "-")}`, method, path, operation, body });
    }
  }
  return [...groups];
}

const resolved = (about, schema) => (schema?.$ref ? about.components.schemas[schema.$ref.split("/").at(-1)] : schema);
const bodyOf = (about, operation) => resolved(about, operation.requestBody?.content?.["application/json"]?.schema);

function Route({ about, route }) {
  const { method, path, operation, body } = route;
  return html`
    <article class="route" id=${route.id}>
      <h3><code>${method.toUpperCase()} ${path}</code></h3>
      <p>${operation.summary}</p>
      ${operation.description ? html`<p>${operation.description}</p>` : null}
      ${body ? html`<details><summary>Fields</summary><${Fields} about=${about} schema=${body} depth=${0} /></details>` : null}
      <details><summary>Try it</summary><${Try} about=${about} route=${route} /></details>
    </article>`;
}

function Fields({ about, schema, depth }) {
  const required = new Set(schema.required ?? []);
  return html`
    <table class="fields">
      <thead><tr><th scope="col">Field</th><th scope="col">Type</th><th scope="col">Default</th><th scope="col">Meaning</th></tr></thead>
      <tbody>${Object.entries(schema.properties ?? {}).map(([name, field]) => html`
        <tr>
          <th scope="row"><code>${name}</code>${required.has(name) ? " (required)" : ""}</th>
          <td>${kinds(field).map((kind, at) => html`${at ? " or " : ""}<${Kind} about=${about} schema=${kind} depth=${depth} />`)}</td>
          <td>${field.default === undefined ? "" : html`<code>${JSON.stringify(field.default)}</code>`}</td>
          <td>${field.description}</td>
        </tr>`)}</tbody>
    </table>`;
}

const kinds = (schema) => (schema.anyOf ?? schema.oneOf ?? [schema]).filter(({ type }) => type !== "null");

function Kind({ about, schema, depth }) {
  const [open, setOpen] = useState(false);
  const inner = resolved(about, schema);
  if (inner?.properties && depth < 4) {
    const name = schema.$ref?.split("/").at(-1) ?? "object";
    return html`<button class="small" aria-expanded=${open} onClick=${() => setOpen(!open)}>${name}</button>${open ? html`<${Fields} about=${about} schema=${inner} depth=${depth + 1} />` : null}`;
  }
  if (inner?.type === "array") return html`list of ${kinds(inner.items ?? {}).map((kind, at) => html`${at ? " or " : ""}<${Kind} about=${about} schema=${kind} depth=${depth} />`)}`;
  return html`<span>${inner?.type ?? "any"}${range(inner ?? {})}</span>`;
}

function range(schema) {
  const parts = [];
  if (schema.enum) parts.push(schema.enum.slice(0, 12).map((value) => JSON.stringify(value)).join(", "));
  if (schema.const !== undefined) parts.push(JSON.stringify(schema.const));
  if (schema.minimum !== undefined) parts.push(`≥ ${schema.minimum}`);
  if (schema.exclusiveMinimum !== undefined) parts.push(`> ${schema.exclusiveMinimum}`);
  if (schema.maximum !== undefined) parts.push(`≤ ${schema.maximum}`);
  if (schema.exclusiveMaximum !== undefined) parts.push(`< ${schema.exclusiveMaximum}`);
  if (schema.maxLength !== undefined) parts.push(`at most ${schema.maxLength} characters`);
  if (schema.maxItems !== undefined) parts.push(`at most ${schema.maxItems}`);
  return parts.length ? ` (${parts.join("; ")})` : "";
}

// A body with what is required, and what makes an answer worth looking at.
function example(about, schema) {
  const known = {
    messages: [{ role: "user", content: "Hello!" }], prompt: "Hello", input: "Hello", max_tokens: 64, text: "Hello", query: "Hello",
    documents: ["Hello", "Goodbye"], content: "Hello",
  };
  const required = new Set(schema.required ?? []);
  const body = {};
  for (const [name, field] of Object.entries(schema.properties ?? {})) {
    const kind = resolved(about, kinds(field)[0] ?? {}) ?? {};
    if (name === "model" && kind.enum) body.model = kind.enum[0];
    else if (required.has(name) || ["messages", "prompt", "input", "max_tokens"].includes(name)) {
      body[name] = known[name] ?? kind.enum?.[0] ?? field.default ?? { string: "", integer: 1, number: 1, boolean: false, array: [], object: {} }[kind.type] ?? null;
    }
  }
  if (body.messages) delete body.prompt;
  return body;
}

function Try({ about, route }) {
  const [path, setPath] = useState(route.path);
  const [text, setText] = useState(() => (route.body ? JSON.stringify(example(about, route.body), null, 2) : ""));
  const [answer, setAnswer] = useState(null);
  const control = useRef(null);
  const send = async (event) => {
    event.preventDefault();
    control.current = new AbortController();
    setAnswer({ status: "…", text: "" });
    const began = performance.now();
    try {
      const asked = { method: route.method.toUpperCase(), body: route.body ? text : undefined, signal: control.current.signal };
      const response = await ask(path, asked);
      const reader = response.body?.pipeThrough(new TextDecoderStream()).getReader();
      let whole = "";
      for (;;) {
        const { done, value } = (await reader?.read()) ?? { done: true };
        if (!done && whole.length === LONGEST_SHOWN) continue; // no more is shown
        whole = (whole + (value ?? "")).slice(0, LONGEST_SHOWN);
        setAnswer({ status: `${response.status}, ${((performance.now() - began) / 1000).toFixed(2)} s`, text: done ? pretty(whole) : whole });
        if (done) break;
      }
    } catch (error) {
      if (error.name !== "AbortError") setAnswer({ status: "no answer", text: error.message });
    }
  };
  return html`
    <form class="try" onSubmit=${send}>
      <label>Path <input value=${path} onInput=${(e) => setPath(e.target.value)} /></label>
      ${route.body ? html`<label>Body <textarea class="code" rows="8" value=${text} onInput=${(e) => setText(e.target.value)}></textarea></label>` : null}
      <button class="primary">Send</button> <button type="button" onClick=${() => control.current?.abort()}>Stop</button>
      ${answer ? html`<p role="status">${answer.status}</p><pre tabindex="0">${answer.text}</pre>` : null}
    </form>`;
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

function Key({ locked, onChange }) {
  const [key, setKey] = useState(readKey());
  const send = (event) => {
    event.preventDefault();
    writeKey(key.trim());
    onChange();
  };
  return html`<form class="key" onSubmit=${send}><label>${locked ? "This server needs an API key" : "API key"} <input type="password" autocomplete="off" value=${key} onInput=${(e) => setKey(e.target.value)} /></label><button>Keep</button></form>`;
}

const place = document.getElementById("app");
place.replaceChildren(); // what stood there until now would stay beside it
render(html`<${Docs} />`, place);
