"use strict";
// Curves, drawn by uPlot. A chart is made when it is first seen.

const SHOW_POINTS = 25; // a curve of at most so many points shows them, and is not smoothed
const MOST_READ = 4; // values in a caption
const ROLLOUTS = [1, 2, 5].flatMap((n) => [1, 10, 100, 1e3, 1e4, 1e5, 1e6].map((size) => n * size)).sort((a, b) => a - b); // steps between ticks
const SOURCE = /^rollout\/([^/]+)\/(reward_mean|pass_rate)$/; // of a prompt mix
const TITLES = {
  "rollout/reward_mean": ["Reward", "mean of a rollout"], "rollout/response_length_mean": ["Response length", "tokens"], "train/entropy": ["Entropy", "nats a token"],
  "rollout/truncated_frac": ["Cut responses", "share"], "train/ppo_kl": ["KL to the policy that sampled", "nats a token"], "train/kl": ["KL to the reference", "nats a token"],
  "train/grad_norm": ["Gradient norm", "before clipping"], "rollout/train_rollout_log_prob_diff_mean": ["Trainer against engine", "mean difference of log-probs"],
  "reward/zero_spread_group_frac": ["Groups of equal rewards", "share; they train nothing"], "perf/step_s": ["Time of a rollout", "seconds"], "perf/mfu": ["Model FLOPs utilisation", "share of the peak"],
  "perf/actor_train_tflops": ["Compute of the update", "TFLOP/s a device"], "perf/tokens_per_s_per_device": ["Throughput", "tokens/s a device"],
};
const chartSettings = { smoothing: Number(remembered("smoothing", "0.6")), log: false };
const openCharts = new Set();
const seen = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    if (!entry.isIntersecting) continue;
    seen.unobserve(entry.target);
    entry.target.draw();
  }
}, { rootMargin: "200px" });
addEventListener("beforeprint", () => {
  for (const plot of document.querySelectorAll(".plot")) {
    seen.unobserve(plot);
    if (!plot.chart) plot.draw();
  }
});
const resized = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    const width = target.clientWidth;
    if (target.chart && width && Math.abs(width - target.chart.width) > 1) target.chart.setSize({ width, height: target.chart.height });
  }
});

/** Exponential moving average without its bias to 0 at the beginning; nulls stay. */
function smoothed(values, factor) {
  let sum = 0, weight = 0;
  return values.map((value) => {
    if (value === null || value === undefined) return null;
    sum = factor * sum + (1 - factor) * value;
    weight = factor * weight + (1 - factor);
    return sum / weight;
  });
}

/** The values of the series at the cursor, or their last ones: [colour, name, text] each. */
function readout(entries, step, most = MOST_READ) {
  const shown = entries.slice(0, most).map(([colour, name, text]) => el("span", {}, report.runs.length > 1 || entries.length > 1 ? el("span", { class: "swatch", style: `background:${colour}`, title: name }) : null, text));
  return [...shown, entries.length > most ? el("span", { class: "muted", text: `+${entries.length - most}` }) : null, el("span", { class: "muted", text: step === null ? "" : `rollout ${step}` })];
}

/** A figure that draws `build(parent)` -> uPlot once it is in view. */
function lazyFigure(caption, description, build, tall) {
  const plot = el("div", { class: tall ? "plot tall" : "plot", role: "img", "aria-label": description });
  plot.draw = () => {
    plot.chart = build(plot);
    openCharts.add(plot.chart);
    resized.observe(plot);
  };
  seen.observe(plot);
  return el("figure", {}, el("figcaption", {}, caption), plot);
}

function closeCharts() {
  for (const chart of openCharts) chart.destroy();
  openCharts.clear();
  seen.disconnect();
  resized.disconnect();
}

function axes() {
  const common = { stroke: cssColour("--fg"), grid: { stroke: cssColour("--line"), width: 1 }, ticks: { stroke: cssColour("--line") } };
  const widest = (u, labels) => Math.ceil(26 + 7 * (labels || [""]).reduce((size, text) => Math.max(size, text.length), 0));
  return [{ ...common, incrs: ROLLOUTS, size: 34 }, { ...common, size: widest, values: (_, ticks) => ticks.map((t) => (t === null ? "" : number(Number(t.toPrecision(6))))) }];
}

/** The range of an axis: uPlot's, but for one value alone, of which it would show 0 to 100 for 0. */
function fitted(u, low, high) {
  if (low === null) return [0, 1];
  if (low < high) return uPlot.rangeNum(low, high, 0.1, true);
  return low === 0 ? [0, 1] : [low - Math.abs(low) / 2, low + Math.abs(low) / 2];
}

/** Red lines where a value was not finite. */
function badMarks(metric) {
  return {
    hooks: {
      draw: (u) => {
        u.ctx.save();
        u.ctx.strokeStyle = cssColour("--bad");
        u.ctx.lineWidth = 2 * devicePixelRatio;
        for (const run of report.runs)
          for (const step of run.bad[metric] || []) {
            const x = u.valToPos(step, "x", true);
            u.ctx.beginPath();
            u.ctx.moveTo(x, u.bbox.top);
            u.ctx.lineTo(x, u.bbox.top + u.bbox.height);
            u.ctx.stroke();
          }
        u.ctx.restore();
      },
    },
  };
}

function describe(metric) {
  const parts = report.runs.map((run) => {
    const values = (run.metrics[metric] || []).filter((value) => value !== null);
    if (!values.length) return run.name + ": no finite value";
    return `${run.name}: first ${number(values[0])}, last ${number(values[values.length - 1])}, ` +
      `lowest ${number(values.reduce((a, b) => Math.min(a, b)))}, highest ${number(values.reduce((a, b) => Math.max(a, b)))}`;
  });
  return `${metric} by rollout. ${parts.join("; ")}`;
}

/** [title, unit] of a metric as people say it; none for most. */
function titleOf(metric) {
  const set = /^eval\/(.*)\/mean$/.exec(metric);
  const source = SOURCE.exec(metric);
  if (source) return [`${source[2] === "pass_rate" ? "Pass rate" : "Reward"}: ${source[1]}`, "a source of the prompts"];
  return set ? [`Evaluation: ${set[1]}`, ""] : TITLES[metric] || null;
}

function lastOf(run, metric) {
  const values = run.metrics[metric] || [];
  for (let k = values.length - 1; k >= 0; k--) if (values[k] !== null) return [run.steps[k], values[k]];
  return [null, null];
}

/** The curves of one metric, of all runs, over the rollout. The caption has the values: the last, or those at the cursor. */
function metricFigure(metric, tall) {
  const bad = report.runs.reduce((count, run) => count + (run.bad[metric] || []).length, 0);
  const title = titleOf(metric);
  const values = el("span", { class: "values" });
  const caption = [el("span", { class: "title", text: title ? title[0] : metric }), values, title ? el("span", { class: "name", text: metric + (title[1] ? `, ${title[1]}` : "") }) : null,
    bad ? el("span", { class: "bad", text: `${bad} not finite` }) : null];
  const latest = report.runs.map((run, i) => [runColour(i), run.name, lastOf(run, metric)]).filter(([, , [step]]) => step !== null);
  const showLast = () => values.replaceChildren(...readout(latest.map(([colour, name, [, value]]) => [colour, name, number(value)]), latest.length === 1 ? latest[0][2][0] : null).filter(Boolean));
  showLast();
  const follow = { hooks: { setCursor: (u) => {
    const i = u.cursor.idx;
    if (i === null || i === undefined) return showLast();
    const entries = report.runs.map((run, k) => [runColour(k), run.name, number(u.data[u.rawColumns[k]][i])]);
    values.replaceChildren(...readout(entries, u.data[0][i]).filter(Boolean));
  } } };
  return lazyFigure(caption, describe(metric), (parent) => {
    const steps = [...new Set(report.runs.flatMap((run) => run.steps))].sort((a, b) => a - b);
    const place = new Map(steps.map((step, i) => [step, i]));
    const columns = [steps], series = [{ label: "rollout" }], rawColumns = [];
    const { smoothing, log } = chartSettings;
    report.runs.forEach((run, i) => {
      const raw = new Array(steps.length).fill(null);
      (run.metrics[metric] || []).forEach((value, k) => {
        if (value !== null && !(log && value <= 0)) raw[place.get(run.steps[k])] = value;
      });
      const count = raw.filter((value) => value !== null).length;
      const smooth = smoothing > 0 && count > SHOW_POINTS; // a few evaluations are read as they are
      const common = { spanGaps: true, stroke: runColour(i), value: (_, v) => number(v), points: { show: count <= SHOW_POINTS, size: 5 } };
      rawColumns.push(columns.length);
      columns.push(raw);
      series.push({ ...common, label: run.name, width: smooth ? 1 : 2, alpha: smooth ? 0.4 : 1 });
      if (smooth) {
        columns.push(smoothed(raw, smoothing));
        series.push({ ...common, label: run.name + ", smoothed", width: 2.5, points: { show: false } });
      }
    });
    const options = {
      width: parent.clientWidth || 360, height: tall ? 260 : 190, series, axes: axes(), plugins: [badMarks(metric), follow],
      scales: { x: { time: false }, y: log ? { distr: 3 } : { range: fitted } }, cursor: { sync: { key: "rollout" } }, legend: { show: false },
    };
    const chart = new uPlot(options, null, parent);
    chart.rawColumns = rawColumns;
    chart.setData(columns);
    return chart;
  }, tall);
}

/** Seconds by phase of one run, stacked. */
function phasesFigure(run) {
  const names = Object.keys(run.metrics).filter((name) => /^perf\/\w+_s$/.test(name) && !/_per_s$|^perf\/(step|sampling)_s$/.test(name));
  const order = Object.keys(PHASE_COLOURS).map((phase) => `perf/${phase}_s`);
  names.sort((a, b) => (order.indexOf(a) + 1 || 99) - (order.indexOf(b) + 1 || 99));
  if (!names.length) return el("p", { class: "muted", text: "No phase was timed." });
  const last = run.steps.map((step, i) => [step, i]).filter(([step]) => step > 0);
  const description = "Seconds by phase and rollout: " + names.map((name) => {
    const values = run.metrics[name].filter((value) => value !== null);
    return `${name} ${seconds(values.reduce((a, b) => a + b, 0))} in all`;
  }).join(", ");
  const values = el("span", { class: "values" });
  const entries = (secondsOf) => names.map((name, k) => [phaseColour(name.slice(5, -2), k), name, `${name.slice(5, -2)} ${duration(secondsOf(name))}`]);
  const showMean = () => {
    const mean = (name) => last.reduce((sum, [, i]) => sum + (run.metrics[name][i] || 0), 0) / (last.length || 1);
    values.replaceChildren(...readout(entries(mean), null, names.length).filter(Boolean), el("span", { class: "muted", text: "mean" }));
  };
  showMean();
  const follow = { hooks: { setCursor: (u) => {
    const j = u.cursor.idx;
    if (j === null || j === undefined) return showMean();
    values.replaceChildren(...readout(entries((name) => run.metrics[name][last[j][1]] || 0), last[j][0], names.length).filter(Boolean));
  } } };
  return lazyFigure([el("span", { class: "title", text: "Seconds by phase, stacked" }), values], description, (parent) => {
    const sums = new Array(last.length).fill(0);
    const columns = [], series = [];
    names.forEach((name, k) => {
      last.forEach(([, i], j) => { sums[j] += run.metrics[name][i] || 0; });
      columns.unshift(sums.slice());
      const colour = phaseColour(name.slice(5, -2), k);
      series.unshift({ label: name.slice(5, -2), stroke: colour, fill: colour, width: 1, points: { show: false } });
    });
    return new uPlot({
      width: parent.clientWidth || 360, height: 260, axes: axes(), scales: { x: { time: false }, y: { range: (u, low, high) => [0, high || 1] } }, plugins: [follow],
      series: [{ label: "rollout" }, ...series], cursor: { sync: { key: "rollout" } }, legend: { show: false },
    }, [last.map(([step]) => step), ...columns], parent);
  }, true);
}
