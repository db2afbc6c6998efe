/**
 * Markdown as DOM nodes. `marked` only cuts the text into tokens; nodes are made here by
 * `createElement` and `textContent`, so that HTML in an answer is text, whatever it is. Images become
 * links: fetching one would tell its server what the address holds.
 */
import { lexer } from "./vendor/marked.js";
import { copyFrom } from "./ui.js";

/** @typedef {any} Token one of marked's */

const SAFE_LINK = /^(https?:|mailto:)/i;
const MAX_DEPTH = 40;
/** A block that grows beyond this is cut at a line, so that a frame never has much to lex. */
const MAX_OPEN_CHARS = 4000;
/** Code that grows is in parts of their own layout: only the last is laid out again. */
const MAX_PART_CHARS = 2000;
/** @type {Record<string, string>} */
const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0", hellip: "…", mdash: "—", ndash: "–" };
/** @type {Record<string, string>} */
const INLINE = { strong: "strong", em: "em", del: "del" };

/**
 * Shows a text that grows. What a block further down has closed is never rendered again.
 */
export class GrowingMarkdown {
  /** @param {HTMLElement} element */
  constructor(element) {
    this.element = element;
    this.text = "";
    /** Characters whose nodes are final. */
    this.settled = 0;
    /** @type {Node[]} those of the text behind */
    this.open = [];
    /** @type {{text: Text, close: RegExp} | null} a code block without its end */
    this.fence = null;
  }

  reset() {
    this.element.replaceChildren();
    this.text = "";
    this.settled = 0;
    this.open = [];
    this.fence = null;
  }

  /**
   * @param {string} text that of the last call and more, or another one
   * @param {boolean} isWhole whether no more will come
   */
  update(text, isWhole) {
    if (!text.startsWith(this.text)) this.reset();
    if (text === this.text && !isWhole) return;
    const added = text.slice(this.text.length);
    this.text = text;
    if (this.fence && !isWhole && !this.fence.close.test(this.lastLines(added))) {
      this.fence.text = growCode(this.fence.text, added);
      return;
    }
    this.fence = null;
    this.render(isWhole);
  }

  /**
   * The added text with the whole of the line that it begins in.
   * @param {string} added
   */
  lastLines(added) {
    const start = this.text.lastIndexOf("\n", this.text.length - added.length - 1);
    return this.text.slice(Math.max(start, this.settled));
  }

  /** @param {boolean} isWhole */
  render(isWhole) {
    const tail = this.text.slice(this.settled);
    const tokens = /** @type {Token[]} */ (lexer(tail));
    for (const node of this.open) node.parentNode?.removeChild(node);
    this.open = [];
    let last = tokens.length - 1;
    while (last >= 0 && tokens[last].type === "space") last -= 1;
    tokens.forEach((token, place) => {
      const node = blockOf(token, 0);
      if (node) this.element.append(node);
      if (isWhole || place < last) this.settled += token.raw.length;
      else if (node) this.open.push(node);
    });
    if (!isWhole && last >= 0) this.watch(tokens[last]);
  }

  /**
   * Keeps what comes next cheap.
   * @param {Token} token the block that may grow
   */
  watch(token) {
    const fence = /^ {0,3}(`{3,}|~{3,})[^\n]*\n/.exec(token.raw);
    const code = this.open[0] instanceof Element ? this.open[0].querySelector("code") : null;
    if (token.type === "code" && fence && code?.firstChild instanceof Text) {
      // marked leaves out line ends at the end, which are in the text as long as it grows.
      const shown = token.raw.slice(fence[0].length);
      code.firstChild.data = "";
      const text = growCode(code.firstChild, shown);
      const close = new RegExp(`\\n {0,3}\\${fence[1][0]}{${fence[1].length},}[ \\t]*(\\n|$)`);
      if (!close.test(token.raw)) this.fence = { text, close };
      return;
    }
    if (token.raw.length < MAX_OPEN_CHARS || token.type === "table") return;
    const cut = cutOf(token);
    if (cut === 0) return;
    for (const node of this.open) node.parentNode?.removeChild(node);
    this.open = [];
    for (const each of lexer(token.raw.slice(0, cut))) {
      const node = blockOf(each, 0);
      if (node) this.element.append(node);
    }
    this.settled += cut;
  }
}

/**
 * Adds code; a part that is long ends with its line.
 * @param {Text} text the last of the block
 * @param {string} added
 * @returns {Text} the last one now
 */
function growCode(text, added) {
  const end = text.length > MAX_PART_CHARS ? added.indexOf("\n") : -1;
  if (end < 0) {
    text.appendData(added);
    return text;
  }
  text.appendData(added.slice(0, end + 1));
  const part = textNode(added.slice(end + 1));
  const owner = /** @type {Element} */ (text.parentElement);
  const span = element("span", [part]);
  span.className = "part";
  if (owner.className === "part") owner.after(span);
  else owner.append(span);
  return part;
}

/**
 * Where a long block may be cut: before its last item, line or word.
 * @param {Token} token
 */
function cutOf(token) {
  const pattern = token.type === "list" ? /\n(?=(?:[-*+]|\d{1,9}[.)]) )/g : /[\n ]/g;
  const places = [...token.raw.matchAll(pattern)];
  const last = places[places.length - 1];
  return last?.index === undefined ? 0 : last.index + 1;
}

/**
 * @param {Token} token
 * @param {number} depth
 * @returns {Node | null}
 */
function blockOf(token, depth) {
  if (depth > MAX_DEPTH) return textNode(token.raw);
  const make = BLOCKS[token.type];
  return make ? make(token, depth + 1) : null;
}

/** @type {Record<string, (token: Token, depth: number) => Node | null>} */
const BLOCKS = {
  space: () => null,
  def: () => null,
  hr: () => element("hr"),
  heading: (token, depth) => element(`h${Math.min(token.depth + 2, 6)}`, inline(token.tokens, depth)),
  paragraph: (token, depth) => element("p", inline(token.tokens, depth)),
  text: (token, depth) => element("span", token.tokens ? inline(token.tokens, depth) : [textNode(decoded(token.text))]),
  html: (token) => element("p", [textNode(token.raw.trimEnd())]),
  blockquote: (token, depth) => element("blockquote", blocks(token.tokens, depth)),
  code: (token) => codeBlock(token),
  list: (token, depth) => list(token, depth),
  table: (token, depth) => table(token, depth),
};

/**
 * @param {Token[]} tokens
 * @param {number} depth
 */
function blocks(tokens, depth) {
  return tokens.map((each) => blockOf(each, depth)).filter((each) => each !== null);
}

/**
 * @param {Token} token
 * @param {number} depth
 */
function list(token, depth) {
  const made = element(token.ordered ? "ol" : "ul");
  if (token.ordered && token.start > 1) made.setAttribute("start", String(token.start));
  for (const item of token.items) {
    const box = item.task ? [textNode(item.checked ? "☑ " : "☐ ")] : [];
    const tokens = item.tokens.filter((/** @type {Token} */ each) => each.type !== "checkbox");
    made.append(element("li", [...box, ...blocks(tokens, depth)]));
  }
  return made;
}

/**
 * @param {Token} token
 * @param {number} depth
 */
function table(token, depth) {
  const row = (/** @type {Token[]} */ cells, /** @type {string} */ tag) => {
    const made = cells.map((cell, place) => {
      const found = element(tag, inline(cell.tokens, depth));
      if (token.align[place]) found.classList.add(`align-${token.align[place]}`);
      return found;
    });
    return element("tr", made);
  };
  const head = element("thead", [row(token.header, "th")]);
  const body = element("tbody", token.rows.map((/** @type {Token[]} */ cells) => row(cells, "td")));
  const scroller = element("div", [element("table", [head, body])]);
  scroller.className = "scroller";
  scroller.tabIndex = 0;
  return scroller;
}

/** @param {Token} token */
function codeBlock(token) {
  const name = /^[\w+#.-]{1,30}/.exec(token.lang ?? "")?.[0] ?? "";
  const code = element("code", [textNode(token.text)]);
  const copy = /** @type {HTMLButtonElement} */ (element("button", [textNode("Copy")]));
  copy.type = "button";
  copy.addEventListener("click", () => copyFrom(copy, code.textContent ?? ""));
  const head = element("div", [element("span", [textNode(name || "code")]), copy]);
  head.className = "code-head";
  const pre = element("pre", [code]);
  pre.tabIndex = 0;
  const block = element("div", [head, pre]);
  block.className = "code";
  return block;
}

/**
 * @param {Token[]} tokens
 * @param {number} depth
 * @returns {Node[]}
 */
function inline(tokens, depth) {
  return (tokens ?? []).map((token) => inlineOf(token, depth));
}

/**
 * @param {Token} token
 * @param {number} depth
 * @returns {Node}
 */
function inlineOf(token, depth) {
  if (depth > MAX_DEPTH) return textNode(token.raw);
  const tag = INLINE[token.type];
  if (tag) return element(tag, inline(token.tokens, depth + 1));
  if (token.type === "codespan") return element("code", [textNode(token.text)]);
  if (token.type === "br") return element("br");
  if (token.type === "link") return link(token.href, inline(token.tokens, depth + 1), token.raw);
  if (token.type === "image") return link(token.href, [textNode(`Image: ${token.text || token.href}`)], token.raw);
  if (token.type === "text" && token.tokens) return element("span", inline(token.tokens, depth + 1));
  if (token.type === "text") return textNode(decoded(token.text));
  if (token.type === "escape") return textNode(token.text);
  return textNode(token.raw);
}

/**
 * @param {string} href
 * @param {Node[]} content
 * @param {string} raw shown in place of a link that leads nowhere safe
 */
function link(href, content, raw) {
  if (!SAFE_LINK.test(href)) return textNode(raw);
  const made = /** @type {HTMLAnchorElement} */ (element("a", content));
  made.href = href;
  made.rel = "noopener noreferrer";
  made.target = "_blank";
  return made;
}

/**
 * @param {string} tag
 * @param {Node[]} [content]
 */
function element(tag, content = []) {
  const made = document.createElement(tag);
  made.append(...content);
  return made;
}

/** @param {string} text */
const textNode = (text) => document.createTextNode(text);

/**
 * Character references, as Markdown has them in text.
 * @param {string} text
 */
function decoded(text) {
  return text.replace(/&(?:#(\d{1,7})|#[xX]([0-9a-fA-F]{1,6})|([a-z]{2,8}));/g, (all, decimal, hex, name) => {
    if (name) return ENTITIES[name] ?? all;
    const code = decimal ? Number(decimal) : parseInt(hex, 16);
    return code > 0 && code <= 0x10ffff ? String.fromCodePoint(code) : "\ufffd";
  });
}
