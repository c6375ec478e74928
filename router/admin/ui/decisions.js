// The stream of decisions, newest first, with what came of each.
const [DECISIONS_KEPT, DECISIONS_SHOWN, DECISIONS_ON_A_PHONE] = [500, 60, 15];
const PHONE = matchMedia("(max-width: 700px)");
const decisions = {
  kept: [], // {serial, told, line}, newest first
  added: 0, // how many the router has ever made
  paused: false,
  since: 0, // `added` when it was paused
  nowS: 0, // the router's clock
};

function clearDecisions() {
  decisions.kept = [];
  decisions.added = 0;
}

/** Take in the latest; those told again may have their first token by now. */
function takeDecisions(told, nowS) {
  const { added, rows, outcomes } = record(told);
  const first = known(added) ?? decisions.added;
  decisions.added = first;
  decisions.nowS = isNumber(nowS) ? nowS : decisions.nowS;
  const old = new Map(decisions.kept.map((one) => [one.serial, one]));
  list(rows).forEach((row, n) => {
    const serial = first - n;
    if (old.has(serial)) old.get(serial).told = record(row);
    else old.set(serial, { serial, told: record(row), line: null });
  });
  list(outcomes).map(list).forEach(([firstToken, cached, ofTokens], n) => {
    const one = old.get(first - n);
    if (one) Object.assign(one.told, { first_token_s: firstToken, cached_tokens: cached, worker_prompt_tokens: ofTokens });
  });
  decisions.kept = [...old.values()].sort((a, b) => b.serial - a.serial).slice(0, DECISIONS_KEPT);
  const reasons = new Set(decisions.kept.map((one) => text(one.told.reason, 40)));
  offer(by("of-reason"), [...reasons].sort());
}

function drawDecisions() {
  const table = by("decision-rows");
  if (!table.tHead) {
    const heads = decisionCells({}).map(({ name, number }) =>
      make("th", { scope: "col", class: number ? "number" : null }, name));
    table.append(make("thead", {}, make("tr", {}, ...heads)), make("tbody"));
  }
  const fresh = Math.max(decisions.added - decisions.since, 0);
  if (decisions.paused) {
    say(by("decisions-said"), `Paused: ${plural(fresh, "decision")} since.`);
    return;
  }
  const fits = decisions.kept.filter(filterOf()).slice(0, PHONE.matches ? DECISIONS_ON_A_PHONE : DECISIONS_SHOWN);
  const lines = [];
  let missed = 0;
  fits.forEach((one, n) => {
    lines.push(decisionLine(one));
    const below = decisions.kept[decisions.kept.indexOf(one) + 1];
    if (below && below.serial !== one.serial - 1 && n + 1 < fits.length) {
      missed = one.serial - 1 - below.serial;
      lines.push(gapLine(one, missed));
    }
  });
  settle(table.tBodies[0], lines);
  const shown = `${decisions.added.toFixed(0)} so far; the latest ${fits.length} that fit.`;
  say(by("decisions-said"), decisions.added ? shown : "Nothing was decided yet.");
}

function filterOf() {
  const worker = by("of-worker").value.trim();
  const tenant = by("of-tenant").value.trim().toLowerCase();
  const reason = by("of-reason").value;
  return ({ told }) =>
    (!worker || String(told.worker) === worker) &&
    (!tenant || (typeof told.tenant === "string" && told.tenant.toLowerCase().includes(tenant))) &&
    (!reason || text(told.reason, 40) === reason);
}

function decisionCells(told) {
  const ago = isNumber(told.now_s) ? Math.max(decisions.nowS - told.now_s, 0) : null;
  const hits = known(told.expected_hit_tokens);
  const prompt = known(told.prompt_tokens);
  const counted = known(told.worker_prompt_tokens) ?? prompt; // the router may only estimate
  return [
    { name: "Request", value: text(told.request, 20) },
    { name: "Ago", value: seconds(ago === null ? null : Math.round(ago)), number: true },
    { name: "Worker", value: text(told.worker, 12), number: true },
    { name: "Reason", value: text(told.reason, 40) },
    { name: "Tenant", value: text(told.tenant, 40) },
    { name: "Prompt", value: short(prompt), number: true },
    { name: "Expected hits", value: prompt ? percent((hits ?? 0) / prompt) : NOTHING, number: true },
    { name: "Reported", value: counted && known(told.cached_tokens) !== null ? percent(told.cached_tokens / counted) : NOTHING, number: true },
    { name: "First token", value: seconds(known(told.first_token_s)), number: true },
    { name: "Cost at each worker (the lowest wins), and its parts", value: costs(told), wide: true },
  ];
}

/** The chosen worker's cost first, then the runners-up; terms where the router took it apart. */
function costs(told) {
  const unit = told.unit === "s" ? seconds : short;
  return list(told.best).slice(0, 3).map(record).map((one, n) => {
    const cost = isNumber(one.cost) ? unit(one.cost) : "ruled out";
    const terms = Object.entries(record(one.terms)).slice(0, 8)
      .filter(([, value]) => isNumber(value) && value !== 0)
      .map(([name, value]) => `${text(name, 30).replace(/_s$/, "").replaceAll("_", " ")} ${unit(value)}`);
    const words = `worker ${text(one.worker, 12)}: ${cost}`;
    return { first: n === 0, words, terms: terms.length ? ` (${terms.join(", ")})` : "" };
  });
}

function decisionLine(one) {
  const cells = decisionCells(one.told);
  if (one.line === null) {
    one.line = make("tr", {}, ...cells.map(({ name, number, wide }) =>
      make("td", { "data-is": name, class: number ? "number" : wide ? "wide" : null })));
  }
  cells.forEach(({ value }, n) => {
    const cell = one.line.cells[n];
    if (!Array.isArray(value)) {
      say(cell, value);
      cell.classList.toggle("none", value === NOTHING);
    }
    if (Array.isArray(value) && cell.childElementCount !== value.length) {
      cell.replaceChildren(...value.map(({ first, words, terms }) =>
        make("span", { class: "chip" }, make(first ? "b" : "span", {}, words), terms)));
    }
  });
  return one.line;
}

function gapLine(one, missed) {
  one.gap ??= make("tr", { class: "gap" }, make("td", { colspan: decisionCells({}).length }));
  say(one.gap.cells[0], `${plural(missed, "decision")} between are not shown: there are more than the router sends to this page`);
  return one.gap;
}

function decisionWords(told) {
  const [request, ago, , reason, , prompt, hits] = decisionCells(told).map(({ value }) => value);
  return `request ${request}, ${ago} ago, ${reason}: ${prompt} tokens, ${hits} expected here`;
}

function listenDecisions() {
  for (const id of ["of-worker", "of-tenant", "of-reason"]) {
    by(id).addEventListener("input", () => guarded("decisions", drawDecisions));
  }
  by("pause").addEventListener("click", () => {
    decisions.paused = !decisions.paused;
    decisions.since = decisions.added;
    by("pause").setAttribute("aria-pressed", String(decisions.paused));
    say(by("pause"), decisions.paused ? "Resume" : "Pause");
    guarded("decisions", drawDecisions);
  });
}
