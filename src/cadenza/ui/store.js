/**
 * The conversations in this browser, in IndexedDB; in memory only where there is none. A record that
 * cannot be read is left out, so that no damage keeps the page from opening.
 *
 * @typedef {import("./conversation.js").Conversation} Conversation
 * @typedef {{id: string, title: string, updated: number}} Head
 */
import { readConversation } from "./conversation.js";

const NAME = "cadenza";
const OPENING_MS = 3000;

export class Store {
  constructor() {
    /** @type {IDBDatabase | null} */
    this.database = null;
    /** @type {Map<string, Conversation>} */
    this.memory = new Map();
    this.isKept = false;
  }

  async open() {
    try {
      this.database = await openDatabase();
      this.database.onversionchange = () => this.database?.close();
      this.isKept = true;
    } catch {
      this.database = null;
    }
  }

  /** @returns {Promise<Head[]>} the newest first */
  async heads() {
    /** @type {Head[]} */
    const found = this.database
      ? await this.all("heads").catch(() => [])
      : [...this.memory.values()].map(headOf);
    const heads = found.filter((each) => typeof each?.id === "string");
    return heads.sort((one, other) => (other.updated || 0) - (one.updated || 0));
  }

  /**
   * @param {string} id
   * @returns {Promise<Conversation | null>} null where it is damaged or gone
   */
  async get(id) {
    if (!this.database) return this.memory.get(id) ?? null;
    try {
      const store = this.database.transaction("bodies").objectStore("bodies");
      return readConversation(await done(store.get(id)));
    } catch {
      return null;
    }
  }

  /** @returns {Promise<Conversation[]>} all that can be read */
  async everything() {
    const heads = await this.heads();
    const found = await Promise.all(heads.map((head) => this.get(head.id)));
    return found.filter((each) => each !== null);
  }

  /** @param {Conversation} conversation */
  async put(conversation) {
    if (!this.database) {
      this.memory.set(conversation.id, conversation);
      return;
    }
    await this.change((heads, bodies) => {
      heads.put(headOf(conversation));
      bodies.put(conversation);
    });
  }

  /** @param {string} id */
  async remove(id) {
    this.memory.delete(id);
    await this.change((heads, bodies) => {
      heads.delete(id);
      bodies.delete(id);
    });
  }

  async clear() {
    this.memory.clear();
    await this.change((heads, bodies) => {
      heads.clear();
      bodies.clear();
    });
  }

  /** @param {(heads: IDBObjectStore, bodies: IDBObjectStore) => void} make */
  async change(make) {
    if (!this.database) return;
    const transaction = this.database.transaction(["heads", "bodies"], "readwrite");
    make(transaction.objectStore("heads"), transaction.objectStore("bodies"));
    await new Promise((resolve, reject) => {
      transaction.oncomplete = () => resolve(null);
      transaction.onabort = () => reject(transaction.error);
    });
  }

  /** @param {string} name */
  async all(name) {
    if (!this.database) return [];
    return done(this.database.transaction(name).objectStore(name).getAll());
  }
}

/** @param {Conversation} conversation */
const headOf = ({ id, title, updated }) => ({ id, title, updated });

/** @returns {Promise<IDBDatabase>} */
function openDatabase() {
  return new Promise((resolve, reject) => {
    const opening = indexedDB.open(NAME, 1);
    opening.onupgradeneeded = () => {
      opening.result.createObjectStore("heads", { keyPath: "id" });
      opening.result.createObjectStore("bodies", { keyPath: "id" });
    };
    opening.onsuccess = () => resolve(opening.result);
    opening.onerror = () => reject(opening.error);
    setTimeout(() => reject(new Error("the browser's store does not open")), OPENING_MS);
  });
}

/**
 * @param {IDBRequest} asked
 * @returns {Promise<any>}
 */
function done(asked) {
  return new Promise((resolve, reject) => {
    asked.onsuccess = () => resolve(asked.result);
    asked.onerror = () => reject(asked.error);
  });
}
