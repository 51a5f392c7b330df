"use strict";
// The tabs other than the rollouts.

const KEY_METRICS = [
  "rollout/reward_mean", /^eval\/.*\/mean$/, "rollout/response_length_mean", "train/entropy", "rollout/truncated_frac", SOURCE,
  "train/ppo_kl", "train/kl", "train/grad_norm", "rollout/train_rollout_log_prob_diff_mean", "reward/zero_spread_group_frac", "perf/step_s", "perf/mfu", "perf/actor_train_tflops", "perf/tokens_per_s_per_device",
];
const COUNTERS = /(^health\/|^engine\/|failed|skipped|nonfinite|evict|restart|abort|truncat|dropped|rejected|filtered|stale|zero_spread|singleton|clip|retr)/;

const FIRST_CURVES = 4; // of KEY_METRICS, shown larger

/** Facts of a run, each with its name. */
function facts(run) {
  const last = run.steps.length ? run.steps[run.steps.length - 1] : 0;
  const wanted = run.config && run.config["--num-rollout"];
  const times = run.times.filter((time) => time !== null);
  const commit = run.environment && run.environment.commit;
  const change = (metric) => {
    const values = (run.metrics[metric] || []).filter((value) => value !== null);
    return values.length ? `${brief(values[0])} → ${brief(values[values.length - 1])}` : null;
  };
  const evaluations = Object.keys(run.metrics).filter((name) => /^eval\/.*\/mean$/.test(name)).slice(0, 2);
  return [
    ["Reward, first → last", change("rollout/reward_mean")],
    ...evaluations.map((name) => [`${titleOf(name)[0]}, first → last`, change(name)]),
    ["Rollouts", wanted ? `${last} of ${wanted}` : String(last)],
    ["Duration", times.length > 1 ? duration(times[times.length - 1] - times[0]) : null],
    ["Layout", run.world_size === 1 ? "1 process" : run.layout], ["Device", run.environment && run.environment.device],
    ["Commit", commit ? commit.slice(0, 10) + (commit.endsWith("-dirty") ? ", changed" : "") : null],
  ].filter(([, value]) => value);
}

function findings(run) {
  if (!run.alerts.length) return el("p", { class: "fine", text: "✓ Nothing that these checks know went wrong." });
  return el("ul", { class: "alerts" }, run.alerts.map((alert) => el("li", { class: alert.over ? "over" : alert.level },
    el("div", {}, el("span", { class: "level", text: alert.over ? "Over: " : alert.level === "error" ? "Error: " : "Warning: " }),
      alert.metric ? el("a", { href: "#curves/" + encodeURIComponent(alert.metric), text: alert.text }) : alert.text),
    alert.remedy ? el("p", { text: alert.remedy + (/[.?!]$/.test(alert.remedy) ? "" : ".") }) : null)));
}

function overviewPage() {
  const several = report.runs.length > 1;
  const parts = report.runs.map((run, i) => el("section", { class: "run" },
    several ? el("h2", {}, el("span", { class: "swatch", style: `background:${runColour(i)}` }), run.name) : null,
    el("dl", { class: "facts" }, facts(run).map(([name, value]) => el("div", {}, el("dt", { text: name }), el("dd", { text: value })))), findings(run)));
  const names = metricNames();
  const chosen = [...new Set(KEY_METRICS.flatMap((key) => names.filter((name) => (key instanceof RegExp ? key.test(name) : key === name))))];
  const alerted = [...new Set(report.runs.flatMap((run) => run.alerts.filter((alert) => !alert.over).map((alert) => alert.metric)))].filter((name) => name && names.includes(name) && !chosen.includes(name) && !name.startsWith("health/"));
  const first = chosen.slice(0, FIRST_CURVES), rest = [...alerted.slice(0, 4), ...chosen.slice(FIRST_CURVES)];
  return [...parts, el("h2", { text: several ? "Curves" : "How it went" }), el("div", { class: "charts large" }, first.map((name) => metricFigure(name, true))),
    ...answersOf(), rest.length ? [el("h2", { text: "More curves" }), el("div", { class: "charts" }, rest.map((name) => metricFigure(name)))] : []].flat();
}

/** What the model says: the best, a typical and the worst response of the first and the last recorded rollout of each run. */
function answersOf() {
  loadSamples();
  const c = samples.columns, parts = [];
  report.runs.forEach((run, index) => {
    const mine = [...Array(samples.size).keys()].filter((i) => c.run[i] === index && typeof c.reward[i] === "number");
    const rollouts = mine.map((i) => c.rollout[i]);
    const ends = [...new Set([rollouts.reduce((a, b) => Math.min(a, b), Infinity), rollouts.reduce((a, b) => Math.max(a, b), -Infinity)])].filter(Number.isFinite);
    if (!ends.length) return;
    const row = (which, i, first) => el("tr", { class: first ? "first" : null }, el("th", { scope: "row", text: which }), el("td", { class: "number", text: number(c.reward[i]) }),
      el("td", { "data-part": "prompt" }, el("pre", { class: "plain", text: shortened(samples.prompts[c.prompt[i]]) })), el("td", { "data-part": "the model says" }, el("a", { class: "answer", href: `#rollouts/${index}/${c.id[i]}`, text: shortened(c.response[i]) || "(empty)" })),
      el("td", { "data-part": "label" }, c.label[i] === null ? "" : el("pre", { class: "plain", text: shortened(c.label[i]) })));
    const tables = ends.map((rollout) => {
      const order = mine.filter((i) => c.rollout[i] === rollout).sort((a, b) => c.reward[b] - c.reward[a]);
      const which = [["best", order[0]], ["typical", order[order.length >> 1]], ["worst", order[order.length - 1]]];
      return [el("tr", {}, el("th", { class: "part", scope: "rowgroup", colspan: 5, text: `Rollout ${rollout}` })), which.map(([name, i], k) => row(name, i, k === 0))];
    });
    parts.push(scroller(`Responses of ${run.name}`, el("table", { class: "answers" }, report.runs.length > 1 ? el("caption", { text: run.name }) : null,
      el("thead", {}, el("tr", {}, [["response", ""], ["reward", "number"], ["prompt", ""], ["the model says", ""], ["label", ""]].map(([text, kind]) => el("th", { scope: "col", class: kind || null, text })))), tables.map((rows) => el("tbody", {}, rows.flat())))));
  });
  return parts.length ? [el("h2", { text: "What the model says" }), ...parts] : [];
}

const MOST_SHOWN = 300; // characters of a text in a table
function shortened(text) {
  return text.length > MOST_SHOWN ? text.slice(0, MOST_SHOWN) + " …" : text;
}

let curvesFilter = "";
function curvesPage(words) {
  const grid = el("div", { class: "charts" });
  const status = el("span", { class: "muted", role: "status" });
  const filter = el("input", { type: "search", value: words[0] ?? curvesFilter, placeholder: "reward, ^train/ ...", oninput: fill });
  const smoothing = el("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: chartSettings.smoothing, onchange: () => {
    chartSettings.smoothing = Number(smoothing.value);
    remember("smoothing", smoothing.value);
    fill();
  } });
  const log = el("input", { type: "checkbox", checked: chartSettings.log, onchange: () => { chartSettings.log = log.checked; fill(); } });
  function fill() {
    closeCharts();
    curvesFilter = filter.value;
    let test;
    try {
      const pattern = new RegExp(filter.value, "i");
      test = (name) => pattern.test(name);
    } catch {
      test = (name) => name.includes(filter.value);
    }
    const names = metricNames().filter(test);
    status.textContent = `${names.length} curves`;
    grid.replaceChildren(...names.map((name) => metricFigure(name)));
  }
  fill();
  return [el("div", { class: "controls" }, labelled("Filter", filter), labelled("Smoothing", smoothing), labelled("Logarithmic", log), status), grid];
}

let timeRun = 0, timePlace = 1000;
function timePage() {
  const run = report.runs[timeRun] || report.runs[0];
  const ranks = Object.keys(run.timeline);
  const picker = el("div", { class: "controls" }, runPicker(timeRun, (i) => { timeRun = i; showPage(); }));
  const parts = report.runs.length > 1 ? [picker, phasesFigure(run)] : [phasesFigure(run)];
  parts.push(...recordings(run, timeRun), el("h2", { text: "By rank" }));
  if (!ranks.length) {
    parts.push(el("p", { class: "muted", text: "Not recorded: add --record-timeline to the run to see when each rank was in which phase." }));
    return parts;
  }
  const start = Math.min(...ranks.map((rank) => run.timeline[rank][0][1]));
  const end = Math.max(...ranks.map((rank) => run.timeline[rank].at(-1)[1] + run.timeline[rank].at(-1)[2]));
  const steps = (run.metrics["perf/step_s"] || []).filter((value) => value !== null).sort((a, b) => a - b);
  const width = Math.min(end - start, 5 * (steps[steps.length >> 1] || (end - start) / 5));
  const holder = el("div", {});
  const slider = el("input", { type: "range", min: 0, max: 1000, value: timePlace, oninput: draw, "aria-label": "Place in the run" });
  function draw() {
    timePlace = Number(slider.value);
    const from = start + (Number(slider.value) / 1000) * Math.max(0, end - start - width);
    holder.replaceChildren(gantt(run, ranks, from, width, start));
  }
  draw();
  parts.push(el("div", { class: "controls" }, labelled("Place in the run", slider)), holder, rankTable(run, ranks));
  return parts;
}

/** Traces, snapshots and stacks, where somebody asked for them. The page is in the first run's folder. */
function recordings(run, i) {
  const parts = [], ranks = Object.keys(run.stacks);
  if (run.profile.length) {
    parts.push(el("h2", { text: "Traces and memory snapshots" }), el("p", { class: "muted", text: "Traces open in ui.perfetto.dev, snapshots in pytorch.org/memory_viz." }),
      el("ul", {}, run.profile.map((name) => el("li", {}, i === 0 && !isLive ? el("a", { href: "profile/" + encodeURIComponent(name), text: "profile/" + name }) : `${run.folder}/profile/${name}`))));
  }
  if (ranks.length) {
    parts.push(el("h2", { text: "Stacks of ranks" }), ranks.map((rank) => el("details", {}, el("summary", { text: "rank " + rank }), el("pre", { tabindex: 0, "aria-label": "Stacks of rank " + rank, text: run.stacks[rank] }))));
  }
  return parts.flat();
}

function gantt(run, ranks, from, width, start) {
  const height = 22, left = 88, total = 1000, slow = slowRanks(run, ranks);
  const svg = el("svg", { class: "gantt", viewBox: `0 0 ${total} ${ranks.length * height + 24}`, role: "img",
    "aria-label": `Phases of ${ranks.length} ranks from ${duration(from - start)} to ${duration(from - start + width)} after the start; ${slow.length ? "slow: rank " + slow.join(", ") : "no rank is slow"}; the table below has the sums` });
  const x = (time) => left + ((time - from) / width) * (total - left - 6);
  const used = new Set();
  ranks.forEach((rank, i) => {
    svg.append(el("text", { x: 4, y: i * height + 15, class: slow.includes(rank) ? "slow" : null, text: "rank " + rank + (slow.includes(rank) ? " slow" : "") }));
    for (const [phase, begin, length, busy] of run.timeline[rank]) {
      if (begin + length < from || begin > from + width) continue;
      used.add(phase);
      const a = Math.max(x(begin), left), b = Math.min(x(begin + length), total - 6);
      const full = Math.max(b - a, 0.6), share = length > 0 ? Math.min(1, busy / length) : 1, title = `${phase}, rank ${rank}: ${duration(length)}, of them ${duration(busy)} of processor time`;
      svg.append(el("g", {}, el("title", { text: title }), el("rect", { x: a, y: i * height + 3, width: full, height: height - 5, fill: phaseColour(phase, 0), "fill-opacity": 0.25 }),
        el("rect", { x: a, y: i * height + 3, width: full * share, height: height - 5, fill: phaseColour(phase, 0) })));
    }
  });
  [...used].forEach((phase, i) => {
    svg.append(el("rect", { x: left + i * 105, y: ranks.length * height + 8, width: 10, height: 10, fill: phaseColour(phase, 0) }),
      el("text", { x: left + 14 + i * 105, y: ranks.length * height + 17, text: phase }));
  });
  return svg;
}

function busySeconds(run, ranks) {
  return ranks.map((rank) => run.timeline[rank].reduce((sum, row) => sum + row[3], 0));
}

/** The ranks that the others wait for: they worked longer than most. */
function slowRanks(run, ranks) {
  const busy = busySeconds(run, ranks), usual = busy.slice().sort((a, b) => a - b)[(busy.length - 1) >> 1];
  return ranks.filter((_, i) => busy[i] > 1.3 * usual);
}

function rankTable(run, ranks) {
  const phases = [...new Set(ranks.flatMap((rank) => run.timeline[rank].map((row) => row[0])))];
  const sums = ranks.map((rank) => phases.map((phase) => run.timeline[rank].filter((row) => row[0] === phase).reduce((sum, row) => [sum[0] + row[2], sum[1] + row[3]], [0, 0])));
  const busy = busySeconds(run, ranks), slow = slowRanks(run, ranks);
  return scroller("Seconds of ranks of " + run.name, el("table", {},
    el("caption", { class: "muted", text: "Seconds of each phase, and in brackets those of the processor. In the picture, the full colour is work and the pale one is waiting: a slow rank works while the others wait." }),
    el("thead", {}, el("tr", {}, el("th", { text: "rank", scope: "col" }), phases.map((phase) => el("th", { class: "number", scope: "col", text: phase })), el("th", { class: "number", scope: "col", text: "busy" }))),
    el("tbody", {}, ranks.map((rank, i) => el("tr", {}, el("th", { scope: "row", text: rank }), sums[i].map((cell) => el("td", { class: "number", text: `${number(cell[0])} (${number(cell[1])})` })),
      el("td", { class: "number" }, slow.includes(rank) ? el("mark", { text: number(busy[i]) + " slow" }) : number(busy[i])))))));
}

const TOTALS = ["train/skipped_steps", "train/critic_skipped_steps", "engine/evictions", "perf/failed_saves"];

/** What must hold, and whether it did, for one run. */
function gatesTable(run, i) {
  const columns = ["state", "limit", "last", "highest", "rollouts in which it did not hold"];
  const rows = run.guards.map((guard) => el("tr", {}, el("th", { scope: "row" }, guard.metric ? el("a", { href: "#curves/" + encodeURIComponent("^" + guard.metric + "$"), text: guard.name }) : guard.name),
    el("td", { class: "state " + ({ held: "fine", "not looked at": "muted" }[guard.state] || "bad"), text: guard.state }),
    [guard.limit, guard.last, guard.highest].map((value) => el("td", { class: "number", text: number(value) })),
    el("td", { class: "number", text: guard.rollouts ? `${guard.breaches} of ${guard.rollouts}` : "-" })));
  return [el("h2", {}, "Guards", report.runs.length > 1 ? [" of ", el("span", { class: "swatch", style: `background:${runColour(i)}` }), run.name] : []),
    scroller("Guards of " + run.name, el("table", {}, el("thead", {}, el("tr", {}, el("th", { scope: "col", text: "guard" }), columns.map((text, k) => el("th", { class: k ? "number" : null, scope: "col", text })))), el("tbody", {}, rows)))];
}

/** What the certificates of a run say: where trainer, engine and transformers differ. */
function certificatesTable(run, i) {
  if (!run.certificates || !run.certificates.length) return [];
  const largest = (row) => Object.entries(row.differences).map(([name, [site, gap, limit]]) => `${name}: ${number(gap)} at ${site} (limit ${number(limit)})`).join("; ");
  const rows = run.certificates.map((row) => el("tr", {}, el("th", { scope: "row", text: row.rollout }),
    el("td", { class: "state " + (row.holds ? "fine" : "bad"), text: row.holds ? "all agree" : `${row.texts.length} found` }),
    el("td", { text: row.reference }), el("td", { text: largest(row) }), el("td", {}, row.texts.map((text) => el("div", { text })))));
  const columns = ["rollout", "state", "weights of the reference", "nearest to its limit", "findings"];
  return [el("h2", {}, "Certificates", report.runs.length > 1 ? [" of ", el("span", { class: "swatch", style: `background:${runColour(i)}` }), run.name] : []),
    scroller("Certificates of " + run.name, el("table", {}, el("thead", {}, el("tr", {}, columns.map((text) => el("th", { scope: "col", text })))), el("tbody", {}, rows)))];
}

function countersPage() {
  const names = metricNames().filter((name) => COUNTERS.test(name));
  const head = el("tr", {}, el("th", { scope: "col", text: "metric" }), report.runs.flatMap((run) => ["last", "highest", "rollouts above 0"].map((what) => el("th", { class: "number", scope: "col", text: report.runs.length > 1 ? `${what} (${run.name})` : what }))));
  const rows = names.map((name) => el("tr", {}, el("th", { scope: "row" }, el("a", { href: "#curves/" + encodeURIComponent("^" + name + "$"), text: name })), report.runs.flatMap((run) => {
    const values = (run.metrics[name] || []).filter((value) => value !== null);
    const above = values.filter((value, k) => value > (TOTALS.includes(name) && k ? values[k - 1] : 0)).length;
    const cells = values.length ? [number(values.at(-1)), number(values.reduce((a, b) => Math.max(a, b))), String(above)] : ["-", "-", "-"];
    return cells.map((text) => el("td", { class: "number", text }));
  })));
  return [...report.runs.flatMap(gatesTable), ...report.runs.flatMap(certificatesTable), el("h2", { text: "Counters" }), scroller("Counters", el("table", {}, el("thead", {}, head), el("tbody", {}, rows)))];
}

let settingsShown = "changed", settingsFilter = "";
function settingsPage() {
  const configs = report.runs.map((run) => run.config || {});
  const flags = [...new Set(configs.flatMap(Object.keys))].sort();
  const shown = (value) => (value === undefined ? "-" : typeof value === "string" ? value : JSON.stringify(value));
  const differs = (flag) => new Set(configs.map((config) => shown(config[flag]))).size > 1;
  const filter = el("input", { type: "search", value: settingsFilter, placeholder: "lr, rollout ...", oninput: fill });
  const which = el("select", { onchange: () => { settingsShown = which.value; fill(); } }, [["changed", "not the default, or differing"], ["differs", "differing between the runs"], ["all", "all"]].map(([value, text]) => el("option", { value, text, selected: settingsShown === value })));
  const body = el("tbody", {});
  function fill() {
    settingsFilter = filter.value;
    body.replaceChildren(...flags.filter((flag) => flag.includes(filter.value)).map((flag) => {
      const other = differs(flag), changed = report.runs.map((run) => (run.changed || []).includes(flag));
      if ((settingsShown === "differs" && !other) || (settingsShown === "changed" && !other && !changed.some(Boolean))) return null;
      return el("tr", {}, el("th", { scope: "row" }, flag, other ? " " : null, other ? el("span", { class: "badge", text: "differs" }) : null),
        configs.map((config, i) => el("td", {}, changed[i] ? el("mark", { text: shown(config[flag]) }) : shown(config[flag]))));
    }).filter(Boolean));
  }
  fill();
  return [el("div", { class: "controls" }, labelled("Filter", filter), labelled("Show", which), el("span", { class: "muted" }, "Marked: ", el("mark", { text: "not the default" }))),
    flags.length ? scroller("Settings", el("table", {}, el("thead", {}, el("tr", {}, el("th", { scope: "col", text: "flag" }), report.runs.map((run) => el("th", { scope: "col", text: run.name })))), body))
      : el("p", { class: "muted", text: "The runs have no run.json: they are of an earlier version." })];
}

function environmentPage() {
  return report.runs.map((run, i) => el("section", {},
    el("h2", {}, el("span", { class: "swatch", style: `background:${runColour(i)}` }), run.name),
    el("p", { class: "muted", text: run.folder }),
    run.argv ? [el("h3", { text: "Command line" }), el("pre", { tabindex: 0, "aria-label": "Command line", text: run.argv.join(" ") })] : null,
    run.warnings && run.warnings.length ? [el("h3", { text: "Warnings at the start" }), el("ul", {}, run.warnings.map((text) => el("li", { text })))] : null,
    run.notes && run.notes.length ? [el("h3", { text: "Notes" }), el("ul", {}, run.notes.map((text) => el("li", { text })))] : null,
    run.environment ? [el("h3", { text: "Environment" }), scroller("Environment of " + run.name, el("table", {}, el("tbody", {}, Object.entries(run.environment).map(([name, value]) => el("tr", {}, el("th", { scope: "row", text: name }), el("td", { text: value === null ? "-" : String(value) }))))))] : null,
    run.patches ? [el("h3", { text: "Patches of megatron-core" }), el("pre", { tabindex: 0, "aria-label": "Patches", text: run.patches })] : null));
}
