// All workers: what is told of them as rows, and the rows as cells or as a table.
const TABLE_ROWS = 100;
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
  const index = typeof told.index === "string" ? told.index : "";
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
      index: index[at] ?? "-",
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
  if (fleet.asTable) drawTable();
  else drawCells();
}

function fleetWords() {
  const counts = new Map();
  for (const row of fleet.all) counts.set(row.state, (counts.get(row.state) ?? 0) + 1);
  const states = [...counts].sort((a, b) => rankOf(a[0]) - rankOf(b[0]));
  const hidden = fleet.all.length - fleet.shown.length;
  const words = states.map(([state, count]) => `${count} ${state}`).join(", ");
  const unknown = fleet.all.filter((row) => row.index === "0").length;
  return [
    `${fleet.all.length} worker${fleet.all.length === 1 ? "" : "s"}${words ? `: ${words}` : ""}`,
    unknown ? `${unknown} with an index that is a lower bound` : "",
    hidden ? `${hidden} filtered out` : "",
    fleet.lit ? fleet.lit.words : "",
  ].filter(Boolean).join(" · ");
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
  const told = [...present, unit(fleet.full), fleet.all.some((r) => r.hot), ink.load].join();
  const legend = by("legend");
  if (legend.dataset.told === told) return;
  legend.dataset.told = told;
  const plain = { state: "ready", index: "1", load: null, kv: null, hits: null, hot: false };
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
    item({ ...plain, index: "0" }, "corner: index is a lower bound"),
  ];
  for (const state of [...present].sort((a, b) => rankOf(a) - rankOf(b)).slice(0, 20)) {
    if (state !== "ready") {
      items.push(item({ ...plain, state }, `${stateLook(state).letter}: ${state}`));
    }
  }
  legend.replaceChildren(...items);
}

function drawTable() {
  const heads = ["Worker", "State", "Requests", "Before first token", "Queued prefill", "KV", "Hits", "Address"];
  const head = make("tr", {}, ...heads.map((name) => make("th", { scope: "col" }, name)));
  const rows = fleet.shown.slice(0, TABLE_ROWS).map((row) => {
    const open = make("button", { type: "button", "data-worker": row.id }, `${row.id}`);
    const lit = fleet.lit !== null && fleet.lit.has(row);
    const cells = [
      row.state + (row.hot ? ", hot" : "") + (row.index === "0" ? ", index ?" : ""),
      short(row.requests), short(row.waiting), seconds(row.wait), percent(row.kv), percent(row.hits),
    ];
    return make("tr", { class: lit ? "lit" : null },
      make("td", {}, open),
      ...cells.map((words, n) => make("td", { "data-is": n ? heads[n + 1] : null }, words)),
      make("td", { class: "wide" }, named(row)));
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
  if (row.index === "0") lines.push("its index is a lower bound");
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
