// The last minutes as small curves with axes, each with what it is now in words.
const KEPT = 600;
const [WIDE, HIGH] = [600, 60];
const WINDOWS = [60, 120, 300, KEPT]; // seconds: the picture grows until it shows all
const SPARKS = [
  { title: "Requests sent", show: (v) => measured(v, "/s"), lines: [["requests_per_s", "to workers"]] },
  {
    title: "Time to first token",
    show: seconds,
    lines: [["ttft_mean_s", "mean"], ["ttft_p95_s", "p95"]],
  },
  {
    title: "Cache hits",
    show: percent,
    most: 1,
    lines: [["hit_share", "reported"], ["expected_hit_share", "expected"]],
  },
  { title: "Requests", show: short, lines: [["inflight", "in flight"], ["held", "held"]] },
  { title: "Imbalance", show: (v) => measured(v, `${THIN}×`), lines: [["imbalance", "busiest worker over the mean"]] },
  {
    title: "Errors by blame",
    show: (v) => measured(v, "/s"),
    lines: [
      ["worker_errors_per_s", "workers'"],
      ["client_errors_per_s", "clients'"],
      ["router_errors_per_s", "router's"],
    ],
  },
  {
    title: "Full pool",
    show: (v) => measured(v, "/s"),
    lines: [["refused_per_s", "refused"], ["busy_per_s", "workers busy"]],
  },
];

const past = {
  columns: [],
  rows: [],
  clear() {
    this.rows = [];
  },
  take(columns, rows) {
    this.columns = list(columns);
    this.rows.push(...list(rows).map(list));
    this.rows.splice(0, this.rows.length - KEPT);
  },
  values(name) {
    const at = this.columns.indexOf(name);
    return this.rows.map((row) => known(row[at]));
  },
};

function makeSparks() {
  for (const spark of SPARKS) {
    spark.paths = spark.lines.map((_, n) => drawn("path", { class: `line${n}` }));
    spark.now = spark.lines.map(() => make("b"));
    spark.mostSaid = make("span", { class: "most" });
    const keys = spark.lines.map(([, name], n) => {
      const line = drawn("path", { class: `line${n}`, d: "M0 4H26" });
      const key = drawn("svg", { class: "key", viewBox: "0 0 26 8", "aria-hidden": "true" }, line);
      return make("li", {}, key, `${name} `, spark.now[n]);
    });
    spark.top = make("span");
    spark.began = make("span");
    const box = { viewBox: `0 0 ${WIDE} ${HIGH}`, preserveAspectRatio: "none", role: "img" };
    const grid = drawn("path", { class: "rule", d: `M0 1H${WIDE}M0 ${HIGH / 2}H${WIDE}` });
    spark.svg = drawn("svg", box, grid, ...spark.paths);
    spark.svg.addEventListener("pointermove", (event) => tellMoment(spark, event));
    spark.svg.addEventListener("pointerleave", tip.hide);
    const caption = make("figcaption", {}, spark.title, " ", spark.mostSaid);
    const upward = make("div", { class: "up", "aria-hidden": "true" }, spark.top, make("span", {}, "0"));
    const along = make("div", { class: "along", "aria-hidden": "true" }, spark.began, make("span", {}, "now"));
    const plot = make("div", { class: "plot" }, upward, spark.svg, along);
    by("sparks").append(make("figure", { class: "spark" }, caption, plot, make("ul", {}, ...keys)));
  }
}

function drawSparks() {
  const span = spanOf();
  say(by("pulse-title"), span === 60 ? "Last minute" : `Last ${span / 60} minutes`);
  for (const spark of SPARKS) {
    const lines = spark.lines.map(([name]) => past.values(name));
    const seen = lines.flat().filter((value) => value !== null);
    const most = seen.reduce((a, b) => Math.max(a, b), 0);
    const top = spark.most ?? (most > 0 ? rounded(most) : 1);
    say(spark.mostSaid, seen.length ? `peak ${spark.show(most)}` : "nothing yet");
    say(spark.top, spark.show(top));
    say(spark.began, `${span / 60}${THIN}min ago`);
    const words = [];
    lines.forEach((values, n) => {
      spark.paths[n].setAttribute("d", curve(values, top, span));
      const now = spark.show(latest(values));
      say(spark.now[n], now);
      words.push(`${spark.lines[n][1]} ${now}`);
    });
    spark.svg.setAttribute("aria-label", `${spark.title}: ${words.join(", ")}`);
  }
}

function spanOf() {
  return WINDOWS.find((span) => span >= past.rows.length) ?? KEPT;
}

/** The last value known, of the last ten seconds: a quiet second has no time to first token. */
function latest(values) {
  return values.slice(-10).reduce((last, value) => value ?? last, null);
}

/** One step a second, the newest at the right; where nothing is known the pen is lifted. */
function curve(values, top, span) {
  let [path, lifted] = ["", true];
  const step = WIDE / span;
  values.forEach((value, n) => {
    if (value === null) {
      lifted = true;
      return;
    }
    const y = HIGH - 1 - Math.min(value / top, 1) * (HIGH - 3);
    path += `${lifted ? "M" : "L"}${(WIDE - (values.length - n) * step).toFixed(1)} ${y.toFixed(1)}`;
    if (values[n + 1] === null || values[n + 1] === undefined) path += `h${step}`;
    lifted = false;
  });
  return path;
}

function tellMoment(spark, event) {
  const box = spark.svg.getBoundingClientRect();
  const span = spanOf();
  const at = Math.floor(((event.clientX - box.left) / box.width - 1) * span) + past.rows.length;
  if (at < 0 || at >= past.rows.length) return tip.hide();
  const ago = past.rows.length - 1 - at;
  const words = spark.lines.map(([name, said]) => `${said} ${spark.show(past.values(name)[at])}`);
  tip.show([ago ? `${seconds(ago)} ago` : "now", ...words].join("\n"), event.clientX, event.clientY);
}
