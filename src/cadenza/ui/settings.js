/**
 * The settings of requests, and their panel. They are kept in this browser, the key never with them.
 *
 * @typedef {{model: string, temperature: string, top_p: string, top_k: string, min_p: string,
 *   max_tokens: string, seed: string, stop: string, repetition_penalty: string,
 *   presence_penalty: string, frequency_penalty: string, reasoning_effort: string, tools: string,
 *   second_model: string, second_temperature: string, second_seed: string, isDouble: boolean,
 *   wantsReceipt: boolean}} Settings
 * @typedef {import("./app.js").App} App
 */
import { html } from "./ui.js";

const NAME = "cadenza.settings";

/** @type {Settings} an empty field leaves the server's default */
const DEFAULTS = {
  model: "",
  temperature: "",
  top_p: "",
  top_k: "",
  min_p: "",
  max_tokens: "",
  seed: "",
  stop: "",
  repetition_penalty: "",
  presence_penalty: "",
  frequency_penalty: "",
  reasoning_effort: "",
  tools: "",
  second_model: "",
  second_temperature: "",
  second_seed: "",
  isDouble: false,
  wantsReceipt: true,
};

/** The fields of numbers: name, label, step, lowest. @type {[keyof Settings, string, string, string][]} */
const NUMBERS = [
  ["temperature", "Temperature", "0.1", "0"],
  ["top_p", "Top p", "0.05", "0"],
  ["top_k", "Top k", "1", "-1"],
  ["min_p", "Min p", "0.01", "0"],
  ["max_tokens", "Most tokens", "1", "1"],
  ["seed", "Seed", "1", "-1"],
  ["repetition_penalty", "Repetition penalty", "0.05", "0"],
  ["presence_penalty", "Presence penalty", "0.1", "-2"],
  ["frequency_penalty", "Frequency penalty", "0.1", "-2"],
];
const EFFORTS = ["", "none", "minimal", "low", "medium", "high"];

/** @returns {Settings} */
export function readSettings() {
  const settings = { ...DEFAULTS };
  try {
    const kept = JSON.parse(localStorage.getItem(NAME) ?? "{}");
    for (const [name, value] of Object.entries(DEFAULTS)) {
      if (typeof kept[name] === typeof value) Object.assign(settings, { [name]: kept[name] });
    }
  } catch {
    // the defaults are as good
  }
  return settings;
}

/** @param {Settings} settings */
export function keepSettings(settings) {
  try {
    localStorage.setItem(NAME, JSON.stringify(settings));
  } catch {
    // they hold until the page is closed
  }
}

/**
 * The fields of a request's body. Throws an Error where a field cannot be read.
 * @param {Settings} settings
 * @param {boolean} isSecond whether of the second of two answers side by side
 * @returns {Record<string, unknown>}
 */
export function bodyFields(settings, isSecond) {
  /** @type {Record<string, unknown>} */
  const fields = {};
  for (const [name, label] of NUMBERS) {
    const text = String(settings[name]).trim();
    if (text === "") continue;
    const number = Number(text);
    if (!Number.isFinite(number)) throw new Error(`${label} is no number`);
    fields[name] = number;
  }
  const stops = settings.stop.split("\n").filter((line) => line !== "");
  if (stops.length) fields.stop = stops;
  if (settings.reasoning_effort) fields.reasoning_effort = settings.reasoning_effort;
  const tools = toolsOf(settings.tools);
  if (tools.length) fields.tools = tools;
  if (settings.model) fields.model = settings.model;
  return isSecond ? { ...fields, ...secondFields(settings) } : fields;
}

/** @param {Settings} settings */
function secondFields(settings) {
  /** @type {Record<string, unknown>} */
  const fields = {};
  if (settings.second_model) fields.model = settings.second_model;
  if (settings.second_temperature.trim()) fields.temperature = Number(settings.second_temperature);
  if (settings.second_seed.trim()) fields.seed = Number(settings.second_seed);
  return fields;
}

/** @param {string} text */
function toolsOf(text) {
  if (!text.trim()) return [];
  let read;
  try {
    read = JSON.parse(text);
  } catch {
    throw new Error("Tools are not JSON");
  }
  if (!Array.isArray(read)) throw new Error("Tools are not a list");
  return read;
}

/** @param {{app: App}} props */
export function SettingsPanel({ app }) {
  const { settings, conversation } = app;
  const set = (/** @type {keyof Settings} */ name) => (/** @type {any} */ event) =>
    app.changeSettings({ [name]: event.target.value });
  return html`
    <section class="panel" aria-labelledby="settings-title">
      <h2 id="settings-title">Settings</h2>
      <label class="wide">
        System message of this conversation
        <textarea
          rows="3"
          value=${conversation.system}
          onInput=${(/** @type {any} */ event) => app.setSystem(event.target.value)}
        ></textarea>
      </label>
      <div class="fields">
        ${NUMBERS.map(
          ([name, label, step, low]) => html`
            <label key=${name}>
              ${label}
              <input
                type="number"
                step=${step}
                min=${low}
                value=${settings[name]}
                placeholder=${app.defaultOf(name)}
                onInput=${set(name)}
              />
            </label>
          `,
        )}
        <label>
          Reasoning effort
          <select value=${settings.reasoning_effort} onChange=${set("reasoning_effort")}>
            ${EFFORTS.map((each) => html`<option key=${each} value=${each}>${each || "default"}</option>`)}
          </select>
        </label>
      </div>
      <label class="wide">
        Stop texts, one a line
        <textarea rows="2" value=${settings.stop} onInput=${set("stop")}></textarea>
      </label>
      <label class="wide">
        Tools, as JSON
        <textarea
          rows="3"
          class="mono"
          spellcheck=${false}
          value=${settings.tools}
          onInput=${set("tools")}
        ></textarea>
      </label>
      <fieldset>
        <legend>Two answers side by side</legend>
        <label class="check">
          <input
            type="checkbox"
            checked=${settings.isDouble}
            onChange=${(/** @type {any} */ event) => app.changeSettings({ isDouble: event.target.checked })}
          />
          Ask twice at once
        </label>
        <div class="fields">
          <label>
            Second model
            <select value=${settings.second_model} onChange=${set("second_model")}>
              <option value="">the same</option>
              ${app.models.map((each) => html`<option key=${each.id} value=${each.id}>${each.id}</option>`)}
            </select>
          </label>
          <label>
            Second temperature
            <input
              type="number"
              step="0.1"
              min="0"
              value=${settings.second_temperature}
              placeholder="the same"
              onInput=${set("second_temperature")}
            />
          </label>
          <label>
            Second seed
            <input
              type="number"
              step="1"
              value=${settings.second_seed}
              placeholder="the same"
              onInput=${set("second_seed")}
            />
          </label>
        </div>
      </fieldset>
      <label class="check">
        <input
          type="checkbox"
          checked=${settings.wantsReceipt}
          onChange=${(/** @type {any} */ event) => app.changeSettings({ wantsReceipt: event.target.checked })}
        />
        Ask for a receipt of each answer, to prove it
      </label>
      <p class="note">An empty field leaves the server's default, which is shown in it.</p>
      <button type="button" onClick=${() => app.resetSettings()}>Reset settings</button>
    </section>
  `;
}

export const emptySettings = () => ({ ...DEFAULTS });
