// What the newest evaluation says of the predictions: confusions, precision and recall of the classes, calibration.
function predictionsOf(run) {
  const test = run.test;
  if (!test || !test.per_class) return h("p", { class: "empty" }, "This task returns no predictions with classes.");
  const name = (index) => test.classes[index] || String(index);
  return [
    h("p", { class: "hint" }, `${number(test.samples)} samples, after update ${number(test.update)}.`),
    errorsOf(test, name), confusionOf(test, name), classesOf(test, name), calibrationOf(test),
  ];
}

// The images of `--report-samples`: the wrong predictions with the highest confidence.
function errorsOf(test, name) {
  if (!test.errors) return [];
  const wrong = test.samples - test.per_class.samples.reduce((sum, count, index) => sum + (test.per_class.recall[index] || 0) * count, 0);
  const title = h("h4", {}, "Errors with the highest confidence");
  if (!test.errors.length) return [title, h("p", {}, "No sample has a wrong class.")];
  const figures = test.errors.map((each) => {
    const isKnown = isNumber(each.label_probability), label = name(each.label), predicted = name(each.predicted);
    const image = /^data:image\/(png|jpeg);base64,/.test(each.image || "") ? h("img", { src: each.image, alt: `sample ${each.sample}: ${label} taken for ${predicted}` }) : h("span", { class: "none" }, "not readable");
    const of = isKnown ? percent(each.label_probability) : "";
    return h("figure", {}, image, h("figcaption", {}, h("b", {}, label), of ? ` ${of}` : "", h("br"), "taken for ", h("b", { class: "bad" }, predicted), ` ${percent(each.confidence)}`, h("br"), h("span", { class: "note" }, `sample ${number(each.sample)}`)));
  });
  return [title, h("p", { class: "hint" }, `${test.errors.length} of ${counted(Math.round(wrong), "error")}, with the probabilities of both classes.`), h("div", { class: "errors" }, figures)];
}

function confusionOf(test, name) {
  const worst = (test.confused || []).slice(0, 10).map(([label, predicted, count]) => [name(label), name(predicted), number(count)]);
  const list = worst.length ? h("div", { class: "scroll" }, table(["class", "taken for", "samples"], worst, { class: "numbers" })) : h("p", {}, "No sample has a wrong class.");
  if (!test.confusion) return [h("h4", {}, "Most frequent errors"), list];
  const cell = (count, label, predicted) => {
    const share = count / Math.max(1, test.per_class.samples[label]);
    const colour = label === predicted ? "var(--forward)" : "var(--backward)";
    const title = `${name(label)} taken for ${name(predicted)}: ${number(count)} of ${number(test.per_class.samples[label])}`;
    return h("td", { title, style: count ? { background: `color-mix(in srgb, ${colour} ${Math.round(30 + 70 * share)}%, transparent)` } : {} }, count ? number(count) : "");
  };
  const head = h("tr", {}, h("th", {}, "class"), test.classes.map((each) => h("th", { scope: "col" }, each)));
  const rows = test.confusion.map((row, label) => h("tr", {}, h("th", { scope: "row" }, name(label)), row.map((count, predicted) => cell(count, label, predicted))));
  return [
    h("h4", {}, "Confusion matrix: a row per class, a column per prediction"),
    h("div", { class: "scroll" }, h("table", { class: "confusion" }, h("thead", {}, head), h("tbody", {}, rows))),
    h("h4", {}, "Most frequent errors"), list,
  ];
}

function classesOf(test, name) {
  const { samples, precision, recall } = test.per_class;
  const rows = samples.map((count, index) => [name(index), number(count), percent(precision[index]), percent(recall[index])]);
  return [h("h4", {}, "Classes"), h("div", { class: "scroll classes" }, table(["class", "samples", "precision", "recall"], rows, { class: "numbers" }))];
}

function calibrationOf(test) {
  const bins = test.calibration || [];
  if (!bins.length) return [];
  const size = 220, at = (value) => (size * value).toFixed(1);
  const most = Math.max(...bins.map((bin) => bin.samples));
  const points = bins.map((bin) => `<circle cx="${at(bin.confidence)}" cy="${at(1 - bin.accuracy)}" r="${(3 + 7 * Math.sqrt(bin.samples / most)).toFixed(1)}" fill="var(--accent)" fill-opacity="0.6"><title>${bin.samples} samples: confidence ${percent(bin.confidence)}, accuracy ${percent(bin.accuracy)}</title></circle>`);
  const picture = h("div", { class: "calibration", role: "img", "aria-label": "accuracy over confidence" });
  picture.innerHTML = `<svg viewBox="-12 -12 ${size + 24} ${size + 24}" width="${size + 24}" height="${size + 24}"><rect width="${size}" height="${size}" fill="none" stroke="var(--grid)"/><line x1="0" y1="${size}" x2="${size}" y2="0" stroke="var(--muted)" stroke-dasharray="4 4"/>${points.join("")}</svg>`;
  const rows = bins.map((bin) => [number(bin.samples), percent(bin.confidence), percent(bin.accuracy)]);
  return [
    h("h4", {}, "Calibration: accuracy (up) over confidence (right); on the line, they are equal"), picture,
    h("div", { class: "scroll" }, table(["samples", "confidence", "accuracy"], rows, { class: "numbers" })),
  ];
}
