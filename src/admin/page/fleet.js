"use strict";
// Everything shown comes in as JSON and goes out as text: nothing here is ever parsed as markup.

const BEAT_MS = 2000;
const DECISIONS = 40;
// More pods than this, and each becomes a small square.
const DENSE_FROM = 60;
// More bands than this are folded.
const BANDS_FROM = 12;

const view = { fleet: null, decisions: null, chosen: null, open: null, openRow: null, pressed: false, filter: "", paused: false, at: 0, bandsOpen: new Set() };
const byId = (id) => document.getElementById(id);

function make(tag, classes, ...children) {
  const node = document.createElement(tag);
  if (classes) node.className = classes;
  for (const child of children) if (child !== null && child !== undefined) node.append(child);
  return node;
}

const show = (value, digits = 0) => typeof value === "number"
  ? value.toLocaleString("en", { maximumFractionDigits: digits }) : "–";
const percent = (value) => typeof value === "number" ? `${Math.round(value * 100)} %` : "–";
function span(ms) {
  if (typeof ms !== "number") return "–";
  if (ms < 1000) return `${Math.round(ms)} ms`;
  if (ms < 60000) return `${(ms / 1000).toFixed(1)} s`;
  return ms < 3600000 ? `${Math.round(ms / 60000)} min` : `${(ms / 3600000).toFixed(1)} h`;
}
const tokens = (count) => count < 1000 ? `${count}` : `${show(count / 1000, 1)}k`;

// What a pod has to do, here and at other replicas.
function load(pod) {
  const sum = (counts) => (counts.prefills || 0) + (counts.decodes_pending || 0) + (counts.decodes_running || 0);
  return { own: sum(pod.in_flight), others: sum(pod.others) };
}

function state(pod) {
  if (pod.health.ejected_for_s !== null) return pod.health.probing ? "ejected probing" : "ejected";
  if (pod.terminating) return "terminating";
  if (!pod.ready) return "not-ready";
  if (!pod.serves_http) return "worker";
  if (pod.draining) return "draining";
  return "ready";
}

const shortName = (name) => name.slice(name.indexOf("/") + 1);
// Inside its roleset, a pod needs no longer say the roleset's name.
function nameWithin(pod) {
  const name = shortName(pod.name);
  return pod.roleset && name.startsWith(`${pod.roleset}-`) ? name.slice(pod.roleset.length + 1) : name;
}

function matches(pod) {
  const words = view.filter.toLowerCase().split(/\s+/).filter(Boolean);
  const text = `${pod.name} ${pod.role} ${pod.roleset || ""} ${pod.engine} ${pod.address} ${state(pod)}`.toLowerCase();
  return words.every((word) => text.includes(word));
}

function tile(pod, most, dense) {
  const { own, others } = load(pod);
  const all = own + others;
  const stale = pod.ready && !pod.signals.fresh;
  const node = make("button", `tile ${pod.role} ${state(pod)}${all ? "" : " quiet"}${stale ? " stale" : ""}`);
  node.type = "button";
  if (pod.name === view.chosen) node.classList.add("chosen");
  const fill = make("span", "fill");
  fill.style.height = `${most ? Math.round(100 * all / most) : 0}%`;
  const extra = [];
  if (typeof pod.signals.kv_usage === "number") extra.push(`KV ${percent(pod.signals.kv_usage)}`);
  if (pod.signals.waiting) extra.push(`${show(pod.signals.waiting)} waiting`);
  node.append(fill, make("span", "name", nameWithin(pod)), make("span", "load", show(all)),
    make("span", "more", extra.join(" · ")));
  if (!dense && typeof pod.signals.kv_usage === "number") {
    const kv = make("span", "kv");
    kv.style.width = percent(pod.signals.kv_usage).replace(" ", "");
    node.append(kv);
  }
  node.title = `${pod.name}\n${state(pod).replace("-", " ")}, ${own} here, ${others} elsewhere` +
    (extra.length ? `\n${extra.join(", ")}` : "") + (stale ? "\nno fresh metrics" : "");
  node.addEventListener("click", () => { view.chosen = view.chosen === pod.name ? null : pod.name; draw(); });
  return node;
}

function lane(letter, role, pods, most, dense) {
  if (!pods.length) return null;
  const tiles = make("div", "tiles");
  for (const pod of pods) tiles.append(tile(pod, most[role] || 0, dense));
  return make("div", `lane ${role}`, make("span", "dim", letter), tiles);
}

function roleFact(role, title, pods) {
  if (!pods.length) return null;
  const loads = pods.map((pod) => { const { own, others } = load(pod); return own + others; }).sort((a, b) => a - b);
  const total = loads.reduce((a, b) => a + b, 0);
  const spread = pods.length > 1
    ? ` (${loads[0]} to ${loads[loads.length - 1]} each, median ${loads[Math.floor(loads.length / 2)]})` : "";
  return make("div", `fact ${role}`, make("span", "swatch"), make("b", "", `${pods.length}`),
    make("span", "", `${title}, `), make("b", "", show(total)), make("span", "dim", `in flight${spread}`));
}

function bandPlan(model, plan) {
  const title = "Bands of prompt lengths" + (plan.profile ? `, profile ${plan.profile}` : "") +
    `, even in ${plan.mode === "rps" ? "requests" : "tokens"}`;
  const folded = plan.bands.length > BANDS_FROM;
  const box = make(folded ? "details" : "div", "bands", make(folded ? "summary" : "div", "dim", title));
  if (folded) {
    const key = `${model} ${plan.profile}`;
    box.open = view.bandsOpen.has(key);
    box.addEventListener("toggle", () => view.bandsOpen[box.open ? "add" : "delete"](key));
  }
  const ends = plan.bands.map((band) => band.max === null ? 0 : band.max);
  const longest = Math.max(2, ...ends, ...plan.bands.map((band) => band.min)) * 2;
  const place = (length) => 100 * Math.log2(1 + Math.min(length, longest)) / Math.log2(1 + longest);
  for (const band of plan.bands) {
    const bar = make("div");
    const from = place(band.min);
    bar.style.left = `${from}%`;
    bar.style.width = `${(band.max === null ? 100 : place(band.max)) - from}%`;
    const range = band.max === null ? `${tokens(band.min)} and more` : `${tokens(band.min)} to ${tokens(band.max)}`;
    box.append(make("div", "band-row", make("span", "", band.roleset), make("div", "track", bar),
      make("span", "dim", range)));
  }
  return box;
}

// An adapter has pods of another model, which are drawn there.
function drawAlias(name, model) {
  const shown = model.instances.slice(0, 24).join(", ") + (model.instances.length > 24 ? ", …" : "");
  const whose = model.alias_of === null ? "no pod that is known serves it"
    : `${model.routable_pods} of ${model.instances.length} pods routable, of model ${model.alias_of}`;
  return make("section", "", make("h2", "", name, " ", make("span", "dim", whose)), make("p", "dim", shown));
}

function drawModel(name, model, dense) {
  if (model.instances) return { section: drawAlias(name, model), byName: new Map() };
  const byName = new Map(model.pods.map((pod) => [pod.name, pod]));
  const roles = { prefill: [], decode: [], other: [] };
  const most = {};
  for (const pod of model.pods) {
    (roles[pod.role] || roles.other).push(pod);
    const { own, others } = load(pod);
    most[pod.role] = Math.max(most[pod.role] || 1, own + others);
  }
  const counts = {};
  for (const pod of model.pods) { const kind = state(pod).split(" ")[0]; counts[kind] = (counts[kind] || 0) + 1; }
  const troubles = ["ejected", "draining", "terminating", "not-ready"].filter((kind) => counts[kind])
    .map((kind) => make("span", `chip ${kind === "ejected" ? "bad" : "warn"}`, `${counts[kind]} ${kind.replace("-", " ")}`));
  const facts = make("div", "facts", roleFact("prefill", "prefill", roles.prefill),
    roleFact("decode", "decode", roles.decode), roleFact("other", "combined", roles.other), ...troubles);

  const groups = new Map();
  for (const pod of model.pods) {
    if (!matches(pod)) continue;
    const key = pod.role === "other" ? "" : pod.roleset || "";
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(pod);
  }
  const partial = new Set(model.partial_rolesets.map((set) => set.name));
  const names = [...groups.keys()].sort((a, b) => (a === "") - (b === "") || a.localeCompare(b, "en", { numeric: true }));
  const sets = make("div", "sets");
  for (const key of names) {
    const pods = groups.get(key).sort((a, b) => a.name.localeCompare(b.name, "en", { numeric: true }));
    const of = (role) => pods.filter((pod) => pod.role === role);
    const title = key === "" ? "no roleset" : partial.has(key) ? `${key}: incomplete, takes no part` : key;
    const card = make("div", `set${partial.has(key) ? " partial" : ""}`, make("h3", "", title),
      lane("P", "prefill", of("prefill"), most, dense), lane("D", "decode", of("decode"), most, dense),
      lane("C", "other", of("other"), most, dense));
    card.title = title;
    sets.append(card);
  }
  const widest = Math.max(0, ...[...groups.values()].map((pods) =>
    Math.max(...["prefill", "decode", "other"].map((role) => pods.filter((pod) => pod.role === role).length))));
  sets.style.setProperty("--set-width", dense ? `${Math.min(520, Math.max(120, 52 + 38 * widest))}px` : "330px");

  const section = make("section", dense ? "dense" : "", make("h2", "", name, " ",
    make("span", "dim", `${model.routable_pods} of ${model.pods.length} pods routable, ${model.rolesets.length} rolesets` +
      (model.not_up ? `, ${model.not_up}` : "") +
      (model.locked_strategy ? `, locked to ${model.locked_strategy}` : ""))), facts, sets);
  if (!names.length) section.append(make("p", "dim", model.pods.length ? "No pod matches." : "No pods."));
  for (const plan of model.bands) section.append(bandPlan(name, plan));
  for (const pair of model.failing_pairs) {
    const out = pair.health.ejected_for_s;
    section.append(make("p", "dim", `Pair ${pair.prefill} and ${pair.decode}: ${pair.health.consecutive_failures} failures in a row` +
      (out === null ? "" : out > 0 ? `, ejected for ${span(out * 1000)} more` : ", waits for its probe")));
  }
  if (model.config_disagreements) {
    section.append(make("p", "dim", `${model.config_disagreements} pods carry another configuration than ${model.config_pod}: ` +
      model.config_differing_pods.slice(0, 5).join(", ")));
  }
  return { section, byName };
}

function legend() {
  const entry = (kind, text) => make("span", "", make("span", `mark ${kind}`), text);
  return make("div", "legend", make("span", "", "Number: requests in flight, at all replicas."),
    entry("full", "height: share of the busiest of its role"), entry("ejected", "ejected after failures"),
    entry("draining", "draining"), entry("terminating", "terminating"), entry("not-ready", "not ready, or no HTTP"));
}

function drawDetail(pods) {
  const aside = byId("detail");
  const pod = view.chosen && pods.get(view.chosen);
  aside.hidden = !pod;
  if (!pod) return;
  const close = make("button", "", "Close");
  close.type = "button";
  close.addEventListener("click", () => { view.chosen = null; draw(); });
  const list = (entries) => make("dl", "", ...entries.flatMap(([key, value]) => [make("dt", "", key), make("dd", "", value)]));
  const { own, others } = load(pod);
  const { in_flight: mine, others: theirs, signals, health } = pod;
  aside.replaceChildren(close, make("h2", "", pod.name), list([
    ["state", state(pod).replace("-", " ")], ["role", pod.role], ["roleset", pod.roleset || "–"], ["engine", pod.engine],
    ["address", pod.address], ["restarts", show(pod.restarts)],
  ]), make("h3", "", "In flight"), list([
    ["here", show(own)], ["at other replicas", show(others)],
    ["prefills", `${show(mine.prefills)} + ${show(theirs.prefills)}`],
    ["decodes running", `${show(mine.decodes_running)} + ${show(theirs.decodes_running)}`],
    ["decodes to come", `${show(mine.decodes_pending)} + ${show(theirs.decodes_pending)}`],
    ["completed here", show(mine.completed)], ["others’ age", span(theirs.age_ms)],
  ]), make("h3", "", "What the engine says"), list([
    ["age", signals.age_ms === null ? "never" : `${span(signals.age_ms)}${signals.fresh ? "" : ", too old"}`],
    ["running", show(signals.running)], ["waiting", show(signals.waiting)], ["KV in use", percent(signals.kv_usage)],
    ["generates", `${show(signals.generation_tps)} tokens/s`], ["prefills", `${show(signals.prompt_tps)} tokens/s`],
    ["mean prefill", signals.prefill_seconds_mean === null ? "–" : span(signals.prefill_seconds_mean * 1000)],
  ]), make("h3", "", "Health"), list([
    ["failures in a row", show(health.consecutive_failures)],
    ["ejected for", health.ejected_for_s === null ? "–" : span(health.ejected_for_s * 1000)],
    ["ejections in a row", show(health.ejections_in_a_row)],
  ]));
}

const REASONS = {
  prefill_spread: "prefill load was uneven: the least loaded",
  band: "within the band of its length",
  cold_start: "a pod without history got the benefit",
  ejections_ignored: "all were ejected: ejections ignored",
};

function why(decision) {
  if (decision.error) return decision.error;
  const parts = [];
  if (decision.steps !== "none") parts.push(...decision.steps.split("+").map((step) => REASONS[step] || step.replaceAll("_", " ")));
  if (decision.target.reason) parts.push(decision.target.reason.replaceAll("_", " "));
  const { prefill, decode } = decision.candidates;
  if (decision.target.prefill) {
    parts.push(`best of ${prefill} × ${decode}` + (decision.scores.total === null ? "" : ` at ${show(decision.scores.total, 3)}`));
  } else if (decode) parts.push(`of ${decode}`);
  if (decision.ties.total > 1) parts.push(`${decision.ties.total} tied`);
  if (decision.conflicts) parts.push(`decided ${decision.conflicts + 1} times`);
  if (decision.missing_signals.length) parts.push(`without ${decision.missing_signals.join(", ")}`);
  return parts.join("; ");
}

function prompt(length) {
  if (!length) return "–";
  return length.tokens === undefined ? `> ${show(length.more_than_tokens)}` : show(length.tokens);
}

function candidates(title, pods) {
  if (!pods || !pods.length) return null;
  const skip = new Set(["pod", "fate", "score", "requests"]);
  const terms = [...new Set(pods.flatMap((pod) => Object.keys(pod)))].filter((key) => !skip.has(key));
  const head = make("tr", "", ...["pod", "", "score", "requests", ...terms].map((text) => make("th", "", text.replaceAll("_", " "))));
  const body = make("tbody");
  for (const pod of pods.slice(0, 50)) {
    const cell = (value) => make("td", "", typeof value === "boolean" ? (value ? "yes" : "no") : show(value, 3));
    body.append(make("tr", "", make("td", "", make("code", "", pod.pod)), make("td", "", pod.fate.replaceAll("_", " ")),
      cell(pod.score), cell(pod.requests), ...terms.map((key) => cell(pod[key]))));
  }
  const rest = pods.length > 50 ? ` (50 of ${pods.length})` : "";
  return make("div", "", make("b", "", title + rest), make("table", "", make("thead", "", head), body));
}

async function fill(id, row) {
  const found = await ask(`/debug/decisions?limit=4&request_id=${encodeURIComponent(id)}`);
  const cell = make("td");
  cell.colSpan = 7;
  for (const decision of found.decisions) {
    cell.append(...[candidates("Prefill", decision.prefill_pods), candidates("Decode", decision.decode_pods)].filter(Boolean));
  }
  if (!cell.childNodes.length) cell.append("Nothing was compared for it.");
  row.replaceChildren(cell);
}

// The row below an open decision is made once: it would flicker if it were made anew at every beat.
function openRow(id) {
  if (view.openRow === null || view.openRow.id !== id) {
    view.openRow = { id, row: make("tr", "more") };
    fill(id, view.openRow.row).catch(failed);
  }
  return view.openRow.row;
}

function drawDecisions() {
  const page = view.decisions;
  if (!page) return;
  byId("decisions-note").textContent = page.decisions.length ? `of this replica, the last ${page.decisions.length}` : "none yet";
  const rows = [];
  for (const decision of page.decisions) {
    const target = decision.target;
    const where = decision.error ? "nowhere" : target.prefill
      ? `${shortName(target.prefill)} → ${shortName(target.decode)}` : shortName(target.pod);
    const by = decision.error ? "–" : decision.policies
      ? `${decision.policies.prefill} / ${decision.policies.decode}` : decision.strategy;
    const row = make("tr", `pick${decision.error ? " failed" : ""}`, make("td", "", span(decision.age_ms)),
      make("td", "", make("code", "", decision.request_id.slice(0, 8))), make("td", "", decision.model),
      make("td", "", by), make("td", "where", where), make("td", "", why(decision)),
      make("td", "number", prompt(decision.prompt_length)));
    row.title = decision.request_id;
    row.addEventListener("click", () => { view.open = view.open === decision.request_id ? null : decision.request_id; drawDecisions(); });
    rows.push(row);
    if (view.open === decision.request_id) rows.push(openRow(decision.request_id));
  }
  byId("decision-rows").replaceChildren(...rows);
}

function drawPlane(plane) {
  const models = Object.entries(plane.models);
  byId("plane-note").textContent = plane.plane === "redis"
    ? `${plane.grade}, ${plane.connected ? "connected to Redis" : "no connection to Redis"}` : "nothing is shared: no Redis is configured";
  byId("plane-rows").replaceChildren(...models.map(([name, model]) => make("tr", "", make("td", "", name),
    ...[show(model.members), span(model.view_age_ms), typeof model.last_sync_us === "number" ? span(model.last_sync_us / 1000) : "–",
      show(model.own_pods), show(model.remote_pods), show(model.syncs), show(model.failures), show(model.resyncs),
      show(model.reaped)].map((text) => make("td", "number", text)))));
}

function drawChips(fleet, plane) {
  const chip = (kind, ...parts) => make("span", `chip ${kind}`, ...parts);
  // A pod that serves several models is one pod.
  const pods = [...new Map(Object.values(fleet.models).flatMap((model) => model.pods).map((pod) => [pod.slot, pod])).values()];
  const ready = pods.filter((pod) => pod.routable).length;
  const sum = (kind) => pods.reduce((total, pod) => total + load(pod)[kind], 0);
  const ejected = pods.filter((pod) => pod.health.ejected_for_s !== null).length;
  const chips = [
    chip("", make("b", "", fleet.replica), ` v${fleet.version}`),
    fleet.draining ? chip("warn", "draining") : chip("good", "serving"),
    chip(ready ? "" : "bad", make("b", "", `${ready}`), ` of ${pods.length} pods routable`),
    chip("", make("b", "", show(sum("own"))), " in flight here, ", make("b", "", show(sum("others"))), " elsewhere"),
  ];
  if (ejected) chips.push(chip("bad", `${ejected} ejected`));
  if (plane.plane === "redis") {
    const members = Math.max(0, ...Object.values(plane.models).map((model) => model.members));
    const age = Math.max(0, ...Object.values(plane.models).map((model) => model.view_age_ms || 0));
    chips.push(plane.connected ? chip("good", `Redis: ${members} replicas, view ${span(age)} old`) : chip("bad", "Redis: no connection"));
  } else chips.push(chip("", "alone: no Redis"));
  const troubles = fleet.problems.length + fleet.config.errors + fleet.config.warnings.length;
  if (troubles) chips.push(chip("warn", troubles === 1 ? "1 configuration problem" : `${troubles} configuration problems`));
  chips.push(chip("", `snapshot ${fleet.snapshot_version}`));
  byId("chips").replaceChildren(...chips);
}

function drawConfiguration(fleet) {
  const all = [...fleet.problems, ...fleet.config.warnings];
  const list = byId("problems");
  list.className = `problems${all.length ? "" : " none"}`;
  list.replaceChildren(...(all.length ? all.slice(0, 100) : ["No problems."]).map((text) => make("li", "", text)));
  byId("settings").replaceChildren(...fleet.config.settings.filter((setting) => setting.origin !== "default").map((setting) =>
    make("tr", "", make("td", "", make("code", "", setting.name)), make("td", "", setting.value), make("td", "", setting.origin))));
}

function draw() {
  const fleet = view.fleet;
  if (!fleet) return;
  const models = Object.entries(fleet.models).sort(([a], [b]) => a.localeCompare(b, "en", { numeric: true }));
  const dense = models.reduce((sum, [, model]) => sum + model.pods.length, 0) > DENSE_FROM;
  const pods = new Map();
  const sections = models.map(([name, model]) => {
    const { section, byName } = drawModel(name, model, dense);
    for (const [key, pod] of byName) pods.set(key, pod);
    return section;
  });
  if (sections.length) sections[sections.length - 1].append(legend());
  else sections.push(make("section", "", make("h2", "", "No models"), make("p", "dim", "No pod names a model yet.")));
  byId("models").replaceChildren(...sections);
  drawDetail(pods);
}

async function ask(path) {
  const answer = await fetch(path, { headers: { accept: "application/json" } });
  if (!answer.ok) throw new Error(`${path} answered ${answer.status}`);
  return answer.json();
}

function failed(error) {
  const line = byId("trouble");
  line.hidden = false;
  line.textContent = `This replica does not answer: ${error.message}. What you see is from before.`;
}

// A click is lost when what it began on is replaced before it ends.
function released() {
  if (!view.pressed) return Promise.resolve();
  return new Promise((resolve) => ["pointerup", "pointercancel"].forEach((kind) =>
    addEventListener(kind, () => setTimeout(resolve, 0), { once: true })));
}

async function refresh() {
  try {
    const [fleet, decisions, plane] = await Promise.all([ask("/debug/fleet?format=json"),
      ask(`/debug/decisions?brief=true&limit=${DECISIONS}`), ask("/debug/state")]);
    await released();
    view.fleet = fleet;
    view.decisions = decisions;
    view.at = Date.now();
    document.title = `${fleet.replica}: fleet`;
    byId("trouble").hidden = true;
    drawChips(fleet, plane);
    draw();
    drawDecisions();
    drawPlane(plane);
    drawConfiguration(fleet);
  } catch (error) {
    failed(error);
  }
}

function tick() {
  byId("age").textContent = view.at ? `${span(Date.now() - view.at)} old` : "";
}

byId("filter").addEventListener("input", (event) => { view.filter = event.target.value; draw(); });
byId("pause").addEventListener("click", (event) => {
  view.paused = !view.paused;
  event.target.setAttribute("aria-pressed", `${view.paused}`);
  event.target.textContent = view.paused ? "Go on" : "Pause";
});
for (const [kind, pressed] of [["pointerdown", true], ["pointerup", false], ["pointercancel", false]]) {
  addEventListener(kind, () => { view.pressed = pressed; });
}
document.addEventListener("keydown", (event) => { if (event.key === "Escape") { view.chosen = null; draw(); } });

// One question at a time: the next one is asked a beat after the last was answered.
async function live() {
  if (!view.paused && !document.hidden) await refresh();
  setTimeout(live, BEAT_MS);
}
setInterval(tick, 500);
live();
