// The models of this server: what they do, load, unload, pull, remove, and the memory they hold.

import { getJson, objects, readMetrics, request } from "./api.js";
import { html, useEffect, useRef, useState } from "./vendor/preact.js";

const LOOK_MS = 1000;

export const bytes = (count) => {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  for (; count >= 1024 && at < units.length - 1; at++) count /= 1024;
  return `${count.toFixed(at > 1 && count < 100 ? 1 : 0)} ${units[at]}`;
};

// Calls `look` at once and every so often while the page is visible.
export function useLooks(look, milliseconds) {
  useEffect(() => {
    let gone = false;
    let timer;
    const turn = async () => {
      if (!document.hidden) await look();
      if (!gone) timer = setTimeout(turn, milliseconds);
    };
    turn();
    return () => {
      gone = true;
      clearTimeout(timer);
    };
  }, []);
}

export function Models({ many, announce }) {
  const [models, setModels] = useState(null);
  const [memory, setMemory] = useState([]);
  const [budget, setBudget] = useState(0);
  const [problem, setProblem] = useState("");
  const look = async () => {
    try {
      setModels((await getJson(many ? "models" : "v1/models")).data);
      const metrics = readMetrics(await (await request("metrics")).text());
      setMemory(metrics.filter(({ name, value }) => name === "penstock_model_memory_bytes" && value));
      setBudget(metrics.find(({ name }) => name === "penstock_memory_budget_bytes")?.value ?? 0);
      setProblem("");
    } catch (error) {
      setProblem(error.message);
    }
  };
  useLooks(look, LOOK_MS);
  const act = async (path, method, body, said) => {
    try {
      await request(path, { method, body });
      announce(said);
    } catch (error) {
      announce(error.message, true);
    }
    look();
  };
  return html`
    <section class="view" aria-labelledby="models-title">
      <h2 id="models-title">Models</h2>
      ${problem ? html`<p class="error" role="alert">${problem}</p>` : null}
      ${many ? html`<${Memory} memory=${memory} budget=${budget} /><${Pull} announce=${announce} onDone=${look} />` : html`<p>This server was started with one model. Without one, <code>penstock serve</code> serves a library of many.</p>`}
      <table>
        <thead><tr><th scope="col">Model</th><th scope="col">State</th><th scope="col">Memory</th>${many ? html`<th scope="col">Actions</th>` : null}</tr></thead>
        <tbody>
          ${(models ?? []).map((model) => html`<${Row} key=${model.id} model=${model} many=${many} held=${memory.find(({ labels }) => labels.model_name === model.id)?.value} act=${act} />`)}
        </tbody>
      </table>
      ${models?.length === 0 ? html`<p>The library is empty: pull a model.</p>` : null}
    </section>`;
}

function Row({ model, many, held, act }) {
  const state = model.status?.value ?? "loaded";
  const progress = model.status?.progress?.value ?? model.status?.progress;
  const body = { model: model.id };
  const remove = () => {
    if (confirm(`Remove ${model.id} from this machine?`)) act("api/delete", "DELETE", body, `${model.id} is removed.`);
  };
  return html`
    <tr>
      <th scope="row">${model.id}</th>
      <td>${state} ${state === "loading" && typeof progress === "number" ? html`<progress max="1" value=${progress} aria-label=${`Loading ${model.id}`}></progress>` : null}</td>
      <td>${held ? bytes(held) : ""}</td>
      ${many ? html`<td>
        ${state === "loaded" || state === "loading"
          ? html`<button class="small" onClick=${() => act("models/unload", "POST", body, `${model.id} is unloaded.`)}>Unload</button>`
          : html`<button class="small" onClick=${() => act("models/load", "POST", body, `${model.id} is being loaded.`)}>Load</button>`}
        <button class="small" onClick=${remove}>Remove</button>
      </td>` : null}
    </tr>`;
}

function Memory({ memory, budget }) {
  const held = memory.reduce((sum, { value }) => sum + value, 0);
  const total = Math.max(budget, held, 1);
  return html`
    <div class="memory">
      <p id="memory-text">${bytes(held)} planned for models${budget ? ` of ${bytes(budget)}` : ""}</p>
      <svg viewBox="0 0 1000 20" preserveAspectRatio="none" role="img" aria-labelledby="memory-text">
        <rect width="1000" height="20" class="room" />
        ${memory.map(({ labels, value }, at) => {
          const before = memory.slice(0, at).reduce((sum, one) => sum + one.value, 0);
          return html`<rect x=${(1000 * before) / total} width=${(1000 * value) / total} height="20" class=${`part${at % 4}`}><title>${labels.model_name}: ${bytes(value)}</title></rect>`;
        })}
      </svg>
    </div>`;
}

function Pull({ announce, onDone }) {
  const [name, setName] = useState("");
  const [state, setState] = useState(null);
  const control = useRef(null);
  const pull = async (event) => {
    event.preventDefault();
    control.current = new AbortController();
    setState({ text: `Looking for ${name}…` });
    try {
      const response = await request("api/pull", { method: "POST", body: { model: name }, signal: control.current.signal });
      for await (const { status, completed, total } of objects(response)) setState({ text: status, completed, total });
      announce(`${name} is here.`);
      setName("");
    } catch (error) {
      if (error.name !== "AbortError") announce(error.message, true);
    }
    setState(null);
    onDone();
  };
  return html`
    <form class="pull" onSubmit=${pull}>
      <label>Pull a model <input value=${name} onInput=${(e) => setName(e.target.value)} placeholder="Qwen/Qwen3-0.6B" required disabled=${state !== null} /></label>
      ${state === null ? html`<button>Pull</button>` : html`<button type="button" onClick=${() => control.current.abort()}>Cancel</button>`}
      ${state === null ? null : html`<p role="status">${state.text} ${state.total ? html`<progress max=${state.total} value=${state.completed ?? 0}></progress> ${bytes(state.completed ?? 0)} of ${bytes(state.total)}` : null}</p>`}
    </form>`;
}
