// Where a message is written: text, images and files.

import { html, useEffect, useRef, useState } from "./vendor/preact.js";

const LARGEST_TEXT = 1 << 20;
const LARGEST_IMAGE = 16 << 20;

export function Composer({ busy, images, onSend, onStop }) {
  const [text, setText] = useState("");
  const [attached, setAttached] = useState({ images: [], files: [] });
  const [problem, setProblem] = useState("");
  const area = useRef(null);
  useEffect(() => {
    area.current.style.height = "auto";
    area.current.style.height = `${Math.min(area.current.scrollHeight, 240)}px`;
  }, [text]);
  useEffect(() => area.current.focus(), []);

  const send = (event) => {
    event?.preventDefault();
    if (busy || (!text.trim() && !attached.images.length && !attached.files.length)) return;
    onSend({ content: text, ...attached });
    setText("");
    setAttached({ images: [], files: [] });
    setProblem("");
  };
  const key = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
    if (event.key === "Escape" && busy) onStop();
  };
  const attach = async (files) => {
    for (const file of files) {
      const image = file.type.startsWith("image/");
      if (image && !images) setProblem(`${file.name}: this model takes no images.`);
      else if (file.size > (image ? LARGEST_IMAGE : LARGEST_TEXT)) setProblem(`${file.name} is larger than ${image ? "16" : "1"} MiB.`);
      else if (image) {
        const data = await asDataUrl(file);
        setAttached((old) => ({ ...old, images: [...old.images, data] }));
      } else {
        const read = await file.text();
        if (read.includes("\0")) setProblem(`${file.name} is not text.`);
        else setAttached((old) => ({ ...old, files: [...old.files, { name: file.name, text: read }] }));
      }
    }
  };
  const drop = (event) => {
    event.preventDefault();
    attach(event.dataTransfer.files);
  };
  const paste = (event) => {
    if (event.clipboardData.files.length) {
      event.preventDefault();
      attach(event.clipboardData.files);
    }
  };
  const without = (kind, at) => setAttached((old) => ({ ...old, [kind]: old[kind].filter((_, number) => number !== at) }));
  return html`
    <form class="composer" onSubmit=${send} onDrop=${drop} onDragOver=${(event) => event.preventDefault()}>
      ${problem ? html`<p class="error" role="alert">${problem}</p>` : null}
      <ul class="attachments" hidden=${!attached.images.length && !attached.files.length}>
        ${attached.images.map((image, at) => html`<li><img src=${image} alt="to be sent" /><button type="button" class="small" aria-label="Remove image" onClick=${() => without("images", at)}>×</button></li>`)}
        ${attached.files.map((file, at) => html`<li>${file.name} <button type="button" class="small" aria-label=${`Remove ${file.name}`} onClick=${() => without("files", at)}>×</button></li>`)}
      </ul>
      <div class="row">
        <label class="attach" title="Attach files"><span aria-hidden="true">+</span><span class="hidden">Attach files</span>
          <input type="file" multiple onChange=${(e) => (attach(e.target.files), (e.target.value = ""))} />
        </label>
        <textarea ref=${area} rows="1" aria-label="Message" placeholder="Write a message" value=${text} onInput=${(e) => setText(e.target.value)} onKeyDown=${key} onPaste=${paste}></textarea>
        ${busy ? html`<button type="button" class="primary" onClick=${onStop}>Stop</button>` : html`<button class="primary">Send</button>`}
      </div>
    </form>`;
}

function asDataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}
