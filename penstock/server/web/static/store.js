// Conversations, kept in this browser (IndexedDB). A conversation is a tree of messages: an edit or another answer is a
// sibling, and `chosen` of every message says which child is shown.

const DATABASE = "penstock";
const removed = new Set();
let opening;

function database() {
  opening ??= new Promise((resolve, reject) => {
    const asked = indexedDB.open(DATABASE, 1);
    asked.onupgradeneeded = () => asked.result.createObjectStore("conversations", { keyPath: "id" });
    asked.onsuccess = () => resolve(asked.result);
    asked.onerror = () => reject(asked.error);
  });
  return opening;
}

async function inStore(mode, work) {
  const store = (await database()).transaction("conversations", mode).objectStore("conversations");
  const asked = work(store);
  return new Promise((resolve, reject) => {
    asked.onsuccess = () => resolve(asked.result);
    asked.onerror = () => reject(asked.error);
  });
}

export const allConversations = async () =>
  (await inStore("readonly", (store) => store.getAll())).sort((a, b) => b.updated - a.updated);
export const saveConversation = (conversation) =>
  removed.has(conversation.id) ? Promise.resolve() : inStore("readwrite", (store) => store.put(conversation));
export const removeConversation = (id) => {
  removed.add(id); // an answer that was coming in saves what it has when it ends
  return inStore("readwrite", (store) => store.delete(id));
};

export const newId = () => Array.from(crypto.getRandomValues(new Uint8Array(9)), (b) => b.toString(36)).join("");

export function newConversation(models = []) {
  const root = { id: "root", parent: null, role: "root", children: [], chosen: null };
  return {
    id: newId(), title: "New conversation", created: Date.now(), updated: Date.now(),
    models, system: "", tools: "", settings: {}, messages: { root },
  };
}

export function addMessage(conversation, parent, message) {
  const added = { id: newId(), parent, children: [], chosen: null, created: Date.now(), ...message };
  conversation.messages[added.id] = added;
  conversation.messages[parent].children.push(added.id);
  conversation.messages[parent].chosen = added.id;
  conversation.updated = Date.now();
  return added;
}

export function siblings(conversation, message) {
  return conversation.messages[message.parent].children.map((id) => conversation.messages[id]);
}

export function choose(conversation, message) {
  conversation.messages[message.parent].chosen = message.id;
}

// The messages that lead to one, the first of them first.
export function pathTo(conversation, id) {
  const path = [];
  for (let at = conversation.messages[id]; at && at.role !== "root"; at = conversation.messages[at.parent]) path.push(at);
  return path.reverse();
}

// The messages that are shown: from the root along what was chosen.
export function shownPath(conversation) {
  const path = [];
  for (let at = conversation.messages.root; at.chosen; ) path.push((at = conversation.messages[at.chosen]));
  return path;
}

export function removeMessage(conversation, message) {
  const parent = conversation.messages[message.parent];
  parent.children = parent.children.filter((id) => id !== message.id);
  if (parent.chosen === message.id) parent.chosen = parent.children.at(-1) ?? null;
  const gone = [message.id];
  while (gone.length) {
    const id = gone.pop();
    gone.push(...conversation.messages[id].children);
    delete conversation.messages[id];
  }
}

// Messages as the API takes them.
export function forApi(conversation, id) {
  const messages = pathTo(conversation, id).map((message) => {
    if (message.role === "tool") return { role: "tool", tool_call_id: message.call, content: message.content };
    if (message.role === "assistant") {
      const told = { role: "assistant", content: message.content ?? "" };
      if (message.calls?.length) {
        told.tool_calls = message.calls.map(({ id, name, text }) => ({ id, type: "function", function: { name, arguments: text } }));
      }
      return told;
    }
    const files = (message.files ?? []).map(({ name, text }) => `\n\n${name}:\n\`\`\`\n${text}\n\`\`\``).join("");
    const text = message.content + files;
    if (!message.images?.length) return { role: "user", content: text };
    const images = message.images.map((image) => ({ type: "image_url", image_url: { url: image } }));
    return { role: "user", content: [...images, { type: "text", text }] };
  });
  return conversation.system ? [{ role: "system", content: conversation.system }, ...messages] : messages;
}

export function asMarkdown(conversation) {
  const parts = [`# ${conversation.title}`];
  if (conversation.system) parts.push(`**System**\n\n${conversation.system}`);
  for (const message of shownPath(conversation)) {
    const who = message.role === "assistant" ? message.model ?? "Assistant" : message.role === "tool" ? "Tool" : "You";
    const calls = (message.calls ?? []).map(({ name, text }) => `\`\`\`json\n${name}(${text})\n\`\`\``);
    parts.push([`**${who}**`, message.content, ...calls].filter(Boolean).join("\n\n"));
  }
  return parts.join("\n\n") + "\n";
}
