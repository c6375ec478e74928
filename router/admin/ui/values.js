// What the router tells may lack anything or be anything: nobody below reads it but through these.
const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
const known = (value) => (isNumber(value) && value >= 0 ? value : null);
const list = (value) => (Array.isArray(value) ? value : []);
const record = (value) =>
  value !== null && typeof value === "object" && !Array.isArray(value) ? value : {};
const NOTHING = "–";
const THIN = "\u00a0"; // between a figure and its unit, where no line ends

/** A text, or a number as one, of at most `most` characters; – for all else. */
function text(value, most = 200) {
  if (isNumber(value)) return String(value);
  if (typeof value !== "string" || value === "") return NOTHING;
  return value.length > most ? value.slice(0, most - 1) + "…" : value;
}

/** 950, 1.2k, 33M: two digits below ten, whole numbers above, and a unit. */
function short(value) {
  if (!isNumber(value)) return NOTHING;
  const size = Math.abs(value);
  if (size >= 999.5e12) return value.toExponential(1);
  for (const [unit, of] of [["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e3]]) {
    if (size >= of * 0.9995) return digits(value / of) + unit;
  }
  return digits(value);
}

function digits(value) {
  if (Math.abs(value) >= 9.95 || Number.isInteger(value)) return value.toFixed(0);
  return Number(value.toPrecision(2)).toString();
}

/** The same with a unit behind it, which never stands alone. */
function measured(value, unit) {
  return isNumber(value) ? short(value) + unit : NOTHING;
}

/** A time in seconds as people say it: 12 ms, 1.4 s, 3.2 min. */
function seconds(value) {
  if (!isNumber(value)) return NOTHING;
  if (value < 0) return "-" + seconds(-value);
  if (value === 0) return `0${THIN}s`;
  if (value < 0.9995) return `${digits(value * 1e3)}${THIN}ms`;
  if (value < 120) return `${digits(value)}${THIN}s`;
  return value < 7200 ? `${digits(value / 60)}${THIN}min` : `${short(value / 3600)}${THIN}h`;
}

/** The time of day of a Date, 24 hours; empty: it is none. */
function timeOfDay(date) {
  if (date === null || Number.isNaN(date.getTime())) return "";
  return [date.getHours(), date.getMinutes(), date.getSeconds()].map((part) => String(part).padStart(2, "0")).join(":");
}

function percent(value) {
  if (!isNumber(value)) return NOTHING;
  return `${short(value * 100)}${THIN}%`;
}

function plural(count, one, many = one + "s") {
  return `${short(count)} ${count === 1 ? one : many}`;
}

/** An element with attributes and children; texts stay texts, whatever is in them. */
function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === true) element.setAttribute(key, "");
    else if (value !== false && value !== null) element.setAttribute(key, value);
  }
  element.append(...children);
  return element;
}

function drawn(name, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

const by = (id) => document.getElementById(id);

/** Change a text only where it is another one: screen readers and selections stay at rest. */
function say(element, words) {
  if (element.textContent !== words) element.textContent = words;
}

/** The options of a select, its choice kept. */
function offer(select, values) {
  const told = values.join("\n");
  if (select.dataset.told === told) return;
  select.dataset.told = told;
  const chosen = select.value;
  const options = values.map((value) => make("option", { value }, text(value, 40)));
  select.replaceChildren(make("option", { value: "" }, "all"), ...options);
  select.value = values.includes(chosen) ? chosen : "";
}

const tip = {
  show(words, x, y) {
    const box = by("tip");
    say(box, words);
    box.hidden = false;
    const { width, height } = box.getBoundingClientRect();
    box.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - width - 4))}px`;
    box.style.top = `${y + 18 + height > innerHeight ? Math.max(4, y - height - 10) : y + 18}px`;
  },
  hide() {
    by("tip").hidden = true;
  },
};
