// Curves over updates, samples or time: metrics of training and evaluation, throughput, waiting for data.
const AXES = {
  update: { column: 0, name: "updates", format: short },
  samples: { column: 1, name: "samples", format: short },
  time: { column: 2, name: "time of training", format: seconds },
};

function curveKeys() {
  const names = [];
  for (const run of runs) for (const name of [...run.metrics, ...run.evaluations.columns.slice(3)]) if (!names.includes(name)) names.push(name);
  return names;
}

function traceKeys() {
  const names = [];
  for (const run of runs) for (const name of run.traces) if (!names.includes(name)) names.push(name);
  return names;
}

function rateKeys() {
  const names = [];
  for (const run of runs) for (const name of ["samples_per_s", "data_wait_share", ...run.rates]) if (!names.includes(name) && run.curves.columns.includes(name)) names.push(name);
  return names;
}

const TITLES = { samples_per_s: "samples per second", data_wait_share: "waiting for data" };
const UNITS = { accuracy: " %", top5_accuracy: " %", calibration_error: " %", data_wait_share: " %" };
const titleOf = (name) => TITLES[name] || name.replace(/_per_s$/, " per second").replace(/_/g, " ");

function points(table, name, scale = 1) {
  const column = table.columns.indexOf(name), x = AXES[view.x].column;
  if (column < 0) return [];
  return table.rows
    .filter((row) => isNumber(row[x]))
    .map((row) => [row[x], isNumber(row[column]) && !(view.log && row[column] <= 0) ? scale * row[column] : null]);
}

// Exponential mean with the bias of its beginning removed.
function smoothed(data) {
  let mean = 0, weight = 0;
  return data.map(([x, y]) => {
    if (y === null) return [x, null];
    mean = view.smooth * mean + (1 - view.smooth) * y;
    weight = view.smooth * weight + (1 - view.smooth);
    return [x, mean / weight];
  });
}

function curveSeries(name) {
  const series = [], scale = name === "data_wait_share" ? 100 : 1;
  for (const run of shownRuns()) {
    const colour = runColour(run), data = points(run.curves, name, scale), label = runName(run);
    const line = { type: "line", showSymbol: data.length === 1, symbolSize: 5, connectNulls: false, color: colour, z: 3 };
    if (data.length) {
      const isRaw = view.smooth > 0;
      const style = { width: isRaw ? 1 : 1.5, opacity: isRaw ? 0.3 : 1 };
      series.push({ ...line, id: `${run.id}|training`, name: label, data, lineStyle: style, silent: isRaw });
      if (isRaw) series.push({ ...line, id: `${run.id}|smoothed`, name: `${label}, smoothed`, data: smoothed(data), lineStyle: { width: 2 } });
    }
    const evaluated = points(run.evaluations, name, scale);
    if (evaluated.length) {
      series.push({
        ...line, id: `${run.id}|evaluation`, name: `${label}, evaluation`, data: evaluated, showSymbol: true, symbol: "circle",
        symbolSize: 7, lineStyle: { width: 1.5, type: "dashed" }, itemStyle: { color: colour, borderColor: css("--panel"), borderWidth: 1 }, z: 4,
      });
    }
  }
  return series;
}

// The first seconds of a run have few calls, so that their rates scatter. The upper limit of the axis of a rate is at most
// three times its 95th percentile; the values above it are in the tooltips.
function upperLimit(series) {
  const values = series.flatMap((each) => each.data.map((point) => point[1])).filter(isNumber).sort((a, b) => a - b);
  const limit = 3 * values[Math.floor(0.95 * values.length)];
  return values.length >= 20 && limit > 0 && values[values.length - 1] > limit ? Number(limit.toPrecision(1)) : null;
}

// The same for all curves, so that the same zoom shows the same updates in all of them.
function extent() {
  const column = AXES[view.x].column;
  let least = Infinity, most = -Infinity;
  for (const run of shownRuns()) {
    for (const rows of [run.curves.rows, run.evaluations.rows]) {
      for (const row of rows) if (isNumber(row[column])) { least = Math.min(least, row[column]); most = Math.max(most, row[column]); }
    }
  }
  return least <= most ? [least, Math.max(most, least + 1e-9)] : [0, 1];
}

function curveTooltip(unit) {
  return (items) => {
    if (!items.length) return "";
    const axis = AXES[view.x];
    const lines = items
      .filter((item) => isNumber(item.value[1]))
      .map((item) => `${item.marker}${escaped(item.seriesName)}: <b>${number(item.value[1], 6)}${unit}</b>`
        + (item.value[0] === items[0].value[0] ? "" : ` <small>at ${escaped(axis.format(item.value[0]))}</small>`));
    const x = items[0].value[0];
    return [`${axis.name}: ${view.x === "time" ? seconds(x) : number(x, 9)}`, ...lines].join("<br>");
  };
}

function curveOption(name) {
  return (width) => {
    const axis = AXES[view.x], [least, most] = extent(), unit = UNITS[name] || "", base = chartBase();
    const zoom = view.zoom ? { startValue: view.zoom[0], endValue: view.zoom[1] } : { start: 0, end: 100 };
    const format = (value) => (isNumber(value) ? short(value) + unit : "");
    const series = curveSeries(name), limit = name.endsWith("_per_s") ? upperLimit(series) : null;
    return {
      ...base,
      tooltip: { ...base.tooltip, trigger: "axis", formatter: curveTooltip(unit), axisPointer: { type: "line", lineStyle: { color: css("--muted") } } },
      grid: { left: 8, right: 18, top: 14, bottom: 62, containLabel: true },
      xAxis: axisStyle({
        type: "value", min: least, max: most, name: axis.name, nameLocation: "middle", nameGap: 26, splitNumber: width < 500 ? 3 : 6,
        axisLabel: { color: css("--muted"), fontSize: 11, hideOverlap: true, formatter: (value) => axis.format(value), showMinLabel: true, showMaxLabel: false },
      }),
      yAxis: axisStyle({ type: view.log ? "log" : "value", scale: true, max: limit, axisLabel: { color: css("--muted"), fontSize: 11, formatter: format } }),
      toolbox: { show: true, itemSize: 0, right: -100, feature: { dataZoom: { yAxisIndex: "none", icon: { zoom: "path://", back: "path://" } } } },
      dataZoom: [
        { id: "inside", type: "inside", zoomOnMouseWheel: "ctrl", moveOnMouseMove: "shift", preventDefaultMouseMove: false, filterMode: "none", ...zoom },
        {
          id: "slider", type: "slider", height: 18, bottom: 8, showDetail: false, brushSelect: false, filterMode: "none", ...zoom,
          borderColor: css("--line"), fillerColor: css("--filler"), handleStyle: { color: css("--panel"), borderColor: css("--muted") },
          moveHandleSize: 0, dataBackground: { lineStyle: { color: css("--line") }, areaStyle: { color: css("--grid") } },
          selectedDataBackground: { lineStyle: { color: css("--muted") }, areaStyle: { color: css("--grid") } },
        },
      ],
      series,
    };
  };
}

const hasMouse = () => window.matchMedia("(hover: hover) and (pointer: fine)").matches;

// Dragging over a chart zooms into that range.
function selectWithMouse(chart) {
  if (hasMouse()) chart.dispatchAction({ type: "takeGlobalCursor", key: "dataZoomSelect", dataZoomSelectActive: true });
}

function followZoom(chart) {
  chart.group = "curves";
  chart.on("datazoom", () => {
    const [zoom] = chart.getOption().dataZoom.filter((each) => each.id === "slider");
    view.zoom = zoom.start <= 0 && zoom.end >= 100 ? null : [zoom.startValue, zoom.endValue];
    document.querySelector("#reset-zoom").disabled = view.zoom === null;
  });
  chart.getZr().on("dblclick", resetZoom);
}

function resetZoom() {
  view.zoom = null;
  document.querySelector("#reset-zoom").disabled = true;
  for (const [key, chart] of charts) if (key.startsWith("curve:")) chart.dispatchAction({ type: "dataZoom", start: 0, end: 100 });
}

function curvesSection() {
  const isPartial = runs.some((run) => run.curves.decimated);
  const names = curveKeys(), rates = rateKeys();
  const hint = isPartial ? " Long runs are drawn with the minima and maxima of intervals of updates." : "";
  if (!names.length && !rates.length) return [h("p", { class: "empty" }, "No update is done yet.")];
  return [
    h("p", { class: "hint" }, `Solid: training. Dashed with points: evaluation.${hint} Drag over a chart to zoom, double-click to reset.`),
    h("div", { class: "charts" }, [...names, ...traceKeys()].map((name) => figure(`curve:${name}`, titleOf(name), UNITS[name] ? "in percent" : "", 320, curveOption(name)))),
  ];
}

function ratesSection() {
  const notes = {
    samples_per_s: "of all replicas; over the last second of training; the first call of a process includes the compilation",
    data_wait_share: "share of the time of the calls, in percent",
  };
  return [h("div", { class: "charts" }, rateKeys().map((name) => figure(`curve:${name}`, titleOf(name), notes[name] || "of all replicas", 280, curveOption(name))))];
}
