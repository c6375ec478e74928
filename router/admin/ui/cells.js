// One worker as one cell of a canvas: its address, three bars (load, KV, hits), and where it is not
// well the reason in words; of hundreds of workers cells have room for the bars and a letter alone.
const STATES = {
  ready: { letter: "", hatch: "", means: "takes requests" },
  slow_start: { letter: "R", hatch: "dots", means: "new: its share grows" },
  busy: { letter: "B", hatch: "rising", means: "says it is busy: others go first for a while" },
  joining: { letter: "J", hatch: "dots", means: "not recognized yet" },
  draining: { letter: "D", hatch: "rising", means: "nothing new; what runs there ends" },
  leaving: { letter: "L", hatch: "rising", means: "goes once it is idle" },
  trial: { letter: "T", hatch: "dots", means: "was ejected; gets one request at a time" },
  ejected: { letter: "E", hatch: "falling", means: "for a while: it failed too often" },
  silent: { letter: "S", hatch: "rising", means: "leaves probes unanswered; nothing new" },
  down: { letter: "X", hatch: "crossed", means: "its probes fail" },
};
const BAD = ["down", "silent", "ejected", "trial"]; // red
const TROUBLE = ["down", "silent", "ejected", "trial", "joining", "draining", "leaving", "busy", "slow_start", "ready"];

/** How a state is drawn; one that this page does not know gets its first letter. */
function stateLook(state) {
  if (Object.hasOwn(STATES, state)) return STATES[state];
  return { letter: text(state, 1).toUpperCase(), hatch: "falling", means: text(state, 40) };
}

/** Where cells stand: as many a line as fit, as large as lets all be seen at once. */
function layOut(count, width) {
  let size = { wide: 178, high: 116 };
  if (count > 24) size = { wide: 124, high: 74 };
  if (count > 150) {
    const side = Math.floor(Math.sqrt((width * 430) / count));
    size = { wide: Math.max(17, Math.min(side, 40)), high: Math.max(19, Math.min(side, 40)) };
  }
  const columns = Math.max(1, Math.floor(width / size.wide));
  const wide = count > 24 || columns <= count ? width / columns : size.wide;
  const lines = Math.max(1, Math.ceil(count / columns));
  return { columns, wide, high: size.high, lines, height: lines * size.high };
}

/** The colours in force, from the style sheet. */
function inks() {
  const style = getComputedStyle(document.documentElement);
  const found = {};
  for (const name of ["panel", "text", "soft", "line", "edge", "cell", "load", "kv", "hits", "mark", "bad", "bad-cell"]) {
    found[name] = style.getPropertyValue(`--${name}`).trim();
  }
  return found;
}

function hatch(pen, kind, ink, x, y, wide, high) {
  pen.save();
  pen.beginPath();
  pen.rect(x, y, wide, high);
  pen.clip();
  pen.strokeStyle = pen.fillStyle = ink;
  pen.lineWidth = 1;
  pen.beginPath();
  const step = 6;
  if (kind === "dots") {
    for (let down = 3; down < high; down += step) {
      for (let right = 3; right < wide; right += step) pen.fillRect(x + right, y + down, 1.6, 1.6);
    }
  }
  for (let at = -high; at < wide + high; at += step) {
    if (kind === "rising" || kind === "crossed") {
      pen.moveTo(x + at, y + high);
      pen.lineTo(x + at + high, y);
    }
    if (kind === "falling" || kind === "crossed") {
      pen.moveTo(x + at, y);
      pen.lineTo(x + at + high, y + high);
    }
  }
  pen.stroke();
  pen.restore();
}

/** Draw a worker into the rectangle. `full`: the load that fills its bar. `mood`: lit, dim, chosen. */
function drawCell(pen, ink, worker, place, full, mood) {
  const look = stateLook(worker.state);
  const roomy = place.wide >= 100;
  const bad = BAD.includes(worker.state) || (worker.trouble && worker.state === "ready");
  const gap = roomy ? 3 : 1;
  const [x, y] = [place.x + gap, place.y + gap];
  const [wide, high] = [place.wide - 2 * gap, place.high - 2 * gap];
  pen.globalAlpha = mood.dim ? 0.3 : 1;
  pen.fillStyle = bad ? ink["bad-cell"] : ink.cell;
  pen.fillRect(x, y, wide, high);
  if (look.hatch && !roomy) hatch(pen, look.hatch, ink.edge, x, y, wide, high);
  const words = roomy ? cellWords(worker, look, high > 90) : null;
  const head = roomy ? drawWords(pen, ink, words, bad, { x, y, wide, high }) : 0;
  if (high - head > 14) {
    drawBars(pen, ink, worker, { x: x + 2, y: y + head + 1, wide: wide - 4, high: high - head - 2 }, full);
  }
  if (!roomy && look.letter) badge(pen, ink, look.letter, x + wide / 2, y + high / 2, 11);
  if (worker.exact?.mode === "degraded" || worker.exact?.mode === "approximate") {
    drawCorner(pen, ink, worker.exact.mode === "approximate", x + wide, y, roomy ? 13 : 7);
  }
  const border = mood.chosen ? 4 : mood.lit ? 3 : worker.hot ? 2.5 : 1;
  pen.lineWidth = border;
  pen.strokeStyle = mood.chosen || mood.lit || worker.hot ? ink.mark : bad ? ink.bad : ink.edge;
  pen.setLineDash(mood.lit && !mood.chosen ? [] : worker.state === "joining" ? [3, 2] : []);
  pen.strokeRect(x + border / 2 - 0.5, y + border / 2 - 0.5, wide - border + 1, high - border + 1);
  pen.setLineDash([]);
  pen.globalAlpha = 1;
}

/** The corner of a worker whose hits are not exact: full if they are a bound, empty if guessed. */
function drawCorner(pen, ink, guessed, right, top, size) {
  pen.fillStyle = guessed ? ink.cell : ink.text;
  pen.strokeStyle = ink.text;
  pen.lineWidth = 1;
  pen.beginPath();
  pen.moveTo(right, top);
  pen.lineTo(right, top + size);
  pen.lineTo(right - size, top);
  pen.closePath();
  pen.fill();
  pen.stroke();
}

function drawBars(pen, ink, worker, box, full) {
  const bars = [
    [worker.load === null ? null : worker.load / full, ink.load],
    [worker.kv, ink.kv],
    [worker.hits, ink.hits],
  ];
  const gap = box.wide > 30 ? 3 : 1;
  const wide = (box.wide - 2 * gap) / 3;
  bars.forEach(([share, colour], n) => {
    const x = box.x + n * (wide + gap);
    pen.fillStyle = ink.line;
    pen.fillRect(x, box.y + box.high - 1, wide, 1);
    if (share === null) return;
    const high = Math.min(Math.max(share, 0), 1) * box.high;
    pen.fillStyle = colour;
    pen.fillRect(x, box.y + box.high - high, wide, high);
  });
}

/** What stands in a cell: its number and state, its address, and why it is not well or what it does. */
function cellWords(worker, look, large) {
  const name = worker.state === "ready" ? (large ? "ready" : "") : worker.state.replaceAll("_", " ");
  const reason = reasonAt(worker.trouble, addressOf(worker)) || (worker.state === "ready" ? "" : look.means);
  const figures = [
    `${short(worker.requests)} requests, ${short(worker.waiting)} wait`,
    `KV ${percent(worker.kv)}, hits ${percent(worker.hits)}`,
  ];
  return {
    title: `${worker.id}  ${name}${worker.hot ? (name ? ", hot" : "hot") : ""}`,
    address: addressOf(worker),
    reason,
    figures: reason || !large ? [] : figures,
  };
}

/** Host and port of a worker, and its rank where it is one of several. */
function addressOf(worker) {
  let host = worker.url;
  try {
    host = new URL(worker.url).host || host;
  } catch {
    // What is no URL is shown as it is.
  }
  return host + (worker.rank === null ? "" : `#${worker.rank}`);
}

/** A reason without the address that it begins with, where that stands before it. */
function reasonAt(reason, address) {
  return reason.startsWith(`${address}: `) ? reason.slice(address.length + 2) : reason;
}

/** Returns how much of the cell's height the words take. */
function drawWords(pen, ink, words, bad, box) {
  const [left, room] = [box.x + 5, box.wide - 10];
  pen.textBaseline = "top";
  pen.fillStyle = bad ? ink.bad : ink.text;
  pen.font = "700 12px system-ui, sans-serif";
  pen.fillText(fitted(pen, words.title, room - 12), left, box.y + 5);
  pen.fillStyle = ink.text;
  pen.font = "11px system-ui, sans-serif";
  pen.fillText(fitted(pen, words.address, room, true), left, box.y + 20);
  let down = 35;
  const most = Math.max(1, Math.floor((box.high - down - 2) / 13));
  const lines = [...wrapped(pen, words.reason, room, most), ...words.figures];
  for (const line of lines) {
    pen.fillText(fitted(pen, line, room), left, box.y + down);
    down += 13;
  }
  return down;
}

/** A text as at most so many lines that fit, the last one cut short where there is more. */
function wrapped(pen, words, room, most) {
  const lines = [];
  for (const word of words.split(" ").filter(Boolean)) {
    const last = lines.at(-1);
    if (last !== undefined && pen.measureText(`${last} ${word}`).width <= room) lines[lines.length - 1] += ` ${word}`;
    else if (lines.length < most) lines.push(word);
    else {
      lines[lines.length - 1] += ` ${word}…`;
      break;
    }
  }
  return lines;
}

/** A letter on a plate, so that no bar or hatching below it is in its way. */
function badge(pen, ink, letter, x, y, size) {
  pen.fillStyle = ink.panel;
  pen.strokeStyle = ink.text;
  pen.lineWidth = 1;
  pen.beginPath();
  pen.rect(x - size / 2 - 0.5, y - size / 2 - 0.5, size + 1, size + 1);
  pen.fill();
  pen.stroke();
  pen.fillStyle = ink.text;
  pen.font = `700 ${size - 1}px system-ui, sans-serif`;
  pen.textAlign = "center";
  pen.textBaseline = "middle";
  pen.fillText(letter, x, y + 0.5);
  pen.textAlign = "left";
}

/** What fits of a text: its beginning, or its end. */
function fitted(pen, words, room, end = false) {
  if (pen.measureText(words).width <= room) return words;
  const part = (kept) => (end ? "…" + kept : kept + "…");
  let kept = words.slice(0, 200);
  while (kept.length > 1 && pen.measureText(part(kept)).width > room) {
    kept = end ? kept.slice(1) : kept.slice(0, -1);
  }
  return part(kept);
}

/** A canvas of this size in CSS pixels, sharp on any screen; its pen. */
function sized(canvas, wide, high) {
  const scale = Math.min(devicePixelRatio || 1, 3);
  const [w, h] = [Math.round(wide * scale), Math.round(high * scale)];
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
    canvas.style.height = `${high}px`;
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, wide, high);
  return pen;
}
