"""The page's script: says what is under the pointer in the picture of memory, or under a cursor moved by arrow keys.

It reads the numbers from the page's JSON and writes only text nodes, so that no name in them can become markup.
"""

from __future__ import annotations

SCRIPT = """
"use strict";
(() => {
  const source = document.getElementById("moments");
  if (!source) return;
  const { columns, bands, num_nodes: numNodes } = JSON.parse(source.textContent);
  if (!columns.length) return;
  const tip = document.createElement("div");
  tip.id = "tip";
  tip.hidden = true;
  tip.setAttribute("role", "status");
  document.body.append(tip);

  const formatBytes = (size) => {
    if (size < 1024) return `${size} B`;
    let unit = "";
    for (unit of ["KiB", "MiB", "GiB"]) {
      size /= 1024;
      if (size < 1024) break;
    }
    return `${size.toFixed(1)} ${unit}`;
  };
  const isAlive = (value, position) => value.first <= position && position <= value.last;
  const sizeAt = (band, index) => {
    if (band.sizes) return band.sizes[index];
    return !band.value || isAlive(band.value, columns[index].position) ? band.size : 0;
  };
  const bandAt = (index, size) => {
    let below = 0, found = -1;
    for (let number = 0; number < bands.length; number++) {
      const height = sizeAt(bands[number], index);
      if (height && below <= size) found = number;
      below += height;
    }
    return size < 0 || size > below ? -1 : found;
  };
  const line = (text, kind) => {
    const element = document.createElement(kind === "title" ? "strong" : "div");
    if (kind && kind !== "title") element.className = kind;
    element.textContent = text;
    tip.append(element);
  };
  const where = (layer, location) => [layer || "(model)", location].filter(Boolean).join("  \\u00b7  ");
  const describeBand = (band, index) => {
    const value = band.value;
    if (value) {
      line(`%${value.name}  ${formatBytes(band.size)}`, "title");
      line(`${value.type}, ${band.label}`);
      line(`${value.operation}  \\u00b7  ${where(value.layer, value.location)}`);
      line(`alive from operation ${Math.max(value.first, 0)} to ${value.last}`);
      line(value.why, "quiet");
      return;
    }
    line(`${band.label}  ${formatBytes(sizeAt(band, index))}`, "title");
    if (band.where) line(band.where);
    const position = columns[index].position;
    const present = (band.members || []).filter((member) => isAlive(member, position));
    present.sort((a, b) => b.size - a.size);
    present.slice(0, 3).forEach((member) => {
      line(`%${member.name}  ${formatBytes(member.size)}  \\u00b7  ${where(member.layer, member.location)}`);
      line(member.why, "quiet");
    });
    if (present.length > 3) line("and others", "quiet");
    if (band.why) line(band.why, "quiet");
  };
  const show = (column, chosen, x, y) => {
    tip.replaceChildren();
    const moment = columns[column];
    if (chosen >= 0) describeBand(bands[chosen], column);
    line(`operation ${moment.position} of ${numNodes}: ${moment.operation}`, chosen >= 0 ? "now" : "title");
    line(where(moment.layer, moment.location));
    line(`${formatBytes(moment.live)} alive, ${moment.pass} pass, ${moment.duration}`, "quiet");
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const isRight = x + 18 + box.width > innerWidth;
    tip.style.left = `${Math.max(isRight ? x - 18 - box.width : x + 18, 8)}px`;
    tip.style.top = `${Math.max(Math.min(y + 14, innerHeight - box.height - 8), 8)}px`;
  };
  // The picture is there twice, for wide and for narrow screens; one of them is shown.
  document.querySelectorAll("svg.memory").forEach((svg) => {
    const paths = [...svg.querySelectorAll(".band")];
    const cursor = svg.querySelector(".cursor");
    const left = +svg.dataset.left, step = +svg.dataset.step, floor = +svg.dataset.floor, scale = +svg.dataset.scale;
    // The picture's own titles are for readers without scripts.
    svg.querySelectorAll(".band title").forEach((title) => title.remove());
    let column = -1, chosen = -1;
    const choose = (newColumn, newChosen) => {
      if (chosen !== newChosen) {
        if (chosen >= 0) paths[chosen].classList.remove("chosen");
        if (newChosen >= 0) paths[newChosen].classList.add("chosen");
      }
      column = newColumn;
      chosen = newChosen;
      const x = left + (column + 0.5) * step;
      cursor.setAttribute("transform", `translate(${x.toFixed(1)} 0)`);
      cursor.setAttribute("visibility", "visible");
    };
    const hide = () => {
      if (chosen >= 0) paths[chosen].classList.remove("chosen");
      chosen = -1;
      tip.hidden = true;
      cursor.setAttribute("visibility", "hidden");
    };
    svg.addEventListener("pointermove", (event) => {
      const point = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
      const index = Math.floor((point.x - left) / step);
      if (index < 0 || index >= columns.length || point.y > floor) return hide();
      choose(index, bandAt(index, (floor - point.y) / scale));
      show(column, chosen, event.clientX, event.clientY);
    });
    svg.addEventListener("pointerleave", hide);
    svg.addEventListener("blur", hide);
    svg.addEventListener("keydown", (event) => {
      const sideways = { ArrowLeft: -1, ArrowRight: 1 }[event.key] || 0;
      const upwards = { ArrowUp: 1, ArrowDown: -1 }[event.key] || 0;
      if (event.key === "Escape") return hide();
      if (!sideways && !upwards) return;
      event.preventDefault();
      const index = Math.min(Math.max(column + sideways, 0), columns.length - 1);
      let number = chosen + upwards;
      while (number >= 0 && number < bands.length && !sizeAt(bands[number], index)) number += upwards || 1;
      if (number < 0 || number >= bands.length) number = chosen >= 0 && sizeAt(bands[chosen], index) ? chosen : -1;
      choose(index, number);
      const corner = new DOMPoint(left + (index + 0.5) * step, floor / 3).matrixTransform(svg.getScreenCTM());
      show(column, chosen, corner.x, corner.y);
    });
  });
})();
"""
