// What is wrong now, the worst first; one green line where nothing is.
const RUNBOOK = "docs/operations.md";
const [KINDS_SHOWN, ROWS_SHOWN] = [30, 20];
const problems = { kinds: [], ready: 0, workers: 0, unixS: null, doctor: null };

function takeProblems(frame) {
  problems.kinds = list(frame.wrong).map(record).slice(0, KINDS_SHOWN);
  problems.unixS = known(frame.unix_s);
  const states = list(record(frame.workers).states);
  const indexes = list(record(frame.workers).state);
  problems.workers = indexes.length;
  problems.ready = indexes.filter((at) => ["ready", "busy", "slow_start"].includes(states[at])).length;
}

function drawProblems() {
  const kinds = [...problems.kinds, ...doctorKind()];
  const count = kinds.reduce((sum, kind) => sum + (known(kind.count) ?? 1), 0);
  const box = by("problems");
  box.classList.toggle("bad", count > 0);
  box.classList.toggle("well", count === 0);
  document.title = count ? `(${short(count)}) warmroute` : "warmroute";
  const words = count === 0
    ? `Nothing is wrong: ${short(problems.ready)} of ${plural(problems.workers, "worker")} take requests, and the router refused none in the last minute.`
    : `${plural(count, "thing")} ${count === 1 ? "is" : "are"} wrong`;
  say(by("problems-title"), words);
  const lines = by("problem-rows");
  const told = JSON.stringify(kinds, (key, value) => (key === "for_s" ? undefined : value));
  if (lines.dataset.told !== told) {
    lines.dataset.told = told;
    lines.replaceChildren(...kinds.map(problemKind));
  }
  // The rest stays as it is, so that a focus and a selection stay, too.
  const rows = kinds.flatMap((kind) => rowsOf(kind));
  [...lines.querySelectorAll(".since")].forEach((one, n) => say(one, sinceWords(rows[n])));
}

const rowsOf = (kind) => list(kind.rows).map(record).slice(0, ROWS_SHOWN);

/** Nothing new came for so long: what was well then need not be so now. */
function doubtProblems(ago) {
  if (by("problems").classList.contains("well")) {
    say(by("problems-title"), `Nothing was wrong ${ago} ago; the present state is unknown.`);
  }
}

/** A kind of problem: what it is, where the runbook has it, and each worker or thing with its reason. */
function problemKind(kind) {
  const rows = rowsOf(kind);
  const count = known(kind.count) ?? rows.length;
  const runbook = kind.runbook === undefined ? [] : [" ", make("code", {}, `${RUNBOOK}: ${text(kind.runbook, 60)}`)];
  const head = make("p", {}, make("strong", {}, text(kind.title, 100) + (count > 1 ? ` (${short(count)})` : "")), ...runbook);
  const lines = rows.map(problemRow);
  const left = count - rows.length;
  if (left > 0) {
    lines.push(make("li", {}, `and ${plural(left, "more", "more")}: sort the fleet by trouble to see them`));
  }
  return make("li", {}, head, make("ul", {}, ...lines));
}

function problemRow(row) {
  const where = typeof row.where === "string" && row.where ? text(row.where, 100) : "";
  const id = known(row.worker);
  const whose = id === null
    ? (where ? [make("b", {}, where)] : [])
    : [make("button", { type: "button", "data-worker": id }, `worker ${id}`), " ", make("b", {}, where)];
  const address = addressOf({ url: where, rank: null });
  const why = typeof row.why === "string" && row.why ? reasonAt(text(row.why, 300), address) : "no reason is known";
  return make("li", {}, ...whose, whose.length ? `: ${why}` : why, make("span", { class: "since" }));
}

/** Since when, on the clock on the wall, and for how long. */
function sinceWords(row) {
  const forS = known(row.for_s);
  if (forS === null) return "";
  const began = timeOfDay(problems.unixS === null ? null : new Date((problems.unixS - forS) * 1e3));
  return ` (${began ? `since ${began}, ` : ""}for ${seconds(Math.round(forS))})`;
}

/** What the doctor found when it was asked last, as a kind of problem. */
function doctorKind() {
  const { doctor } = problems;
  if (doctor === null || !doctor.rows.length) return [];
  return [{ title: `The doctor found (asked at ${timeOfDay(doctor.at)})`, count: doctor.rows.length, rows: doctor.rows }];
}

function listenProblems() {
  by("problem-rows").addEventListener("click", (event) => {
    const id = Number(event.target.closest("button")?.dataset.worker ?? NaN);
    if (isNumber(id)) openDetail(id);
  });
}
