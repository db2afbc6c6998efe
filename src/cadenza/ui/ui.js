/**
 * The view library in one place: preact's `h` behind htm's templates, and the hooks that are used.
 * No text ever becomes HTML: htm makes elements, and preact sets text as text.
 */
import { h, render } from "./vendor/preact.js";
import { useEffect, useLayoutEffect, useRef, useState } from "./vendor/hooks.js";
import htm from "./vendor/htm.js";

/** @type {(strings: TemplateStringsArray, ...values: unknown[]) => any} */
export const html = /** @type {any} */ (htm).bind(h);
export { render, useEffect, useLayoutEffect, useRef, useState };

/** Tells who listens to a topic that something of it changed, at most once a frame. */
export class Changes {
  constructor() {
    /** @type {Map<string, Set<() => void>>} */
    this.listeners = new Map();
    /** @type {Set<string>} */
    this.due = new Set();
  }

  /** @param {string} topic */
  tell(topic) {
    if (this.due.size === 0) {
      // A hidden page has no frames, and must still come to an end.
      if (document.hidden) setTimeout(() => this.flush(), 100);
      else requestAnimationFrame(() => this.flush());
    }
    this.due.add(topic);
  }

  flush() {
    const topics = [...this.due];
    this.due.clear();
    for (const topic of topics) for (const listener of [...(this.listeners.get(topic) ?? [])]) listener();
  }

  /**
   * @param {string} topic
   * @param {() => void} listener
   * @returns {() => void} ends it
   */
  listen(topic, listener) {
    const found = this.listeners.get(topic) ?? new Set();
    this.listeners.set(topic, found.add(listener));
    return () => {
      found.delete(listener);
      if (found.size === 0) this.listeners.delete(topic);
    };
  }
}

/**
 * Renders the component again when something of the topic changes.
 * @param {Changes} changes
 * @param {string} topic
 */
export function useChanges(changes, topic) {
  const [, again] = useState(0);
  useEffect(() => changes.listen(topic, () => again((/** @type {number} */ n) => n + 1)), [topic]);
}

/**
 * A colour of the style sheet as it is now: a custom property itself is text such as light-dark(…).
 * @param {HTMLElement} element
 * @param {string} name of a custom property, without the dashes
 */
export function colourOf(element, name) {
  element.style.color = `var(--${name})`;
  const found = getComputedStyle(element).color;
  element.style.color = "";
  return found;
}

/**
 * A text for the clipboard; says on the button whether it worked.
 * @param {HTMLButtonElement} button
 * @param {string} text
 */
export async function copyFrom(button, text) {
  const before = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Not allowed";
  }
  setTimeout(() => (button.textContent = before), 1500);
}
