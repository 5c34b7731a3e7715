// The page: its head, its sections, the settings of the reader, and the entry for new data.
const root = document.querySelector("#report");
const signatures = new Map(); // what a section was drawn from

const SECTIONS = [
  ["overview", "Overview", overview],
  ["curves", "Curves", curvesSection],
  ["predictions", "Predictions of the test split", () => forEachRun("predictions", predictionsOf)],
  ["throughput", "Throughput and waiting", ratesSection],
  ["instances", "Instances and slow ones", () => forEachRun("instances", instancesOf)],
  ["timeline", "Timeline", () => forEachRun("timeline", timelineOf)],
  ["startup", "Where the start-up time went", () => forEachRun("startup", startsOf)],
  ["plan", "Plan and pipeline", () => forEachRun("plan", planOf)],
  ["settings", "Settings", settingsSection],
  ["environment", "Environment and versions", environmentSection],
];

// The parts of several runs stand below each other; of more than three, all but the first are folded.
function forEachRun(section, draw) {
  if (runs.length === 1) return draw(runs[0]);
  return shownRuns().map((run, index) => {
    const key = `${section}|${run.id}`, isFolded = view.folded.has(key) ? !view.folded.get(key) : index > 0 && runs.length > 3;
    const isOpen = view.isPrinting || !isFolded;
    const details = h("details", { class: "run", open: isOpen }, h("summary", {}, swatch(runColour(run)), runName(run)), draw(run));
    details.addEventListener("toggle", () => { if (view.isPrinting || details.open === !isFolded && !view.folded.has(key)) { drawCharts(true); return; } view.folded.set(key, details.open); drawCharts(true); });
    return details;
  });
}

function redraw(isForced) {
  for (const [name, , draw] of SECTIONS) {
    const target = root.querySelector(`#${name} .content`), old = signatures.get(name);
    const signature = sectionSignature(name);
    if (!isForced && old === signature) continue;
    signatures.set(name, signature);
    target.replaceChildren(...[draw()].flat(3).filter(Boolean));
  }
  drawLegend();
  drawCharts();
}

// A section is drawn again only if its data has changed, so that a selected text or a focus is not lost.
function sectionSignature(name) {
  const used = {
    curves: (run) => [run.metrics, run.traces, run.curves.decimated, run.curves.updates, run.evaluations.rows.length],
    predictions: (run) => run.test,
    throughput: (run) => [run.rates, run.curves.updates],
    instances: (run) => [run.calls, run.instances, run.timeline.end_s],
    timeline: (run) => run.timeline,
    startup: (run) => [run.starts, run.summary && run.summary.seconds_to_first_update],
    plan: (run) => [run.plan, run.instances, run.calls && run.calls.totals.map((total) => isSlow(run, total))],
    settings: (run) => run.config,
    environment: (run) => [run.versions, run.instances, run.summary],
    overview: (run) => [run.state, run.message, run.config, run.results, factsOf(run).map(String)],
  }[name];
  return JSON.stringify([theme(), [...view.hidden], runs.map((run) => [run.id, used(run)])]);
}

function drawLegend() {
  const chips = runs.map((run) => h("button", {
    type: "button", class: "chip", "aria-pressed": String(!view.hidden.has(run.id)), title: run.id,
    onclick: () => { if (view.hidden.has(run.id)) view.hidden.delete(run.id); else view.hidden.add(run.id); redraw(true); },
  }, swatch(runColour(run)), runName(run)));
  root.querySelector("#chips").replaceChildren(...(runs.length > 1 ? chips : []));
  root.querySelector("h1").textContent = runs.length === 1 ? runName(runs[0]) : root.dataset.title;
}

function choice(name, options, current, pick) {
  const group = h("div", { class: "choice", role: "group", "aria-label": name });
  const buttons = Object.entries(options).map(([value, label]) => h("button", {
    type: "button", "data-value": value, "aria-pressed": String(value === current),
    onclick: () => { for (const each of buttons) each.setAttribute("aria-pressed", String(each === buttons[Object.keys(options).indexOf(value)])); pick(value); },
  }, label));
  group.append(...buttons);
  return group;
}

function toolbar() {
  const smooth = h("input", { type: "range", id: "smooth", min: "0", max: "0.99", step: "0.01", value: "0", oninput: (event) => { view.smooth = Number(event.target.value); drawCharts(); } });
  const log = h("input", { type: "checkbox", id: "log", onchange: (event) => { view.log = event.target.checked; drawCharts(); } });
  const axis = choice("x axis", { update: "updates", samples: "samples", time: "time" }, view.x, (value) => { view.x = value; view.zoom = null; drawCharts(); resetZoom(); });
  return h("div", { class: "toolbar", role: "toolbar", "aria-label": "curves" },
    h("span", { class: "field" }, "x axis ", axis), h("label", { class: "field" }, log, " log scale"), h("label", { class: "field" }, "smoothing ", smooth),
    h("button", { type: "button", id: "reset-zoom", disabled: true, onclick: resetZoom }, "reset zoom"));
}

function setTheme(name, isKept) {
  document.documentElement.dataset.theme = name;
  if (isKept) try { localStorage.setItem("raypod-theme", name); } catch (_) { /* pages of files may have no storage */ }
  if (root.firstChild) redraw(true);
}

function storedTheme() {
  try { return localStorage.getItem("raypod-theme"); } catch (_) { return null; }
}

function begin() {
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const followed = () => storedTheme() || (system.matches ? "dark" : "light");
  setTheme(followed(), false);
  system.addEventListener("change", () => setTheme(followed(), false));
  const toggle = h("button", { type: "button", id: "theme", onclick: () => setTheme(isDark() ? "light" : "dark", true) }, "light / dark");
  const links = SECTIONS.map(([name, title]) => h("a", { href: `#${name}` }, title));
  root.append(
    h("header", {}, h("div", { class: "title" }, h("h1", {}, ""), toggle), h("div", { id: "chips" }), h("nav", { "aria-label": "sections" }, links)),
    h("main", {}, SECTIONS.map(([name, title]) => h("section", { id: name }, h("h2", {}, title), name === "curves" ? toolbar() : null, h("div", { class: "content" })))),
  );
  echarts.connect("curves");
  let timer = null;
  window.addEventListener("resize", () => { clearTimeout(timer); timer = setTimeout(() => redraw(true), 150); });
  let shownTheme = null;
  window.addEventListener("beforeprint", () => { shownTheme = theme(); view.isPrinting = true; setTheme("light", false); });
  window.addEventListener("afterprint", () => { view.isPrinting = false; setTheme(shownTheme || followed(), false); });
}

function update(newRuns) {
  runs = newRuns;
  for (const id of [...view.hidden]) if (!runs.some((run) => run.id === id)) view.hidden.delete(id);
  for (const id of [...colourOf.keys()]) if (!runs.some((run) => run.id === id)) colourOf.delete(id);
  redraw(false);
}

window.raypodReport = { update, charts, ready: false, get runs() { return runs; } };
begin();
update(JSON.parse(document.querySelector("#raypod-data").textContent));
window.raypodReport.ready = true;
