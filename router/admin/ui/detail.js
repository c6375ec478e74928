// One worker in full, as `/workers/ID` tells it.
const detail = { id: null, from: null, asked: 0 };

function openDetail(id) {
  if (by("detail").hidden) detail.from = document.activeElement;
  detail.id = id;
  by("detail").hidden = false;
  by("detail-body").replaceChildren();
  tip.hide();
  drawDetail();
  by("detail").focus();
}

function closeDetail() {
  if (by("detail").hidden) return;
  detail.id = null;
  by("detail").hidden = true;
  detail.from?.focus?.();
}

/** What is known already at once, the rest when it comes. */
async function drawDetail() {
  const { id } = detail;
  if (id === null) return;
  const row = fleet.all.find((one) => one.id === id);
  say(by("detail-title"), `Worker ${id}${row ? `: ${row.state}` : ": gone"}`);
  const asked = ++detail.asked;
  const told = await asking(`workers/${encodeURIComponent(id)}`).catch(() => null);
  if (detail.id !== id || detail.asked !== asked) return;
  const parts = [];
  if (row) parts.push(make("p", { class: "said" }, stateLook(row.state).means));
  if (row?.exact) parts.push(make("p", {}, exactnessWords(row.exact)));
  parts.push(told === null ? make("p", {}, "The router tells no more of it.") : termsOf(told));
  const here = decisions.kept.filter((one) => one.told.worker === id).slice(0, 5);
  if (here.length) {
    const lines = here.map((one) => make("li", {}, decisionWords(one.told)));
    parts.push(make("h3", {}, "Latest requests of this worker"), make("ul", {}, ...lines));
  }
  by("detail-body").replaceChildren(...parts);
}

function termsOf(told) {
  const terms = [];
  for (const [name, value] of Object.entries(record(told)).slice(0, 60)) {
    if (value === null || ["id", "state", "hits"].includes(name)) continue;
    terms.push(make("dt", {}, calledWithoutUnit(name)), make("dd", {}, valueWords(name, value)));
  }
  return make("dl", {}, ...terms);
}

/** A field's name for people; times carry their unit behind the figure. */
function calledWithoutUnit(name) {
  return (timed(name) ? name.slice(0, -2) : text(name, 40)).replaceAll("_", " ");
}

const timed = (name) => name.endsWith("_s") && !name.endsWith("per_s");

function valueWords(name, value) {
  if (Array.isArray(value)) {
    const more = value.length > 8 ? `, and ${value.length - 8} more` : "";
    return (value.slice(0, 8).map((one) => text(one, 80)).join(", ") || "none") + more;
  }
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (isNumber(value)) return timed(name) ? seconds(value) : short(value);
  return text(value, 300);
}

function listenDetail() {
  by("detail-close").addEventListener("click", closeDetail);
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") closeDetail();
  });
}
