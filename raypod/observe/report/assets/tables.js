// The overview, the settings with the differences between runs, and the versions.
const STATES = { done: "good", running: "good", starting: "good", failed: "bad", died: "bad", interrupted: "warn", preempted: "warn", unknown: "warn" };

const FEW_COLUMNS = 13;  // of facts, which fit side by side; of more, those that all runs share are a note

function stateOf(run) {
  return h("span", { class: `state ${STATES[run.state] || "warn"}` }, run.state);
}

const lastOf = (table, name) => {
  const column = table.columns.indexOf(name);
  for (let row = table.rows.length - 1; column >= 0 && row >= 0; row -= 1) if (isNumber(table.rows[row][column])) return table.rows[row][column];
  return null;
};

function factsOf(run) {
  const summary = run.summary || {}, calls = run.calls ? run.calls.totals : [];
  const rate = isNumber(summary.samples_per_s) ? summary.samples_per_s : lastOf(run.curves, "samples_per_s");
  const wait = isNumber(summary.data_wait_share) ? summary.data_wait_share : lastOf(run.curves, "data_wait_share");
  const metric = (name, table, of) => [`${titleOf(name)}, ${of}`, number(lastOf(table, name)) + (UNITS[name] || ""), lastOf(table, name)];
  const slow = calls.filter((total) => isSlow(run, total)).map((total) => total.instance), counts = run.timeline.counts;
  const update = isNumber(run.update) ? run.update : run.curves.updates;
  return [
    ["updates", isNumber(run.update) ? `${number(run.update)} of ${number(run.total_updates)}` : number(update), update],
    ...run.metrics.map((name) => metric(name, run.curves, "last update")),
    ...run.evaluations.columns.slice(3).map((name) => metric(name, run.evaluations, "evaluation")),
    ["samples per second", number(rate, 4), rate],
    ["waiting for data", percent(wait), wait],
    ["duration", seconds(run.timeline.end_s), run.timeline.end_s],
    ["lost instances", number(counts.instance_lost || 0), counts.instance_lost || 0],
    ["checkpoints", number(counts.checkpoint_saved || 0), counts.checkpoint_saved || 0],
    ["slow instances", slow.length ? slow.join(", ") : "none", slow.length],
  ];
}

function overview() {
  if (!runs.length) return [h("p", { class: "empty" }, "No run is selected.")];
  const message = (run) => (run.message ? h("p", { class: run.state === "done" ? "" : "message" }, `${runs.length > 1 ? `${runName(run)}: ` : ""}${run.message}`) : null);
  if (runs.length === 1) {
    const [run] = runs;
    const tiles = [["state", stateOf(run)], ...factsOf(run)];
    const place = run.plan ? `${counted(run.plan.geometry.num_instances, "instance")}, ${counted(run.plan.geometry.total_replicas, "replica")}` : "";
    const started = isNumber(run.timeline.origin_unix_s) ? `started ${new Date(1000 * run.timeline.origin_unix_s).toLocaleString()}` : "";
    return [
      h("p", { class: "subtitle" }, [run.task, place, run.device_line, started].filter(Boolean).join(" · ")), message(run),
      h("dl", { class: "tiles" }, tiles.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))),
    ];
  }
  const facts = runs.map((run) => new Map(factsOf(run).map(([name, text, key]) => [name, { text, key }])));
  const all = [...new Set(facts.flatMap((each) => [...each.keys()]))], textOf = (each, name) => (each.get(name) || { text: "–" }).text;
  const same = all.length > FEW_COLUMNS ? all.filter((name) => facts.every((each) => textOf(each, name) === textOf(facts[0], name))) : [];
  const names = all.filter((name) => !same.includes(name));
  const rows = runs.map((run, index) => [h("span", { class: "name" }, swatch(runColour(run)), runName(run)), stateOf(run), ...names.map((name) => textOf(facts[index], name))]);
  const keys = runs.map((run, index) => [runName(run), run.state, ...names.map((name) => (facts[index].get(name) || { key: null }).key)]);
  const list = sortableTable("runs", ["run", "state", ...names], rows, keys, { class: names.length > FEW_COLUMNS ? "numbers many" : "numbers" });
  const note = same.length ? h("p", { class: "note" }, `The same in all runs: ${same.map((name) => `${name} ${textOf(facts[0], name)}`).join("; ")}.`) : null;
  return [parallelOf(), h("div", { class: "scroll" }, comparison()), h("div", { class: "scroll" }, list), note, runs.map(message)];
}

// What `raypod compare` prints: the settings that differ, and the best and last value of each metric.
function comparison() {
  const rows = differentSettings().filter((name) => name !== "run.run_dir").map((name) => [name, ...runs.map((run) => settingText(run.config[name]))]);
  const keyOf = (result) => `${result.split} ${result.name}`, keys = [...new Set(runs.flatMap((run) => run.results.map(keyOf)))];
  for (const key of keys) {
    const results = runs.map((run) => run.results.find((result) => keyOf(result) === key) || {});
    rows.push([`${key}, best`, ...results.map((result) => (isNumber(result.best) ? `${number(result.best)} (update ${result.update})` : "–"))]);
    rows.push([`${key}, last`, ...results.map((result) => (isNumber(result.last) ? number(result.last) : "–"))]);
  }
  return table(["", ...runs.map(runName)], rows, { class: "compare results" });
}

const allSettings = () => [...new Set(runs.flatMap((run) => Object.keys(run.config)))];
const settingDiffers = (name) => runs.some((run) => settingText(run.config[name]) !== settingText(runs[0].config[name]));
const differentSettings = () => allSettings().filter(settingDiffers);

const settingText = (value) => (value === null || value === undefined ? "–" : String(value));

function settingsSection() {
  const names = allSettings();
  if (!names.length) return [h("p", { class: "empty" }, "The run folder has no configuration.")];
  if (runs.length === 1) {
    const sections = new Map();
    for (const name of names) {
      const [section, ...key] = name.split(".");
      sections.set(section, [...(sections.get(section) || []), [key.join(".") || section, settingText(runs[0].config[name])]]);
    }
    return [h("div", { class: "settings" }, [...sections].map(([section, pairs]) => h("div", {}, h("h4", {}, section),
      h("dl", {}, pairs.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", { class: value === "–" ? "none" : null }, value)))))))];
  }
  const different = differentSettings(), shown = view.allSettings ? names : different;
  const box = h("input", { type: "checkbox", checked: view.allSettings, onchange: (event) => { view.allSettings = event.target.checked; redraw(true); } });
  const rows = shown.map((name) => [name, ...runs.map((run) => ({ content: settingText(run.config[name]), class: settingDiffers(name) ? "different" : null }))]);
  return [
    h("p", { class: "hint" }, `${different.length} of ${names.length} settings differ. `, h("label", {}, box, " show all settings")),
    shown.length ? table(["setting", ...runs.map(runName)], rows, { class: "compare" }) : h("p", { class: "empty" }, "The settings of these runs are equal."),
  ];
}

function environmentSection() {
  const packages = [...new Set(runs.flatMap((run) => Object.keys(run.versions)))];
  const version = (run, name) => {
    const found = Object.entries(run.versions[name] || {});
    if (found.length < 2) return found.length ? found[0][0] : "–";
    return found.map(([value, instances]) => `${value} (instances ${instances.join(", ")})`).join("; ");
  };
  const summary = (run, name) => ((run.summary || {})[name] ? String(run.summary[name]) : "–");
  const lastSaved = (run) => {  // of a run without a summary; the text begins with the path
    const saved = run.timeline.marks.filter((mark) => mark[0] === "checkpoint_saved");
    return saved.length ? saved[saved.length - 1][4].split(" after update ")[0].split("/").pop() : "–";
  };
  const lines = [
    ["device", (run) => run.device_line || "–"], ["hosts", (run) => [...new Set(run.instances.map((each) => each.host))].join(", ") || "–"],
    ["parameters", (run) => number(run.parameters)], ["run folder", (run) => run.id], ["raypod of the coordinator", (run) => run.raypod || "–"],
    ...packages.map((name) => [name, (run) => version(run, name)]),
    ["weights, SHA-256", (run) => summary(run, "weights_sha256")], ["last checkpoint", (run) => (run.summary ? summary(run, "checkpoint") : lastSaved(run))],
  ];
  const rows = lines.map(([name, value]) => {
    const values = runs.map(value);
    return [name, ...values.map((each) => ({ content: each, class: runs.length > 1 && each !== values[0] ? "different" : null }))];
  });
  return [table(["", ...runs.map(runName)], rows, { class: "compare" })];
}
