// What to change, as the last `warmroute advise` beside the router said, and what became of it.
const ADVICE_EVERY_MS = 60000;
const ADVICE_HEADS = ["Change", "To what", "Mean TTFT, times", "Good answers, points", "Do"];

const advice = { timer: null };

/** Once the router has answered at all; then every minute. */
function followAdvice() {
  if (advice.timer !== null) return;
  advice.timer = setInterval(lookAtAdvice, ADVICE_EVERY_MS);
  lookAtAdvice();
}

async function lookAtAdvice() {
  if (document.hidden || link.locked) return;
  try {
    const told = record(await asking("advice"));
    guarded("advice", () => drawAdvice(told));
  } catch {
    by("advice").hidden = true; // that nobody answers stands at the top of the page
  }
}

function drawAdvice(told) {
  const given = record(told.advice);
  const made = isNumber(told.written_at);
  by("advice").hidden = !made && !told.every_s && !told.failed;
  const found = list(given.findings).map(record).slice(0, 10);
  const recorded = record(given.recorded);
  const words = [
    made ? `Of ${new Date(told.written_at * 1e3).toLocaleString()}, by ${plural(known(recorded.requests) ?? 0, "request")}.` : "None yet.",
    made && found.length === 0 ? "Change nothing: nothing that was tried is clearly better." : "",
    told.running === true ? "The next one is being made." : "",
    told.failed ? `The last try: ${text(told.failed, 600)}` : "",
  ];
  say(by("advice-said"), words.filter(Boolean).join(" "));
  const head = make("tr", {}, ...ADVICE_HEADS.map((name) => make("th", { scope: "col" }, name)));
  const rows = found.map((one) => {
    const change = record(one.change);
    const forecast = record(one.forecast);
    const cells = [
      change.kind, `${text(change.title, 300)}${one.why ? text(one.why, 300) : ""}`,
      between(record(forecast.next_ttft), 1), between(record(forecast.next_good), 100), change.do,
    ];
    return make("tr", {}, ...cells.map((cell) => make("td", { class: "wide" }, text(cell, 600))));
  });
  by("advice-rows").replaceChildren(...(rows.length ? [make("thead", {}, head), make("tbody", {}, ...rows)] : []));
  const checks = list(given.checks).map(record).slice(0, 10);
  by("advice-checks").replaceChildren(...checks.map((one) => make("li", {}, checkWords(one))));
}

/** A mean and where it should lie, times `factor`. */
function between(found, factor) {
  const [mean, low, high] = [found.mean, found.low, found.high].map((value) =>
    isNumber(value) ? (value * factor).toFixed(factor === 1 ? 2 : 1) : "?");
  return `${mean} [${low}, ${high}]`;
}

function checkWords(check) {
  const forecast = record(check.forecast);
  const happened = known(check.happened);
  const within = happened !== null && happened >= forecast.low && happened <= forecast.high;
  const verdict = happened === null ? "not held against anything" : within ? "within" : "NOT within";
  return `Forecast of ${text(check.title, 300)}: TTFT times ${between(forecast, 1)}; since then ${happened === null ? "?" : happened.toFixed(2)}: ${verdict}.`;
}
