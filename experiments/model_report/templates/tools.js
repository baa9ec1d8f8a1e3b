"use strict";
// Numbers and texts: read from the page's data, spelled, and put into elements. Text from outside only ever becomes text:
// by `textContent`, and by `literal` where Plotly would read it as markup.

const byId = (id) => document.getElementById(id);
const clamp = (x, most) => Math.min(Math.max(x, 0), most);
const literal = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
const short = (text) => literal([...text].length > 14 ? [...text].slice(0, 13).join("") + "…" : text);

function spell(x) {
  if (x === null || x === undefined) return "–";
  const size = Math.abs(x);
  return size !== 0 && (size < 1e-4 || size >= 1e6) ? x.toExponential(3) : String(Number(x.toPrecision(4)));
}

const codes = { uint8: [Uint8Array, 255], uint16: [Uint16Array, 65535], float32: [Float32Array, null] };

function unpack(packed) {
  if (!packed.numbers) {
    const text = atob(packed.data);
    const bytes = new Uint8Array(text.length);
    for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
    packed.numbers = new codes[packed.kind][0](bytes.buffer);
    packed.data = null;
  }
  return packed.numbers;
}

// What an array [L, N, ...] holds of one head: a list, or a list of rows; null is not known.
function ofHead(packed, layer, head) {
  const [, heads, rows, columns] = packed.shape;
  const size = rows * (columns ?? 1);
  const unknown = codes[packed.kind][1];
  const flat = unpack(packed).subarray((layer * heads + head) * size, (layer * heads + head + 1) * size);
  const read = (x) => (unknown === null ? (Number.isFinite(x) ? x : null) : x === unknown ? null : x / (unknown - 1));
  const numbers = Array.from(flat, read);
  if (columns === undefined) return numbers;
  return Array.from({ length: rows }, (_, i) => numbers.slice(i * columns, (i + 1) * columns));
}

// b − a, of numbers or of lists of them.
function minus(b, a) {
  if (Array.isArray(b)) return b.map((x, i) => minus(x, a[i]));
  return a === null || b === null ? null : b - a;
}

function element(tag, text, attributes = {}) {
  const made = document.createElement(tag);
  made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

function tableOf({ caption, columns, rows }) {
  const table = element("table", "");
  table.append(element("caption", caption));
  const first = table.createTHead().insertRow();
  for (const column of columns) first.append(element("th", column, { scope: "col" }));
  const body = table.createTBody();
  for (const row of rows) {
    const line = body.insertRow();
    row.forEach((cell, i) => line.append(i === 0 ? element("th", cell, { scope: "row" }) : element("td", cell)));
  }
  return table;
}
