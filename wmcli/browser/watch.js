// Runs in progress: an overview of all of them, and the details of one, which the address names behind #.
"use strict";

(() => {
  const { el, find, setText, number } = ui;

  // State -> look of its dot, and its place when sorted. The words are those of `wm runs` and `wm sweep status`.
  const STATES = {
    running: ["live", 0], failed: ["bad", 1], damaged: ["bad", 2], interrupted: ["warning", 3], requeued: ["warning", 4],
    idle: ["", 5], waiting: ["", 6], finished: ["good", 7], done: ["good", 8], deleted: ["", 9],
  };

  // -- numbers for people --------------------------------------------------------------------------------------------

  function duration(seconds) {
    if (seconds === null || seconds === undefined) return "";
    if (seconds < 99.5) return `${seconds.toFixed(0)} s`;
    if (seconds < 6000) return `${(seconds / 60).toFixed(0)} min`;
    return seconds < 48 * 3600 ? `${(seconds / 3600).toFixed(1)} h` : `${(seconds / 86400).toFixed(0)} days`;
  }

  function ago(time) {
    return time ? `${duration(Math.max(0, (Date.now() - new Date(time)) / 1000))} ago` : "";
  }

  function bytes(size) {
    if (!size) return "";
    const power = Math.min(Math.floor(Math.log10(size) / 3), 4);
    return `${number(size / 1000 ** power)} ${["B", "kB", "MB", "GB", "TB"][power]}`;
  }

  function count(value) {
    return value === null || value === undefined ? "" : Math.round(value).toLocaleString("en");
  }

  function brief(value, digits) { // without zeros at the end
    return String(Number(value.toPrecision(digits))).replaceAll("-", "−");
  }

  function score(row) {
    if (row.score === null || row.score === undefined) return "";
    return brief(row.score, 4) + (row.stderr === null || row.stderr === undefined ? "" : ` ± ${brief(row.stderr, 2)}`);
  }

  function rate(value) {
    return value ? number(value) : "";
  }

  function rates(row) {
    const parts = [[row.updates_per_second, "updates"], [row.steps_per_second, "steps"]];
    return parts.filter(([value]) => value).map(([value, unit]) => `${rate(value)} ${unit}/s`).join(", ");
  }

  function clock(time) {
    const date = new Date(time), text = date.toLocaleTimeString("en-GB");
    return date.toDateString() === new Date().toDateString() ? text : `${date.toLocaleDateString("en-CA")} ${text}`;
  }

  function word(row) {
    return row.killed && row.status !== "running" ? `${row.status}, killed` : row.status;
  }

  function dot(status) {
    return el("span", { class: `dot ${(STATES[status] ?? [""])[0]}`, "aria-hidden": "true" });
  }

  // -- overview ------------------------------------------------------------------------------------------------------

  // key: [heading, text of a row, value to sort by]; one of the texts may be absent in all rows, and so its column.
  const COLUMNS = {
    status: ["state", word, (row) => (STATES[row.status] ?? ["", 99])[1]],
    name: ["run", (row) => row.name, (row) => row.name],
    epoch: ["epoch", (row) => (row.epochs ? `${row.epoch ?? "–"} / ${row.epochs}` : ""), (row) => (row.epoch ?? 0) / (row.epochs || 1)],
    stage: ["stage", (row) => (row.status === "running" ? row.stage ?? "" : ""), (row) => row.stage ?? ""],
    updates: ["updates/s", (row) => rate(row.updates_per_second), (row) => row.updates_per_second ?? 0],
    left: ["left", (row) => duration(row.seconds_left), (row) => row.seconds_left ?? Infinity],
    score: ["score", score, (row) => row.score ?? -Infinity],
    steps: ["steps", (row) => count(row.steps), (row) => row.steps ?? 0],
    active: ["active", (row) => ago(row.active), (row) => row.active ?? ""],
    preset: ["preset", (row) => row.preset ?? "", (row) => row.preset ?? ""],
    environment: ["environment", (row) => row.environment ?? "", (row) => row.environment ?? ""],
    seed: ["seed", (row) => String(row.seed ?? ""), (row) => row.seed ?? 0],
    attempts: ["attempts", (row) => String(row.attempts ?? ""), (row) => row.attempts ?? 0],
    took: ["work", (row) => duration(row.seconds), (row) => row.seconds ?? 0],
    memory: ["memory", (row) => bytes(row.peak_bytes), (row) => row.peak_bytes ?? 0],
    size: ["size", (row) => bytes(row.bytes), (row) => row.bytes ?? 0],
    played: ["steps/s", (row) => rate(row.steps_per_second), (row) => row.steps_per_second ?? 0],
  };
  const RIGHT = new Set(["epoch", "updates", "played", "left", "score", "steps", "seed", "attempts", "took", "memory", "size", "active"]);
  const DOWN = new Set(["score", "steps", "memory", "size", "active", "took", "epoch", "updates", "played", "attempts"]); // largest first

  const rows = new Map(); // name -> row
  const lines = new Map(); // name -> {tr, cells}
  let unread = true; // more rows follow
  let order = { key: "status", down: false };

  function buildHeadings() {
    find("#runs thead tr").replaceChildren(...Object.entries(COLUMNS).map(([key, [heading]]) =>
      el("th", { scope: "col", class: RIGHT.has(key) ? "number" : "", data: { key } },
        el("button", { title: `Sort by ${heading}`, onclick: () => sortBy(key) }, heading))));
    find("#order").replaceChildren(...Object.entries(COLUMNS).map(([key, [heading]]) => el("option", { value: key }, heading)));
  }

  function sortBy(key) {
    order = { key, down: order.key === key ? !order.down : DOWN.has(key) };
    drawOverview();
  }

  const names = new Intl.Collator("en", { numeric: true });

  function compare(one, other) {
    const value = COLUMNS[order.key][2], [a, b] = [value(one), value(other)];
    const by = typeof a === "string" ? names.compare(a, b) : a - b || 0;
    return (order.down ? -by : by) || names.compare(one.name, other.name);
  }

  function matching(row, words) {
    const text = [row.name, word(row), row.stage, row.preset, row.environment, row.problem].join(" ").toLowerCase();
    return words.every((each) => text.includes(each));
  }

  function makeLine(name) {
    const cells = {};
    for (const [key, [heading]] of Object.entries(COLUMNS)) {
      cells[key] = el("td", { class: `${key} ${RIGHT.has(key) ? "number" : ""}`, data: { label: heading } });
    }
    cells.name.append(el("a", { href: address(name) }, name), el("span", { class: "problem", hidden: true }));
    cells.status.append(el("span", { class: "state" }, el("span"), el("span")));
    const tr = el("tr", { class: "link", onclick: (event) => {
      if (!event.target.closest("a") && !getSelection().toString()) location.hash = address(name);
    } }, Object.values(cells));
    return { tr, cells };
  }

  function drawLine({ cells }, row) {
    for (const [key, [, text]] of Object.entries(COLUMNS)) {
      if (key === "status") {
        const [mark, label] = cells.status.firstChild.children;
        mark.className = `dot ${(STATES[row.status] ?? [""])[0]}`;
        setText(label, text(row));
      } else if (key === "name") {
        const problem = row.problem || (row.status === "failed" ? row.last : "") || "";
        cells.name.lastChild.hidden = !problem;
        setText(cells.name.lastChild, problem);
        cells.name.lastChild.title = problem;
      } else if (key === "epoch") drawEpoch(cells.epoch, row, text(row));
      else setText(cells[key], text(row));
    }
  }

  function drawEpoch(cell, row, text) {
    if (!text) return cell.replaceChildren();
    if (!cell.firstChild) cell.append(el("span"), el("span", { class: "bar" }, el("i")));
    setText(cell.firstChild, text);
    const done = ["finished", "done"].includes(row.status) ? 1 : Math.max(0, (row.epoch ?? 0) - (row.status === "running")) / row.epochs;
    find("i", cell).style.setProperty("--share", `${100 * done}%`);
    return undefined;
  }

  function drawOverview() {
    const every = [...rows.values()], words = find("#filter").value.toLowerCase().split(/\s+/).filter(Boolean);
    const shown = every.filter((row) => matching(row, words)).sort(compare);
    const body = find("#runs tbody");
    for (const name of [...lines.keys()]) if (!rows.has(name)) lines.delete(name);
    shown.forEach((row) => {
      if (!lines.has(row.name)) lines.set(row.name, makeLine(row.name));
      drawLine(lines.get(row.name), row);
    });
    const trs = shown.map((row) => lines.get(row.name).tr);
    if (trs.length !== body.children.length || trs.some((tr, index) => tr !== body.children[index])) body.replaceChildren(...trs);
    drawHeadings(every);
    drawCounts(every);
    find("#nothing").hidden = shown.length > 0;
    setText(find("#nothing"), every.length ? "No run has these words." : unread ? "Reading the runs …" : "There are no runs yet. They appear here when they begin.");
    setText(find("#matches"), words.length ? `${shown.length} of ${every.length}` : unread && every.length ? "reading more …" : "");
  }

  function drawHeadings(every) {
    for (const th of find("#runs thead tr").children) {
      const { key } = th.dataset, [, text] = COLUMNS[key];
      const hidden = key !== "status" && key !== "name" && !every.some((row) => text(row));
      th.hidden = hidden;
      for (const { cells } of lines.values()) cells[key].hidden = hidden;
      if (key === order.key) th.setAttribute("aria-sort", order.down ? "descending" : "ascending");
      else th.removeAttribute("aria-sort");
    }
    find("#runs thead").hidden = !every.length;
    find("#order").value = order.key;
  }

  function drawCounts(every) {
    const by = new Map();
    for (const row of every) by.set(row.status, (by.get(row.status) ?? 0) + 1);
    const sorted = [...by].sort(([one], [other]) => (STATES[one]?.[1] ?? 99) - (STATES[other]?.[1] ?? 99));
    find("#counts").replaceChildren(...sorted.map(([status, amount]) => el("span", { class: "state" }, dot(status), `${amount} ${status}`)));
    const running = by.get("running");
    document.title = `${running ? `${running} running – ` : ""}wm watch`;
  }

  // -- details of one run --------------------------------------------------------------------------------------------

  let open = null; // {name, run, charts: Map of "stage\nmetric" -> chart}

  function address(name) {
    return `#${encodeURIComponent(name)}`;
  }

  function named() {
    try { return decodeURIComponent(location.hash.slice(1)); } catch { return ""; }
  }

  // Shows what the address names. Called when it changes, and with all rows.
  function follow() {
    const name = named();
    find("#overview").hidden = Boolean(name);
    find("#detail").hidden = !name;
    if (!name) {
      if (open) socket.send({ do: "close" });
      open = null;
      drawOverview();
      return;
    }
    if (open?.name !== name) {
      open = { name, run: {}, charts: new Map() };
      find("#stages").replaceChildren();
      find("#returns").replaceChildren();
      drawDetail();
      scrollTo(0, 0);
    }
    if (rows.has(name)) socket.send({ do: "open", run: name });
  }

  function receiveRun(head) {
    if (!open || head.run !== open.name) return;
    Object.assign(open.run, head);
    drawDetail(head);
  }

  function receivePoints(head) {
    if (!open || head.run !== open.name) return;
    for (const { stage, metric, from, points } of head.curves) {
      const chart = chartOf(stage, metric);
      chart.points.splice(from, Infinity, ...points);
      chart.dirty = true;
      if (!chart.points.length) removeChart(chart);
    }
    drawCharts();
  }

  function drawDetail(changed = {}) {
    const { run, name } = open, row = rows.get(name) ?? {}, state = { ...row, status: run.status ?? row.status ?? (greeted ? "not here" : "…") };
    setText(find("#name"), name);
    find("#status").replaceChildren(dot(state.status), state.status);
    drawFacts(state);
    drawNotes(run);
    drawFilm(run.film); // before the chart beside it, which takes the room that is left
    if ("returns" in changed) drawReturns();
    if ("events" in changed) drawEvents(run.events);
    find("#loading").hidden = !run.unread;
    find("#curve-tools").hidden = !open.charts.size && !run.unread;
  }

  function drawFacts(row) {
    const facts = [
      ["epoch", row.epochs ? `${row.epoch ?? "–"} of ${row.epochs}` : ""], ["stage", row.stage], ["rate", rates(row)],
      ["time left, about", duration(row.seconds_left)], ["newest score", score(row) && `${score(row)} over ${row.episodes} episodes`],
      ["steps", count(row.steps)], ["time of work", duration(row.seconds)], ["preset", row.preset], ["environment", row.environment],
      ["seed", row.seed], ["attempts", row.attempts], ["peak memory", bytes(row.peak_bytes)], ["size on disk", bytes(row.bytes)],
      ["last change", row.active ? clock(row.active) : ""],
    ].filter(([, text]) => text !== "" && text !== null && text !== undefined);
    const list = find("#facts");
    if (list.children.length !== facts.length) list.replaceChildren(...facts.map(() => el("div", {}, el("dt"), el("dd"))));
    facts.forEach(([label, text], index) => {
      setText(list.children[index].firstChild, label);
      setText(list.children[index].lastChild, text);
    });
  }

  function drawNotes(run) {
    const notes = [];
    if (greeted && !run.status && !rows.has(open.name)) notes.push(el("div", { class: "note" }, "There is no run of this name. It appears here when it begins."));
    if (run.status === "deleted") notes.push(el("div", { class: "note bad" }, "This run is no more: its folder was deleted or moved."));
    if (run.problem) notes.push(el("div", { class: "note bad" }, run.problem));
    if (run.killed) notes.push(el("div", { class: "note" }, "Its last process ended at once, as by kill −9 or a power cut. What it published is intact."));
    if (run.command) notes.push(el("div", { class: "note plain" }, "To go on:", el("code", {}, run.command), copyButton(run.command)));
    const box = find("#notes"), text = (elements) => [...elements].map((each) => each.textContent).join("\n");
    if (text(box.children) !== text(notes)) box.replaceChildren(...notes);
  }

  function copyButton(text) {
    return el("button", { class: "quiet", onclick: async (event) => {
      const button = event.currentTarget;
      try {
        await navigator.clipboard.writeText(text);
      } catch { // not over plain HTTP from another machine
        const range = document.createRange();
        range.selectNodeContents(button.previousSibling);
        getSelection().removeAllRanges();
        getSelection().addRange(range);
        return;
      }
      setText(button, "Copied");
      setTimeout(() => setText(button, "Copy"), 1500);
    } }, "Copy");
  }

  function drawReturns() {
    const over = find("#over").value, points = (open.run.returns ?? []).filter((point) => point[over] !== null && point.mean !== null);
    points.sort((one, other) => one[over] - other[over]);
    const box = find("#returns");
    setText(find("#returns-note"), points.length ? caption(points) : "No evaluation yet.");
    if (!points.length) return box.replaceChildren();
    const limit = (sign) => points.map(({ mean, stderr }) => (stderr === null ? null : mean + sign * 1.96 * stderr));
    return ui.chart(box, [{
      name: "mean return", x: points.map((point) => point[over]), y: points.map((point) => point.mean),
      low: limit(-1), high: limit(1), stroke: "--c0",
    }], { xName: over === "step" ? "environment steps" : "minutes of work", height: 220 });
  }

  function caption(points) {
    const last = points.at(-1), episodes = new Set(points.map((point) => point.episodes));
    const spread = points.some((point) => point.stderr !== null) ? ", with 95 % intervals" : "";
    return `${points.length} evaluation${points.length > 1 ? "s" : ""} of ${[...episodes].sort((a, b) => a - b).join(" or ")} episodes${spread}; newest ${brief(last.mean, 4)} (${last.name})`;
  }

  function drawFilm(film) {
    const box = find("#film"), image = find("img", box);
    box.hidden = !film;
    find("#top").classList.toggle("no-film", !film);
    if (!film) return;
    image.hidden = !film.src;
    if (film.src && image.src !== film.src) image.src = film.src;
    image.alt = film.caption;
    setText(find("p", box), film.caption);
  }

  const EVENTS = { started: "live", resumed: "live", interrupted: "warning", published: "good" };

  function drawEvents(events) {
    const list = find("#events");
    list.replaceChildren(...[...events].reverse().map(({ time, kind, text }) =>
      el("li", {}, el("time", { datetime: time }, clock(time)), el("span", { class: `dot ${EVENTS[kind] ?? ""}`, title: kind, style: { animation: "none" } }), el("span", {}, text))));
    if (!events.length) list.replaceChildren(el("li", { class: "muted" }, "Nothing yet."));
  }

  // -- curves --------------------------------------------------------------------------------------------------------

  const COLORS = new Map(); // stage -> its color
  const seen = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) target.chart.visible = isIntersecting;
    drawCharts();
  }, { rootMargin: "200px" });

  function chartOf(stage, metric) {
    const key = `${stage}\n${metric}`;
    if (!open.charts.has(key)) {
      if (!COLORS.has(stage)) COLORS.set(stage, `--c${COLORS.size % 7}`);
      const value = el("span"), plot = el("div");
      const box = el("div", { class: "panel metric" }, el("h4", {}, metric.replaceAll("_", " "), value), plot);
      const chart = { key, stage, metric, box, plot, value, points: [], dirty: true, visible: false };
      box.chart = chart;
      box.addEventListener("pointerleave", drawCharts);
      open.charts.set(key, chart);
      gridOf(stage).append(box);
      seen.observe(box);
      filterMetrics();
    }
    return open.charts.get(key);
  }

  function gridOf(stage) {
    const box = find("#stages");
    for (const each of box.children) if (each.dataset.stage === stage) return each.lastChild;
    box.append(el("details", { class: "stage", open: true, data: { stage } }, el("summary", {}, stage), el("div", { class: "grid" })));
    return box.lastChild.lastChild;
  }

  function removeChart(chart) {
    open.charts.delete(chart.key);
    seen.unobserve(chart.box);
    const grid = chart.box.parentElement;
    chart.box.remove();
    if (!grid.children.length) grid.parentElement.remove();
  }

  // Draws the charts in view that changed; not one under the pointer, whose values somebody reads.
  function drawCharts() {
    const log = find("#log").checked, smoothing = Number(find("#smoothing").value);
    for (const chart of open?.charts.values() ?? []) {
      const looked = JSON.stringify([log, smoothing, chart.plot.clientWidth]);
      if (!chart.visible || (!chart.dirty && chart.looked === looked) || (chart.plot.matches(":hover") && chart.looked === looked)) continue;
      Object.assign(chart, { dirty: false, looked });
      const column = (index) => chart.points.map((point) => point[index]);
      const drawnLog = log && chart.points.some(([, value]) => value > 0);
      const band = chart.points[0]?.length > 2 ? { low: column(2), high: column(3) } : {};
      ui.chart(chart.plot, [{ name: chart.metric, x: column(0), y: column(1), stroke: COLORS.get(chart.stage), ...band }], { log: drawnLog, smoothing, height: 150 });
      setText(chart.value, (log && !drawnLog ? "not logarithmic: none above 0 · " : "") + number(chart.points.at(-1)?.[1], 4));
    }
    find("#curve-tools").hidden = !open?.charts.size && !open?.run.unread;
  }

  function filterMetrics() {
    const words = find("#metrics").value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const { stage, metric, box } of open?.charts.values() ?? []) {
      const text = `${stage} ${metric} ${metric.replaceAll("_", " ")}`.toLowerCase();
      box.hidden = !words.every((each) => text.includes(each));
    }
    for (const stage of find("#stages").children) stage.hidden = [...stage.lastChild.children].every((box) => box.hidden);
  }

  // -- connection ----------------------------------------------------------------------------------------------------

  let greeted = false;

  function receive(head) {
    if (head.type === "hello") {
      rows.clear();
      setText(find("#title"), `wm watch ${head.title}`);
      for (const row of head.rows) rows.set(row.name, row);
      greeted = true;
      unread = head.unread;
      drawCounts([...rows.values()]);
      follow();
    } else if (head.type === "runs") {
      unread = head.unread;
      for (const name of head.gone) rows.delete(name);
      for (const row of head.rows) rows.set(row.name, row);
      if (open) {
        drawCounts([...rows.values()]);
        if (!open.run.status && rows.has(open.name)) socket.send({ do: "open", run: open.name });
        drawDetail();
      } else drawOverview();
    } else if (head.type === "run") receiveRun(head);
    else if (head.type === "points") receivePoints(head);
  }

  const socket = ui.connect({ command: "wm watch", receive, changed: (isOpen) => {
    const fresh = find("#fresh");
    document.body.classList.toggle("stale", !isOpen);
    fresh.replaceChildren(...(isOpen ? [dot("running"), "live"] : [`not updated since ${clock(new Date())}`]));
  } });

  buildHeadings();
  find("header .push").append(ui.themeButton());
  find("#filter").addEventListener("input", drawOverview);
  find("#order").addEventListener("change", (event) => sortBy(event.target.value));
  find("#over").addEventListener("change", drawReturns);
  find("#log").addEventListener("change", drawCharts);
  find("#smoothing").addEventListener("input", drawCharts);
  find("#metrics").addEventListener("input", filterMetrics);
  addEventListener("hashchange", follow);
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.matches("input, select")) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    if (event.key === "/") find(open ? "#metrics" : "#filter").focus();
    else if (event.key === "Escape" && open) location.hash = "";
    else return;
    event.preventDefault();
  });
  new ResizeObserver(() => {
    if (!open) return;
    drawReturns();
    drawCharts();
  }).observe(find("#detail"));
  new ResizeObserver(([{ target }]) => document.documentElement.style.setProperty("--top", `${target.offsetHeight}px`)).observe(find("header.top"));
  setInterval(() => { if (!open && !document.hidden) drawOverview(); }, 5000); // "3 min ago"
  follow();
})();
