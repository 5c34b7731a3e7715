// Parallel coordinates of many runs: an axis for each setting that differs, and for the results; a line for each run.
const PARALLEL_FROM = 6, MOST_AXES = 14;

function parallelOf() {
  if (shownRuns().length < PARALLEL_FROM) return null;
  const axes = parallelAxes();
  if (axes.length < 2) return null;
  const note = `A line for each run. Drag along an axis to select runs; a click on the axis shows all of them.${axes.isPartial ? ` The first ${MOST_AXES} axes.` : ""}`;
  return figure("parallel", "Settings and results", note, isNarrow() ? 64 * axes.length + 40 : 340, (width) => parallelOption(axes, width));
}

const isNarrow = () => window.innerWidth < 700;

// {name, values: [of each run], isResult}; the results are the last axes.
function parallelAxes() {
  const shown = shownRuns(), keyOf = (result) => `${result.split} ${result.name}`;
  const settings = differentSettings().filter((name) => name !== "run.run_dir").map((name) => ({ name: name.split(".").slice(1).join(".") || name, values: shown.map((run) => run.config[name]) }));
  const results = [...new Set(shown.flatMap((run) => run.results.map(keyOf)))].map((key) => {
    const found = shown.map((run) => run.results.find((result) => keyOf(result) === key) || {});
    const isBest = found.some((result) => isNumber(result.best));
    return { name: `${key}, ${isBest ? "best" : "last"}`, values: found.map((result) => (isBest ? result.best : result.last)), isResult: true };
  }).filter((axis) => axis.values.some(isNumber));
  const kept = settings.slice(0, Math.max(2, MOST_AXES - results.length)), axes = [...kept, ...results].slice(0, MOST_AXES);
  axes.isPartial = axes.length < settings.length + results.length;
  return axes;
}

function parallelOption(axes, width) {
  const shown = shownRuns(), base = chartBase(), muted = css("--muted"), isDown = isNarrow();
  const room = isDown ? width - 40 : Math.max(60, (width - 100) / (axes.length - 1));
  const parallelAxis = axes.map((axis, dim) => {
    const known = axis.values.filter((value) => value !== null && value !== undefined), isNumeric = known.length > 0 && known.every(isNumber);
    const isLog = isNumeric && Math.min(...known) > 0 && Math.max(...known) >= 100 * Math.min(...known);
    const data = isNumeric ? null : [...new Set(axis.values.map(settingText))].sort((one, other) => compared(one, other, false));
    return axisStyle({
      dim, name: axis.name, splitNumber: isDown ? 3 : 5, type: isNumeric ? (isLog ? "log" : "value") : "category", ...(data ? { data } : { scale: true }), nameGap: isDown ? 8 : 14,
      nameLocation: isDown ? "start" : "end", nameTruncate: { maxWidth: isDown ? 110 : room - 6, ellipsis: "…" }, nameTextStyle: { color: axis.isResult ? css("--text") : muted, fontSize: 11, fontWeight: axis.isResult ? "bold" : "normal" },
      axisLabel: { color: muted, fontSize: 10, hideOverlap: true, ...(isNumeric ? { formatter: short } : { width: room - 14, overflow: "truncate" }) },
      areaSelectStyle: { width: 16, color: css("--accent"), opacity: 0.25, borderColor: css("--accent") },
    });
  });
  const series = shown.map((run, index) => ({
    type: "parallel", id: run.id, name: runName(run), smooth: false, inactiveOpacity: 0.06, activeOpacity: 1, emphasis: { lineStyle: { width: 4 } },
    lineStyle: { color: runColour(run), width: 2, opacity: 0.8 },
    data: [axes.map((axis, dim) => (parallelAxis[dim].type === "category" ? settingText(axis.values[index]) : isNumber(axis.values[index]) ? axis.values[index] : "-"))],
  }));
  const facts = (index) => axes.map((axis) => `${escaped(axis.name)}: <b>${escaped(isNumber(axis.values[index]) ? number(axis.values[index]) : settingText(axis.values[index]))}</b>`).join("<br>");
  return {
    ...base,
    tooltip: { ...base.tooltip, trigger: "item", formatter: (item) => `${item.marker}${escaped(item.seriesName)}<br>${facts(item.seriesIndex)}` },
    parallel: isDown ? { left: 116, right: 24, top: 18, bottom: 30, layout: "vertical" } : { left: 50, right: 60, top: 34, bottom: 16, layout: "horizontal" },
    parallelAxis, series,
  };
}
