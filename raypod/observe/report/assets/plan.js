// Drawings of the plan: hosts, instances, replicas and IPUs, and the pipeline of a replica.
function planOf(run) {
  const plan = run.plan;
  if (!plan) return [h("p", { class: "empty" }, "The run folder has no plan.")];
  const size = plan.geometry, data = plan.dataset || {};
  const facts = [
    ["pod", plan.cluster], ["hosts", number(new Set(plan.instances.map((each) => each.host)).size)], ["instances", number(size.num_instances)],
    ["replicas", number(size.total_replicas)], ["IPUs", number(size.total_ipus)], ["IPUs per replica", number(size.ipus_per_replica)],
    ["micro-batch", `${number(size.micro_batch_size)} samples`], ["gradient accumulation", number(size.gradient_accumulation)],
    ["global batch", `${number(size.global_batch_size)} samples`], ["updates per call", number(size.device_iterations)],
    ["data", `${data.name || "–"}: ${number(data.train_samples)} training, ${number(data.test_samples)} test`],
    ["length", `${number(plan.total_updates)} updates, ${number(plan.updates_per_epoch)} per epoch, ${number(plan.legs)} ${plan.legs === 1 ? "leg" : "legs"}`],
  ];
  return [
    h("dl", { class: "facts" }, facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))),
    h("h4", {}, "Placement"), placement(run), plan.pipeline ? pipeline(plan.pipeline) : null,
  ];
}

function placement(run) {
  const size = run.plan.geometry, known = new Map(run.instances.map((each) => [each.instance, each]));
  const totals = new Map(((run.calls && run.calls.totals) || []).map((each) => [each.instance, each]));
  const byHost = new Map();
  for (const spec of run.plan.instances) {
    const actual = known.get(spec.index) || {}, host = actual.host || spec.host;
    byHost.set(host, [...(byHost.get(host) || []), { ...spec, ...actual, planned: spec.host }]);
  }
  const idle = run.plan.hosts.filter((host) => !byHost.has(host));
  const hosts = [...byHost].map(([host, instances]) => h("section", { class: "host" }, h("h5", {}, `host ${host}`), h("div", { class: "instances" }, instances.map((each) => instanceBox(run, each, size, totals.get(each.index))))));
  const spare = idle.map((host) => h("section", { class: "host idle" }, h("h5", {}, `host ${host}`), h("p", {}, "idle")));
  return [h("div", { class: "placement" }, hosts, spare), h("p", { class: "hint" }, "Boxes: host, instance (one process), replica. Squares: IPUs, numbered over the pod.")];
}

function instanceBox(run, instance, size, total) {
  const ipus = size.ipus_per_replica || 1, replicas = [];
  for (let local = 0; local < instance.local_replicas; local += 1) {
    const replica = instance.replica_offset + local;
    const squares = Array.from({ length: ipus }, (_, ipu) => h("i", { class: "ipu" }, String(replica * ipus + ipu)));
    replicas.push(h("span", { class: "replica", title: `replica ${replica}` }, h("b", {}, `r${replica}`), squares));
  }
  const flags = [];
  if (total && isSlow(run, total)) flags.push(h("span", { class: "flag" }, `slow, ${total.busy_ratio.toFixed(2)} ×`));
  if (instance.lost) flags.push(h("span", { class: "flag" }, `lost ${instance.lost} ×`));
  if (instance.planned !== instance.host && instance.host) flags.push(h("span", { class: "flag" }, `planned on ${instance.planned}`));
  return h("div", { class: "instance" }, h("h6", {}, `instance ${instance.index}`, flags), h("div", { class: "replicas" }, replicas));
}

function pipeline(found) {
  const stages = found.stages.map((name, stage) => [
    stage ? h("span", { class: "arrow", "aria-hidden": "true" }, "→") : null,
    h("div", { class: "stage" }, h("b", {}, `IPU ${found.ipus[stage]}`), h("span", {}, `from ${name}`)),
  ]);
  return [h("h4", {}, `Pipeline of a replica, ${found.execution}`), h("div", { class: "stages" }, stages), schedule(found)];
}

function schedule(found) {
  if (!found.cycles) return null;
  const columns = Math.max(8, Math.min(found.sections.length, Math.floor((Math.min(1180, document.documentElement.clientWidth) - 150) / 25)));
  const work = new Map(found.cells.map(([cycle, stage, what, micro]) => [`${cycle} ${stage} ${what}`, micro]));
  const sections = { "ramp-up": "ramp-up", main: "main part", "ramp-down": "ramp-down", update: "update" };
  const rows = found.stages.map((_, stage) => ["forward", "backward"].map((what) => {
    const cells = Array.from({ length: Math.min(columns, found.sections.length) }, (_unused, cycle) => {
      if (work.has(`${cycle} ${stage} update`)) return h("td", { class: "update", title: "weight update" }, "U");
      const micro = work.get(`${cycle} ${stage} ${what}`);
      const title = micro === undefined ? `cycle ${cycle}, ${sections[found.sections[cycle]]}: idle` : `cycle ${cycle}, ${sections[found.sections[cycle]]}: ${what} of micro-batch ${micro}`;
      return h("td", { class: micro === undefined ? "idle" : what, title }, micro === undefined ? "·" : String(micro));
    });
    return h("tr", {}, h("th", { scope: "row" }, what === "forward" ? `IPU ${found.ipus[stage]} fwd` : "bwd"), cells);
  }));
  const cut = found.cycles > columns ? ` The first ${columns} of ${found.cycles} cycles are drawn.` : "";
  const note = `Columns are cycles of one update, numbers micro-batches; ${found.accumulation} micro-batches take ${found.cycles} cycles.${cut}`;
  return [h("div", { class: "scroll" }, h("table", { class: "schedule" }, h("tbody", {}, rows))), h("p", { class: "hint" }, note)];
}
