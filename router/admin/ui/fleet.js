// All workers: what is told of them as rows, and the rows as cells or as a table.
const TABLE_ROWS = 100;
const REASONS = 5; // for which hits are not exact, shown at once
const fleet = {
  names: [],
  all: [], // rows, in the router's order
  shown: [], // those that pass the filters, in the order chosen
  full: 1, // the load that fills a bar
  chosen: null, // a worker's id
  lit: null, // {words, has(row)}: the workers that hold a trunk
  asTable: false,
  place: null,
};

/** Rows from the columns of one frame. */
function takeFleet(frame) {
  const told = record(frame.workers);
  const states = list(told.states);
  const troubles = record(frame.troubles);
  const exactness = record(frame.exactness);
  const kinds = list(exactness.kinds).map(exactnessOf);
  const of = (name) => list(told[name]);
  const thousandths = (value) => (known(value) === null ? null : value / 1e3);
  fleet.all = fleet.names.map((name, at) => {
    const [id, url, rank, kind, models, modelCount, role, capacity] = list(name);
    return {
      at,
      id: isNumber(id) ? id : at,
      url: text(url, 300),
      rank: known(rank),
      kind: text(kind, 40),
      models: list(models).map((model) => text(model, 100)),
      modelCount: known(modelCount) ?? 0,
      role: text(role, 20),
      capacity: known(capacity),
      state: text(states[of("state")[at]] ?? "unknown", 20),
      exact: kinds[list(exactness.rows)[at]] ?? null,
      requests: known(of("requests")[at]),
      waiting: known(of("waiting")[at]),
      queued: known(of("queued_tokens")[at]),
      wait: thousandths(of("wait_ms")[at]),
      context: known(of("context_tokens")[at]),
      kv: thousandths(of("kv")[at]),
      hits: thousandths(of("hits")[at]),
      trouble: Object.hasOwn(troubles, id) ? text(troubles[id]) : "",
    };
  });
  const present = new Set(fleet.all.map((row) => row.state));
  offer(by("states"), [...present].sort((a, b) => rankOf(a) - rankOf(b)));
}

/** How exact hits are: the mode, why, and what makes them exact. */
function exactnessOf(told) {
  const { mode, reason, lift } = record(told);
  const words = (value) => (typeof value === "string" ? text(value, 300) : "");
  return { mode: text(mode, 20), reason: words(reason), lift: words(lift) };
}

function exactnessWords(exact) {
  if (!exact.reason) return `Its expected hits are ${exact.mode}.`;
  const lift = exact.lift ? ` For exact hits: ${exact.lift}.` : "";
  return `Its expected hits are ${exact.mode}. ${exact.reason}${lift}`;
}

function rankOf(state) {
  const rank = TROUBLE.indexOf(state);
  return rank < 0 ? 0 : rank;
}

/** Filter, sort, measure. */
function arrangeFleet() {
  const measure = by("measure").value;
  const taking = fleet.all.filter((row) => row.state === "ready");
  const mean = taking.reduce((sum, row) => sum + (row.requests ?? 0), 0) / (taking.length || 1);
  for (const row of fleet.all) {
    row.load = row[measure];
    row.hot = row.state === "ready" && taking.length > 1 && row.requests >= 4 && row.requests > 2 * mean;
  }
  const most = fleet.all.reduce((a, row) => Math.max(a, row.load ?? 0), 0);
  fleet.full = rounded(Math.max(most, measure === "wait" ? 0.1 : 4));
  const words = by("find").value.trim().toLowerCase();
  const state = by("states").value;
  const fits = (row) =>
    (!state || row.state === state) && (!words || `${row.id}` === words || called(row).includes(words));
  fleet.shown = fleet.all.filter(fits).sort(orderOf(by("sort").value));
}

function called(row) {
  return `${row.url} ${row.kind} ${row.models.join(" ")} ${row.state}`.toLowerCase();
}

/** The next of 1, 2, 4, 5, 8 times a power of ten, so that the scale seldom moves. */
function rounded(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 4, 5, 8, 10].find((step) => step * power >= value * 0.9999) * power;
}

function orderOf(sort) {
  const down = (name) => (a, b) => (b[name] ?? -1) - (a[name] ?? -1) || a.at - b.at;
  if (sort === "trouble") return (a, b) => rankOf(a.state) - rankOf(b.state) || down("load")(a, b);
  if (sort === "hits") return (a, b) => (a.hits ?? 2) - (b.hits ?? 2) || a.at - b.at;
  return ["requests", "wait", "kv"].includes(sort) ? down(sort) : (a, b) => a.id - b.id || a.at - b.at;
}

function drawFleet() {
  arrangeFleet();
  say(by("fleet-said"), fleetWords());
  by("grid").hidden = by("hint").hidden = by("legend").hidden = fleet.asTable;
  by("table").hidden = !fleet.asTable;
  drawExactness();
  if (fleet.asTable) drawTable();
  else drawCells();
}

function fleetWords() {
  const counts = new Map();
  for (const row of fleet.all) counts.set(row.state, (counts.get(row.state) ?? 0) + 1);
  const states = [...counts].sort((a, b) => rankOf(a[0]) - rankOf(b[0]));
  const hidden = fleet.all.length - fleet.shown.length;
  const words = states.map(([state, count]) => `${count} ${state}`).join(", ");
  const modes = ["approximate", "degraded"].map((mode) => {
    const count = fleet.all.filter((row) => row.exact?.mode === mode).length;
    return count ? `${count} with ${mode} hits` : "";
  });
  return [
    `${fleet.all.length} worker${fleet.all.length === 1 ? "" : "s"}${words ? `: ${words}` : ""}`,
    ...modes,
    hidden ? `${hidden} filtered out` : "",
    fleet.lit ? fleet.lit.words : "",
  ].filter(Boolean).join(" · ");
}

/** Why hits are not exact, for how many workers, and what makes them exact: approximate first. */
function drawExactness() {
  const reasons = new Map();
  for (const { id, exact } of fleet.all) {
    if (!exact?.reason) continue;
    const key = `${exact.mode} ${exact.reason} ${exact.lift}`;
    if (!reasons.has(key)) reasons.set(key, { exact, ids: [] });
    reasons.get(key).ids.push(id);
  }
  const all = [...reasons.values()].sort((a, b) => (a.exact.mode < b.exact.mode ? -1 : 1));
  const lines = all.slice(0, REASONS).map(({ exact, ids }) => {
    const few = `Worker${ids.length > 1 ? "s" : ""} ${ids.join(", ")}`;
    const whose = ids.length > 3 ? plural(ids.length, "worker") : few;
    const lift = exact.lift ? [" For exact hits: ", make("code", {}, exact.lift)] : [];
    return make("li", {}, make("strong", {}, `${whose}: ${exact.mode} hits. `), exact.reason, ...lift);
  });
  if (all.length > REASONS) lines.push(make("li", {}, `${plural(all.length - REASONS, "more reason")}`));
  by("exactness").hidden = lines.length === 0;
  by("exactness").replaceChildren(...lines);
}

function drawCells() {
  const canvas = by("cells");
  const width = Math.floor(by("grid").clientWidth);
  if (width < 10) return;
  const place = layOut(fleet.shown.length, width);
  fleet.place = place;
  const pen = sized(canvas, width, place.height + 2);
  const ink = inks();
  fleet.shown.forEach((row, n) => {
    const x = (n % place.columns) * place.wide;
    const y = Math.floor(n / place.columns) * place.high;
    const lit = fleet.lit !== null && fleet.lit.has(row);
    const mood = { lit, dim: fleet.lit !== null && !lit, chosen: row.id === fleet.chosen };
    drawCell(pen, ink, row, { x, y, wide: place.wide, high: place.high }, fleet.full, mood);
  });
  canvas.setAttribute("aria-label", `Cells of ${fleetWords()}`);
  drawLegend(ink);
}

function drawLegend(ink) {
  const present = new Set(fleet.all.map((row) => row.state));
  const unit = by("measure").value === "wait" ? seconds : short;
  const modes = ["degraded", "approximate"].filter((m) => fleet.all.some((r) => r.exact?.mode === m));
  const told = [...present, ...modes, unit(fleet.full), fleet.all.some((r) => r.hot), ink.load].join();
  const legend = by("legend");
  if (legend.dataset.told === told) return;
  legend.dataset.told = told;
  const plain = { state: "ready", exact: null, load: null, kv: null, hits: null, hot: false, trouble: "" };
  const item = (worker, words) => {
    const canvas = make("canvas", { "aria-hidden": "true" });
    canvas.style.width = "24px";
    drawCell(sized(canvas, 24, 24), ink, worker, { x: 0, y: 0, wide: 24, high: 24 }, 1, {});
    return make("li", {}, canvas, words);
  };
  const items = [
    item({ ...plain, load: 1 }, `left bar: load, full at ${unit(fleet.full)}`),
    item({ ...plain, kv: 1 }, "middle: KV in use"),
    item({ ...plain, hits: 1 }, "right: hits of the last minute"),
    item({ ...plain, hot: true }, "thick border: more than twice the mean"),
  ];
  const corners = { degraded: "full corner: hits are a bound", approximate: "empty corner: hits are guessed" };
  for (const mode of modes) items.push(item({ ...plain, exact: { mode } }, corners[mode]));
  for (const state of [...present].sort((a, b) => rankOf(a) - rankOf(b)).slice(0, 20)) {
    if (state !== "ready") {
      items.push(item({ ...plain, state }, `${state.replaceAll("_", " ")}: ${stateLook(state).means}`));
    }
  }
  legend.replaceChildren(...items);
}

function drawTable() {
  const heads = ["Worker", "State", "Requests", "Before first token", "Queued prefill", "KV", "Hits", "Hits are", "Address"];
  const head = make("tr", {}, ...heads.map((name) => make("th", { scope: "col" }, name)));
  const rows = fleet.shown.slice(0, TABLE_ROWS).map((row) => {
    const open = make("button", { type: "button", "data-worker": row.id }, `${row.id}`);
    const lit = fleet.lit !== null && fleet.lit.has(row);
    const cells = [
      row.state + (row.hot ? ", hot" : ""),
      short(row.requests), short(row.waiting), seconds(row.wait), percent(row.kv), percent(row.hits),
      row.exact?.mode ?? NOTHING,
    ];
    return make("tr", { class: lit ? "lit" : null },
      make("td", {}, open),
      ...cells.map((words, n) => make("td", { "data-is": n ? heads[n + 1] : null }, words)),
      make("td", { class: "wide" }, named(row), ...(row.trouble ? [make("span", { class: "chip" }, row.trouble)] : [])));
  });
  const left = fleet.shown.length - rows.length;
  if (left > 0) {
    const words = `${short(left)} more: filter or sort to see them`;
    rows.push(make("tr", { class: "gap" }, make("td", { colspan: heads.length }, words)));
  }
  const focused = document.activeElement?.dataset?.worker;
  by("table").replaceChildren(make("table", { class: "stacks" }, make("thead", {}, head), make("tbody", {}, ...rows)));
  if (focused !== undefined) {
    [...by("table").querySelectorAll("button")].find((b) => b.dataset.worker === focused)?.focus();
  }
}

function named(row) {
  return row.url + (row.rank === null ? "" : `#${row.rank}`);
}

function workerWords(row) {
  const lines = [
    `Worker ${row.id}, ${row.state}${row.hot ? ", hot" : ""}`,
    named(row),
    `${short(row.requests)} requests, ${short(row.waiting)} before their first token`,
    `${short(row.queued)} tokens to prefill, ${seconds(row.wait)}`,
    `KV in use ${percent(row.kv)}, hits ${percent(row.hits)}`,
  ];
  if (row.exact !== null) lines.push(exactnessWords(row.exact));
  if (row.trouble) lines.push(row.trouble);
  return lines.join("\n");
}

/** The worker below a point of the page, or null. */
function workerAt(event) {
  const { place } = fleet;
  if (place === null) return null;
  const box = by("cells").getBoundingClientRect();
  const column = Math.floor((event.clientX - box.left) / place.wide);
  const line = Math.floor((event.clientY - box.top) / place.high);
  if (column < 0 || column >= place.columns || line < 0) return null;
  return fleet.shown[line * place.columns + column] ?? null;
}

function choose(row, open) {
  fleet.chosen = row === null ? null : row.id;
  if (row !== null) say(by("said"), workerWords(row));
  drawFleet();
  if (open && row !== null) openDetail(row.id);
}

function moveChoice(event) {
  const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -fleet.place?.columns, ArrowDown: fleet.place?.columns };
  const at = fleet.shown.findIndex((row) => row.id === fleet.chosen);
  const last = fleet.shown.length - 1;
  let next = null;
  if (event.key in steps) next = at < 0 ? 0 : at + steps[event.key];
  else if (event.key === "Home") next = 0;
  else if (event.key === "End") next = last;
  else if ((event.key === "Enter" || event.key === " ") && at >= 0) choose(fleet.shown[at], true);
  else return;
  event.preventDefault();
  if (next !== null && next >= 0 && next <= last) choose(fleet.shown[next], false);
}

function listenFleet() {
  const canvas = by("cells");
  canvas.addEventListener("pointermove", (event) => {
    const row = workerAt(event);
    if (row === null) tip.hide();
    else tip.show(workerWords(row), event.clientX, event.clientY);
  });
  canvas.addEventListener("pointerleave", tip.hide);
  canvas.addEventListener("click", (event) => choose(workerAt(event), true));
  canvas.addEventListener("keydown", moveChoice);
  by("table").addEventListener("click", (event) => {
    const id = Number(event.target.closest("button")?.dataset.worker ?? NaN);
    if (isNumber(id)) openDetail(id);
  });
  for (const id of ["find", "states", "sort", "measure"]) {
    by(id).addEventListener("input", () => guarded("fleet", drawFleet));
  }
  by("as-table").addEventListener("click", () => {
    fleet.asTable = !fleet.asTable;
    by("as-table").setAttribute("aria-pressed", String(fleet.asTable));
    guarded("fleet", drawFleet);
  });
}
