// What all pages share: elements, the socket, charts, theme and messages. Text is only ever set as text.
"use strict";

const ui = (() => {
  const RETRY = { first: 500, most: 8000 }; // ms
  const CLOSED = { gone: 1001, elsewhere: 4001, refused: 4002 }; // codes, as in server.py
  const TOAST_MS = { note: 6000, error: 12000 };

  // -- elements ------------------------------------------------------------------------------------------------------

  // el("button", { class: "main", title: "Play", onclick: f, disabled: true, data: { id: 3 } }, "Play", child)
  // A key with a value of null is left out; functions become listeners; other values attributes or, if boolean, properties.
  function el(tag, options = {}, ...children) {
    return fill(document.createElement(tag), options, children);
  }

  function svg(tag, options = {}, ...children) {
    return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), options, children);
  }

  function fill(element, options, children) {
    for (const [key, value] of Object.entries(options)) {
      if (value === null || value === undefined) continue;
      if (typeof value === "function") element.addEventListener(key.replace(/^on/, ""), value);
      else if (key === "data") Object.assign(element.dataset, value);
      else if (key === "style") for (const [name, text] of Object.entries(value)) element.style.setProperty(name, text);
      else if (typeof value === "boolean" && !key.startsWith("aria-")) element[key] = value;
      else element.setAttribute(key, value);
    }
    element.append(...children.flat().filter((child) => child !== null && child !== undefined));
    return element;
  }

  function find(selector, root = document) {
    return root.querySelector(selector);
  }

  // Sets text only where it changed, which spares the browser's layout.
  function setText(element, text) {
    if (element.textContent !== String(text)) element.textContent = text;
  }

  // 0.01234 -> "0.0123", 12345.6 -> "12346", null -> "–"; a real minus sign.
  function number(value, digits = 3) {
    if (value === null || value === undefined || !Number.isFinite(value)) return "–";
    if (Number.isInteger(value) && Math.abs(value) < 1e7) return String(value).replace("-", "−");
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-4 || size >= 1e7)) return value.toExponential(digits - 1).replace("-", "−");
    const places = size === 0 ? 0 : Math.max(0, digits - 1 - Math.floor(Math.log10(size)));
    return value.toFixed(Math.min(places, 6)).replace("-", "−");
  }

  // -- messages ------------------------------------------------------------------------------------------------------

  // kind: "note", "error", or "result", which stays until it is dismissed.
  // code: a command behind the text.
  function toast(text, kind = "note", code = null) {
    const box = find(".toasts") ?? document.body.appendChild(el("div", { class: "toasts", role: "status", "aria-live": "polite" }));
    for (const other of box.children) if (other.firstChild.textContent === text + (code ?? "")) other.remove();
    const item = el("div", { class: `toast ${kind}` }, el("span", {}, text, code === null ? null : el("code", {}, code)));
    item.append(el("button", { class: "quiet", title: "Dismiss", "aria-label": "Dismiss", onclick: () => item.remove() }, "✕"));
    box.append(item);
    while (box.children.length > 4) box.firstChild.remove();
    if (TOAST_MS[kind]) setTimeout(() => item.remove(), TOAST_MS[kind]);
  }

  // Shows a line across the top until the next one; null removes it. `parts` are texts and elements.
  function banner(...parts) {
    find(".banner")?.remove();
    if (parts[0] !== null) document.body.prepend(el("div", { class: "banner", role: "alert" }, parts));
  }

  // -- theme ---------------------------------------------------------------------------------------------------------

  let colors = {};

  // color("--accent") as the theme has it, for canvases. They are drawn again at the event "themechange" of `document`.
  function color(name) {
    return (colors[name] ??= getComputedStyle(document.documentElement).getPropertyValue(name).trim());
  }

  function isDark() {
    const chosen = document.documentElement.dataset.theme;
    return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  }

  function announceTheme() {
    colors = {};
    document.dispatchEvent(new Event("themechange"));
  }

  // A button that toggles light and dark; the choice is remembered where there is storage.
  function themeButton() {
    return el("button", { class: "quiet", title: "Light or dark", "aria-label": "Light or dark", onclick: () => {
      const theme = isDark() ? "light" : "dark";
      document.documentElement.dataset.theme = theme;
      remember(() => localStorage, "wm-theme", theme);
      announceTheme();
    } }, "◐");
  }

  function recall(storage, key) {
    try { return storage().getItem(key); } catch { return null; }
  }

  function remember(storage, key, value) {
    try { storage().setItem(key, value); } catch { /* no storage: it lasts as long as the page */ }
  }

  const chosen = recall(() => localStorage, "wm-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", announceTheme);

  // -- socket --------------------------------------------------------------------------------------------------------

  function makeIdentifier() {
    return Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, "0")).join("");
  }

  // {head, frames: [{width, height, rgb}]} of a message in its wire form, see server.py.
  function decode(data) {
    if (typeof data === "string") return { head: JSON.parse(data), frames: [] };
    const length = new DataView(data).getUint32(0, true);
    const head = JSON.parse(new TextDecoder().decode(new Uint8Array(data, 4, length)));
    let offset = 4 + length;
    const frames = head.frames.map(([height, width]) => {
      const rgb = new Uint8Array(data, offset, height * width * 3);
      offset += rgb.length;
      return { width, height, rgb };
    });
    return { head, frames };
  }

  // Connects, and connects again whenever the connection is lost. Messages of type "error" and "note" become toasts.
  //   command: what starts the server, such as "wm play --browser", for the user
  //   receive(head, frames): called with every other message
  //   changed(isOpen): optional, called when the connection opens and when it is lost
  // Returns {send(object)}: true if it went out; nothing is kept for later.
  function connect({ command, receive, changed = () => {} }) {
    const session = recall(() => sessionStorage, "wm-session") ?? makeIdentifier();
    remember(() => sessionStorage, "wm-session", session);
    const token = new URLSearchParams(location.search).get("token") ?? "";
    const address = `${location.protocol === "https:" ? "wss:" : "ws:"}//${location.host}/socket?`
      + new URLSearchParams({ token, session });
    let socket = null, wait = RETRY.first, timer = null;

    function open() {
      clearTimeout(timer);
      socket = new WebSocket(address);
      socket.binaryType = "arraybuffer";
      socket.onopen = () => {
        wait = RETRY.first;
        banner(null);
        changed(true);
      };
      socket.onmessage = (event) => {
        const { head, frames } = decode(event.data);
        if (head.type === "error" || head.type === "note") toast(head.message, head.type);
        else receive(head, frames);
      };
      socket.onclose = (event) => {
        changed(false);
        if (event.code === CLOSED.gone) banner("The server has ended. Start it again with ", el("code", {}, command), " and open the address that it prints.");
        else if (event.code >= 4000) banner(sentence(event.reason), el("button", { onclick: open }, event.code === CLOSED.elsewhere ? "Continue here" : "Try again"));
        else retry();
      };
    }

    async function retry() {
      timer = setTimeout(open, wait);
      const failedBefore = wait > RETRY.first;
      wait = Math.min(wait * 2, RETRY.most);
      const now = el("button", { onclick: open }, "Try now");
      banner("Connection lost. Trying again …", now);
      if (!failedBefore) return;
      try {
        const answer = await fetch(location.href, { cache: "no-store" });
        if (answer.status === 403) {
          clearTimeout(timer);
          banner("Another server runs here now. Open the address that it printed.");
        }
      } catch {
        banner("No answer from the server. If it has ended, start it again with ", el("code", {}, command), " and open the address that it prints. Trying again …", now);
      }
    }

    open();
    return {
      send(request) {
        if (socket.readyState !== WebSocket.OPEN) return false;
        socket.send(JSON.stringify(request));
        return true;
      },
    };
  }

  function sentence(text) {
    const trimmed = text.trim();
    return trimmed.charAt(0).toUpperCase() + trimmed.slice(1) + (/[.!?…]$/.test(trimmed) ? "" : ".");
  }

  // -- pictures ------------------------------------------------------------------------------------------------------

  // Draws a frame at its own size; style sheets scale it.
  function paint(canvas, frame) {
    const { width, height, rgb } = frame;
    if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
    const image = new ImageData(width, height), rgba = image.data;
    for (let from = 0, to = 0; from < rgb.length; to += 4) {
      rgba[to] = rgb[from++];
      rgba[to + 1] = rgb[from++];
      rgba[to + 2] = rgb[from++];
      rgba[to + 3] = 255;
    }
    canvas.getContext("2d").putImageData(image, 0, 0);
  }

  // -- charts --------------------------------------------------------------------------------------------------------

  const sizes = new WeakMap(); // of canvases; to ask for them would make the browser lay out the page
  const measuring = new ResizeObserver((entries) => {
    for (const { target, contentRect } of entries) sizes.set(target, contentRect);
  });

  function sizeOf(canvas) {
    if (!sizes.has(canvas)) {
      sizes.set(canvas, { width: canvas.clientWidth, height: canvas.clientHeight });
      measuring.observe(canvas);
    }
    return sizes.get(canvas);
  }

  // Draws values into a canvas as a line that fills it; null and NaN are gaps. `low` and `high` fix the range, else the data's.
  function sparkline(canvas, values, { stroke = "--c0", low = null, high = null, most = values.length } = {}) {
    const ratio = devicePixelRatio || 1, { width, height } = sizeOf(canvas);
    if (!width || !height) return;
    const size = { width: Math.round(width * ratio), height: Math.round(height * ratio) };
    if (canvas.width !== size.width || canvas.height !== size.height) Object.assign(canvas, size);
    const context = canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    const finite = values.filter(Number.isFinite);
    if (!finite.length) return;
    const bottom = low ?? Math.min(...finite), top = high ?? Math.max(...finite), span = top - bottom || 1;
    const middle = top === bottom ? 0.5 : 0;
    const x = (index) => 1.5 + (index + most - values.length) * (width - 4) / Math.max(most - 1, 1);
    const y = (value) => height - 2 - ((value - bottom) / span + middle) * (height - 4);
    context.strokeStyle = context.fillStyle = color(stroke);
    context.lineWidth = 1.5;
    context.lineJoin = "round";
    context.beginPath();
    let pen = false;
    values.forEach((value, index) => {
      if (Number.isFinite(value)) context[pen ? "lineTo" : "moveTo"](x(index), y(value));
      pen = Number.isFinite(value);
    });
    context.stroke();
    const last = values.findLastIndex(Number.isFinite);
    context.beginPath();
    context.arc(x(last), y(values[last]), 2, 0, 2 * Math.PI);
    context.fill();
  }

  // Round numbers between two bounds, about `count` of them.
  function ticks(low, high, count) {
    const rough = (high - low) / Math.max(count, 1), power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].find((each) => each * power >= rough * 0.75) * power;
    const found = [];
    for (let index = Math.ceil(low / step - 1e-9); index * step <= high + step * 1e-9; index++) found.push(index * step || 0);
    return found;
  }

  // Exponents between two bounds: of 1, 10, 100, or of 1, 2, 5, 10, or else of round numbers.
  function logTicks(low, high) {
    for (const digits of [[1], [1, 2, 5]]) {
      const found = [];
      for (let power = Math.floor(low); power <= high; power++) found.push(...digits.map((digit) => power + Math.log10(digit)));
      const inside = found.filter((each) => each >= low - 1e-9 && each <= high + 1e-9), every = Math.ceil(inside.length / 5);
      if (inside.length > 1) return inside.filter((_, index) => index % every === 0);
    }
    return ticks(10 ** low, 10 ** high, 3).filter((each) => each > 0).map(Math.log10);
  }

  // Exponential moving average without bias at the start; `weight` in [0, 1), 0 leaves the values as they are.
  function smooth(values, weight) {
    let sum = 0, total = 0;
    return values.map((value) => {
      if (!Number.isFinite(value)) return value;
      sum = weight * sum + (1 - weight) * value;
      total = weight * total + (1 - weight);
      return sum / total;
    });
  }

  const MARKED = 12; // a curve of so few points, or one, shows them

  // Fills `box` with a line chart with axes, legend and values under the pointer.
  //   series: [{name, x: [...], y: [...], stroke: "--c0"}]; null and NaN are gaps. With `low` and `high`, a band between them
  //   log: y on a logarithmic scale, which leaves out what is not positive
  //   smoothing: weight as in `smooth`; the curve as it is stays behind, faint
  //   xName: words below; height: px
  function chart(box, series, { log = false, smoothing = 0, xName = "", height = 180 } = {}) {
    box.classList.add("chart");
    const width = Math.max(box.clientWidth, 160);
    const edge = { left: 52, right: 10, top: 8, bottom: xName ? 34 : 20 };
    const scale = (value) => (log ? (value > 0 ? Math.log10(value) : NaN) : value);
    const curves = series.map((each, index) => {
      const raw = each.y.map((value) => (value === null ? NaN : scale(value)));
      const band = [each.low, each.high].map((values) => (values ?? []).map((value) => (value === null ? NaN : scale(value))));
      return { ...each, raw, band, y: smoothing ? smooth(raw, smoothing) : raw, stroke: `var(${each.stroke ?? `--c${index % 7}`})` };
    });
    const [x0, x1] = bounds(curves.flatMap((each) => each.x.filter((_, index) => Number.isFinite(each.raw[index]))));
    const [y0, y1] = bounds(curves.flatMap((each) => [...each.raw, ...each.band.flat()]), 0.05);
    const across = width - edge.left - edge.right, down = height - edge.top - edge.bottom;
    const px = (x) => edge.left + (x - x0) / (x1 - x0) * across;
    const py = (y) => edge.top + (y1 - y) / (y1 - y0) * down;
    const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": series.map((each) => each.name).join(", ") });
    for (const tick of log ? logTicks(y0, y1) : ticks(y0, y1, down / 30)) {
      picture.append(
        svg("line", { class: "axis", x1: edge.left, x2: width - edge.right, y1: py(tick), y2: py(tick) }),
        svg("text", { x: edge.left - 6, y: py(tick) + 4, "text-anchor": "end" }, short(log ? 10 ** tick : tick)),
      );
    }
    for (const tick of ticks(x0, x1, across / 55)) {
      picture.append(svg("text", { x: px(tick), y: height - edge.bottom + 15, "text-anchor": "middle" }, short(tick)));
    }
    if (xName) picture.append(svg("text", { x: edge.left + across / 2, y: height - 4, "text-anchor": "middle" }, xName));
    const line = (each, y, kind) => {
      let path = "", pen = false;
      y.forEach((value, index) => {
        const drawn = Number.isFinite(value) && Number.isFinite(each.x[index]);
        if (drawn) path += `${pen ? "L" : "M"}${px(each.x[index]).toFixed(1)} ${py(value).toFixed(1)}`;
        pen = drawn;
      });
      picture.append(svg("path", { class: kind, d: path || "M0 0", style: { stroke: each.stroke } }));
    };
    for (const each of curves) {
      const corner = (edge) => (value, index) => Number.isFinite(each.band[1 - edge][index]) && Number.isFinite(value) ? `${px(each.x[index]).toFixed(1)} ${py(value).toFixed(1)}` : null;
      const corners = [...each.band[0].map(corner(0)), ...each.band[1].map(corner(1)).reverse()].filter((each) => each !== null);
      if (corners.length) picture.append(svg("path", { class: "band", d: `M${corners.join("L")}Z`, style: { fill: each.stroke } }));
    }
    for (const each of curves) if (smoothing) line(each, each.raw, "curve faint");
    for (const each of curves) {
      line(each, each.y, "curve");
      const points = each.y.map((value, index) => [each.x[index], value]).filter(([x, value]) => Number.isFinite(x) && Number.isFinite(value));
      if (points.length <= MARKED) for (const [x, value] of points) picture.append(svg("circle", { cx: px(x), cy: py(value), r: 2.5, style: { fill: each.stroke } }));
    }
    const cursor = svg("line", { class: "cursor", y1: edge.top, y2: height - edge.bottom, visibility: "hidden" });
    const tip = el("div", { class: "tip", hidden: true });
    picture.append(cursor);
    picture.addEventListener("pointermove", (event) => {
      const at = x0 + (event.offsetX / picture.clientWidth * width - edge.left) / across * (x1 - x0);
      const near = curves.map((each) => nearest(each, at)).filter((each) => each !== null);
      if (!near.length) return;
      const place = px(near[0].x);
      cursor.setAttribute("x1", place);
      cursor.setAttribute("x2", place);
      cursor.setAttribute("visibility", "visible");
      tip.replaceChildren(el("div", { class: "muted" }, number(near[0].x, 6)), ...near.map(({ each, y }) =>
        el("div", {}, el("i", { class: "dot", style: { background: each.stroke } }), ` ${each.name} ${number(log ? 10 ** y : y, 4)}`)));
      tip.hidden = false;
      tip.style.left = place < width / 2 ? `${place + 10}px` : "auto";
      tip.style.right = place < width / 2 ? "auto" : `${width - place + 10}px`;
    });
    picture.addEventListener("pointerleave", () => {
      cursor.setAttribute("visibility", "hidden");
      tip.hidden = true;
    });
    const names = curves.length < 2 ? [] : [el("div", { class: "legend" }, curves.map((each) =>
      el("span", {}, el("i", { style: { background: each.stroke } }), each.name)))];
    box.replaceChildren(picture, tip, ...names);
  }

  function bounds(values, margin = 0) {
    let low = Infinity, high = -Infinity;
    for (const value of values) if (Number.isFinite(value)) {
      low = Math.min(low, value);
      high = Math.max(high, value);
    }
    if (low > high) return [0, 1];
    const span = high - low || Math.abs(high) || 1;
    return low === high ? [low - span / 2, high + span / 2] : [low - span * margin, high + span * margin];
  }

  function short(value) { // 15000 -> "15k", 0.5000001 -> "0.5"
    const size = Math.abs(value), [unit, letter] = size >= 1e6 ? [1e6, "M"] : size >= 1e4 ? [1e3, "k"] : [1, ""];
    return `${Number((value / unit).toPrecision(6))}${letter}`.replaceAll("-", "−");
  }

  function nearest(each, at) {
    let best = null;
    each.x.forEach((x, index) => {
      if (Number.isFinite(each.y[index]) && (best === null || Math.abs(x - at) < Math.abs(best.x - at))) best = { each, x, y: each.y[index] };
    });
    return best;
  }

  return { el, svg, find, setText, number, toast, color, themeButton, connect, paint, sparkline, chart };
})();
