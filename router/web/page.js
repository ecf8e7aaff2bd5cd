// Shows what v1/overview/stream says. Names come from engines: they are only ever set as text.
"use strict";

const SVG = "http://www.w3.org/2000/svg";
const by = (id) => document.getElementById(id);
let key = sessionStorage.getItem("deeplink-key") || "";

function made(parent, name, text, attributes = {}, space = null) {
  const element = space ? document.createElementNS(space, name) : document.createElement(name);
  for (const [attribute, value] of Object.entries(attributes)) element.setAttribute(attribute, value);
  if (text !== null) element.textContent = text;
  parent.append(element);
  return element;
}

const seconds = (value) => value === 0 ? "–" : value < 1 ? `${Math.round(1000 * value)} ms` : `${value.toFixed(2)} s`;
const STATES = { up: "up", down: "down", "no new requests": "shut" };

function showFleet(engines) {
  const body = by("fleet");
  body.replaceChildren();
  const order = (one) => [one.chip, one.role, one.name].join("\0");
  for (const engine of [...engines].sort((one, other) => order(one) < order(other) ? -1 : 1)) {
    const row = made(body, "tr", null);
    for (const name of ["chip", "role", "name", "kind"]) made(row, "td", engine[name]);
    made(row, "td", engine.state + (engine.why ? `: ${engine.why}` : ""), { class: STATES[engine.state] || "" });
    const bar = made(made(row, "td", null, { title: `${Math.round(100 * engine.kv_use)} %` }), "span", null, { class: "bar" });
    const drawn = made(bar, "svg", null, { width: 96, height: 10 }, SVG);
    made(drawn, "rect", null, { width: 96 * Math.min(1, engine.kv_use), height: 10 }, SVG);
    for (const name of ["requests", "prefill_tokens", "decode_tokens"]) made(row, "td", engine[name], { class: "number" });
  }
}

function showFlows(flows, engines) {
  const drawing = by("flows");
  drawing.replaceChildren();
  const chips = new Map(engines.map((engine) => [engine.name, engine.chip]));
  const sides = [["prefill", 10], ["decode", 590]].map(([side, x]) => {
    const names = [...new Set(flows.map((flow) => flow[side]))].sort();
    return { side, x, names, place: new Map(names.map((name, index) => [name, 30 + 56 * index])) };
  });
  const height = 20 + 56 * Math.max(1, ...sides.map(({ names }) => names.length));
  drawing.setAttribute("viewBox", `0 0 800 ${height}`);
  if (!flows.length) made(drawing, "text", "no two engines can hand over", { x: 10, y: 30, class: "soft" }, SVG);
  for (const flow of [...flows].sort((one, other) => one.live - other.live)) {
    const [from, to] = [sides[0].place.get(flow.prefill), sides[1].place.get(flow.decode)];
    const line = `M 210 ${from} C 400 ${from}, 400 ${to}, 590 ${to}`;
    made(drawing, "path", null, { d: line, class: "way" }, SVG);
    if (!flow.live) continue;
    const path = made(drawing, "path", null, { d: line, class: "way live" }, SVG);
    path.style.strokeWidth = Math.min(10, 1.5 + Math.sqrt(flow.live));
    // Off the middle, where all the ways cross.
    made(drawing, "text", flow.live, { x: 356, y: 0.72 * from + 0.28 * to - 5, "text-anchor": "middle" }, SVG);
  }
  for (const { side, x, names, place } of sides) {
    for (const name of names) {
      const y = place.get(name);
      made(drawing, "rect", null, { x, y: y - 22, width: 200, height: 44, rx: 6, class: `box ${side}` }, SVG);
      made(drawing, "text", name.length > 24 ? name.slice(0, 23) + "…" : name, { x: x + 10, y: y - 3 }, SVG);
      const done = flows.filter((flow) => flow[side] === name).reduce((sum, flow) => sum + flow.done, 0);
      made(drawing, "text", `${chips.get(name) || "gone"}, ${side}, ${done} done`, { x: x + 10, y: y + 14, class: "soft" }, SVG);
    }
  }
}

function showEnds(ends) {
  const body = by("ends");
  body.replaceChildren();
  for (const [end, count] of Object.entries(ends).sort((one, other) => other[1] - one[1])) {
    const row = made(body, "tr", null);
    made(row, "td", end, { class: end === "done" ? "up" : "" });
    made(row, "td", count, { class: "number" });
  }
  if (!Object.keys(ends).length) made(made(body, "tr", null), "td", "none yet");
}

function show(data) {
  const running = Object.entries(data.phases).map(([phase, count]) => `${count} ${phase}`);
  by("running").textContent = Object.values(data.phases).reduce((sum, count) => sum + count, 0);
  by("running").parentElement.title = running.join(", ");
  for (const name of ["queue", "requests", "failed"]) by(name).textContent = data[name];
  by("first50").textContent = seconds(data.first_byte.p50);
  by("first99").textContent = seconds(data.first_byte.p99);
  by("whole50").textContent = seconds(data.whole.p50);
  by("whole99").textContent = seconds(data.whole.p99);
  showFlows(data.flows, data.engines);
  showFleet(data.engines);
  showEnds(data.ends);
  by("ask").hidden = true;
  by("all").hidden = false;
  by("state").textContent = `live, ${data.engines.length} engines`;
}

async function follow() {
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const answer = await fetch("v1/overview/stream", { headers, cache: "no-store" });
  if (answer.status === 401) {
    by("refused").hidden = !key;
    by("ask").hidden = false;
    by("all").hidden = true;
    by("state").textContent = "a key is needed";
    key = "";
    sessionStorage.removeItem("deeplink-key");
    return false;
  }
  if (!answer.ok) throw new Error(`the router answered ${answer.status}`);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const { done, value } = await reader.read();
    if (done) throw new Error("the router has closed the connection");
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    if (events.length) show(JSON.parse(events.at(-1).slice("data: ".length)));
  }
}

async function always() {
  for (; ;) {
    try {
      if (!await follow()) return;
    } catch (error) {
      by("state").textContent = `not connected (${error.message}); trying again`;
    }
    await new Promise((wake) => setTimeout(wake, 2000));
  }
}

by("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  key = by("key").value;
  by("key").value = "";
  sessionStorage.setItem("deeplink-key", key);
  always();
});
always();
