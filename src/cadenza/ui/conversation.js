/**
 * Conversations as values: a tree of messages, of which one path is shown. An edited message and an
 * answer that is made again are siblings, so nothing is lost. Knows neither the page nor the server.
 *
 * @typedef {{id: string, name: string, arguments: string, result?: string}} Call
 * @typedef {{firstMs: number | null, tokens: number, perSecond: number | null, prompt: number | null,
 *   cached: number | null}} Figures
 * @typedef {"writing" | "done" | "stopped" | "length" | "failed" | "cut"} State
 * @typedef {import("./images.js").Picture} Picture
 * @typedef {{id: string, parent: string | null, role: "user" | "assistant", text: string,
 *   images: Picture[], thinking: string, calls: Call[], state: State, error: string, model: string,
 *   figures: Figures | null, beside: string | null}} Message
 * @typedef {{id: string, title: string, updated: number, system: string, leaf: string | null,
 *   messages: Record<string, Message>}} Conversation
 */

import { picturesOf } from "./images.js";

export const EXPORT_VERSION = 1;
const MAX_TITLE_CHARS = 60;
const ID = /^[\w-]{1,64}$/;
/** @type {readonly State[]} */
const STATES = ["writing", "done", "stopped", "length", "failed", "cut"];

/** `randomUUID` is there in secure contexts only, which http://a.lan:8000 is not. */
export function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(12));
  return [...bytes].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** @returns {Conversation} */
export function newConversation(system = "") {
  return { id: newId(), title: "New conversation", updated: Date.now(), system, leaf: null, messages: {} };
}

/**
 * Adds a message below `parent` and shows it.
 * @param {Conversation} conversation
 * @param {string | null} parent
 * @param {Partial<Message> & {role: Message["role"]}} given
 * @returns {Message}
 */
export function addMessage(conversation, parent, given) {
  const message = { ...emptyMessage(), ...given, id: newId(), parent };
  conversation.messages[message.id] = message;
  conversation.leaf = message.id;
  conversation.updated = Date.now();
  if (parent === null && message.role === "user") conversation.title = titleOf(message.text || message.images[0]?.name || "");
  return message;
}

/** @returns {Message} */
function emptyMessage() {
  return {
    id: "",
    parent: null,
    role: "user",
    text: "",
    images: [],
    thinking: "",
    calls: [],
    state: "done",
    error: "",
    model: "",
    figures: null,
    beside: null,
  };
}

/** @param {string} text */
function titleOf(text) {
  const line = text.trim().split("\n", 1)[0] || "New conversation";
  return line.length > MAX_TITLE_CHARS ? `${line.slice(0, MAX_TITLE_CHARS)}…` : line;
}

/**
 * The messages from the first to `leaf`.
 * @param {Conversation} conversation
 * @param {string | null} [leaf]
 */
export function pathTo(conversation, leaf = conversation.leaf) {
  /** @type {Message[]} */
  const path = [];
  const seen = new Set();
  for (let id = leaf; id !== null && !seen.has(id); ) {
    const message = conversation.messages[id];
    if (!message) break;
    seen.add(id);
    path.unshift(message);
    id = message.parent;
  }
  return path;
}

/**
 * The versions of a message, itself among them, the oldest first.
 * @param {Conversation} conversation
 * @param {Message} message
 */
export function versions(conversation, message) {
  const all = Object.values(conversation.messages);
  return all.filter((each) => each.parent === message.parent && each.role === message.role);
}

/**
 * Shows the newest path through a message.
 * @param {Conversation} conversation
 * @param {string} id
 */
export function show(conversation, id) {
  let leaf = id;
  for (;;) {
    const below = Object.values(conversation.messages).filter((each) => each.parent === leaf);
    const next = below[below.length - 1];
    if (!next) break;
    leaf = next.id;
  }
  conversation.leaf = leaf;
}

/**
 * What the server is sent.
 * @param {string} system
 * @param {Message[]} path
 */
export function asMessages(system, path) {
  /** @type {Record<string, unknown>[]} */
  const sent = system.trim() ? [{ role: "system", content: system }] : [];
  for (const message of path) {
    // A call without a result leaves a conversation that chat templates refuse.
    const calls = message.calls.filter((call) => call.result !== undefined);
    if (message.role === "user" || !calls.length) {
      sent.push({ role: message.role, content: contentOf(message) });
      continue;
    }
    const shown = calls.map((call) => ({
      id: call.id,
      type: "function",
      function: { name: call.name, arguments: call.arguments },
    }));
    sent.push({ role: "assistant", content: message.text, tool_calls: shown });
    for (const call of calls) sent.push({ role: "tool", tool_call_id: call.id, content: call.result });
  }
  return sent;
}

/**
 * A message's text; with images, parts of OpenAI's API, the images first.
 * @param {Message} message
 */
function contentOf(message) {
  if (!message.images.length) return message.text;
  const parts = message.images.map((each) => ({ type: "image_url", image_url: { url: each.url } }));
  return message.text ? [...parts, { type: "text", text: message.text }] : parts;
}

/**
 * The shown path as Markdown.
 * @param {Conversation} conversation
 */
export function asMarkdown(conversation) {
  const parts = [`# ${conversation.title}`];
  if (conversation.system.trim()) parts.push(`## System\n\n${conversation.system}`);
  for (const message of pathTo(conversation)) {
    const who = message.role === "user" ? "User" : `Assistant${message.model ? ` (${message.model})` : ""}`;
    const calls = message.calls.map((call) => `\`${call.name}(${call.arguments})\``);
    const images = message.images.map((each) => `(image: ${each.name})`);
    parts.push([`## ${who}`, ...images, message.text, ...calls].filter(Boolean).join("\n\n"));
  }
  return `${parts.join("\n\n")}\n`;
}

/** @param {Conversation[]} conversations */
export const asExport = (conversations) =>
  JSON.stringify({ cadenza: EXPORT_VERSION, conversations }, null, 1);

/**
 * The conversations of an export. Throws an Error that says what is wrong with it.
 * @param {string} text
 */
export function readExport(text) {
  let read;
  try {
    read = JSON.parse(text);
  } catch {
    throw new Error("the file is not JSON");
  }
  if (read?.cadenza !== EXPORT_VERSION || !Array.isArray(read.conversations)) {
    throw new Error(`the file is no export of this page (cadenza: ${EXPORT_VERSION})`);
  }
  return read.conversations.map(readConversation);
}

/**
 * A conversation out of a file or the browser's store, which anybody may have written. Throws an
 * Error where it is none.
 * @param {any} given
 * @returns {Conversation}
 */
export function readConversation(given) {
  if (typeof given?.id !== "string" || !ID.test(given.id) || typeof given.messages !== "object") {
    throw new Error("a conversation in it is damaged");
  }
  /** @type {Record<string, Message>} */
  const messages = {};
  for (const each of Object.values(given.messages ?? {})) {
    const message = readMessage(each);
    messages[message.id] = message;
  }
  const leaf = typeof given.leaf === "string" && messages[given.leaf] ? given.leaf : null;
  return {
    id: given.id,
    title: textOf(given.title) || "Untitled",
    system: textOf(given.system),
    updated: Number(given.updated) || 0,
    leaf,
    messages,
  };
}

/**
 * @param {any} given
 * @returns {Message}
 */
function readMessage(given) {
  if (typeof given?.id !== "string" || !ID.test(given.id)) throw new Error("a message in it is damaged");
  const calls = Array.isArray(given.calls) ? given.calls.map(readCall) : [];
  const state = STATES.includes(given.state) ? given.state : "done";
  return {
    id: given.id,
    parent: typeof given.parent === "string" ? given.parent : null,
    role: given.role === "assistant" ? "assistant" : "user",
    text: textOf(given.text),
    images: picturesOf(given.images),
    thinking: textOf(given.thinking),
    calls,
    // What was being written when the page was closed has ended.
    state: state === "writing" ? "cut" : state,
    error: textOf(given.error),
    model: textOf(given.model),
    figures: readFigures(given.figures),
    beside: typeof given.beside === "string" ? given.beside : null,
  };
}

/**
 * @param {any} given
 * @returns {Call}
 */
function readCall(given) {
  return {
    id: textOf(given?.id),
    name: textOf(given?.name),
    arguments: textOf(given?.arguments),
    result: typeof given?.result === "string" ? given.result : undefined,
  };
}

/**
 * @param {any} given
 * @returns {Figures | null}
 */
function readFigures(given) {
  if (typeof given?.tokens !== "number") return null;
  const number = (/** @type {unknown} */ value) => (typeof value === "number" ? value : null);
  return {
    tokens: given.tokens,
    firstMs: number(given.firstMs),
    perSecond: number(given.perSecond),
    prompt: number(given.prompt),
    cached: number(given.cached),
  };
}

/** @param {unknown} given */
const textOf = (given) => (typeof given === "string" ? given : "");
