// The page: what its figures show, and how one goes from one to the other.

const data = JSON.parse(byId("data").textContent);
const state = { show: 0, layer: 0, head: 0 }; // show: 0 or 1, a subject, or "difference"
const shown = () => (state.show === "difference" ? data.subjects : [data.subjects[state.show]]);
const namesOf = () => shown().map((one) => one.name).join(" and ");
const minusNames = () => shown().map((one) => one.name).reverse().join(" minus ");
const headName = (layer, head) => `L${layer} H${head}`;

// Of what is shown: one subject's, or the difference of two.
function view(read) {
  const found = shown().map(read);
  if (found.some((one) => one === undefined)) return undefined;
  return found.length === 1 ? found[0] : minus(found[1], found[0]);
}

function linksTo(heads, show, label = headName) {
  const found = document.createDocumentFragment();
  for (const [layer, head] of heads) {
    found.append(element("a", label(layer, head), { href: `#L${layer}H${head}`, "data-show": show }), " ");
  }
  return found;
}

// --- layers × heads -------------------------------------------------------------------------------------------

const names = [...new Set(data.subjects.flatMap((one) => one.measures.map(({ name }) => name)))];
const measureOf = (subject, name) => subject.measures.find((one) => one.name === name);
const absent = "The two have nothing here to compare.";

function mapModel(name) {
  const z = view((subject) => measureOf(subject, name)?.values);
  if (z === undefined) return absent;
  const { label, low, high, by_head: byHead } = shown().map((subject) => measureOf(subject, name))[0];
  const change = state.show === "difference";
  const known = z.flat().filter((x) => x !== null);
  const [least, largest] = known.length ? [Math.min(...known), Math.max(...known)] : [0, 1];
  const most = Math.max(-least, largest, 1e-12);
  const columns = byHead ? z[0].map((_, j) => `head ${j}`) : ["layer"];
  const every = Math.ceil(z.length / 16);
  return {
    caption: `${label}, ${minusNames()}`,
    z,
    change,
    low: change ? -most : (low ?? least),
    high: change ? most : (high ?? largest),
    corner: "layer",
    rows: z.map((_, i) => `layer ${i}`),
    columns,
    say: (i, j) => `layer ${i}${byHead ? `, head ${j}` : ""}: ${spell(z[i][j])}`,
    axes: {
      margin: { l: 28, r: 8, t: 8, b: 24 },
      xaxis: { visible: byHead, dtick: Math.ceil(z[0].length / 12), tick0: 0 },
      yaxis: { dtick: every, tick0: 0 },
    },
  };
}

const maps = names
  .map((name, i) => [`map-${i}`, () => mapModel(name)])
  .filter(([id]) => byId(id)) // one that is the same everywhere has none
  .map(([id, model]) => new HeatMap(id, model, go));

// --- one head -------------------------------------------------------------------------------------------------

const lines = (read) => shown().map((one) => ({ name: one.name, ...read(one) }));
const here = (packed) => ofHead(packed, state.layer, state.head);
const captionOf = (what, of = namesOf()) => `${what} of ${headName(state.layer, state.head)}, ${of}`;

function patternModel() {
  const change = state.show === "difference";
  if (change && !data.sameWindow) return "The two read different tokens: choose one of them.";
  const z = view((subject) => here(subject.pattern));
  const { queries, keys, start } = shown()[0];
  const most = Math.max(...z.flat().map(Math.abs), 1e-12);
  const place = (i) => start + i;
  const ticks = (texts) => ({ tickvals: texts.map((_, i) => i), ticktext: texts.map(short), tickfont: { size: 9 } });
  const row = (texts, i) => (i < queries.length ? `${place(i)} ${texts[i]}` : texts[i]);
  return {
    caption: captionOf("Pattern", minusNames()),
    z,
    change,
    low: change ? -most : 0,
    high: change ? most : 1,
    power: 2,
    corner: "query, by key",
    rows: queries.map((_, i) => row(queries, i)),
    columns: keys.map((_, j) => row(keys, j)),
    say: (i, j) => `query ${row(queries, i)}, key ${row(keys, j)}: ${spell(z[i][j])}`,
    axes: {
      margin: { l: 84, r: 8, t: 84, b: 8 },
      xaxis: { ...ticks(keys), side: "top", tickangle: -90 },
      yaxis: ticks(queries),
    },
  };
}

function entropyModel() {
  return {
    caption: captionOf("Entropy by position"),
    lines: lines((one) => ({ x: one.positions, y: here(one.entropy) })),
    axes: { xaxis: { title: { text: "position" } }, yaxis: { range: [-0.02, 1.05], title: { text: "H / ln n" } } },
  };
}

function spectrumModel() {
  const counted = (y) => ({ x: y.map((_, i) => i + 1), y });
  return {
    caption: captionOf("Score spectrum"),
    lines: lines((one) => counted(here(one.spectrum))),
    axes: {
      xaxis: { title: { text: "index" } },
      yaxis: { type: "log", title: { text: "singular value" }, exponentformat: "power" },
    },
  };
}

function numbersTable() {
  const many = shown().length > 1;
  const rows = [];
  for (const name of names) {
    const found = shown().map((subject) => measureOf(subject, name)).filter((one) => one?.by_head);
    if (found.length !== shown().length) continue;
    const values = found.map((one) => one.values[state.layer][state.head]);
    const all = found[0].values.flat();
    const above = all.filter((x) => x !== null && values[0] !== null && x > values[0]).length;
    const last = many ? minus(values[1], values[0]) : median(found[0].values[state.layer]);
    rows.push([found[0].label, ...values.map(spell), spell(last), ...(many ? [] : [`${above + 1} of ${all.length}`])]);
  }
  const columns = many ? [...shown().map((one) => one.name), "difference"] : ["this head", "median of its layer", "rank, from the largest"];
  return { caption: captionOf("Numbers"), columns: ["measure", ...columns], rows };
}

function median(values) {
  const known = values.filter((x) => x !== null).sort((a, b) => a - b);
  if (!known.length) return null;
  return (known[Math.floor((known.length - 1) / 2)] + known[Math.ceil((known.length - 1) / 2)]) / 2;
}

function membersOf(subject, label) {
  const found = [];
  subject.clusters.forEach((one, i) => {
    if (one === label) found.push([Math.floor(i / subject.heads), i % subject.heads]);
  });
  return found;
}

function showCluster() {
  const place = byId("cluster");
  place.replaceChildren();
  for (const subject of shown()) {
    const show = data.subjects.indexOf(subject);
    const at = state.layer * subject.heads + state.head;
    const others = membersOf(subject, subject.clusters[at]).filter(([l, h]) => l * subject.heads + h !== at);
    const count = others.length ? `${others.length + 1} heads look alike: this one and ` : "No other head looks like this one. ";
    const line = element("p", `${shown().length > 1 ? `${subject.name}: ` : ""}${count}`, { class: "heads" });
    line.append(linksTo(others, show));
    const next = subject.nearest[at].map((i) => [Math.floor(i / subject.heads), i % subject.heads]);
    const near = element("p", "The most similar ones, by divergence: ", { class: "heads" });
    const far = new Map(next.map((one, i) => [String(one), subject.divergence[at][i]]));
    near.append(linksTo(next, show, (l, h) => `${headName(l, h)} (${spell(far.get(String([l, h])))})`));
    place.append(line, near);
  }
}

function showClusters() {
  const place = byId("clusters");
  place.replaceChildren();
  for (const subject of shown()) {
    const labels = [...new Set(subject.clusters)];
    const found = labels.map((label) => membersOf(subject, label)).filter((members) => members.length > 1);
    found.sort((a, b) => b.length - a.length);
    const alone = subject.clusters.length - found.flat().length;
    const caption = `${subject.name}: ${found.length} clusters of ${subject.clusters.length} heads; ${alone} are like no other`;
    const rows = found.map((members) => [String(members.length), ""]);
    const table = tableOf({ caption, columns: ["heads", "which"], rows });
    table.classList.add("heads");
    found.forEach((members, i) => {
      table.tBodies[0].rows[i].cells[1].append(linksTo(members, data.subjects.indexOf(subject)));
    });
    const scroll = element("div", "", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption });
    scroll.append(table);
    place.append(scroll);
  }
}

const ofOneHead = [
  new HeatMap("pattern", patternModel),
  new Curve("entropy", entropyModel),
  new Curve("spectrum", spectrumModel),
];

// --- choosing -------------------------------------------------------------------------------------------------

function choose(layer, head) {
  const { layers, heads } = shown().reduce((a, b) => (b.layers * b.heads < a.layers * a.heads ? b : a));
  [state.layer, state.head] = [clamp(layer, layers - 1), clamp(head, heads - 1)];
  for (const [id, count] of [["layer", layers], ["number", heads]]) {
    const select = byId(id);
    if (select.options.length !== count) {
      select.replaceChildren(...Array.from({ length: count }, (_, i) => element("option", String(i))));
    }
  }
  byId("layer").selectedIndex = state.layer;
  byId("number").selectedIndex = state.head;
  byId("head-title").textContent = `Layer ${state.layer}, head ${state.head}`;
  maps.forEach((map) => map.mark(state.layer, state.head));
  byId("numbers").replaceChildren(tableOf(numbersTable()));
  showCluster();
  ofOneHead.forEach((figure) => figure.draw());
}

function setShow(show) {
  state.show = show;
  for (const input of document.querySelectorAll("#show input")) input.checked = input.value === String(show);
  maps.forEach((map) => map.draw());
  showClusters();
  choose(state.layer, state.head);
}

// Goes to a head: the address is where it is, so that it can be kept and gone back to.
function go(layer, head) {
  const hash = `#L${layer}H${head}`;
  if (location.hash === hash) follow();
  else location.hash = hash;
}

function follow() {
  const found = /^#L(\d+)(?:H(\d+))?$/.exec(location.hash);
  if (!found) return;
  choose(Number(found[1]), Number(found[2] ?? 0));
  byId("head-title").focus({ preventScroll: true });
  byId("head").scrollIntoView();
}

document.addEventListener("click", (event) => {
  const link = event.target.closest('a[href^="#L"]');
  if (!link) return;
  if (link.dataset.show !== undefined && state.show !== "difference") setShow(Number(link.dataset.show));
  if (link.getAttribute("href") === location.hash) follow();
});
window.addEventListener("hashchange", follow);
const step = (by) => {
  const { layers, heads } = shown()[0];
  const at = clamp(state.layer * heads + state.head + by, layers * heads - 1);
  choose(Math.floor(at / heads), at % heads);
};
byId("previous").addEventListener("click", () => step(-1));
byId("next").addEventListener("click", () => step(1));
byId("choose").addEventListener("submit", (event) => event.preventDefault());
byId("choose").addEventListener("change", () => choose(byId("layer").selectedIndex, byId("number").selectedIndex));
for (const input of document.querySelectorAll("#show input")) {
  input.addEventListener("change", () => setShow(input.value === "difference" ? "difference" : Number(input.value)));
}

// --- light and dark -------------------------------------------------------------------------------------------

const themes = ["auto", "light", "dark"];
const memory = {
  get: () => { try { return localStorage.getItem("theme"); } catch { return null; } },
  set: (value) => { try { localStorage.setItem("theme", value); } catch { /* a page from disk may have no memory */ } },
};
function setTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  byId("theme").textContent = `Theme: ${theme}`;
  drawn.forEach((figure) => figure.draw());
}
let theme = themes.includes(memory.get()) ? memory.get() : "auto";
byId("theme").addEventListener("click", () => {
  theme = themes[(themes.indexOf(theme) + 1) % themes.length];
  memory.set(theme);
  setTheme(theme);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => setTheme(theme));

setTheme(theme);
setShow(0);
follow();
