"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const calls = data.calls, count = calls.layer.length;
const byId = (id) => document.getElementById(id);
const unique = (values) => [...new Set(values)].sort((a, b) => a - b);
const layers = unique(calls.layer), steps = unique(calls.step), branches = unique(calls.branch);
const tip = byId("tip");

const largest = (values) => values.reduce((a, b) => Math.max(a, b), -Infinity);

function option(select, value, text) {
  const made = document.createElement("option");
  made.value = value;
  made.textContent = text;
  select.append(made);
}

function inSeconds(s) {
  if (s < 1e-3) return (s * 1e6).toFixed(0) + " µs";
  return s < 1 ? (s * 1e3).toPrecision(3) + " ms" : s.toPrecision(3) + " s";
}

function inBytes(b) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (b >= 1024 && unit < units.length - 1) { b /= 1024; unit += 1; }
  return (unit ? b.toPrecision(3) : b) + " " + units[unit];
}

/* colour ramps: four stops from the style sheet, which knows light from dark */
function ramp(name) {
  const style = getComputedStyle(document.documentElement);
  const stops = [0, 1, 2, 3].map((i) => style.getPropertyValue(`--${name}-${i}`).trim());
  const rgb = stops.map((hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16)));
  const at = (share) => {
    const place = Math.min(Math.max(share, 0), 1) * 3, low = Math.min(Math.floor(place), 2), part = place - low;
    return `rgb(${rgb[low].map((v, i) => Math.round(v + (rgb[low + 1][i] - v) * part)).join(",")})`;
  };
  return { stops, at };
}

const rhoTop = Math.max(largest(calls.rho_before), largest(calls.rho), 1.05);
const maps = [
  { id: "before", column: calls.rho_before, low: 1, high: rhoTop, ramp: "ramp", show: (v) => v.toFixed(3) },
  { id: "rho", column: calls.rho, low: 1, high: rhoTop, ramp: "ramp", show: (v) => v.toFixed(3), dots: true },
  { id: "density", column: calls.density, low: 0, high: 1, ramp: "cool", show: (v) => v.toFixed(3) },
  { id: "seconds", column: calls.seconds, low: 0, high: robustTop(calls.seconds), ramp: "cool", show: inSeconds },
];

/* the first attentions of a run warm up: they may be so slow that they would leave one colour for all others */
function robustTop(values) {
  const sorted = [...values].sort((a, b) => a - b);
  return Math.min(sorted[sorted.length - 1], 1.5 * sorted[Math.floor(0.95 * (sorted.length - 1))]);
}

/* per cell, the index of its last call: earlier ones are those of other videos in the same run */
function cellsOf(branch) {
  const cells = new Map();
  for (let i = 0; i < count; i++) if (calls.branch[i] === branch) cells.set(calls.layer[i] + "," + calls.step[i], i);
  return cells;
}

let cells = cellsOf(branches[0]);
const LEFT = 34, BOTTOM = 20;

function draw(map) {
  const canvas = byId("map-" + map.id), scale = window.devicePixelRatio || 1;
  const width = canvas.clientWidth, height = Math.min(340, Math.max(120, layers.length * 16)) + BOTTOM;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  canvas.style.height = height + "px";
  const context = canvas.getContext("2d"), colours = ramp(map.ramp);
  const style = getComputedStyle(document.documentElement);
  context.scale(scale, scale);
  const w = (width - LEFT) / steps.length, h = (height - BOTTOM) / layers.length;
  const gap = w > 4 && h > 4 ? 1 : 0;
  layers.forEach((layer, row) => steps.forEach((step, column) => {
    const call = cells.get(layer + "," + step);
    if (call === undefined) return;
    context.fillStyle = colours.at((map.column[call] - map.low) / (map.high - map.low || 1));
    context.fillRect(LEFT + column * w, row * h, w - gap, h - gap);
    if (map.dots && calls.replanned[call]) {
      context.fillStyle = style.getPropertyValue("--dot");
      context.beginPath();
      context.arc(LEFT + (column + 0.5) * w, (row + 0.5) * h, Math.min(2.5, w / 3, h / 3), 0, 7);
      context.fill();
    }
  }));
  context.fillStyle = style.getPropertyValue("--soft");
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "middle";
  context.textAlign = "right";
  const every = (n, room, size) => Math.max(1, Math.ceil(n * size / room));
  const rowEvery = every(layers.length, height - BOTTOM, 13), columnEvery = every(steps.length, width - LEFT, 26);
  layers.forEach((layer, row) => row % rowEvery || context.fillText(layer, LEFT - 6, (row + 0.5) * h));
  context.textAlign = "center";
  steps.forEach((step, column) => column % columnEvery || context.fillText(step, LEFT + (column + 0.5) * w, height - 8));
  const legend = byId("legend-" + map.id), over = largest(map.column) > map.high ? "≥ " : "";
  legend.replaceChildren(map.show(map.low), document.createElement("i"), over + map.show(map.high));
  legend.children[0].style.background = `linear-gradient(90deg, ${colours.stops.join(",")})`;
}

function callAt(canvas, event) {
  const box = canvas.getBoundingClientRect();
  const column = Math.floor((event.clientX - box.left - LEFT) / ((box.width - LEFT) / steps.length));
  const row = Math.floor((event.clientY - box.top) / ((box.height - BOTTOM) / layers.length));
  return cells.get(layers[row] + "," + steps[column]);
}

function tell(event) {
  const i = callAt(event.target, event);
  tip.style.opacity = i === undefined ? 0 : 1;
  if (i === undefined) return;
  const sent = calls.bytes_to_owners[i] + calls.bytes_chunks[i] + calls.bytes_to_sources[i];
  tip.textContent = [
    `layer ${calls.layer[i]}, step ${calls.step[i]}, pass ${calls.branch[i]}`,
    `${calls.strategy[i]}${calls.replanned[i] ? `, new plan (${calls.plan_ms[i].toFixed(2)} ms)` : ""}`,
    `ρ_s ${calls.rho_before[i].toFixed(3)} → ${calls.rho[i].toFixed(3)}, least possible ${calls.rho_bound[i].toFixed(3)}`,
    `density ${calls.density[i].toFixed(3)}`,
    `${inSeconds(calls.seconds[i])} slowest, ${inSeconds(calls.seconds_mean[i])} mean`,
    `sent ${inBytes(sent)}, USP ${inBytes(calls.bytes_usp[i])}`,
  ].join("\n");
  const left = Math.min(event.clientX + 14, window.innerWidth - tip.offsetWidth - 8);
  const above = event.clientY + 18 + tip.offsetHeight > window.innerHeight;
  tip.style.left = Math.max(4, left) + "px";
  tip.style.top = (above ? event.clientY - tip.offsetHeight - 10 : event.clientY + 18) + "px";
}

function drawBars() {
  const chosen = byId("layer").value, names = chosen === "all" ? Object.keys(data.work) : [chosen];
  const sum = (work) => names.map((n) => work[n]).reduce((a, b) => a.map((v, i) => v + b[i]));
  const before = sum(data.before), after = sum(data.work);
  const top = Math.max(largest(before), largest(after), 1), mean = after.reduce((a, b) => a + b, 0) / after.length;
  byId("bars").replaceChildren(...after.map((value, rank) => {
    const row = document.createElement("div"), tracks = document.createElement("div");
    const label = document.createElement("span"), number = document.createElement("span");
    row.className = "bar";
    tracks.className = "tracks";
    for (const [amount, colour] of [[before[rank], "--before"], [value, "--after"]]) {
      const bar = document.createElement("div");
      bar.style.cssText = `width:${amount / top * 100}%;background:var(${colour})`;
      tracks.append(bar);
    }
    const line = document.createElement("div");
    line.className = "mean";
    line.style.cssText = `left:${mean / top * 100}%;height:auto;margin:0;border-radius:0`;
    tracks.append(line);
    label.textContent = "rank " + rank;
    number.textContent = before[rank].toLocaleString("en") + " → " + value.toLocaleString("en");
    row.append(label, tracks, number);
    return row;
  }));
}

function sortBy(table, column, heading) {
  const falling = heading.getAttribute("aria-sort") !== "descending";
  for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
  heading.setAttribute("aria-sort", falling ? "descending" : "ascending");
  const rows = [...table.tBodies[0].rows], value = (row) => Number(row.cells[column].dataset.v);
  rows.sort((a, b) => (falling ? value(b) - value(a) : value(a) - value(b)));
  table.tBodies[0].append(...rows);
}

branches.forEach((branch) => option(byId("branch"), branch, branches.length === 2 ? ["0: first", "1: second"][branch] ?? branch : branch));
byId("branch").parentElement.hidden = branches.length < 2;
byId("branch").addEventListener("change", (event) => { cells = cellsOf(Number(event.target.value)); maps.forEach(draw); });
option(byId("layer"), "all", "all");
Object.keys(data.work).forEach((layer) => option(byId("layer"), layer, layer));
byId("layer").addEventListener("change", drawBars);
for (const map of maps) {
  byId("map-" + map.id).addEventListener("pointermove", tell);
  byId("map-" + map.id).addEventListener("pointerleave", () => { tip.style.opacity = 0; });
}
for (const table of document.querySelectorAll("table.sortable")) {
  [...table.tHead.rows[0].cells].forEach((heading, i) => heading.firstChild.addEventListener("click", () => sortBy(table, i, heading)));
}
const drawAll = () => { maps.forEach(draw); drawBars(); };
window.addEventListener("resize", drawAll);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
drawAll();
