// State of the page, elements, numbers and colours. All files of this folder are joined into one function.
const view = { x: "update", log: false, smooth: 0, hidden: new Set(), zoom: null, folded: new Map(), allSettings: false, isPrinting: false, sorted: new Map() };
let runs = [];
const charts = new Map(); // key -> ECharts instance
const figures = new Map(); // key -> {element, canvas, option}
const colourOf = new Map(); // id of a run -> index of its colour

const PALETTE = {
  light: ["#0063a6", "#b84300", "#007a5a", "#a3447f", "#7a5c00", "#5b4fc4", "#b3282d", "#00748c", "#4f6b12", "#6b6b6b"],
  dark: ["#6cb6ff", "#ff9d5c", "#4fd1a5", "#f19ad0", "#e3c14a", "#b3a9ff", "#ff8f8f", "#5fd3e8", "#b5d65c", "#bdbdbd"],
};
const PHASES = {
  light: { starting: "#8a8f98", training: "#3b82c4", evaluating: "#2a9d6f", saving: "#d29a1c", repairing: "#d1443c", ending: "#8b6fc9" },
  dark: { starting: "#7d848f", training: "#4f97dc", evaluating: "#3fb68a", saving: "#d9a941", repairing: "#e4655d", ending: "#a48ae0" },
};
const isDark = () => document.documentElement.dataset.theme === "dark";
const theme = () => (isDark() ? "dark" : "light");
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function h(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(element.style, value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

const escaped = (text) => echarts.format.encodeHTML(String(text));
const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

function number(value, digits = 5) {
  if (!isNumber(value)) return "–";
  if (Number.isInteger(value) && Math.abs(value) < 1e15) return value.toLocaleString("en-US");
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-4 || size >= 1e9)) return value.toExponential(Math.max(0, digits - 1));
  return Number(value.toPrecision(digits)).toLocaleString("en-US", { maximumFractionDigits: 12 });
}

function seconds(value) {
  if (!isNumber(value)) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0 s";
  if (size < 1e-3) return `${Number((value * 1e6).toPrecision(3))} µs`;
  if (size < 1) return `${Number((value * 1e3).toPrecision(3))} ms`;
  if (size < 60) return `${Number(value.toPrecision(3))} s`;
  const whole = Math.round(value);
  if (size < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  if (size < 86400) return `${Math.floor(whole / 3600)} h ${Math.round((whole % 3600) / 60)} min`;
  return `${Math.floor(whole / 86400)} d ${Math.round((whole % 86400) / 3600)} h`;
}

const percent = (share, digits = 3) => (isNumber(share) ? `${Number((100 * share).toPrecision(digits))} %` : "–");
const counted = (count, noun) => `${number(count)} ${noun}${count === 1 ? "" : "s"}`;

const short = (value) => {
  const size = Math.abs(value);
  for (const [unit, sign] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (size >= 10 * unit || (unit > 1e3 && size >= unit)) return `${Number((value / unit).toPrecision(3))}${sign}`;
  }
  return size !== 0 && size < 1e-3 ? value.toExponential(1) : String(Number(value.toPrecision(4)));
};

function runColour(run) {
  if (!colourOf.has(run.id)) {
    const used = new Set(runs.filter((each) => colourOf.has(each.id)).map((each) => colourOf.get(each.id)));
    let index = 0;
    while (used.has(index)) index += 1;
    colourOf.set(run.id, index);
  }
  return PALETTE[theme()][colourOf.get(run.id) % PALETTE.light.length];
}

// Names of folders are unique in the page: of equal names, the parent folder is shown, too.
function runName(run) {
  const isTaken = runs.some((other) => other.id !== run.id && other.name === run.name);
  return isTaken ? run.id.split("/").slice(-2).join("/") : run.name;
}

const shownRuns = () => runs.filter((run) => !view.hidden.has(run.id));
const swatch = (colour) => h("span", { class: "swatch", style: { background: colour }, "aria-hidden": "true" });

function table(head, rows, attributes) {
  const cells = (row) =>
    row.map((cell, index) => {
      const isObject = cell !== null && typeof cell === "object" && !(cell instanceof Node) && !Array.isArray(cell);
      const { content, ...rest } = isObject ? cell : { content: cell };
      return h("td", { "data-label": head[index], ...rest }, content);
    });
  const header = h("thead", {}, h("tr", {}, head.map((name) => h("th", { scope: "col" }, name))));
  return h("table", attributes || {}, header, h("tbody", {}, rows.map((row) => h("tr", {}, cells(row)))));
}

// A table whose rows a click on the head of a column sorts: ascending, then descending, then as they came.
// `keys` has a number, a text or null for each cell; the order is kept by the name of the column.
function sortableTable(key, head, rows, keys, attributes) {
  const { name, isDown } = view.sorted.get(key) || {}, column = head.indexOf(name);
  const order = rows.map((_, index) => index);
  if (column >= 0) order.sort((one, other) => compared(keys[one][column], keys[other][column], isDown) || one - other);
  const found = table(head, order.map((index) => rows[index]), attributes);
  found.classList.add("sortable");
  found.querySelectorAll("th").forEach((cell, index) => {
    const isSorted = index === column, next = !isSorted ? { name: head[index], isDown: false } : isDown ? null : { name, isDown: true };
    const click = () => {
      if (next) view.sorted.set(key, next); else view.sorted.delete(key);
      redraw(true);
      root.querySelectorAll(`[data-sort="${CSS.escape(key)}"]`)[index].focus();
    };
    cell.setAttribute("aria-sort", !isSorted ? "none" : isDown ? "descending" : "ascending");
    cell.replaceChildren(h("button", { type: "button", "data-sort": key, onclick: click }, head[index], isSorted ? (isDown ? " ▼" : " ▲") : ""));
  });
  return found;
}

// The order of two keys; unknown ones come last in both directions.
function compared(one, other, isDown) {
  const isUnknown = (key) => key === null || key === undefined || Number.isNaN(key);
  if (isUnknown(one) || isUnknown(other)) return isUnknown(one) - isUnknown(other);
  const order = typeof one === "number" && typeof other === "number" ? one - other : String(one).localeCompare(String(other), "en", { numeric: true });
  return isDown ? -order : order;
}

// One chart with its title and a line of explanation. The element of a key is kept when the page is drawn again.
function figure(key, title, note, height, option) {
  let found = figures.get(key);
  if (!found) {
    const canvas = h("div", { class: "chart", role: "img" });
    const caption = h("figcaption", {}, h("strong", {}), " ", h("span", { class: "note" }));
    found = { element: h("figure", { "data-key": key }, caption, canvas), canvas };
    figures.set(key, found);
  }
  found.element.querySelector("strong").textContent = title;
  found.element.querySelector(".note").textContent = note;
  found.canvas.style.height = `${height}px`;
  found.canvas.setAttribute("aria-label", `${title}. ${note}`);
  found.option = option;
  return found.element;
}

// Draw the charts that are visible in the page; remove those whose element is not in it any more.
// With `isUnfolding`, those that are drawn in the right size already stay as they are.
function drawCharts(isUnfolding) {
  for (const [key, found] of figures) {
    let chart = charts.get(key);
    if (!found.element.isConnected) {
      if (chart) chart.dispose();
      charts.delete(key);
      figures.delete(key);
      continue;
    }
    if (found.canvas.clientWidth === 0) continue; // in a folded part
    if (isUnfolding && chart && chart.getWidth() === found.canvas.clientWidth) continue;
    if (!chart) {
      chart = echarts.init(found.canvas, null, { renderer: "svg" });
      charts.set(key, chart);
      if (key.startsWith("curve:")) followZoom(chart);
    }
    chart.resize();
    chart.setOption(found.option(found.canvas.clientWidth), { replaceMerge: ["series", "visualMap", "legend", "parallelAxis"] });
    if (key.startsWith("curve:")) selectWithMouse(chart);
  }
}

function chartBase() {
  const text = css("--text");
  return {
    animation: false,
    textStyle: { fontFamily: getComputedStyle(document.body).fontFamily, color: text },
    tooltip: {
      confine: true,
      backgroundColor: css("--panel"),
      borderColor: css("--line"),
      textStyle: { color: text, fontSize: 12 },
      extraCssText: "max-width: min(420px, 90vw); white-space: normal; overflow-wrap: anywhere;",
    },
  };
}

function axisStyle(rest) {
  const muted = css("--muted");
  return {
    axisLine: { lineStyle: { color: css("--line") } },
    axisTick: { lineStyle: { color: css("--line") } },
    splitLine: { lineStyle: { color: css("--grid") } },
    axisLabel: { color: muted, fontSize: 11, hideOverlap: true },
    nameTextStyle: { color: muted, fontSize: 11 },
    ...rest,
  };
}
