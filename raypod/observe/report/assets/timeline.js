// The generations of a run with their phases, saves, evaluations, faults and repairs; and where the start-up time went.
const MARKS = {
  checkpoint_saved: { name: "saved", symbol: "triangle", size: 8, colour: "saving" },
  checkpoint_failed: { name: "not saved", symbol: "triangle", size: 12, colour: "repairing" },
  evaluation_done: { name: "evaluated", symbol: "circle", size: 8, colour: "evaluating" },
  instance_lost: { name: "instance lost", symbol: "diamond", size: 14, colour: "repairing" },
  instance_warned: { name: "warning", symbol: "rect", size: 9, colour: "saving" },
  repaired: { name: "repaired", symbol: "diamond", size: 14, colour: "evaluating" },
  resized: { name: "resized", symbol: "roundRect", size: 12, colour: "evaluating" },
  stopped_early: { name: "stopped early", symbol: "rect", size: 9, colour: "ending" },
  process_failed: { name: "failed", symbol: "diamond", size: 16, colour: "repairing" },
  process_interrupted: { name: "interrupted", symbol: "rect", size: 11, colour: "saving" },
  process_preempted: { name: "preempted", symbol: "rect", size: 11, colour: "saving" },
  run_ended: { name: "ended", symbol: "rect", size: 9, colour: "training" },
};
const CAUSES = { started: "started", resumed: "resumed", repaired: "after a repair" };
const IN_TABLE = ["instance_lost", "instance_warned", "repaired", "resized", "checkpoint_failed", "stopped_early", "process_failed",
  "process_interrupted", "process_preempted"];

function timelineOf(run) {
  const timeline = run.timeline;
  if (!timeline.generations.length) return [h("p", { class: "empty" }, "The event log of this run is empty.")];
  const rows = timeline.generations.length;
  return [
    phaseBar(run),
    markList(run),
    figure(`timeline:${run.id}`, "generations", "one row for each start and each repair; boundaries within a colour are segments; select a range below to zoom", 96 + Math.max(10, Math.min(40, 560 / rows)) * rows, timelineOption(run)),
    eventTable(run),
  ];
}

function phaseBar(run) {
  const phases = Object.entries(run.timeline.phase_s).filter(([, value]) => value > 0);
  const total = phases.reduce((sum, [, value]) => sum + value, 0) || 1, colours = PHASES[theme()];
  const bar = phases.map(([name, value]) => h("span", { style: { flexGrow: value / total, background: colours[name] || css("--muted") } }));
  const words = phases.map(([name, value]) => h("li", {}, swatch(colours[name] || css("--muted")), `${name} ${seconds(value)} (${percent(value / total)})`));
  return h("div", { class: "phases" }, h("div", { class: "bar", "aria-hidden": "true" }, bar), h("ul", {}, words));
}

const GLYPHS = { triangle: "▲", diamond: "◆", circle: "●", rect: "■" };

function markList(run) {
  const kinds = Object.keys(MARKS).filter((kind) => run.timeline.counts[kind]), colours = PHASES[theme()];
  const glyph = (kind) => h("span", { "aria-hidden": "true", style: { color: colours[MARKS[kind].colour] } }, GLYPHS[MARKS[kind].symbol]);
  return h("ul", { class: "marks" }, kinds.map((kind) => h("li", {}, glyph(kind), ` ${MARKS[kind].name}: ${number(run.timeline.counts[kind])}`)));
}

function eventTable(run) {
  const marks = run.timeline.marks.filter(([kind]) => IN_TABLE.includes(kind)), shown = marks.slice(-200);
  if (!shown.length) return h("p", { class: "hint" }, "No instance was lost or gave a warning, and no checkpoint failed.");
  const rows = shown.map(([kind, , at, update, text]) => [seconds(at), MARKS[kind].name, isNumber(update) ? number(update) : "–", text]);
  const left = marks.length > shown.length ? h("p", { class: "hint" }, `The newest ${shown.length} of ${marks.length}.`) : null;
  return [h("h4", {}, "Faults, warnings and repairs"), left, table(["time", "event", "update", "details"], rows, { class: "wide-last" })];
}

function drawSpan(parameters, api) {
  const row = api.value(0), begin = api.coord([api.value(1), row]), end = api.coord([api.value(2), row]);
  const height = Math.min(18, api.size([0, 1])[1] * 0.5), area = parameters.coordSys;
  const shape = echarts.graphic.clipRectByRect(
    { x: begin[0], y: begin[1] - height / 2, width: Math.max(1, end[0] - begin[0]), height },
    { x: area.x, y: area.y, width: area.width, height: area.height },
  );
  return shape && { type: "rect", shape, style: { fill: api.visual("color"), stroke: css("--panel"), lineWidth: shape.width > 4 ? 0.6 : 0 } };
}

function timelineOption(run) {
  return (width) => {
    const timeline = run.timeline, base = chartBase(), colours = PHASES[theme()];
    const labels = timeline.generations.map((each, row) => `${isNumber(each.generation) ? each.generation : row + 1}`);
    const phases = [...new Set(timeline.spans.map((span) => span[1]))];
    const spans = phases.map((phase) => ({
      id: `phase:${phase}`, name: phase, type: "custom", renderItem: drawSpan, color: colours[phase] || css("--muted"), encode: { x: [1, 2], y: 0 },
      data: timeline.spans.filter((span) => span[1] === phase).map(([row, , begin, end, update]) => [row, begin, end, update]),
    }));
    const kinds = [...new Set(timeline.marks.map((mark) => mark[0]))].filter((kind) => MARKS[kind]);
    const marks = kinds.map((kind) => ({
      id: `mark:${kind}`, name: MARKS[kind].name, type: "scatter", symbol: MARKS[kind].symbol, symbolSize: MARKS[kind].size, z: 5,
      color: colours[MARKS[kind].colour], itemStyle: { borderColor: css("--panel"), borderWidth: 1 }, symbolOffset: [0, -13], clip: false,
      data: timeline.marks.filter((mark) => mark[0] === kind).map(([, row, at, update, text]) => ({ value: [at, row], update, text })),
    }));
    const tooltip = (item) => {
      if (item.seriesType === "scatter") {
        const update = isNumber(item.data.update) ? `, after update ${number(item.data.update)}` : "";
        return `<b>${item.seriesName}</b> at ${seconds(item.value[0])}${update}<br>${escaped(item.data.text)}`;
      }
      const [row, begin, end, update] = item.value, generation = timeline.generations[row];
      const from = isNumber(update) ? ` from update ${number(update)} on` : "";
      return `generation ${labels[row]}, ${CAUSES[generation.cause]}<br>${item.marker}<b>${item.seriesName}</b>${from}<br>${seconds(begin)} – ${seconds(end)}: <b>${seconds(end - begin)}</b>`;
    };
    const gaps = timeline.gaps.map(([at, gap]) => ({ xAxis: at, label: { formatter: `paused ${seconds(gap)}`, position: "insideEndTop", color: css("--muted"), fontSize: 10 } }));
    if (spans.length && gaps.length <= 20) spans[0].markLine = { silent: true, symbol: "none", lineStyle: { color: css("--muted"), type: "dashed" }, data: gaps };
    return {
      ...base,
      tooltip: { ...base.tooltip, trigger: "item", formatter: tooltip },
      grid: { left: 8, right: 22, top: 26, bottom: 62, containLabel: true },
      xAxis: axisStyle({
        type: "value", min: 0, max: Math.max(timeline.end_s, 1e-9), name: "time since the start", nameLocation: "middle", nameGap: 26, splitNumber: width < 500 ? 3 : 8,
        axisLabel: { color: css("--muted"), fontSize: 11, hideOverlap: true, formatter: seconds, showMaxLabel: false },
      }),
      yAxis: axisStyle({ type: "category", inverse: true, data: labels, name: "generation", nameLocation: "start", nameGap: 4, nameTextStyle: { align: "left", color: css("--muted"), fontSize: 11 }, splitLine: { show: false } }),
      dataZoom: [{
        id: "slider", type: "slider", height: 18, bottom: 8, showDetail: false, brushSelect: true, filterMode: "none", borderColor: css("--line"), fillerColor: css("--filler"),
        handleStyle: { color: css("--panel"), borderColor: css("--muted") }, moveHandleSize: 0, showDataShadow: false,
      }],
      series: [...spans, ...marks],
    };
  };
}

// The steps of each start as a table with bars. Steps in the instances run at the same time in all of them.
function startsOf(run) {
  const starts = run.starts;
  if (!starts.length) return [h("p", { class: "empty" }, "The run has not started yet.")];
  return starts.slice(-6).map((start, position) => {
    const isRepair = start.cause === "repaired";
    const title = `${CAUSES[start.cause].replace("after a repair", "repair")}, generation ${start.generation || position + 1}: ${seconds(start.total_s)}`;
    const steps = start.steps.map(([name, value]) => [name.replace("in the instances: ", "in the slowest instance: "), value, name.startsWith("in the instances")]);
    const measured = steps.filter((step) => !step[2]).reduce((sum, step) => sum + step[1], 0);
    if (!isRepair && isNumber(start.total_s) && steps.length && start.total_s > measured) steps.push(["everything else", start.total_s - measured, false]);
    if (isRepair || !steps.length) for (const [index, each] of start.instances) for (const [name, value] of each) steps.push([`instance ${index}: ${name}`, value, true]);
    const most = Math.max(1e-9, ...steps.map((step) => step[1]));
    const rows = steps.map(([name, value, isInner]) => h("tr", { class: isInner ? "inner" : null },
      h("th", { scope: "row" }, name), h("td", { class: "time" }, seconds(value)),
      h("td", { class: "track", "aria-hidden": "true" }, h("span", { style: { width: `${Math.max(0.4, (100 * value) / most)}%`, background: isInner ? PHASES[theme()].starting : PHASES[theme()].training } }))));
    const first = run.summary && position === 0 && isNumber(run.summary.seconds_to_first_update) ? h("p", { class: "hint" }, `The first update was done ${seconds(run.summary.seconds_to_first_update)} after the command started.`) : null;
    return h("div", { class: "start" }, h("h4", {}, title), h("table", { class: "bars" }, h("tbody", {}, rows)), first);
  });
}
