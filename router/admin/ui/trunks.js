// Heads of prompts that many share; pointing at one lights up the workers that hold it.
const TRUNK_HEADS = ["Trunk", "Tokens", "Share of requests", "Requests/s", "Demand", "Workers with it"];
const trunks = { rows: [], followed: false, kept: 0, pinned: null, over: null, lines: new Map() };

function takeTrunks(told) {
  const { followed, kept, rows } = record(told);
  trunks.followed = followed === true;
  trunks.kept = known(kept) ?? 0;
  trunks.rows = list(rows).map(record).filter((row) => typeof row.hash === "string");
}

function drawTrunks() {
  const words = !trunks.followed
    ? "This policy does not follow sessions, so the router does not know what prompts share."
    : trunks.rows.length
      ? `The ${short(trunks.rows.length)} of ${short(trunks.kept)} with the most demand: seconds of work a second that their prompts bring beside the shared part. Point at one, or press its button, to see which workers hold it.`
      : "No two sessions have shared the head of a prompt yet.";
  say(by("trunks-said"), words);
  const table = by("trunk-rows");
  if (!table.tHead) {
    const row = TRUNK_HEADS.map((name, n) => make("th", { scope: "col", class: n ? "number" : null }, name));
    table.append(make("thead", {}, make("tr", {}, ...row)), make("tbody"));
  }
  table.tHead.hidden = trunks.rows.length === 0;
  const lines = trunks.rows.map(trunkLine);
  settle(table.tBodies[0], lines);
  const there = new Set(trunks.rows.map((row) => row.hash));
  for (const hash of trunks.lines.keys()) if (!there.has(hash)) trunks.lines.delete(hash);
}

function trunkLine(row) {
  let line = trunks.lines.get(row.hash);
  if (!line) {
    const button = make("button", { type: "button", title: text(row.hash) }, text(row.hash, 16).slice(0, 8));
    const heads = TRUNK_HEADS.slice(1);
    const cells = heads.map((name) => make("td", { class: "number", "data-is": name }));
    line = make("tr", {}, make("td", {}, button), ...cells);
    line.addEventListener("pointerenter", () => lightUp("over", row.hash));
    line.addEventListener("pointerleave", () => lightUp("over", null));
    button.addEventListener("focus", () => lightUp("over", row.hash));
    button.addEventListener("blur", () => lightUp("over", null));
    button.addEventListener("click", () => lightUp("pinned", trunks.pinned === row.hash ? null : row.hash));
    trunks.lines.set(row.hash, line);
  }
  const few = (known(row.copies) ?? 0) < (known(row.wanted_copies) ?? 0);
  const words = [
    short(known(row.tokens)),
    percent(known(row.share)),
    short(known(row.requests_per_s)),
    measured(known(row.demand), `${THIN}s/s`),
    `${short(known(row.copies))}, wanted ${short(known(row.wanted_copies))}${few ? ": too few" : ""}`,
  ];
  words.forEach((said, n) => say(line.cells[n + 1], said));
  line.cells[5].classList.toggle("short", few);
  line.classList.toggle("lit", row.hash === (trunks.over ?? trunks.pinned));
  line.querySelector("button").setAttribute("aria-pressed", String(row.hash === trunks.pinned));
  return line;
}

/** Whose holders the fleet shows; `how`: over, for as long as it is pointed at, or pinned. */
function lightUp(how, hash) {
  trunks[how] = hash;
  guarded("fleet", () => {
    lightFleet();
    drawFleet();
  });
  guarded("trunks", drawTrunks);
}

function lightFleet() {
  const row = trunks.rows.find((one) => one.hash === (trunks.over ?? trunks.pinned));
  if (!row) {
    fleet.lit = null;
    return;
  }
  const bits = typeof row.holders === "string" ? row.holders : "";
  const has = ({ at }) => ((parseInt(bits[at >> 2] ?? "0", 16) >> (3 - (at & 3))) & 1) === 1;
  fleet.lit = { has, words: `lit: ${short(known(row.copies))} hold trunk ${text(row.hash, 16).slice(0, 8)}` };
}

/** Bring a table's body to these lines, moving as few as can be: who has the focus keeps it. */
function settle(body, lines) {
  lines.forEach((line, n) => {
    if (body.children[n] !== line) body.insertBefore(line, body.children[n] ?? null);
  });
  while (body.children.length > lines.length) body.lastElementChild.remove();
}
