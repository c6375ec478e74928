// Why workers do not batch: asked for by a button, the costliest cause first.
const [EXAMINE_S, EXAMINE_SLACK_MS] = [10, 20000];
const DOCTOR_HEADS = ["Cause", "Where", "Evidence", "Change"];

function listenDoctor() {
  by("examine").addEventListener("click", async () => {
    by("examine").disabled = true;
    say(by("doctor-said"), `Watching for ${seconds(EXAMINE_S)}.`);
    try {
      const wait = EXAMINE_S * 1e3 + EXAMINE_SLACK_MS;
      drawDoctor(record(await asking(`doctor?seconds=${EXAMINE_S}`, wait)));
    } catch (error) {
      say(by("doctor-said"), `Not examined: ${text(error.message)}.`);
      by("doctor-rows").replaceChildren();
    }
    by("examine").disabled = false;
  });
}

function drawDoctor(report) {
  const found = list(report.findings).map(record).slice(0, 50);
  const time = seconds(known(report.watched_s));
  const words = report.loaded !== true
    ? `The workers had no load in ${time}. Examine again under load.`
    : found.length === 0
      ? `No cause found in ${time} under load.`
      : `${plural(found.length, "cause")} in ${time}; the first cause costs most.`;
  say(by("doctor-said"), words);
  problems.doctor = { at: new Date(), rows: found.map((one) => ({ where: text(one.where, 100), why: `${text(one.name, 60)}: ${text(one.evidence)}` })) };
  guarded("problems", drawProblems);
  const head = make("tr", {}, ...DOCTOR_HEADS.map((name) => make("th", { scope: "col" }, name)));
  const rows = found.map((one) =>
    make("tr", {}, ...[one.name, one.where, one.evidence, changeWords(one.changes)].map((cell) =>
      make("td", { class: "wide" }, text(cell, 600)))));
  by("doctor-rows").replaceChildren(...(rows.length ? [make("thead", {}, head), make("tbody", {}, ...rows)] : []));
}

function changeWords(changes) {
  const each = list(changes).map(record).slice(0, 4);
  const words = each.map((one) => `${text(one.field)}: ${text(one.from)} → ${text(one.to)}`);
  return words.join("; ") || "nothing";
}
