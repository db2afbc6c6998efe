/**
 * Requests to this server. The key is held in memory, in `sessionStorage` if the user says so, and
 * is sent in a header only: never in an address, a cookie or an export.
 */

const KEY_NAME = "cadenza.key";
let key = rememberedKey();

function rememberedKey() {
  try {
    return sessionStorage.getItem(KEY_NAME) ?? "";
  } catch {
    return ""; // storage is switched off
  }
}

/**
 * @param {string} given
 * @param {boolean} isRemembered until this tab is closed
 */
export function setKey(given, isRemembered) {
  key = given;
  try {
    if (isRemembered && given) sessionStorage.setItem(KEY_NAME, given);
    else sessionStorage.removeItem(KEY_NAME);
  } catch {
    // it stays in memory
  }
}

export const hasKey = () => key !== "";

/** An error answer of the server, or none at all: `status` is 0 where it was not reached. */
export class ApiFailure extends Error {
  /**
   * @param {number} status
   * @param {{message?: string, code?: string, param?: string}} error
   * @param {number | null} retryAfter seconds
   */
  constructor(status, error, retryAfter = null) {
    super(error.message ?? `the server answered ${status}`);
    this.status = status;
    this.code = error.code ?? "";
    this.param = error.param ?? "";
    this.retryAfter = retryAfter;
  }
}

/**
 * @typedef {{body?: unknown, json?: string, signal?: AbortSignal, method?: string}} Options
 *   `json` is a body as it is, in place of `body`
 */

/**
 * A response with a good status.
 * @param {string} path without a slash at its beginning
 * @param {Options} [options]
 * @returns {Promise<Response>} rejects with ApiFailure, or with AbortError
 */
export async function request(path, options = {}) {
  /** @type {Record<string, string>} */
  const headers = { accept: "application/json, text/event-stream" };
  if (key) headers.authorization = `Bearer ${key}`;
  const body = options.json ?? (options.body === undefined ? undefined : JSON.stringify(options.body));
  if (body !== undefined) headers["content-type"] = "application/json";
  const method = options.method ?? (body === undefined ? "GET" : "POST");
  let response;
  try {
    response = await fetch(path, {
      method,
      headers,
      signal: options.signal,
      body,
      credentials: "omit",
      cache: "no-store",
    });
  } catch (error) {
    if (isAbort(error)) throw error;
    throw new ApiFailure(0, { message: "the server cannot be reached" });
  }
  if (response.ok) return response;
  const after = Number(response.headers.get("retry-after"));
  const answer = await response.json().catch(() => ({}));
  throw new ApiFailure(response.status, answer.error ?? {}, after || null);
}

/** @param {unknown} error */
export const isAbort = (error) => error instanceof DOMException && error.name === "AbortError";

/**
 * @param {string} path
 * @param {Options} [options]
 */
export const requestJson = async (path, options) => (await request(path, options)).json();

/**
 * The served models.
 * @typedef {{id: string, max_model_len: number | null, system_fingerprint: string | null,
 *   default_sampling_params?: Record<string, unknown>, input_modalities?: string[]}} Model
 * @returns {Promise<Model[]>}
 */
export const listModels = async () => (await requestJson("v1/models")).data;

/** What keeps the server from answering requests: a code, or "" where nothing does. */
export async function trouble() {
  try {
    await request("health");
    return "";
  } catch (error) {
    return error instanceof ApiFailure ? error.code || "unreachable" : "unreachable";
  }
}

/** @param {string} requestId of one's own request; that it has ended is as good */
export const cancel = (requestId) =>
  request(`v1/requests/${encodeURIComponent(requestId)}/cancel`, { method: "POST" }).catch(() => {});
