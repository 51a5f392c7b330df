"use strict";
// Shared by the other files: data, elements, colours, numbers. Text reaches the page through text
// nodes and attributes only, never as markup.

const dataOf = (name) => JSON.parse(document.getElementById("data-" + name).textContent);
const report = dataOf("runs");
const isLive = dataOf("live");
const RUN_COLOURS = {
  light: ["#0072b2", "#d55e00", "#007a5a", "#a23b82", "#7a5c00", "#3f3f3f", "#5b3fc4", "#b3261e"],
  dark: ["#56b4e9", "#ff9a4d", "#3ecf9f", "#e79bcb", "#f0e442", "#c4c4c4", "#b3a1ff", "#ff8a80"],
};
const PHASE_COLOURS = {
  generate: "#0072b2", balance: "#8f7fe0", log_probs: "#e69f00", values: "#56b4e9", train_critic: "#cc79a7",
  train: "#009e73", sync: "#d55e00", eval: "#c9bb2f", save: "#b0607f",
};
const OTHER_PHASES = ["#7f7f7f", "#9c755f", "#4e9a9a"];

const theme = () => document.documentElement.dataset.theme;
const runColour = (i) => RUN_COLOURS[theme()][i % 8];
const phaseColour = (name, i) => PHASE_COLOURS[name] || OTHER_PHASES[i % OTHER_PHASES.length];
const cssColour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** An element. attributes: "on..." are listeners, "text" its text; null and false are left out. */
function el(tag, attributes, ...children) {
  const svg = ["svg", "rect", "text", "title", "g", "line"].includes(tag);
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "text") node.textContent = value;
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat()) if (child !== null && child !== undefined && child !== false) node.append(child);
  return node;
}

/** A number as people read it: 4 digits, exponents for the very small and large. */
function number(value) {
  if (value === null || value === undefined) return "-";
  if (typeof value !== "number") return String(value);
  if (!Number.isFinite(value)) return String(value);
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e7) return String(value);
  return size >= 1e-3 && size < 1e6 ? String(Number(value.toPrecision(4))) : value.toExponential(2);
}

/** A number among facts: three decimals at most. */
function brief(value) {
  return Math.abs(value) < 1000 && Math.abs(value) >= 1e-3 ? String(Number(value.toFixed(3))) : number(value);
}

function seconds(value) {
  return number(value) + " s";
}

const DURATIONS = [[86400, "d", 3600, "h"], [3600, "h", 60, "min"], [60, "min", 1, "s"]];

/** Seconds as people say them, in the two largest units; `duration` of slime_like/text.py. */
function duration(value) {
  if (value < 60) return `${Number(value.toPrecision(3))} s`;
  const [size, unit, small, name] = DURATIONS.find(([size]) => value >= size);
  const whole = Math.round(value / small), rest = whole % (size / small);
  return `${Math.floor(whole / (size / small))} ${unit}` + (rest ? ` ${rest} ${name}` : "");
}

/** All metrics of all runs, sorted. */
function metricNames() {
  return [...new Set(report.runs.flatMap((run) => Object.keys(run.metrics)))].sort();
}

function remembered(key, fallback) {
  try {
    return localStorage.getItem("slime_like." + key) ?? fallback;
  } catch {
    return fallback;
  }
}

function remember(key, value) {
  try {
    localStorage.setItem("slime_like." + key, value);
  } catch {
    // a file:// page of a browser that keeps nothing
  }
}

function labelled(text, control) {
  return el("label", {}, el("span", { text }), control);
}

/** A box that scrolls sideways on a narrow screen, by keyboard too. */
function scroller(label, ...children) {
  return el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label }, ...children);
}

function runPicker(chosen, onchange) {
  const select = el("select", { onchange: () => onchange(Number(select.value)) },
    report.runs.map((run, i) => el("option", { value: i, text: run.name, selected: i === chosen })));
  return labelled("Run", select);
}
