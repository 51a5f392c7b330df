"use strict";
// Tabs, theme, keyboard, and new data of a run that goes on.

const PAGES = {
  overview: ["Overview", overviewPage], curves: ["Curves", curvesPage], time: ["Time", timePage], counters: ["Counters", countersPage],
  rollouts: ["Rollouts", rolloutsPage], settings: ["Settings", settingsPage], environment: ["Environment", environmentPage],
};
let current = "overview";

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  const button = document.getElementById("theme");
  button.setAttribute("aria-pressed", String(name === "dark"));
  remember("theme", name);
}

function showTabs() {
  const tabs = document.getElementById("tabs");
  tabs.replaceChildren(...Object.entries(PAGES).map(([key, [text]]) => el("button", {
    type: "button", role: "tab", id: "tab-" + key, "aria-selected": String(key === current), "aria-controls": "main", tabindex: key === current ? 0 : -1, text,
    onclick: () => { location.hash = key; },
  })));
  const tab = document.getElementById("tab-" + current);
  tabs.scrollLeft = tab.offsetLeft - (tabs.clientWidth - tab.offsetWidth) / 2; // on a narrow screen not all are in view
}

function showHead() {
  document.getElementById("title").textContent = report.runs.length === 1 ? report.runs[0].name : `${report.runs.length} runs`;
  document.getElementById("run-legend").replaceChildren(...(report.runs.length === 1 ? [] : report.runs.map((run, i) => el("span", {}, el("span", { class: "swatch", style: `background:${runColour(i)}` }), run.name))));
}

function decoded(word) {
  try {
    return decodeURIComponent(word);
  } catch {
    return word;
  }
}

/** Draw the page that the address names, `#page/word/...`. */
function showPage() {
  const [key, ...words] = location.hash.slice(1).split("/").map(decoded);
  current = Object.hasOwn(PAGES, key) ? key : "overview";
  closeCharts();
  showHead();
  showTabs();
  const main = document.getElementById("main");
  main.setAttribute("aria-labelledby", "tab-" + current);
  main.replaceChildren(...PAGES[current][1](words).flat(2));
}

document.getElementById("tabs").addEventListener("keydown", (event) => {
  const keys = Object.keys(PAGES), here = keys.indexOf(current);
  const moves = { ArrowRight: here + 1, ArrowLeft: here - 1, Home: 0, End: keys.length - 1 };
  if (!(event.key in moves)) return;
  event.preventDefault();
  location.hash = keys[(moves[event.key] + keys.length) % keys.length];
  requestAnimationFrame(() => document.getElementById("tab-" + current).focus());
});

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
  if (event.key === "/" && document.querySelector("main input[type=search]")) {
    event.preventDefault();
    document.querySelector("main input[type=search]").focus();
  } else if (/^[1-7]$/.test(event.key)) location.hash = Object.keys(PAGES)[Number(event.key) - 1];
});

document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // the address names the page
  document.getElementById("main").focus();
});

document.getElementById("theme").addEventListener("click", () => {
  setTheme(theme() === "dark" ? "light" : "dark");
  showPage();
});

let stale = false; // what is drawn is older than the data
let tag = ""; // of the answer that was taken last
async function follow() {
  const state = document.getElementById("live-state");
  try {
    const answer = await fetch(current === "time" ? "runs.json?timeline" : "runs.json", { cache: "no-store", headers: { "If-None-Match": tag } });
    if (answer.ok || answer.status === 304) {
      if (answer.ok) {
        const data = await answer.json();
        const seen = () => JSON.stringify(report.runs.map((run) => [run.steps, run.alerts, run.guards, run.stacks, run.profile, run.certificates]));
        const before = seen();
        data.runs.forEach((run, i) => Object.assign(report.runs[i], run));
        tag = answer.headers.get("ETag") || "";
        stale ||= before !== seen();
      }
      state.textContent = "followed, " + new Date().toLocaleTimeString();
      const busy = current === "rollouts" || /^(INPUT|SELECT)$/.test(document.activeElement.tagName);
      if (stale && busy && current !== "rollouts") state.textContent += ", drawn when no control is in use";
      if (stale && !busy) {
        stale = false;
        const place = window.scrollY;
        showPage();
        window.scrollTo(0, place);
      }
    }
  } catch {
    state.textContent = "the server is gone; what is shown stays";
  }
  setTimeout(follow, 3000);
}

setTheme(remembered("theme", matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
window.addEventListener("hashchange", showPage);
showPage();
if (isLive) follow();
document.documentElement.dataset.ready = String(Math.round(performance.now()));
