// The list of the runs of a folder: select and follow runs, and keep their data up to date by polling.
(() => {
"use strict";
const POLL_MS = 1000, HIDDEN_POLL_MS = 10000, RETRY_MS = 3000, MOST_RUNS = 20, ALL_ROWS = 8000, MOST_ROWS = 4000;
const ALIVE = ["starting", "running"];
const byId = (id) => document.getElementById(id);
const filter = byId("runs-filter").querySelector("input");
const follow = byId("runs-follow").querySelector("input");

const address = new URLSearchParams(location.search);
if (address.has("token")) {
  sessionStorage.setItem("raypod-token", address.get("token"));
  address.delete("token");
  showAddress(address);
}
const token = sessionStorage.getItem("raypod-token") || "";

let listed = []; // the runs of the folder
let seen = null; // names of the first list and of later ones; null before the first one
const selected = new Map(); // name -> {version, run}
const rows = new Map(); // name -> elements of the list

async function get(path, parameters) {
  const response = await fetch(`${path}?${new URLSearchParams(parameters || {})}`, {
    headers: { Authorization: `Bearer ${token}` },
    cache: "no-store",
  });
  if (response.status === 404) return null;
  if (!response.ok) throw new Error(`${path}: ${response.status}`);
  return response.json();
}

function showState(text, isLost) {
  const element = byId("runs-state");
  if (element.textContent !== text) element.textContent = text;
  element.classList.toggle("lost", isLost);
}

function showAddress(parameters) {
  const query = parameters.toString();
  history.replaceState(null, "", location.pathname + (query ? `?${query}` : "") + location.hash);
}

// The selection is a part of the address, so that it survives a reload.
function readSelection() {
  const names = new URLSearchParams(location.search).getAll("run");
  for (const name of names.slice(0, MOST_RUNS)) selected.set(name, {});
  return names.length > 0;
}

function writeSelection() {
  showAddress(new URLSearchParams([...selected.keys()].map((name) => ["run", name])));
}

function select(name, isSelected) {
  if (isSelected && selected.size < MOST_RUNS) selected.set(name, selected.get(name) || {});
  if (!isSelected) selected.delete(name);
  writeSelection();
  showList();
  draw();
}

function rowOf(name) {
  let row = rows.get(name);
  if (row) return row;
  const item = document.createElement("li");
  const label = document.createElement("label");
  const box = Object.assign(document.createElement("input"), { type: "checkbox" });
  const make = (tag, kind) => Object.assign(document.createElement(tag), { className: kind });
  row = { item, box, name: make("span", "run-name"), facts: make("span", "run-facts"), badge: make("span", "run-badge") };
  row.text = document.createTextNode("");
  row.bar = document.createElement("progress");
  row.facts.append(row.badge, row.text);
  row.name.textContent = name;
  label.append(box, row.name, row.facts, row.bar);
  item.append(label);
  item.dataset.name = name;
  box.addEventListener("change", () => {
    select(name, box.checked);
    poll();
  });
  rows.set(name, row);
  return row;
}

function factsOf(run) {
  const parts = [];
  if (Number.isFinite(run.total_updates)) parts.push(`${run.update} of ${run.total_updates}`);
  if (Number.isFinite(run.loss)) parts.push(`loss ${Number(run.loss.toPrecision(4))}`);
  if (ALIVE.includes(run.state) && Number.isFinite(run.samples_per_s)) {
    parts.push(`${Number(run.samples_per_s.toPrecision(3)).toLocaleString("en-US")}/s`);
  }
  if (run.restarts) parts.push(`${run.restarts} restart${run.restarts === 1 ? "" : "s"}`);
  if (!ALIVE.includes(run.state)) parts.push(new Date(1000 * run.modified_s).toLocaleString());
  return parts.join(" · ");
}

// The columns of the list: what sorts it, and the conditions of the filter. Rates of runs that have ended are not shown.
const COLUMNS = {
  name: (run) => run.name, state: (run) => run.state, update: (run) => run.update, loss: (run) => run.loss,
  rate: (run) => (ALIVE.includes(run.state) ? run.samples_per_s : null), restarts: (run) => run.restarts, time: (run) => run.modified_s,
};
const OPERATORS = { "<": (a, b) => a < b, "<=": (a, b) => a <= b, ">": (a, b) => a > b, ">=": (a, b) => a >= b, "=": (a, b) => a === b };
let sorting = readSorting(); // {column, isDown}; null: the order of the server

function readSorting() {
  const [column, order] = (sessionStorage.getItem("raypod-sort") || "").split(" ");
  return Object.keys(COLUMNS).includes(column) ? { column, isDown: order === "down" } : null;
}

// A word is a part of the name or the state, or a condition as in loss<0.5.
function matches(run, word) {
  const [, column, operator, number] = word.match(/^([a-z]+)(<=|>=|<|>|=)([-+.\de]+)$/) || [];
  if (!Object.keys(COLUMNS).includes(column)) return `${run.name} ${run.state}`.toLowerCase().includes(word);
  const value = COLUMNS[column](run);
  return Number.isFinite(value) && OPERATORS[operator](value, Number(number));
}

function sorted(shown) {
  if (!sorting) return shown;
  const key = COLUMNS[sorting.column], isUnknown = (value) => value === null || value === undefined;
  return shown.map((run, index) => [run, index]).sort(([one, at], [other, otherAt]) => {
    const [a, b] = [key(one), key(other)];
    if (isUnknown(a) || isUnknown(b)) return isUnknown(a) - isUnknown(b) || at - otherAt;
    const order = typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b;
    return (sorting.isDown ? -order : order) || at - otherAt;
  }).map(([run]) => run);
}

// A click on the head of a column sorts: ascending, then descending, then in the order of the server.
function showSorting() {
  for (const button of byId("runs-sort").children) {
    const isSorted = sorting !== null && button.dataset.column === sorting.column;
    button.textContent = button.dataset.column + (isSorted ? (sorting.isDown ? " ▼" : " ▲") : "");
    button.setAttribute("aria-pressed", String(isSorted));
  }
}

function sortBy(column) {
  const isSorted = sorting !== null && sorting.column === column;
  sorting = isSorted && sorting.isDown ? null : { column, isDown: isSorted };
  sessionStorage.setItem("raypod-sort", sorting ? `${column} ${sorting.isDown ? "down" : "up"}` : "");
  showSorting();
  showList();
}

function showList() {
  const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
  const shown = sorted(listed.filter((run) => words.every((word) => matches(run, word))));
  const items = shown.map((run) => {
    const row = rowOf(run.name);
    row.item.dataset.state = run.state;
    row.badge.textContent = run.state;
    row.text.data = factsOf(run);
    row.bar.hidden = !ALIVE.includes(run.state) || !run.total_updates;
    if (!row.bar.hidden) Object.assign(row.bar, { max: run.total_updates, value: run.update });
    row.bar.setAttribute("aria-label", `progress of ${run.name}`);
    row.box.checked = selected.has(run.name);
    row.box.disabled = !row.box.checked && selected.size >= MOST_RUNS;
    row.box.title = row.box.disabled ? `at most ${MOST_RUNS} runs can be compared` : "";
    return row.item;
  });
  const list = byId("runs-list");
  if (items.length !== list.children.length || items.some((item, index) => item !== list.children[index])) {
    const focused = document.activeElement;
    list.replaceChildren(...items);
    if (focused && focused.isConnected) focused.focus({ preventScroll: true });
  }
  byId("runs-count").textContent = `${shown.length < listed.length ? `${shown.length} of ` : ""}${listed.length}, ${selected.size} selected`;
  byId("runs-none").hidden = selected.size > 0;
}

function draw() {
  const order = listed.map((run) => run.name).filter((name) => selected.has(name) && selected.get(name).run);
  window.raypodReport.update(order.map((name) => selected.get(name).run));
}

function addList(runs) {
  listed = runs;
  const names = new Set(runs.map((run) => run.name));
  for (const name of rows.keys()) if (!names.has(name)) rows.delete(name);
  for (const name of [...selected.keys()]) if (!names.has(name)) selected.delete(name);
  const isFirst = seen === null;
  if (isFirst && !readSelection() && runs.length) {
    // Without a selection: what runs now, else the newest run.
    const alive = runs.filter((run) => ALIVE.includes(run.state)).slice(0, MOST_RUNS);
    for (const run of alive.length ? alive : runs.slice(0, 1)) selected.set(run.name, {});
  }
  if (!isFirst && follow.checked) {
    for (const run of runs) {
      if (!seen.has(run.name) && selected.size < MOST_RUNS) selected.set(run.name, {});
    }
  }
  for (const name of [...selected.keys()]) if (!names.has(name)) selected.delete(name);
  seen = names;
  writeSelection();
}

async function refresh() {
  const before = [...selected.keys()].join("/");
  const { runs } = await get("/runs");
  addList(runs);
  showList();
  const count = Math.max(1, selected.size);
  const most = Math.min(MOST_ROWS, Math.floor(ALL_ROWS / count));
  let isChanged = before !== [...selected.keys()].join("/");
  await Promise.all(
    [...selected].map(async ([name, kept]) => {
      const found = await get("/run", { name, rows: most, version: kept.version || "" });
      if (found && found.run && selected.has(name)) {
        Object.assign(kept, { version: found.version, run: found.run });
        isChanged = true;
      }
    }),
  );
  if (isChanged) draw();
  showState(`Live, updated ${new Date().toLocaleTimeString()}`, false);
}

let timer = null, isPolling = false, isWanted = false;
async function poll() {
  isWanted = isPolling;
  if (isPolling) return; // another poll follows this one at once
  clearTimeout(timer);
  isPolling = true;
  const began = performance.now();
  let wait = document.hidden ? HIDDEN_POLL_MS : POLL_MS;
  try {
    await refresh();
    wait = Math.max(wait, 3 * (performance.now() - began)); // the server and the page rest most of the time
  } catch (error) {
    wait = RETRY_MS;
    const isRefused = String(error.message).endsWith("401");
    showState(isRefused ? "Refused: the dashboard was started again; open its new address" : "No answer: has the dashboard ended?", true);
  }
  isPolling = false;
  timer = setTimeout(poll, isWanted ? 0 : wait);
  isWanted = false;
}

filter.addEventListener("input", showList);
for (const column of Object.keys(COLUMNS)) {
  const button = Object.assign(document.createElement("button"), { type: "button" });
  button.dataset.column = column;
  button.addEventListener("click", () => sortBy(column));
  byId("runs-sort").append(button);
}
showSorting();
follow.checked = sessionStorage.getItem("raypod-follow") === "yes";
follow.addEventListener("change", () => sessionStorage.setItem("raypod-follow", follow.checked ? "yes" : "no"));
byId("runs-clear").addEventListener("click", () => {
  selected.clear();
  writeSelection();
  showList();
  draw();
});
document.addEventListener("visibilitychange", () => document.hidden || poll());
if (window.innerWidth < 1200) byId("runs-fold").open = false;
window.raypodDashboard = { selected, poll };
poll();
})();
