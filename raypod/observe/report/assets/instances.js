// Per instance: where the time of a call goes, slow instances, and the calls over the run.
function instancesOf(run) {
  const calls = run.calls;
  if (!calls) return [h("p", { class: "empty" }, "No times of calls are recorded yet: they are written every 10 seconds and at the end.")];
  const many = calls.instances.length;
  const parts = [
    figure(`calls:${run.id}`, "mean time of a call per instance", "bars of equal length: all instances end a call together; a slow one waits less for the others", 60 + Math.max(60, Math.min(24, 900 / many) * many + 20), meanOption(run)),
    figure(`windows:${run.id}`, "calls over the run", "median and 95th percentile of the median instance, and the slowest call of all", 260, windowsOption(run)),
  ];
  if (many > 1) {
    parts.splice(1, 0, figure(`heat:${run.id}`, "busy time over the run", "of each instance, relative to the median of all: above 1 the others wait for it", 96 + Math.max(50, Math.min(24, 900 / many) * many), heatOption(run)));
  }
  return [h("div", { class: "charts" }, parts), instanceTable(run)];
}

const isSlow = (run, total) => isNumber(total.busy_ratio) && total.busy_ratio >= run.calls.straggler_ratio;

function instanceTable(run) {
  const hosts = new Map(run.instances.map((each) => [each.instance, each]));
  const rows = run.calls.totals.map((total) => {
    const known = hosts.get(total.instance) || {};
    const ratio = isNumber(total.busy_ratio) ? `${total.busy_ratio.toFixed(2)} ×` : "–";
    return [
      String(total.instance), known.host || "–", number(total.calls), seconds(total.p50_s), seconds(total.p95_s), seconds(total.slowest_s),
      seconds(total.busy_s), { content: isSlow(run, total) ? h("strong", { class: "bad" }, `${ratio} slow`) : ratio },
      percent(total.data_wait_share), percent(total.peer_wait_share), known.lost ? h("strong", { class: "bad" }, `${known.lost} ×`) : "0",
    ];
  });
  const head = ["instance", "host", "calls", "median", "p95", "slowest", "busy", "busy / median of all", "waits for data", "waits for others", "lost"];
  const note = `The first call of a process, which compiles, is not counted. Busy: the time of a call without the wait for other instances. Slow: at least ${run.calls.straggler_ratio} times the median.`;
  return [h("div", { class: "scroll" }, table(head, rows, { class: "numbers" })), h("p", { class: "hint" }, note)];
}

function meanOption(run) {
  return (width) => {
    const totals = run.calls.totals, base = chartBase(), colours = PHASES[theme()];
    const label = totals.length > 16 ? "" : "instance ";
    const data = (total) => (total.data_wait_share || 0) * (total.mean_s || 0);
    const peer = (total) => (total.peer_wait_share || 0) * (total.mean_s || 0);
    const parts = [
      ["computing", colours.training, (total) => Math.max(0, (total.mean_s || 0) - data(total) - peer(total))],
      ["waiting for data", colours.saving, data],
      ["waiting for other instances", colours.starting, peer],
    ];
    return {
      ...base,
      tooltip: {
        ...base.tooltip, trigger: "axis", axisPointer: { type: "shadow" },
        formatter: (items) => [`instance ${escaped(items[0].name)}`, ...items.map((item) => `${item.marker}${item.seriesName}: <b>${seconds(item.value)}</b>`)].join("<br>"),
      },
      legend: { top: 0, left: 0, itemWidth: 14, itemHeight: 10, textStyle: { color: css("--text"), fontSize: 11 }, icon: "rect" },
      grid: { left: 8, right: 24, top: width < 460 ? 50 : 30, bottom: 24, containLabel: true },
      xAxis: axisStyle({ type: "value", splitNumber: 4, axisLabel: { color: css("--muted"), fontSize: 11, hideOverlap: true, formatter: seconds } }),
      yAxis: axisStyle({ type: "category", inverse: true, data: totals.map((total) => String(total.instance)), axisLabel: { color: css("--muted"), fontSize: 11, formatter: (index) => `${label}${index}` }, splitLine: { show: false } }),
      series: parts.map(([name, color, value]) => ({ id: name, name, type: "bar", stack: "call", color, barMaxWidth: 18, data: totals.map(value) })),
    };
  };
}

function median(values) {
  const known = values.filter(isNumber).sort((a, b) => a - b), half = known.length >> 1;
  if (!known.length) return null;
  return known.length % 2 ? known[half] : (known[half - 1] + known[half]) / 2;
}

function windowsOption(run) {
  return (width) => {
    const calls = run.calls, base = chartBase(), colours = PALETTE[theme()];
    const across = (values, fold) => calls.end_s.map((end, window) => [end, fold(values.map((each) => each[window]))]);
    const most = (values) => { const known = values.filter(isNumber); return known.length ? Math.max(...known) : null; };
    const lines = [
      ["median", across(calls.p50_s, median), colours[0], "solid"],
      ["95th percentile", across(calls.p95_s, median), colours[1], "dashed"],
      ["slowest", across(calls.slowest_s, most), colours[6], "dotted"],
    ];
    return {
      ...base,
      tooltip: {
        ...base.tooltip, trigger: "axis",
        formatter: (items) => [`until ${seconds(items[0].value[0])} after the start`, ...items.map((item) => `${item.marker}${item.seriesName}: <b>${seconds(item.value[1])}</b>`)].join("<br>"),
      },
      legend: { top: 0, left: 0, itemWidth: 22, itemHeight: 10, textStyle: { color: css("--text"), fontSize: 11 } },
      grid: { left: 8, right: 20, top: 40, bottom: 30, containLabel: true },
      xAxis: axisStyle({
        type: "value", min: run.timeline.generations[0].ready_s || 0, max: Math.max(run.timeline.end_s, 1e-9), splitNumber: width < 500 ? 3 : 6, name: "time since the start", nameLocation: "middle", nameGap: 26,
        axisLabel: { color: css("--muted"), fontSize: 11, hideOverlap: true, formatter: seconds, showMinLabel: true, showMaxLabel: false },
      }),
      yAxis: axisStyle({ type: "value", min: 0, axisLabel: { color: css("--muted"), fontSize: 11, formatter: seconds } }),
      series: lines.map(([name, data, color, type]) => ({ id: name, name, type: "line", data, color, symbolSize: 5, showSymbol: data.length < 40, lineStyle: { width: 1.8, type } })),
    };
  };
}

function heatOption(run) {
  return (width) => {
    const calls = run.calls, base = chartBase(), data = [];
    calls.end_s.forEach((_, window) => {
      const middle = median(calls.busy_s.map((each) => each[window]));
      calls.busy_s.forEach((each, row) => {
        if (isNumber(each[window]) && middle > 0) data.push([window, row, Number((each[window] / middle).toFixed(3))]);
      });
    });
    const colours = isDark() ? ["#1d4f7a", "#2b3138", "#b8860b", "#e4655d"] : ["#9cc9ee", "#f1f3f5", "#f0b64a", "#c9302c"];
    return {
      ...base,
      tooltip: {
        ...base.tooltip,
        formatter: (item) => {
          const [window, row, ratio] = item.value;
          return `instance ${calls.instances[row]}, until ${seconds(calls.end_s[window])}<br>busy <b>${seconds(calls.busy_s[row][window])}</b> per call, ${ratio} × the median`;
        },
      },
      grid: { left: 8, right: 16, top: 8, bottom: 66, containLabel: true },
      xAxis: axisStyle({
        type: "category", data: calls.end_s.map((end) => seconds(end)), splitLine: { show: false },
        axisLabel: { color: css("--muted"), fontSize: 11, hideOverlap: true, interval: Math.max(0, Math.ceil(calls.end_s.length / (width < 500 ? 3 : 6)) - 1) },
      }),
      yAxis: axisStyle({ type: "category", inverse: true, data: calls.instances.map(String), splitLine: { show: false } }),
      visualMap: {
        type: "continuous", min: 0.5, max: 2, calculable: false, orient: "horizontal", left: 0, bottom: 0, itemWidth: 12, itemHeight: 130,
        text: ["2 × (slow)", "0.5 ×"], inRange: { color: [colours[0], colours[1], colours[2], colours[3]] }, textStyle: { color: css("--muted"), fontSize: 11 },
      },
      series: [{ id: "busy", type: "heatmap", data, itemStyle: { borderColor: css("--panel"), borderWidth: calls.end_s.length > 100 ? 0 : 1 } }],
    };
  };
}
