/**
 * The page: its state (`App`), what can be done with it, and the frame around its parts.
 * Invariant: nothing in the address starts anything.
 *
 * @typedef {import("./conversation.js").Conversation} Conversation
 * @typedef {import("./conversation.js").Message} Message
 * @typedef {import("./conversation.js").Call} Call
 * @typedef {import("./settings.js").Settings} Settings
 * @typedef {import("./api.js").Model} Model
 */
import { Answer } from "./answer.js";
import { ApiFailure, listModels, setKey } from "./api.js";
import { Chat } from "./chat.js";
import { Compose } from "./compose.js";
import {
  addMessage,
  asExport,
  asMarkdown,
  asMessages,
  newConversation,
  newId,
  pathTo,
  readExport,
  show,
} from "./conversation.js";
import { LivePanel, LiveSteps } from "./live.js";
import { SettingsPanel, bodyFields, emptySettings, keepSettings, readSettings } from "./settings.js";
import { Store } from "./store.js";
import { Changes, html, render, useChanges, useState } from "./ui.js";

const SAVE_MS = 2000;
const MODELS_AGAIN_MS = 3000;
const MAX_IMPORT_BYTES = 256 << 20;
const MAX_ANNOUNCED_CHARS = 2000;
const THEME = "cadenza.theme";
/** @type {readonly string[]} */
const THEMES = ["auto", "light", "dark"];

export class App {
  constructor() {
    this.changes = new Changes();
    this.store = new Store();
    this.live = new LiveSteps(this.changes);
    this.settings = readSettings();
    /** @type {Model[]} */
    this.models = [];
    this.conversation = newConversation();
    /** @type {import("./store.js").Head[]} */
    this.heads = [];
    /** @type {Map<string, Answer>} those of this session, by their messages */
    this.answers = new Map();
    this.needsKey = false;
    this.hasReceipts = true;
    this.notice = "";
    this.announced = "";
    this.panel = "";
    this.isMenuOpen = false;
    this.theme = "auto";
    this.isDark = matchMedia("(prefers-color-scheme: dark)").matches;
    this.savedAt = 0;
    this.focusInput = () => {};
  }

  async start() {
    this.setTheme(readTheme());
    await this.store.open();
    if (!this.store.isKept) this.say("This browser stores nothing here: conversations end with the page.");
    this.heads = await this.store.heads();
    this.tellAll();
    await this.loadModels();
  }

  tellAll() {
    this.changes.tell("app");
    this.changes.tell("chat");
  }

  /** @param {string} notice */
  say(notice) {
    this.notice = notice;
    this.changes.tell("app");
  }

  // --- models and key ----------------------------------------------------------------------------

  async loadModels() {
    try {
      this.models = await listModels();
      this.needsKey = false;
      const isKnown = this.models.some((each) => each.id === this.settings.model);
      if (!isKnown) this.changeSettings({ model: this.models[0]?.id ?? "" });
    } catch (error) {
      if (error instanceof ApiFailure && error.status === 401) this.needsKey = true;
      else setTimeout(() => this.loadModels(), MODELS_AGAIN_MS);
    }
    this.tellAll();
  }

  get shownModel() {
    return this.models.find((each) => each.id === this.settings.model);
  }

  /**
   * The server's default of a setting, as text.
   * @param {string} name
   */
  defaultOf(name) {
    const value = this.shownModel?.default_sampling_params?.[name];
    return typeof value === "number" ? String(value) : "";
  }

  /**
   * @param {string} key
   * @param {boolean} isRemembered
   */
  async useKey(key, isRemembered) {
    setKey(key, isRemembered);
    await this.loadModels();
    this.say(this.needsKey ? "The server does not know this key." : "");
    if (!this.needsKey) this.focusInput();
  }

  // --- settings ------------------------------------------------------------------------------------

  /** @param {Partial<Settings>} changed */
  changeSettings(changed) {
    this.settings = { ...this.settings, ...changed };
    keepSettings(this.settings);
    this.tellAll();
  }

  resetSettings() {
    this.changeSettings({ ...emptySettings(), model: this.settings.model });
  }

  /** @param {string} system */
  setSystem(system) {
    this.conversation.system = system;
    this.save(true);
    this.changes.tell("app");
  }

  /** @param {string} theme */
  setTheme(theme) {
    this.theme = theme;
    document.documentElement.dataset.theme = theme;
    try {
      localStorage.setItem(THEME, theme);
    } catch {
      // it holds until the page is closed
    }
    this.changes.tell("app");
  }

  // --- answers -------------------------------------------------------------------------------------

  get isBusy() {
    return [...this.answers.values()].some((each) => each.isRunning);
  }

  /** Whether the model that is asked takes images. */
  get takesImages() {
    return this.shownModel?.input_modalities?.includes("image") ?? false;
  }

  /**
   * @param {string} text
   * @param {import("./images.js").Picture[]} images
   */
  send(text, images) {
    const asked = addMessage(this.conversation, this.conversation.leaf, { role: "user", text, images });
    this.ask(asked);
  }

  /**
   * Sends another version of a message, with its images.
   * @param {Message} message
   * @param {string} text
   */
  edit(message, text) {
    const { images, parent } = message;
    this.ask(addMessage(this.conversation, parent, { role: "user", text, images }));
  }

  /** @param {Message} message an answer, which stays as a version */
  regenerate(message) {
    const parent = message.parent ? this.conversation.messages[message.parent] : undefined;
    if (parent) this.ask(parent);
  }

  /**
   * Has a message answered, twice where two answers are wanted side by side.
   * @param {Message} parent
   */
  ask(parent) {
    const { conversation } = this;
    const path = asMessages(conversation.system, pathTo(conversation, parent.id));
    const sides = this.settings.isDouble ? [false, true] : [false];
    const made = sides.map(() => addMessage(conversation, parent.id, { role: "assistant", state: "writing" }));
    if (made.length === 2) {
      made[0].beside = made[1].id;
      made[1].beside = made[0].id;
      conversation.leaf = made[0].id;
    }
    sides.forEach((isSecond, place) => this.write(made[place], path, isSecond, {}));
  }

  /**
   * Continues an answer: it is the beginning of what the server writes.
   * @param {Message} message
   */
  goOn(message) {
    const path = asMessages(this.conversation.system, pathTo(this.conversation, message.id));
    this.write(message, path, false, { continue_final_message: true });
  }

  /**
   * @param {Message} message whose call was made
   * @param {Call} call
   * @param {string} result
   */
  giveResult(message, call, result) {
    call.result = result;
    if (message.calls.some((each) => each.result === undefined)) {
      this.save(true);
      this.changes.tell(message.id);
      return;
    }
    this.ask(message);
  }

  /**
   * @param {Message} message
   * @param {Record<string, unknown>[]} path
   * @param {boolean} isSecond
   * @param {Record<string, unknown>} more
   */
  async write(message, path, isSecond, more) {
    const { conversation } = this;
    const onChange = () => {
      this.changes.tell(message.id);
      this.changes.tell("grown");
      this.save(false, conversation);
    };
    let fields;
    try {
      fields = bodyFields(this.settings, isSecond);
    } catch (error) {
      message.state = "failed";
      message.error = error instanceof Error ? `Settings: ${error.message}.` : "";
      this.tellAll();
      return;
    }
    const hasReceipts = this.hasReceipts && Boolean(this.shownModel?.system_fingerprint);
    // A receipt has token ids, and no pixels.
    const seesImages = path.some((each) => Array.isArray(each.content));
    const receipt = this.settings.wantsReceipt && hasReceipts && !seesImages ? { receipt: true } : {};
    const usage = { stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
    const body = { ...fields, ...usage, ...receipt, ...more, messages: path };
    const answer = new Answer({ message, body, onChange });
    this.answers.set(message.id, answer);
    const running = answer.run();
    this.tellAll();
    await running;
    await this.ended(answer, conversation);
  }

  /**
   * @param {Answer} answer
   * @param {Conversation} conversation
   */
  async ended(answer, conversation) {
    if (answer.needsKey) this.needsKey = true;
    if (answer.hasNoReceipts) this.hasReceipts = false;
    const { text, error } = answer.message;
    // Once, when it is whole: a token at a time is unusable in a screen reader.
    this.announced = error || `Answer: ${text.slice(0, MAX_ANNOUNCED_CHARS)}`;
    conversation.updated = Date.now();
    await this.save(true, conversation);
    this.tellAll();
    const { activeElement } = document;
    if (!this.isBusy && (!activeElement || activeElement === document.body)) this.focusInput();
  }

  stop() {
    for (const answer of this.answers.values()) answer.stop();
    this.focusInput();
  }

  /** @param {string} id */
  showMessage(id) {
    show(this.conversation, id);
    this.save(true);
    this.changes.tell("chat");
  }

  // --- conversations -------------------------------------------------------------------------------

  /**
   * @param {boolean} isNow else at most every `SAVE_MS`
   * @param {Conversation} [conversation]
   */
  async save(isNow, conversation = this.conversation) {
    if (!Object.keys(conversation.messages).length) return;
    if (!isNow && Date.now() - this.savedAt < SAVE_MS) return;
    this.savedAt = Date.now();
    try {
      await this.store.put(conversation);
      if (isNow) this.heads = await this.store.heads();
    } catch {
      this.say("The browser could not store this conversation; export it to keep it.");
    }
    if (isNow) this.changes.tell("app");
  }

  startNew() {
    this.stop();
    this.conversation = newConversation(this.conversation.system);
    this.isMenuOpen = false;
    this.tellAll();
    this.focusInput();
  }

  /** @param {string} id */
  async open(id) {
    this.stop();
    const found = await this.store.get(id);
    if (found) this.conversation = found;
    else this.say("This conversation is damaged and cannot be opened; it can be deleted.");
    this.isMenuOpen = false;
    this.tellAll();
  }

  /** @param {string} id */
  async remove(id) {
    await this.store.remove(id);
    this.heads = await this.store.heads();
    if (id === this.conversation.id) this.startNew();
    this.tellAll();
  }

  async removeAll() {
    if (!confirm("Delete every conversation in this browser?")) return;
    await this.store.clear();
    this.heads = [];
    this.startNew();
  }

  async exportAll() {
    save("cadenza-conversations.json", "application/json", asExport(await this.store.everything()));
  }

  exportMarkdown() {
    save("conversation.md", "text/markdown", asMarkdown(this.conversation));
  }

  /** @param {File} file */
  async importFrom(file) {
    try {
      if (file.size > MAX_IMPORT_BYTES) throw new Error("the file is too large");
      const read = readExport(await file.text());
      const known = new Set(this.heads.map((head) => head.id));
      for (const each of read) await this.store.put(known.has(each.id) ? { ...each, id: newId() } : each);
      this.heads = await this.store.heads();
      this.say(`${read.length} conversations were imported.`);
    } catch (error) {
      this.say(`Nothing was imported: ${error instanceof Error ? error.message : error}.`);
    }
  }
}

function readTheme() {
  try {
    const kept = localStorage.getItem(THEME) ?? "";
    return THEMES.includes(kept) ? kept : "auto";
  } catch {
    return "auto";
  }
}

/**
 * Has the browser save a file.
 * @param {string} name
 * @param {string} type
 * @param {string} text
 */
function save(name, type, text) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

// --- the frame -------------------------------------------------------------------------------------

/** @param {{app: App}} props */
function Page({ app }) {
  useChanges(app.changes, "app");
  return html`
    <a class="skip" href="#message">Skip to the message</a>
    <${TopBar} app=${app} />
    <nav class=${app.isMenuOpen ? "menu open" : "menu"} id="menu" aria-label="Conversations">
      <${Menu} app=${app} />
    </nav>
    <main>
      ${app.notice &&
      html`<p class="notice" role="status">
        ${app.notice} <button type="button" onClick=${() => app.say("")}>Close</button>
      </p>`}
      ${app.needsKey ? html`<${KeyForm} app=${app} />` : html`<${Chat} app=${app} /><${Compose} app=${app} />`}
    </main>
    ${app.panel === "settings" && html`<aside aria-label="Settings"><${SettingsPanel} app=${app} /></aside>`}
    ${app.panel === "live" && html`<aside aria-label="Live"><${LivePanel} app=${app} /></aside>`}
    <div class="hidden" role="status" aria-live="polite">${app.announced}</div>
  `;
}

/** @param {{app: App}} props */
function TopBar({ app }) {
  const toggle = (/** @type {string} */ panel) => () => {
    app.panel = app.panel === panel ? "" : panel;
    app.changes.tell("app");
  };
  const menu = () => {
    app.isMenuOpen = !app.isMenuOpen;
    app.changes.tell("app");
  };
  const next = THEMES[(THEMES.indexOf(app.theme) + 1) % THEMES.length];
  return html`
    <header class="top">
      <button type="button" class="menu-button" aria-expanded=${app.isMenuOpen} aria-controls="menu" onClick=${menu}>Menu</button>
      <h1>Cadenza</h1>
      <label class="model">
        <span class="hidden">Model</span>
        <select
          value=${app.settings.model}
          onChange=${(/** @type {any} */ event) => app.changeSettings({ model: event.target.value })}
        >
          ${app.models.length === 0 && html`<option value="">no model</option>`}
          ${app.models.map((each) => html`<option key=${each.id} value=${each.id}>${each.id}</option>`)}
        </select>
      </label>
      <button type="button" aria-pressed=${app.panel === "live"} onClick=${toggle("live")}>Live</button>
      <button type="button" aria-pressed=${app.panel === "settings"} onClick=${toggle("settings")}>Settings</button>
      <button type="button" onClick=${() => app.setTheme(next)}>Theme: ${app.theme}</button>
    </header>
  `;
}

/** @param {{app: App}} props */
function Menu({ app }) {
  return html`
    <button type="button" class="primary" onClick=${() => app.startNew()}>New conversation</button>
    <ul>
      ${app.heads.map(
        (head) => html`
          <li key=${head.id}>
            <button
              type="button"
              class="title"
              aria-current=${head.id === app.conversation.id ? "true" : "false"}
              onClick=${() => app.open(head.id)}
            >
              ${head.title}
            </button>
            <button type="button" aria-label=${`Delete ${head.title}`} onClick=${() => app.remove(head.id)}>×</button>
          </li>
        `,
      )}
    </ul>
    <div class="files">
      <button type="button" onClick=${() => app.exportAll()}>Export all</button>
      <button type="button" onClick=${() => app.exportMarkdown()}>This one as Markdown</button>
      <label class="file">
        Import
        <input
          type="file"
          accept="application/json,.json"
          onChange=${(/** @type {any} */ event) => {
            const [file] = event.target.files;
            if (file) app.importFrom(file);
            event.target.value = "";
          }}
        />
      </label>
      <button type="button" onClick=${() => app.removeAll()}>Delete all</button>
    </div>
    <p class="note"><a href="docs">What this server has</a></p>
  `;
}

/** @param {{app: App}} props */
function KeyForm({ app }) {
  const [key, setKeyText] = useState("");
  const [isRemembered, setRemembered] = useState(false);
  return html`
    <form
      class="key"
      aria-label="API key"
      onSubmit=${(/** @type {Event} */ event) => {
        event.preventDefault();
        app.useKey(key.trim(), isRemembered);
      }}
    >
      <h2>This server needs an API key</h2>
      <label class="wide">
        Key
        <input
          type="password"
          autocomplete="off"
          value=${key}
          onInput=${(/** @type {any} */ event) => setKeyText(event.target.value)}
        />
      </label>
      <label class="check">
        <input
          type="checkbox"
          checked=${isRemembered}
          onChange=${(/** @type {any} */ event) => setRemembered(event.target.checked)}
        />
        Keep it until this tab is closed
      </label>
      <button type="submit" class="primary" disabled=${!key.trim()}>Use it</button>
    </form>
  `;
}

const app = new App();
addEventListener("keydown", (event) => {
  if (event.key === "Escape" && app.isBusy) app.stop();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", (event) => {
  app.isDark = event.matches;
  app.changes.tell("app");
});
addEventListener("pagehide", () => app.save(true));
render(html`<${Page} app=${app} />`, /** @type {HTMLElement} */ (document.getElementById("page")));
app.start();
