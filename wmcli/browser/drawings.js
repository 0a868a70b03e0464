// Pictures of what a model holds: latents and search trees. Each takes the element to fill and says what is under the pointer.
"use strict";

const drawings = (() => {
  const MOST_NODES = 80;
  const ROW = 32; // numbers side by side

  // -- latents -------------------------------------------------------------------------------------------------------

  const FORMS = {
    tokens: ({ shape: [height, width], values, codes }) => ({
      width, height,
      color: (x, y) => `hsl(${values[y * width + x] * 137.508 % 360} 55% ${40 + values[y * width + x] * 29 % 35}%)`,
      words: (x, y) => `row ${y}, column ${x}: code ${values[y * width + x]}${codes === null ? "" : ` of ${codes}`}`,
      title: `${height} × ${width} tokens`,
    }),
    classes: ({ shape: [groups, classes], values }) => ({
      width: classes, height: groups,
      color: (x, y) => ui.color(values[y] === x ? "--accent" : "--line"),
      words: (x, y) => `group ${y}: class ${values[y]} of ${classes}`,
      title: `${groups} groups of ${classes} classes`,
    }),
    numbers: ({ values }) => {
      const width = Math.min(values.length, ROW), height = Math.ceil(values.length / ROW);
      const most = Math.max(...values.map(Math.abs), 1e-9);
      return {
        width, height,
        color: (x, y) => {
          const value = values[y * ROW + x];
          if (!Number.isFinite(value)) return "transparent";
          return `color-mix(in srgb, ${ui.color(value < 0 ? "--c1" : "--c0")} ${Math.round(Math.abs(value) / most * 100)}%, ${ui.color("--paper")})`;
        },
        words: (x, y) => y * ROW + x < values.length ? `number ${y * ROW + x}: ${ui.number(values[y * ROW + x])}` : "",
        title: `${values.length} numbers`,
      };
    },
  };

  // Returns {element, draw(latent)}.
  function latent() {
    const canvas = ui.el("canvas", { class: "cells", role: "img" }), title = ui.el("h3"), words = ui.el("p", { class: "muted small words" });
    const element = ui.el("div", { class: "latent" }, title, canvas, words);
    let form = null, pointer = null;

    function point() {
      ui.setText(words, pointer && form ? form.words(Math.min(Math.floor(pointer.x * form.width), form.width - 1), Math.min(Math.floor(pointer.y * form.height), form.height - 1)) : "");
    }

    canvas.addEventListener("pointermove", (event) => {
      pointer = { x: Math.max(event.offsetX / canvas.clientWidth, 0), y: Math.max(event.offsetY / canvas.clientHeight, 0) };
      point();
    });
    canvas.addEventListener("pointerleave", () => {
      pointer = null;
      point();
    });

    return {
      element,
      draw(value) {
        element.hidden = value === null;
        if (value === null) return;
        form = FORMS[value.kind](value);
        if (canvas.width !== form.width || canvas.height !== form.height) Object.assign(canvas, { width: form.width, height: form.height });
        canvas.style.setProperty("--columns", form.width);
        canvas.style.aspectRatio = `${form.width} / ${form.height}`;
        canvas.setAttribute("aria-label", form.title);
        ui.setText(title, `Latent: ${form.title}`);
        const context = canvas.getContext("2d");
        context.clearRect(0, 0, form.width, form.height);
        for (let y = 0; y < form.height; y++) for (let x = 0; x < form.width; x++) {
          context.fillStyle = form.color(x, y);
          context.fillRect(x, y, 1, 1);
        }
        point();
      },
    };
  }

  // -- search tree ---------------------------------------------------------------------------------------------------

  // The principal line and the most visited other nodes, at most MOST_NODES, none without its parent. `place`: column and
  // depth, leaves side by side.
  function arrange(nodes, line) {
    const order = nodes.map((_, index) => index).sort((a, b) => nodes[b][2] - nodes[a][2] || a - b);
    const kept = new Set([0, ...line]);
    for (const index of order) {
      if (kept.size >= MOST_NODES) break;
      if (kept.has(nodes[index][0])) kept.add(index);
    }
    const children = new Map([...kept].map((index) => [index, []]));
    for (const index of [...kept].sort((a, b) => a - b)) if (index !== 0) children.get(nodes[index][0]).push(index);
    const place = new Map();
    let leaves = 0, deepest = 0;
    const visit = (index, depth) => {
      deepest = Math.max(deepest, depth);
      const below = children.get(index);
      for (const child of below) visit(child, depth + 1);
      const x = below.length ? (place.get(below[0]).x + place.get(below.at(-1)).x) / 2 : leaves++;
      place.set(index, { x, depth });
    };
    visit(0, 0);
    return { place, leaves, deepest };
  }

  // nameOf(action): its name. Returns {element, draw(search)}.
  function tree(nameOf) {
    const title = ui.el("h3"), words = ui.el("p", { class: "muted small words" }), scale = ui.el("p", { class: "scale small muted" });
    const picture = ui.svg("svg", { class: "tree", role: "img" });
    const element = ui.el("div", { class: "search" }, title, picture, scale, words);
    let marks = [], nodes = [], pointer = null;

    function point() {
      const near = pointer && marks.length ? marks.reduce((best, mark) => distance(mark) < distance(best) ? mark : best) : null;
      if (!near) return ui.setText(words, "");
      const [, action, visits, value, prior] = nodes[near.index];
      const name = near.index === 0 ? "root" : nameOf(action);
      ui.setText(words, `${name}: ${visits} ${visits === 1 ? "visit" : "visits"}, value ${ui.number(value)}${prior === null ? "" : `, prior ${ui.number(prior)}`}`);
    }

    function distance(mark) {
      return Math.hypot(mark.x - pointer.x, mark.y - pointer.y);
    }

    picture.addEventListener("pointermove", (event) => {
      const box = picture.getBoundingClientRect(), view = picture.viewBox.baseVal;
      pointer = { x: (event.clientX - box.left) / box.width * view.width, y: (event.clientY - box.top) / box.height * view.height };
      point();
    });
    picture.addEventListener("pointerleave", () => {
      pointer = null;
      point();
    });

    return {
      element,
      draw(search, width) {
        element.hidden = search === null;
        if (search === null) return;
        nodes = search.nodes;
        const { place, leaves, deepest } = arrange(nodes, search.line);
        const height = Math.min(40 + deepest * 44, 320), labels = 16, edge = 14;
        const line = new Set(search.line);
        const values = [...place.keys()].map((index) => nodes[index][3]).filter(Number.isFinite);
        const low = Math.min(...values), high = Math.max(...values);
        const at = ({ x, depth }) => ({
          x: edge + (leaves > 1 ? x / (leaves - 1) : 0.5) * (width - 2 * edge),
          y: edge + (deepest ? depth / deepest : 0) * (height - edge - labels),
        });
        const most = Math.max(nodes[0][2], 1);
        const edges = [], dots = [], texts = [];
        marks = [];
        for (const [index, spot] of place) {
          const [parent, action, visits, value] = nodes[index], { x, y } = at(spot), main = line.has(index);
          marks.push({ index, x, y });
          const share = high > low && Number.isFinite(value) ? (value - low) / (high - low) : 0.5;
          dots.push(ui.svg("circle", {
            cx: x.toFixed(1), cy: y.toFixed(1), r: (2.5 + 4 * Math.sqrt(visits / most)).toFixed(1), class: main ? "node line" : "node",
            style: { fill: `color-mix(in srgb, var(--accent) ${Math.round(share * 100)}%, var(--low))` },
          }));
          if (index === 0) continue;
          const from = at(place.get(parent)), middle = (from.y + y) / 2;
          const path = ui.svg("path", {
            d: `M${from.x.toFixed(1)} ${from.y.toFixed(1)}C${from.x.toFixed(1)} ${middle.toFixed(1)} ${x.toFixed(1)} ${middle.toFixed(1)} ${x.toFixed(1)} ${y.toFixed(1)}`,
            class: main ? "edge line" : "edge", style: { "stroke-width": (0.8 + 5 * Math.sqrt(visits / most)).toFixed(1) },
          });
          if (main) edges.push(path);
          else edges.unshift(path);
          if (main) texts.push(ui.svg("text", { x: x + (x > width - 70 ? -10 : 10), y: y + 4, "text-anchor": x > width - 70 ? "end" : "start" }, nameOf(action)));
        }
        picture.setAttribute("viewBox", `0 0 ${width} ${height}`);
        picture.setAttribute("height", height);
        picture.setAttribute("aria-label", `Search tree of ${nodes.length} nodes`);
        picture.replaceChildren(...edges, ...dots, ...texts);
        const hidden = nodes.length - place.size;
        ui.setText(title, `Search: ${most} visits, value ${ui.number(search.value)}`);
        scale.replaceChildren(`value ${ui.number(values.length ? low : null)}`, ui.el("i"), ui.number(values.length ? high : null), ui.el("span", { class: "push" }, hidden ? `${hidden} nodes not drawn` : "width: visits"));
        point();
      },
    };
  }

  return { latent, tree };
})();
