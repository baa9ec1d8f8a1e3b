// Figures: drawn when they come near the screen, each with its table, a map also with a frame that the arrow keys move.

const drawn = []; // all of them

const probe = document.body.appendChild(element("span", "", { class: "unseen", "aria-hidden": "true" }));
function colour(name) {
  probe.style.color = `var(--${name})`; // resolved for the theme, which the variable itself is not
  return getComputedStyle(probe).color;
}
// Colours from the least to the most; a power above 1 tells small numbers apart.
const scaleOf = (name, count, power = 1) =>
  Array.from({ length: count }, (_, i) => [(i / (count - 1)) ** power, colour(`${name}-${i}`)]);

function layoutOf(changes) {
  const [text, line] = [colour("text"), colour("line")];
  const axis = { fixedrange: true, gridcolor: line, linecolor: line, zeroline: false, tickcolor: line };
  return {
    font: { family: "system-ui, sans-serif", size: 12, color: text },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    dragmode: false,
    showlegend: false,
    hoverlabel: { bgcolor: colour("card"), bordercolor: line, font: { color: text }, align: "left" },
    ...changes,
    xaxis: { ...axis, ...changes.xaxis },
    yaxis: { ...axis, ...changes.yaxis },
  };
}

const config = { displayModeBar: false, responsive: true, typesetMath: false };

// plotly.js takes a second to start, so it starts when the page is there.
const started = new Promise((resolve) => {
  window.addEventListener("load", () => setTimeout(resolve));
}).then(() => document.head.append(element("script", byId("plotly").textContent)));

// A figure that is drawn when it comes near the screen, and its table when that is opened. `model` says what of.
class Figure {
  constructor(id, model) {
    const figure = byId(id);
    this.canvas = figure.querySelector(".canvas");
    this.details = figure.querySelector("details.table");
    this.model = model;
    this.near = false;
    this.listening = false; // to clicks
    this.details.addEventListener("toggle", () => this.fill());
    new IntersectionObserver(
      async (entries, observer) => {
        if (!entries.some((entry) => entry.isIntersecting)) return;
        observer.disconnect();
        await started;
        await new Promise((resolve) => setTimeout(resolve)); // the first is seen before the last is drawn
        this.near = true;
        this.draw();
      },
      { rootMargin: "50%" },
    ).observe(this.canvas);
    drawn.push(this);
  }

  draw() {
    this.fill();
    if (!this.near) return;
    const model = this.model();
    if (typeof model === "string") {
      Plotly.purge(this.canvas);
      this.listening = false;
      this.canvas.replaceChildren(element("p", model, { class: "empty" }));
      return;
    }
    this.canvas.querySelector(".empty")?.remove();
    this.plot(model);
  }

  fill() {
    if (!this.details.open) return;
    const model = this.model();
    const place = this.details.querySelector(".scroll");
    place.replaceChildren(typeof model === "string" ? element("p", model) : tableOf(this.table(model)));
  }
}

// A map with a frame that the arrow keys move. model(): z, rows and columns (their names), corner (what these are),
// low, high, change and power (the colours), say(i, j), axes (of the layout), caption; or a text, why there is none.
class HeatMap extends Figure {
  constructor(id, model, open) {
    super(id, model);
    this.at = [0, 0];
    this.open = open;
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    this.canvas.addEventListener("focus", () => this.move(...this.at));
  }

  plot({ z, rows, columns, low, high, change, power, say, axes }) {
    const names = z.map((row, i) => row.map((_, j) => literal(say(i, j))));
    const common = { type: "heatmap", hoverinfo: "text", hovertext: names, hoverongaps: false, xgap: 1, ygap: 1 };
    const traces = [
      {
        ...common,
        z,
        zmin: low,
        zmax: high,
        colorscale: change ? scaleOf("change", 5) : scaleOf("scale", 6, power),
        colorbar: { thickness: 8, outlinewidth: 0, len: 1, xpad: 4, ypad: 0, nticks: 5 },
      },
      {
        ...common,
        z: z.map((row) => row.map((x) => (x === null ? 1 : null))),
        colorscale: [[0, colour("missing")], [1, colour("missing")]],
        showscale: false,
      },
    ];
    const layout = layoutOf({
      ...axes,
      shapes: this.frame(),
      xaxis: { showgrid: false, ...axes.xaxis, range: [-0.5, columns.length - 0.5] },
      yaxis: { showgrid: false, ...axes.yaxis, range: [rows.length - 0.5, -0.5] },
    });
    Plotly.react(this.canvas, traces, layout, config);
    if (!this.listening) {
      this.listening = true;
      this.canvas.on("plotly_click", ({ points: [{ x, y }] }) => {
        this.move(y, x);
        this.open?.(y, x);
      });
    }
  }

  table({ caption, corner, rows, columns, z }) {
    const cells = z.map((row, i) => [rows[i], ...row.map(spell)]);
    return { caption, columns: [corner, ...columns], rows: cells };
  }

  // A frame that stands out from light cells and from dark ones.
  frame() {
    const [i, j] = this.at;
    const around = { type: "rect", x0: j - 0.5, x1: j + 0.5, y0: i - 0.5, y1: i + 0.5 };
    return [["paper", 5], ["text", 2]].map(([name, width]) => ({ ...around, line: { color: colour(name), width } }));
  }

  // Puts the frame on a cell, or the nearest there is; returns the model, null where there is none.
  mark(i, j) {
    const model = this.model();
    if (typeof model === "string") return null;
    this.at = [clamp(i, model.rows.length - 1), clamp(j, model.columns.length - 1)];
    if (this.near && this.canvas.layout) Plotly.relayout(this.canvas, { shapes: this.frame() });
    return model;
  }

  move(i, j) {
    const model = this.mark(i, j);
    if (model) byId("spoken").textContent = model.say(...this.at);
  }

  key(event) {
    const [i, j] = this.at;
    const steps = { ArrowUp: [i - 1, j], ArrowDown: [i + 1, j], ArrowLeft: [i, j - 1], ArrowRight: [i, j + 1] };
    const to = { ...steps, Home: [i, 0], End: [i, Infinity] }[event.key];
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    if (to) this.move(...to);
    else if (event.key === "Enter" && this.open) this.open(i, j);
    else return;
    event.preventDefault();
  }
}

// Lines. model(): lines of { name, x, y }, axes (of the layout), caption.
class Curve extends Figure {
  plot({ lines, axes }) {
    const colours = [colour("accent"), colour("change-1")];
    const traces = lines.map(({ name, x, y }, i) => ({
      x,
      y,
      name: literal(name),
      mode: "lines",
      line: { color: colours[i], width: 2, dash: i ? "dash" : "solid" },
    }));
    const legend = { orientation: "h", x: 0, y: 1.15, font: { color: colour("text") } };
    const layout = layoutOf({ ...axes, legend, hovermode: "x", margin: { l: 56, r: 8, t: 28, b: 44 } });
    layout.showlegend = lines.length > 1;
    Plotly.react(this.canvas, traces, layout, config);
  }

  table({ caption, lines, axes }) {
    const places = [...new Set(lines.flatMap(({ x }) => x))].sort((a, b) => a - b);
    const found = lines.map(({ x, y }) => new Map(x.map((at, i) => [at, y[i]])));
    const rows = places.map((at) => [String(at), ...found.map((line) => spell(line.get(at)))]);
    return { caption, columns: [axes.xaxis.title.text, ...lines.map(({ name }) => name)], rows };
  }
}
