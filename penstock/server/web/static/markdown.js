// Markdown with code and maths, rendered a block at a time: what has not changed since the last look is not touched.

import { html, useEffect, useRef } from "./vendor/preact.js";
import { Marked } from "./vendor/marked.js";
import "./vendor/purify.js";

const MATHS = [
  { begin: "$$", end: "$$", display: true },
  { begin: "\\[", end: "\\]", display: true },
  { begin: "\\(", end: "\\)", display: false },
];
const LONGEST = 10_000; // characters of one formula

const maths = {
  name: "maths",
  level: "inline",
  start: (text) => {
    const found = MATHS.map(({ begin }) => text.indexOf(begin)).filter((at) => at >= 0);
    return found.length ? Math.min(...found) : undefined;
  },
  tokenizer(text) {
    for (const { begin, end, display } of MATHS) {
      if (!text.startsWith(begin)) continue;
      const at = text.slice(0, LONGEST).indexOf(end, begin.length);
      if (at > begin.length) return { type: "maths", raw: text.slice(0, at + end.length), text: text.slice(begin.length, at), display };
    }
    return undefined;
  },
  renderer: ({ text, display }) => `<span class="maths" data-display="${display}">${escape(text)}</span>`,
};
const escape = (text) => text.replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);
const PLAIN_TAG = /^<\/?(br|sub|sup|kbd|b|i|em|strong|u|mark|details|summary)\s*\/?>$/i;
const asText = { html: ({ text }) => (PLAIN_TAG.test(text.trim()) ? text : escape(text)) }; // an answer's HTML is shown, not used
const parser = new Marked({ gfm: true, breaks: true, extensions: [maths], renderer: asText });
const SAFE = { FORBID_TAGS: ["style", "form", "input", "button", "iframe", "video", "audio", "svg", "math"], FORBID_ATTR: ["style", "id", "name"] };

globalThis.DOMPurify.addHook("afterSanitizeAttributes", (node) => {
  if (node.tagName === "A") {
    node.setAttribute("target", "_blank");
    node.setAttribute("rel", "noopener noreferrer");
  }
});

export function Markdown({ text }) {
  const place = useRef(null);
  const shown = useRef([]); // raw text of every block that is shown
  useEffect(() => {
    const blocks = parser.lexer(text);
    blocks.forEach((block, at) => {
      if (shown.current[at] === block.raw) return;
      const node = rendered(block, blocks.links);
      const old = place.current.children[at];
      if (old) old.replaceWith(node);
      else place.current.append(node);
    });
    while (place.current.children.length > blocks.length) place.current.lastElementChild.remove();
    shown.current = blocks.map((block) => block.raw);
  }, [text]);
  return html`<div class="markdown" ref=${place}></div>`;
}

function rendered(block, links) {
  const node = document.createElement("div");
  if (block.type === "code") {
    node.append(codeBlock(block.text, (block.lang ?? "").split(/\s/)[0]));
    return node;
  }
  node.innerHTML = globalThis.DOMPurify.sanitize(parser.parser(Object.assign([block], { links })), SAFE);
  for (const code of node.querySelectorAll("pre > code")) {
    const language = /language-(\S+)/.exec(code.className)?.[1] ?? "";
    code.parentElement.replaceWith(codeBlock(code.textContent, language));
  }
  for (const image of node.querySelectorAll("img")) image.loading = "lazy";
  for (const place of node.querySelectorAll(".maths")) renderMaths(place);
  return node;
}

function codeBlock(text, language) {
  const figure = document.createElement("figure");
  figure.className = "code";
  const head = document.createElement("figcaption");
  head.textContent = language || "text";
  const copy = document.createElement("button");
  copy.type = "button";
  copy.textContent = "Copy";
  copy.addEventListener("click", async () => {
    await navigator.clipboard?.writeText(text);
    copy.textContent = "Copied";
    setTimeout(() => (copy.textContent = "Copy"), 1500);
  });
  head.append(copy);
  const code = document.createElement("code");
  code.textContent = text;
  const pre = document.createElement("pre");
  pre.tabIndex = 0;
  pre.append(code);
  figure.append(head, pre);
  colour(code, text, language);
  return figure;
}

async function colour(code, text, language) {
  if (!language || text.length > 50_000) return;
  const { default: highlighter } = await import("./vendor/highlight.js");
  if (!highlighter.getLanguage(language)) return;
  code.innerHTML = highlighter.highlight(text, { language, ignoreIllegals: true }).value;
}

let loadingMaths;
function loadMaths() {
  loadingMaths ??= new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = new URL("./vendor/temml.js", import.meta.url).href;
    script.onload = () => resolve(globalThis.temml);
    script.onerror = reject;
    document.head.append(script);
  });
  return loadingMaths;
}

async function renderMaths(place) {
  const source = place.textContent;
  const temml = await loadMaths();
  try {
    temml.render(source, place, { displayMode: place.dataset.display === "true", throwOnError: true, maxExpand: 200, trust: false });
  } catch {
    place.textContent = source;
    place.classList.add("wrong");
  }
}
