// Asks the router once a second, hands out what it tells, and says so when it does not.
const [EVERY_MS, WAIT_MS, SLOWEST_MS, OLD_MS] = [1000, 5000, 8000, 3500];
const link = {
  key: null, // in memory only
  boot: "",
  sample: 0,
  version: 0,
  failures: 0,
  trouble: "",
  told: null, // when something new was last told, on this page's clock
  toldAt: null, // the same, as the router's clock on the wall has it
  timer: null,
  locked: false, // a key is wanted
};

/** GET; its JSON, or null for 204. Throws what `link.trouble` then says. */
async function asking(path, waitMs = WAIT_MS) {
  const stop = new AbortController();
  const timer = setTimeout(() => stop.abort(), waitMs);
  try {
    const headers = link.key === null ? {} : { Authorization: `Bearer ${link.key}` };
    const answer = await fetch(path, { headers, signal: stop.signal, cache: "no-store" });
    if (answer.status === 401) {
      askForKey();
      throw new Error("the admin port asks for a key");
    }
    if (answer.status === 204) return null;
    if (!answer.ok) throw new Error(`the router answers ${answer.status}`);
    return await answer.json();
  } catch (error) {
    if (error.name === "AbortError") throw new Error(`no answer within ${seconds(waitMs / 1e3)}`);
    throw error instanceof TypeError ? new Error("the router does not answer") : error;
  } finally {
    clearTimeout(timer);
  }
}

async function ask() {
  link.timer = null;
  try {
    const query = new URLSearchParams({ boot: link.boot, since: link.sample, names: link.version });
    const told = await asking(`ui/state?${query}`);
    link.failures = 0;
    link.trouble = "";
    if (told !== null) take(record(told));
  } catch (error) {
    link.failures += 1;
    link.trouble = text(error.message);
  }
  tellAge();
  const backOff = Math.min(EVERY_MS * 2 ** link.failures, SLOWEST_MS) * (0.8 + 0.4 * Math.random());
  if (link.locked) return;
  link.timer = document.hidden ? "hidden" : setTimeout(ask, link.failures ? backOff : EVERY_MS);
}

/** A page that nobody sees asks nothing; one that is seen again asks at once. */
function look() {
  if (!document.hidden && link.timer === "hidden") ask();
  if (!document.hidden || link.timer === null) return;
  clearTimeout(link.timer);
  link.timer = "hidden";
}

function take(told) {
  const frame = record(told.frame);
  if (told.boot !== link.boot) {
    past.clear();
    clearDecisions();
  }
  link.boot = text(told.boot, 64);
  link.sample = known(frame.sample) ?? 0;
  if (Array.isArray(told.names)) {
    fleet.names = told.names;
    link.version = known(frame.version) ?? 0;
  }
  link.told = performance.now();
  link.toldAt = isNumber(frame.unix_s) ? new Date(frame.unix_s * 1e3) : null;
  by("main").hidden = false;
  by("door").hidden = true;
  guarded("summary", () => say(by("summary"), summary(frame)));
  guarded("history", () => {
    past.take(told.columns, told.history);
    drawSparks();
  });
  guarded("problems", () => {
    takeProblems(frame);
    drawProblems();
  });
  guarded("decisions", () => takeDecisions(frame.decisions, frame.now_s));
  guarded("trunks", () => {
    takeTrunks(frame.trunks);
    lightFleet();
    drawTrunks();
  });
  guarded("fleet", () => {
    takeFleet(frame);
    drawFleet();
  });
  guarded("decisions", drawDecisions);
  guarded("replicas", () => drawReplicas(list(frame.replicas).map(record)));
  guarded("detail", () => void drawDetail());
}

function summary(frame) {
  const policy = record(frame.policy);
  const readiness = record(frame.readiness);
  const reasons = list(readiness.reasons).map((why) => text(why));
  return [
    readiness.ready === true ? "ready" : `not ready: ${reasons.join(", ") || "no reason given"}`,
    `policy ${text(policy.policy, 120)}`,
    isNumber(policy.suspended_for_s) ? `suspended, ${text(policy.deciding, 80)} decides` : "",
    `${short(known(frame.inflight))} in flight, ${short(known(frame.held))} held`,
  ].filter(Boolean).join(" · ");
}

function drawReplicas(replicas) {
  by("replicas").hidden = replicas.length === 0;
  const names = [...new Set(replicas.flatMap(Object.keys))].slice(0, 12);
  const head = make("tr", {}, ...names.map((name) => make("th", { scope: "col" }, calledWithoutUnit(name))));
  const rows = replicas.slice(0, 100).map((one) =>
    make("tr", {}, ...names.map((name) => make("td", {}, valueWords(name, one[name])))));
  by("replica-rows").replaceChildren(make("thead", {}, head), make("tbody", {}, ...rows));
}

/** One part's defect, or what it was told, must not take the others along. */
function guarded(part, draw) {
  try {
    draw();
  } catch (error) {
    console.warn(`${part} could not be shown:`, error);
  }
}

/** How old is what stands here? */
function tellAge() {
  const age = link.told === null ? Infinity : performance.now() - link.told;
  const old = age > OLD_MS && !link.locked;
  by("main").classList.toggle("old", old && link.told !== null);
  const ago = seconds(Math.round(age / 1e3));
  if (old && link.told !== null) doubtProblems(ago);
  say(by("live"), link.locked ? "a key is needed" : old ? `old: ${ago}` : "live");
  const since = link.toldAt === null ? "" : ` The figures below are ${ago} old, of ${timeOfDay(link.toldAt)}.`;
  const words = link.trouble
    ? `${link.told === null ? "No connection" : "Connection lost"}: ${link.trouble}.`
    : "The router answers, but its figures do not change.";
  say(by("banner"), `${words}${since} The page tries again.`);
  by("banner").hidden = !(old && (link.told !== null || link.trouble));
}

function askForKey() {
  const refused = link.key !== null;
  link.key = null;
  link.locked = true;
  by("door").hidden = false;
  by("main").hidden = true;
  say(by("door-said"), refused ? "That key is not one of the admin port's." : "");
  by("key").focus();
}

function start() {
  makeSparks();
  listenProblems();
  listenFleet();
  listenDetail();
  listenDecisions();
  listenDoctor();
  by("door").addEventListener("submit", (event) => {
    event.preventDefault();
    const key = by("key").value.trim();
    by("key").value = "";
    if (!/^[!-~]+$/.test(key)) return say(by("door-said"), "A key has no blanks, and ASCII only.");
    link.key = key;
    link.locked = false;
    ask();
  });
  document.addEventListener("visibilitychange", look);
  for (const query of ["(prefers-color-scheme: dark)", "(resolution: 1dppx)"]) {
    matchMedia(query).addEventListener("change", () => guarded("fleet", drawFleet));
  }
  new ResizeObserver(() => guarded("fleet", drawFleet)).observe(by("grid"));
  setInterval(tellAge, 500);
  ask();
}

start();
