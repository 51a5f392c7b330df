"use strict";
// The recorded rollouts: a list that draws only the rows in view, and one sample with its tokens.

const ROW_HEIGHT = 52;
let samples = null;
const blocks = new Map();
const pictures = new Map(); // read blocks of them
const list = { order: [], sort: "newest", search: "", run: "", rollout: "", status: "", selected: -1, colour: "advantage" };
const SORTS = {
  newest: ["newest first", (c) => (a, b) => c.rollout[b] - c.rollout[a] || c.group[a] - c.group[b] || a - b],
  oldest: ["oldest first", (c) => (a, b) => c.rollout[a] - c.rollout[b] || c.group[a] - c.group[b] || a - b],
  best: ["highest reward", (c) => (a, b) => ranked(c.reward[b]) - ranked(c.reward[a])],
  worst: ["lowest reward", (c) => (a, b) => ranked(c.reward[a]) - ranked(c.reward[b])],
  longest: ["longest", (c) => (a, b) => c.length[b] - c.length[a]],
  shortest: ["shortest", (c) => (a, b) => c.length[a] - c.length[b]],
  spread: ["largest spread in the group", (c) => (a, b) => spreadOf(b) - spreadOf(a) || c.group[a] - c.group[b]],
};
const COLOURS = {
  advantage: ["advantage", "diverging"], log_prob: ["surprise: -log-prob of the engine", "rising"], diff: ["log-prob difference, trainer - engine", "diverging"],
  ratio: ["ratio, trainer / engine", "ratio"], kl: ["KL to the reference (k3)", "rising"], entropy: ["entropy", "rising"], value: ["value of the critic", "diverging"],
  importance: ["importance weight", "ratio"], token_reward: ["reward of the token", "diverging"], versions: ["weight version", "rising"], none: ["nothing", ""],
};

function ranked(reward) {
  return typeof reward === "number" ? reward : -Infinity;
}

function loadSamples() {
  if (samples) return samples;
  samples = dataOf("samples");
  const c = samples.columns;
  samples.size = c.id.length;
  samples.groups = new Map();
  for (let i = 0; i < samples.size; i++) {
    const key = c.run[i] + "/" + c.rollout[i] + "/" + c.group[i];
    if (!samples.groups.has(key)) samples.groups.set(key, []);
    samples.groups.get(key).push(i);
  }
  return samples;
}

function groupOf(i) {
  const c = samples.columns;
  return samples.groups.get(c.run[i] + "/" + c.rollout[i] + "/" + c.group[i]);
}

function spreadOf(i) {
  const rewards = groupOf(i).map((k) => samples.columns.reward[k]).filter((reward) => typeof reward === "number");
  return rewards.length ? Math.max(...rewards) - Math.min(...rewards) : -1;
}

function detailsOf(i) {
  const block = Math.floor(i / samples.per_block);
  if (!blocks.has(block)) {
    if (document.readyState === "loading" && !document.getElementById(`data-details-${block + 1}`)) return null; // still being read
    blocks.set(block, dataOf("details-" + block));
  }
  return blocks.get(block)[i % samples.per_block];
}

/** The sample's pictures; a block of them is read when one is shown. */
function picturesOf(places) {
  return el("div", { class: "pictures" }, places.map((place, k) => {
    const name = `Image ${k + 1} of ${places.length}`, block = "images-" + Math.floor(place / samples.images_per_block);
    if (place !== null && !pictures.has(block) && document.getElementById("data-" + block)) pictures.set(block, dataOf(block));
    const url = place === null ? null : (pictures.get(block) || [])[place % samples.images_per_block];
    return url ? el("img", { src: url, alt: name, title: name, loading: "lazy" }) : el("span", { class: "muted", text: name + " is not shown" });
  }));
}

function bytesOf(text) {
  return Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer;
}

/** [R] numbers of a field; null where it was not recorded. A number stands for all tokens. */
function valuesOf(details, name, length) {
  if (name === "ratio") {
    const diff = valuesOf(details, "diff", length);
    return diff && diff.map(Math.exp);
  }
  const packed = details[name];
  if (packed === undefined) return null;
  if (typeof packed === "number") return new Array(length).fill(packed);
  if (name === "tokens" || name === "versions") return Array.from(new Int32Array(bytesOf(packed)));
  if (name === "mask") return Array.from(new Uint8Array(bytesOf(packed)));
  const halves = new Uint16Array(bytesOf(packed)), bits = new Uint32Array(halves.length);
  halves.forEach((half, k) => { bits[k] = half << 16; });
  return Array.from(new Float32Array(bits.buffer));
}

function applyFilter() {
  const c = samples.columns, words = list.search.toLowerCase(), found = [];
  const promptHas = samples.prompts.map((prompt) => !words || prompt.toLowerCase().includes(words));
  for (let i = 0; i < samples.size; i++) {
    if (list.run !== "" && c.run[i] !== Number(list.run)) continue;
    if (list.rollout !== "" && c.rollout[i] !== Number(list.rollout)) continue;
    if (list.status !== "" && c.status[i] !== list.status) continue;
    if (words && !promptHas[c.prompt[i]] && !c.response[i].toLowerCase().includes(words) && !(c.label[i] || "").toLowerCase().includes(words)) continue;
    found.push(i);
  }
  list.order = found.sort(SORTS[list.sort][1](c));
}

function rolloutsPage(words) {
  loadSamples();
  if (!samples.size) {
    return [el("p", { text: "No rollout was recorded below the run's folder." }), el("p", { class: "muted" }, "Add ", el("code", { text: "--save-debug-rollout-data 'RUN_DIR/rollouts/{rollout_id}'" }), " to the run."),
      samples.problems.map((text) => el("p", { class: "muted", text }))];
  }
  const c = samples.columns;
  if (words.length === 2) {
    const wanted = c.id.findIndex((id, i) => String(id) === words[1] && c.run[i] === Number(words[0]));
    if (wanted >= 0) list.selected = wanted;
  }
  const status = el("span", { class: "muted", role: "status" });
  const box = el("div", { class: "list", role: "listbox", tabindex: 0, "aria-label": "Samples", id: "samples" });
  const inner = el("div", { role: "presentation" });
  box.append(inner);
  const detail = el("div", { class: "detail", "aria-live": "off" });
  const choice = (values, current, set) => {
    const select = el("select", { onchange: () => { set(select.value); refresh(); } }, values.map(([value, text]) => el("option", { value, text, selected: String(current) === String(value) })));
    return select;
  };
  const search = el("input", { type: "search", id: "search", value: list.search, placeholder: "text of prompt, response, label", oninput: () => { list.search = search.value; refresh(); } });
  const any = (values) => [["", "all"], ...values.map((value) => [value, String(value)])];

  function refresh() {
    applyFilter();
    status.textContent = `${list.order.length} of ${samples.size} samples` + (samples.left_out ? `, ${samples.left_out} others are left out (--samples)` : "");
    inner.setAttribute("style", `height:${list.order.length * ROW_HEIGHT}px`);
    draw();
  }
  function draw() {
    const first = Math.max(0, Math.floor(box.scrollTop / ROW_HEIGHT) - 5), count = Math.ceil((box.clientHeight || 600) / ROW_HEIGHT) + 10;
    inner.replaceChildren(...list.order.slice(first, first + count).map((i, k) => sampleRow(i, first + k)));
    const place = list.order.indexOf(list.selected);
    if (place >= first && place < first + count) box.setAttribute("aria-activedescendant", "row-" + place);
    else box.removeAttribute("aria-activedescendant");
  }
  function sampleRow(i, place) {
    return el("div", { class: "row", role: "option", id: "row-" + place, "aria-selected": String(i === list.selected), "aria-setsize": list.order.length, "aria-posinset": place + 1, style: `top:${place * ROW_HEIGHT}px`, onclick: () => select(place) },
      el("div", { class: "top" }, el("span", { class: "reward", text: number(c.reward[i]) }), el("span", { text: `rollout ${c.rollout[i]}` }), el("span", { class: "muted", text: `group ${c.group[i]} · ${c.length[i]} tokens · ${c.status[i]}` + (report.runs.length > 1 ? " · " + report.runs[c.run[i]].name : "") })),
      el("div", { text: c.response[i].slice(0, 200) }));
  }
  function select(place) {
    if (!list.order.length) return;
    place = Math.max(0, Math.min(place, list.order.length - 1));
    list.selected = list.order[place];
    if (place * ROW_HEIGHT < box.scrollTop) box.scrollTop = place * ROW_HEIGHT;
    if ((place + 1) * ROW_HEIGHT > box.scrollTop + box.clientHeight) box.scrollTop = (place + 1) * ROW_HEIGHT - box.clientHeight;
    history.replaceState(null, "", `#rollouts/${c.run[list.selected]}/${c.id[list.selected]}`);
    draw();
    show();
  }
  function show() {
    detail.replaceChildren(...(list.selected < 0 ? [el("p", { class: "muted", text: "Choose a sample." })] : sampleDetail(list.selected, show, (i) => { list.selected = i; history.replaceState(null, "", `#rollouts/${c.run[i]}/${c.id[i]}`); draw(); show(); })));
  }
  box.addEventListener("scroll", draw);
  box.addEventListener("keydown", (event) => {
    const page = Math.max(1, Math.floor(box.clientHeight / ROW_HEIGHT) - 1), here = list.order.indexOf(list.selected);
    const moves = { ArrowDown: here + 1, j: here + 1, ArrowUp: here - 1, k: here - 1, PageDown: here + page, PageUp: here - page, Home: 0, End: list.order.length - 1 };
    if (!(event.key in moves)) return;
    event.preventDefault();
    select(moves[event.key]);
  });
  requestAnimationFrame(() => {
    if (list.selected < 0 && list.order.length) list.selected = list.order[0];
    const place = list.order.indexOf(list.selected);
    if (place * ROW_HEIGHT > box.clientHeight) box.scrollTop = (place - 2) * ROW_HEIGHT;
    draw();
    show();
  });
  refresh();
  const controls = el("div", { class: "controls" }, labelled("Search", search), labelled("Sort", choice(Object.entries(SORTS).map(([key, [text]]) => [key, text]), list.sort, (v) => { list.sort = v; })),
    labelled("Rollout", choice(any([...new Set(c.rollout)].sort((a, b) => a - b)), list.rollout, (v) => { list.rollout = v; })), labelled("Status", choice(any([...new Set(c.status)].sort()), list.status, (v) => { list.status = v; })),
    report.runs.length > 1 ? labelled("Run", choice([["", "all"], ...report.runs.map((run, i) => [i, run.name])], list.run, (v) => { list.run = v; })) : null, status);
  return [controls, samples.problems.map((text) => el("p", { class: "muted", text })), el("div", { class: "browser" }, box, detail)].flat();
}

function sampleDetail(i, again, open) {
  const c = samples.columns, details = detailsOf(i), length = c.length[i];
  if (details === null) {
    document.addEventListener("DOMContentLoaded", again, { once: true });
    return [el("p", { class: "muted", role: "status", text: "The rest of the file is being read." })];
  }
  const facts = [`reward ${number(c.reward[i])}`, c.advantage[i] === null ? null : `advantage ${number(c.advantage[i])}`, `${length} tokens`, c.status[i], `rollout ${c.rollout[i]}`, `sample ${c.id[i]}`].filter(Boolean).join(" · ");
  const known = Object.keys(COLOURS).filter((name) => name === "none" || valuesOf(details, name, length));
  const colour = known.includes(list.colour) ? list.colour : known[0];
  const picker = el("select", { id: "colour", onchange: () => { list.colour = picker.value; again(); document.getElementById("colour").focus(); } }, known.map((name) => el("option", { value: name, text: COLOURS[name][0], selected: name === colour })));
  const group = groupOf(i);
  const parts = [el("h2", { text: facts }), el("h3", { text: "Prompt" }), c.images[i] ? picturesOf(c.images[i]) : null, el("pre", { tabindex: 0, "aria-label": "Prompt", text: samples.prompts[c.prompt[i]] }), el("div", { class: "controls" }, el("h3", { text: "Response" }), labelled("Tokens coloured by", picker), legendOf(details, colour, length)),
    tokensOf(c.run[i], details, colour, length, c.response[i])];
  if (details.tokens) parts.push(el("details", {}, el("summary", { text: "The response as text" }), el("pre", { tabindex: 0, "aria-label": "Response as text", text: c.response[i] })));
  if (c.label[i] !== null) parts.push(el("h3", { text: "Label" }), el("pre", { tabindex: 0, "aria-label": "Label", text: c.label[i] }));
  if (c.meta[i] !== null) parts.push(el("h3", { text: "Metadata: parts of the reward, turns, tool calls" }), el("pre", { tabindex: 0, "aria-label": "Metadata", text: pretty(c.meta[i]) }));
  parts.push(el("h3", { text: `Group ${c.group[i]}: ${group.length} samples` }), el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, ["sample", "reward", "advantage", "tokens", "status", "response"].map((text) => el("th", { scope: "col", text })))),
    el("tbody", {}, group.map((k) => el("tr", {}, el("th", { scope: "row" }, k === i ? String(c.id[k]) + " (this)" : el("a", { href: `#rollouts/${c.run[k]}/${c.id[k]}`, text: String(c.id[k]), onclick: (event) => { event.preventDefault(); open(k); } })),
      el("td", { text: number(c.reward[k]) }), el("td", { text: number(c.advantage[k]) }), el("td", { text: String(c.length[k]) }), el("td", { text: c.status[k] }), el("td", { text: c.response[k].slice(0, 80) })))))));
  parts.push(tokenTable(c.run[i], details, length));
  return parts.filter(Boolean);
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 1);
  } catch {
    return text;
  }
}

/** The values of tokens that are trained on. */
function trained(values, mask) {
  return mask && mask.some(Boolean) ? values.filter((_, k) => mask[k]) : values;
}

/** [low, high] of the scale of a field, symmetric where it diverges. */
function rangeOf(values, kind) {
  const finite = values.filter(Number.isFinite);
  if (!finite.length) return [0, 1];
  const low = finite.reduce((a, b) => Math.min(a, b)), high = finite.reduce((a, b) => Math.max(a, b));
  if (kind === "rising") return [low, high === low ? low + 1 : high];
  const centre = kind === "ratio" ? 1 : 0, reach = Math.max(high - centre, centre - low) || 1;
  return [centre - reach, centre + reach];
}

function shown(values, name) {
  return name === "log_prob" ? values.map((value) => -value) : values;
}

function background(value, [low, high], kind) {
  if (!Number.isFinite(value)) return "background:var(--bad);color:var(--bg)";
  const place = (value - low) / (high - low);
  if (kind === "rising") return `background:rgba(var(--hot),${(0.55 * place).toFixed(3)})`;
  return `background:rgba(var(${place < 0.5 ? "--hot" : "--cold"}),${(0.55 * Math.abs(2 * place - 1)).toFixed(3)})`;
}

function legendOf(details, name, length) {
  const kind = COLOURS[name][1];
  if (!kind) return null;
  const [low, high] = rangeOf(trained(shown(valuesOf(details, name, length), name), valuesOf(details, "mask", length)), kind);
  const left = kind === "rising" ? "transparent" : "rgba(var(--hot),.55)", right = kind === "rising" ? "rgba(var(--hot),.55)" : "rgba(var(--cold),.55)";
  return el("span", {}, number(low) + " ", el("span", { class: "scale", style: `background:linear-gradient(to right,${left},transparent ${kind === "rising" ? 0 : 50}%,${right})` }), " " + number(high));
}

function tokenText(run, id) {
  return samples.vocabularies[run][id] ?? `<${id}>`;
}

/** The response token by token; the text alone where tokens were not recorded. */
function tokensOf(run, details, name, length, response) {
  const ids = valuesOf(details, "tokens", length);
  if (!ids) return el("pre", { tabindex: 0, "aria-label": "Response", text: response });
  const kind = COLOURS[name][1], mask = valuesOf(details, "mask", length);
  const values = kind ? shown(valuesOf(details, name, length), name) : null, range = kind ? rangeOf(trained(values, mask), kind) : null;
  return el("div", { class: "tokens", tabindex: 0, role: "group", "aria-label": "Response, token by token" }, ids.map((id, k) => {
    const off = mask && !mask[k];
    const title = `token ${k + 1}, id ${id}` + (off ? ", not trained on" : "") + (values ? `, ${COLOURS[name][0]} ${number(values[k])}` : "");
    const text = tokenText(run, id);
    return el("span", { class: off ? "off" : null, title, style: values && !off ? background(values[k], range, kind) : null }, text.includes("\n") ? el("span", { class: "nl", text: "↵" }) : null, text);
  }));
}

/** Every number of every token, made when it is opened. */
function tokenTable(run, details, length) {
  const ids = valuesOf(details, "tokens", length);
  if (!ids) return "";
  const holder = el("div", { class: "scroll" });
  const box = el("details", { ontoggle: () => {
    if (!box.open || holder.firstChild) return;
    const names = Object.keys(COLOURS).filter((name) => COLOURS[name][1] && valuesOf(details, name, length));
    const columns = names.map((name) => shown(valuesOf(details, name, length), name)), mask = valuesOf(details, "mask", length);
    holder.append(el("table", {}, el("thead", {}, el("tr", {}, ["#", "token", "trained", ...names.map((name) => COLOURS[name][0])].map((text) => el("th", { scope: "col", text })))),
      el("tbody", {}, ids.slice(0, 3000).map((id, k) => el("tr", {}, el("td", { text: String(k + 1) }), el("td", {}, el("code", { text: JSON.stringify(tokenText(run, id)) })), el("td", { text: mask && !mask[k] ? "no" : "yes" }), columns.map((column) => el("td", { class: "number", text: number(column[k]) })))))));
  } }, el("summary", { text: "Numbers of every token" }), holder);
  return box;
}
