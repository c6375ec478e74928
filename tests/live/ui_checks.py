"""Checks whether a page is readable and usable by everybody: JavaScript expressions and colour
arithmetic.
"""

from __future__ import annotations

import numpy as np

from policies.contract import Floats

# For each visible text: (the lower of its contrasts, the text), per WCAG 2.2, 1.4.3.
CONTRASTS = """(() => {
  const parts = (colour) => {
    const [r, g, b, a] = [...colour.matchAll(/[\\d.]+/g)].map(Number);
    return {rgb: [r, g, b], a: a ?? 1};
  };
  const light = (rgb) => {
    const [r, g, b] = rgb.map((v) => v / 255)
      .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    for (let one = element; one; one = one.parentElement) {
      const {rgb, a} = parts(getComputedStyle(one).backgroundColor);
      if (a === 1) return rgb;
    }
    return [255, 255, 255];
  };
  const found = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const element = walk.currentNode.parentElement;
    if (!walk.currentNode.textContent.trim() || !element.checkVisibility()) continue;
    if (["SCRIPT", "STYLE", "NOSCRIPT"].includes(element.tagName)) continue;
    const [a, b] = [light(parts(getComputedStyle(element).color).rgb), light(behind(element))];
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    found.push([contrast, element.tagName + " " + walk.currentNode.textContent.slice(0, 40)]);
  }
  return found.sort((a, b) => a[0] - b[0]);
})()"""
# What people who do not see the page need: names of all controls, headings, tables.
NAMELESS = """[...document.querySelectorAll("input, select, button, canvas, [role=img], "
  + "[role=region], section, aside")].filter((one) => one.checkVisibility())
  .filter((one) => !one.closest("[aria-hidden=true]"))
  .filter((one) => !(one.labels?.length || one.getAttribute("aria-label")
    || one.getAttribute("aria-labelledby") || (one.tagName === "BUTTON" && one.textContent.trim())))
  .map((one) => one.outerHTML.slice(0, 120))"""
# Faults of a page's outline: repeated ids, names that point nowhere, headings that skip a level.
BROKEN = """(() => {
  const found = [];
  const ids = [...document.querySelectorAll("[id]")].map((one) => one.id);
  found.push(...ids.filter((id, n) => ids.indexOf(id) !== n).map((id) => "twice: " + id));
  for (const name of ["aria-labelledby", "aria-describedby", "for"]) {
    for (const one of document.querySelectorAll(`[${name}]`)) {
      const id = one.getAttribute(name);
      if (!document.getElementById(id)) found.push(`${name}: ${id}`);
    }
  }
  let level = 0;
  for (const one of document.querySelectorAll("h1, h2, h3, h4")) {
    if (one.tagName[1] > level + 1) found.push("skips: " + one.textContent);
    level = Number(one.tagName[1]);
  }
  if (document.documentElement.lang !== "en") found.push("lang");
  for (const row of document.querySelectorAll("thead th:not([scope])")) found.push(row.textContent);
  return found;
})()"""
# Colours of marks: against their background, and against each other for colour-blind people.
INKS = """(() => {
  const style = getComputedStyle(document.documentElement);
  return Object.fromEntries(["cell", "panel", "load", "kv", "hits", "edge", "mark"]
    .map((name) => [name, style.getPropertyValue("--" + name).trim()]));
})()"""


# The linear RGB that people see who lack a kind of cone (G. Machado et al., "A
# Physiologically-based Model for Simulation of Color Vision Deficiency", 2009, severity 1).
SIGHTS = {
    "full": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": (
        *((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216)),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        *((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413)),
        (-0.011820, 0.042940, 0.968881),
    ),
    "tritanopia": (
        *((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602)),
        (0.004733, 0.691367, 0.303900),
    ),
}
# Linear sRGB to CIE XYZ over its white, D65 (IEC 61966-2-1).
_XYZ = np.array(
    [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
) / np.array([[0.9505], [1.0], [1.089]])


def linear(colour: str) -> Floats:
    """Return a colour #rrggbb as linear RGB, 0..1."""
    parts = np.array([int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)])
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def contrast(one: str, other: str) -> float:
    """Return the contrast of two colours #rrggbb, 1..21 (WCAG 2.2, relative luminance)."""
    low, high = sorted(float(_XYZ[1] @ linear(colour)) for colour in (one, other))
    return (high + 0.05) / (low + 0.05)


def distance(one: str, other: str, sight: str) -> float:
    """Return the distance of two colours as seen with this sight: CIE 1976 L*a*b*, where 2 is just
    visible.
    """

    def seen(colour: str) -> Floats:
        rgb = np.clip(np.array(SIGHTS[sight]) @ linear(colour), 0, 1)
        f = np.cbrt(np.maximum(_XYZ @ rgb, 0.008856))
        return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])

    return float(np.linalg.norm(seen(one) - seen(other)))
