// The page of `wm play --browser`: the environment and dreams side by side, and the hands that steer them.
"use strict";

(() => {
  const { el, svg, find, setText, number } = ui;
  const KEPT = 240; // steps in the small charts
  const LEAST = 60; // steps that a small chart has room for
  const NOTHING = 5e-4; // smaller predictions are shown as 0
  const MEASURED = 200; // latencies
  const FORGOTTEN_MS = 60000; // a request whose effect was not seen by then, such as one that a later one replaced
  const SURE = 3; // steps after which an action was taken, whether or not its echo came
  const CHORD_MS = 40; // in turns, keys that go down within this time are one action
  const RATES = [1, 2, 4, 8, 10, 15, 20, 30, 60];
  const MAIN_ACTORS = { you: "you", agent: "the agent", dreamer: "the dreaming agent", random: "chance", stored: "the stored episode" };
  const PANE_ACTORS = { main: "as environment", you: "you", agent: "its agent", random: "chance" };
  const SOURCES = { environment: "Environment", recording: "Stored episode", none: "No environment" };
  const ICONS = { play: "M3 1l10 6-10 6z", pause: "M3 1h3v12H3zM8 1h3v12H8z", back: "M1 1h2v12H1zM13 1L4 7l9 6z", step: "M11 1h2v12h-2zM1 1l9 6-9 6z" };
  const METERS = [
    ["reward", "Reward", "Of the last step"],
    ["return", "Return", "Sum of rewards so far"],
    ["value", "Value", "Expected return from here on, as the model sees it"],
    ["termination", "P(end)", "Probability that the episode ends here"],
    ["entropy", "Entropy", "In nats: the higher, the less certain"],
    ["disagreement", "Disagreement", "Between the predictions of several models, or of several samples"],
    ["error", "Error", "Mean difference to the real picture, of 255"],
  ];

  const many = (count, one) => `${count} ${one}${count === 1 ? "" : "s"}`;

  let hello = null, view = null, frames = [], keymap = null, selected = null, drawn = false;
  let counter = 0, link = null;
  let renewing = null; // id of the request for another game
  const cards = new Map(); // of panes, by id; the environment's has the id null
  const tracks = new Map(); // for the small charts, by id: [{time, reward, ...}]
  const waiting = new Map(); // id of a request -> ms when it was sent
  const latencies = [], arrivals = [];

  // -- requests ------------------------------------------------------------------------------------------------------

  function send(request) {
    const id = ++counter;
    if (request.do === "restart" || request.do === "start") renewing = id;
    if (link.send({ ...request, id })) waiting.set(id, performance.now());
    return id;
  }

  function receive(head, pictures) {
    if (head.type === "hello") greet(head, pictures);
    else if (head.type === "view") show(head, pictures);
    else if (head.type === "history") replaceTrack(head);
    else if (head.type === "recorded") ui.toast(`Recorded ${many(head.steps, "step")} of ${many(head.episodes, "episode")} as ${head.artifact}. Use it with: `, "result", head.command);
  }

  function measure(echo) {
    const now = performance.now();
    arrivals.push(now);
    while (arrivals[0] < now - 1000) arrivals.shift();
    if (waiting.has(echo)) {
      latencies.push(now - waiting.get(echo));
      waiting.delete(echo);
      if (latencies.length > MEASURED) latencies.shift();
    }
    for (const [id, at] of waiting) if (at < now - FORGOTTEN_MS) waiting.delete(id);
  }

  function framesPerSecond() {
    const now = performance.now();
    return arrivals.filter((at) => at > now - 1000).length;
  }

  function quantile(share) {
    const sorted = [...latencies].sort((a, b) => a - b);
    return sorted.length ? sorted[Math.min(Math.floor(share * sorted.length), sorted.length - 1)] : null;
  }

  // -- views ---------------------------------------------------------------------------------------------------------

  function greet(head, pictures) {
    hello = head;
    document.title = `${head.title} – wm play`;
    setText(find("#title"), head.title);
    setText(find("#environment"), head.environment);
    find("#stage").replaceChildren();
    cards.clear();
    tracks.clear();
    acting.reset();
    buildPad();
    find("#stored").hidden = !head.episodes.length;
    listEpisodes();
    show(head.view, pictures);
  }

  function show(head, pictures) {
    measure(head.echo);
    acting.taken(head);
    if (head.echo !== null && head.echo === renewing) {
      renewing = null;
      tracks.clear();
    }
    view = head;
    frames = pictures;
    follow(null, head.time, head.real);
    for (const pane of head.panes) follow(pane.id, head.time, pane);
    if (drawn) return; // the picture that is about to be drawn is this one
    drawn = true;
    requestAnimationFrame(draw);
  }

  function follow(id, time, values) {
    const track = tracks.get(id) ?? tracks.set(id, []).get(id);
    while (track.length && track.at(-1).time >= time) track.pop();
    track.push({ time, ...Object.fromEntries(METERS.map(([key]) => [key, values[key] ?? null])) });
    if (track.length > KEPT) track.shift();
  }

  function replaceTrack({ pane, from, type, ...columns }) {
    const length = Math.max(...Object.values(columns).map((column) => column.length));
    const track = Array.from({ length }, (_, index) => ({ time: from + index, ...Object.fromEntries(Object.entries(columns).map(([key, column]) => [key, column[index] ?? null])) }));
    tracks.set(pane, track.slice(-KEPT));
  }

  function draw() {
    drawn = false;
    const stage = find("#stage");
    const shown = new Set([null, ...view.panes.map((pane) => pane.id)]);
    for (const [id, card] of cards) if (!shown.has(id)) {
      card.element.remove();
      cards.delete(id);
      tracks.delete(id);
    }
    if (!shown.has(selected) || selected === null) selected = view.panes[0]?.id ?? null;
    [...shown].forEach((id, place) => {
      if (!cards.has(id)) cards.set(id, makeCard(id));
      const { element } = cards.get(id);
      if (stage.children[place] !== element) stage.insertBefore(element, stage.children[place] ?? null);
    });
    drawReal(cards.get(null), view.real);
    view.panes.forEach((pane, index) => drawPane(cards.get(pane.id), pane, index));
    drawControls();
    if (performance.now() >= details.due) drawDetails();
    else details.timer ??= setTimeout(drawDetails, details.due - performance.now());
  }

  // Pictures come first: all else takes at most a third of the time of a slow machine.
  const details = { due: 0, timer: null };

  function drawDetails() {
    clearTimeout(details.timer);
    details.timer = null;
    if (!cards.has(null)) return; // connected again: all is drawn anew
    const began = performance.now();
    drawMeters(cards.get(null), view.real);
    for (const pane of view.panes) if (cards.has(pane.id)) drawInsight(cards.get(pane.id), pane);
    details.due = began + 3 * (performance.now() - began);
  }

  function makeCard(id) {
    const card = { id, room: 0, canvas: el("canvas", { role: "img" }), none: el("p", { class: "none" }), state: el("p", { class: "state" }) };
    card.title = el("h2");
    card.about = el("span", { class: "muted small" });
    card.meters = new Map(METERS.map(([key, name, about]) => {
      const value = el("b"), bar = key === "termination" ? el("i") : null;
      const picture = bar ? el("div", { class: "track" }, bar) : el("canvas", { class: "spark" });
      return [key, { row: el("div", { class: "meter", title: about, hidden: true }, el("span", {}, name), value, picture), value, bar, picture }];
    }));
    card.screen = el("div", { class: "screen" }, card.canvas, card.none, card.state);
    card.numbers = el("div", { class: "numbers" }, el("div", {}, [...card.meters.values()].map((meter) => meter.row)));
    if (id !== null) {
      card.policy = bars("Policy", "percents");
      card.visits = bars("Root of the search: visits · value", "visits", searchedName);
      card.latent = drawings.latent();
      card.tree = drawings.tree(searchedName);
      card.numbers.append(card.policy.element, card.visits.element);
    }
    card.actor = el("select", { "aria-label": "Actor", title: id === null ? "Who moves the environment, and the dreams that follow it" : "Who acts in this dream", onchange: (event) => {
      send({ do: "actor", pane: id, actor: parseActor(card.actor.value) });
      letGo(event);
    } });
    const request = (about, words, what, name = null) => el("button", { title: about, "aria-label": name, onclick: (event) => {
      send({ pane: id, ...what });
      letGo(event);
    } }, words);
    const corner = id === null
      ? deedButton("record", "Record your steps as an experience (o)", el("span", { class: "dot bad" }), el("span", { id: "recorded" }, "Record"))
      : request("Close this dream", "✕", { do: "close" }, "Close this dream");
    corner.classList.add("push");
    card.corner = corner;
    const buttons = id === null ? [
      el("button", { id: "start", title: "Start from a stored episode, or with another seed", onclick: openStart }, "Start …"),
      deedButton("restart", "A new game (r)", "Restart"),
    ] : [
      request("Copy this dream; your keys then steer the copy (b)", "Branch", { do: "branch" }),
      request("Start this dream again from the real frames (w: all)", "Wake", { do: "wake" }),
    ];
    const head = el("div", { class: "head" }, el("div", { class: "row name" }, card.title, card.about, corner),
      el("div", { class: "row" }, el("label", { class: "muted" }, el("span", {}, "Actor"), card.actor), buttons));
    card.element = el("article", { class: "card panel", data: { pane: String(id) }, onpointerdown: () => { if (id !== null) selected = id; } },
      head, el("div", { class: "body" }, card.screen, card.numbers, card.latent?.element ?? []));
    const measuring = new ResizeObserver(() => {
      card.room = card.screen.clientWidth;
      card.width = card.numbers.clientWidth;
      if (view) fit(card);
    });
    measuring.observe(card.screen);
    measuring.observe(card.numbers);
    return card;
  }

  // Scales by whole pixels of the screen. Frames that are larger than their place are made smaller instead.
  function fit(card) {
    const { width, height } = card.canvas, ratio = devicePixelRatio || 1;
    const most = Math.min(card.room / width, Math.max(Math.min(innerHeight * 0.38, 400), 120) / height);
    const scale = most * ratio >= 1 ? Math.floor(most * ratio + 1e-6) / ratio : most;
    card.canvas.style.width = `${width * scale}px`;
    card.canvas.style.height = `${height * scale}px`;
    card.canvas.classList.toggle("smooth", most * ratio < 1);
  }

  function drawFrame(card, index, otherwise) {
    const frame = index === null ? null : frames[index];
    card.canvas.hidden = frame === null;
    card.none.hidden = frame !== null;
    if (frame === null) return setText(card.none, otherwise);
    const changed = card.canvas.width !== frame.width || card.canvas.height !== frame.height;
    ui.paint(card.canvas, frame);
    if (changed || !card.canvas.style.width) fit(card);
  }

  function drawReal(card, real) {
    setText(card.title, SOURCES[real.source] ?? real.source);
    if (!card.actor.options.length) setActors(card.actor, null);
    setValue(card.actor, view.actor);
    drawFrame(card, real.frame, real.source === "none" ? "Dreams only" : "has no picture");
    card.canvas.setAttribute("aria-label", "Frame of the environment");
    const parts = [`step ${view.time}`, real.action === null ? null : nameOf(real.action), real.note];
    setState(card, parts, real.ended);
  }

  function drawPane(card, pane, index) {
    const model = hello.models[pane.model];
    if (!card.actor.options.length) setActors(card.actor, pane.id, model);
    card.corner.disabled = view.panes.length === 1;
    card.element.classList.toggle("selected", view.panes.length > 1 && pane.id === selected);
    setText(card.title, `Dream ${index + 1}`);
    setText(card.about, model.name);
    card.about.title = model.about;
    setValue(card.actor, actorText(pane.actor));
    drawFrame(card, pane.frame, "decodes no frames");
    card.canvas.setAttribute("aria-label", `Frame of dream ${index + 1}`);
    setState(card, [many(pane.age, "imagined step"), pane.action === null || pane.action === undefined ? null : nameOf(pane.action)], pane.terminated ? "terminated" : null);
  }

  function drawInsight(card, pane) {
    drawMeters(card, pane);
    card.policy.draw(pane.policy, (value) => `${Math.round(value * 100)} %`, pane.choice);
    const visits = pane.search?.visits, all = visits?.reduce((sum, each) => sum + each, 0) || 1;
    card.visits.draw(visits?.map((each) => each / all) ?? null, (_, action) => `${visits[action]} · ${decimals(pane.search.values[action])}`, hello.actions.names ? pane.choice : null);
    card.latent.draw(pane.latent);
    // Without a picture the tree takes its place.
    const home = pane.frame === null ? card.screen : card.numbers;
    if (card.tree.element.parentNode !== home) home === card.screen ? card.none.after(card.tree.element) : home.append(card.tree.element);
    card.tree.draw(pane.search, Math.max((home === card.screen ? card.room : card.width) || 280, 200));
  }

  function setState(card, parts, over) {
    const texts = parts.filter((part) => part !== null && part !== undefined);
    card.state.replaceChildren(...texts.map((text) => el("span", {}, text)), ...(over ? [el("span", { class: "over" }, over)] : []));
  }

  function drawMeters(card, values) {
    const track = tracks.get(card.id) ?? [];
    for (const [key, meter] of card.meters) {
      const value = values[key] ?? null;
      if (value === null && !track.some((each) => each[key] !== null && each[key] !== undefined)) {
        meter.row.hidden = true;
        continue;
      }
      meter.row.hidden = false;
      const size = Math.abs(value ?? 1);
      setText(meter.value, number(size < NOTHING ? 0 : value, size < 0.01 ? 2 : 3));
      if (meter.bar) meter.bar.style.transform = `scaleX(${Math.min(Math.max(value ?? 0, 0), 1)})`;
      else ui.sparkline(meter.picture, track.map((each) => each[key] ?? NaN), { most: Math.max(track.length, LEAST), ...(key === "error" ? { stroke: "--c1", low: 0 } : {}) });
    }
  }

  // A heading and a bar for each action. draw(shares, textOf(share, index), chosen action); null hides it.
  function bars(title, kind, nameOfRow = entryName) {
    const list = el("div", { class: `bars ${kind}` }), element = el("section", {}, el("h3", {}, title), list);
    let rows = [];
    return {
      element,
      draw(shares, textOf, chosen) {
        element.hidden = shares === null || shares === undefined;
        if (element.hidden) return;
        if (rows.length !== shares.length) {
          rows = shares.map((_, index) => {
            const bar = el("i"), text = el("span"), name = nameOfRow(index);
            return { bar, text, row: el("div", { class: "bar" }, el("span", { title: name }, name), el("div", { class: "track" }, bar), text) };
          });
          const longest = Math.max(...shares.map((_, index) => nameOfRow(index).length));
          list.style.setProperty("--name", `${Math.min(longest, 16) + 1}ch`);
          list.classList.toggle("narrow", longest <= 8 && shares.length > 4);
          list.replaceChildren(...rows.map((each) => each.row));
        }
        shares.forEach((share, index) => {
          rows[index].bar.style.transform = `scaleX(${Number.isFinite(share) ? Math.max(share, 0) : 0})`;
          setText(rows[index].text, textOf(share, index));
          rows[index].row.classList.toggle("chosen", isChosen(index, chosen));
        });
      },
    };
  }

  function isChosen(index, action) {
    if (!Array.isArray(action)) return index === action;
    const { sizes } = hello.actions; // the rows of all numbers, one behind the other
    return sizes !== undefined && action.some((value, row) => index === value + sizes.slice(0, row).reduce((sum, size) => sum + size, 0));
  }

  function searchedName(index) { // of an action in a search, which is one of its samples where actions are not discrete
    return hello.actions.names ? nameOf(index) : `sample ${index + 1}`;
  }

  function entryName(index) { // of a policy's row
    if (hello.actions.names) return hello.actions.names[index] ?? String(index);
    let rest = index;
    for (const [row, size] of (hello.actions.sizes ?? []).entries()) {
      if (rest < size) return `${row + 1}: ${rest}`;
      rest -= size;
    }
    return String(index);
  }

  function decimals(value) {
    return Number.isFinite(value) ? value.toFixed(2).replace("-", "−") : "–";
  }

  function nameOf(action) {
    if (Array.isArray(action)) return action.map((each) => number(each, 2)).join(", ");
    return hello.actions.names?.[action] ?? String(action ?? "");
  }

  // -- controls ------------------------------------------------------------------------------------------------------

  function icon(name) {
    return svg("svg", { viewBox: "0 0 14 14", "aria-hidden": "true" }, svg("path", { d: ICONS[name] }));
  }

  function setValue(control, value) {
    if (document.activeElement !== control && control.value !== String(value)) control.value = value;
  }

  function actorText(actor) {
    return typeof actor === "object" ? JSON.stringify(actor) : actor;
  }

  function parseActor(text) {
    if (text === "chosen") return { action: acting.choice() };
    return text.startsWith("{") ? JSON.parse(text) : text;
  }

  function setActors(select, pane, model = null) {
    const actors = Object.entries(pane === null ? MAIN_ACTORS : PANE_ACTORS);
    const possible = ([value]) => pane === null ? hello.actors.includes(value) : value !== "agent" || model.acts;
    select.replaceChildren(...actors.filter(possible).map(([value, name]) => el("option", { value }, name)));
    if (pane === null) return;
    const fixed = hello.actions.names?.map((name, action) => el("option", { value: JSON.stringify({ action }) }, name));
    select.append(el("optgroup", { label: "Always the same" }, fixed ?? [el("option", { value: "chosen" }, "what is chosen below")]));
  }

  let dragging = false;

  function drawControls() {
    const { options, playing, recording } = view;
    const play = find("#play");
    if (play.dataset.playing !== String(playing)) {
      play.dataset.playing = playing;
      play.title = `${playing ? "Pause" : "Play"} (${keymap.usesSpace ? "p" : "space"})`;
      play.setAttribute("aria-label", playing ? "Pause" : "Play");
      play.replaceChildren(icon(playing ? "pause" : "play"), el("span", {}, playing ? "Pause" : "Play"));
    }
    find("#back").disabled = view.time <= view.earliest;
    const time = find("#time");
    if (!dragging) {
      Object.assign(time, { min: view.earliest, max: view.latest, value: view.time });
      setText(find("#clock"), `step ${view.time}${view.latest > view.time ? ` of ${view.latest}` : ""}`);
    }
    setValue(find("#mode"), options.mode);
    const rate = find("#rate");
    if (![...rate.options].some((option) => Number(option.value) === options.rate)) {
      const rates = [...new Set([...RATES, options.rate])].sort((a, b) => a - b);
      rate.replaceChildren(...rates.map((each) => el("option", { value: each }, `${number(each)} / s`)));
    }
    setValue(rate, options.rate);
    setValue(find("#horizon"), options.horizon);
    setValue(find("#temperature"), options.temperature);
    const record = find("#record");
    record.setAttribute("aria-pressed", recording !== null);
    record.disabled = view.real.source !== "environment";
    setText(find("#recorded"), recording === null ? "Record" : many(recording.steps, "step"));
  }

  function drawSpeed() {
    const median = quantile(0.5), most = quantile(0.95);
    setText(find("#speed"), hello === null ? "" : `${framesPerSecond()} fps${median === null ? "" : ` · ${Math.round(median)} / ${Math.round(most)} ms`}`);
  }

  const deeds = {
    play: () => send({ do: view.playing ? "pause" : "play" }),
    step: () => send({ do: "step" }),
    back: () => send({ do: "back", steps: 1 }),
    branch: () => selected !== null && send({ do: "branch", pane: selected }),
    wake: () => send({ do: "wake", pane: null }),
    restart: () => send({ do: "restart", seed: null }),
    record: () => send({ do: "record", on: view.recording === null }),
    help: () => find("#helping").showModal(),
  };
  const SHORTCUTS = { p: "play", ".": "step", ",": "back", b: "branch", w: "wake", r: "restart", o: "record", "?": "help" };

  function deedButton(name, title, ...children) {
    return el("button", { id: name, title, onclick: (event) => {
      deeds[name]();
      letGo(event);
    } }, children);
  }

  // Keys go to the game again after a click or a choice with the pointer.
  function letGo(event) {
    if (event.type === "change" || event.detail > 0) event.currentTarget.blur();
  }

  function bindControls() {
    for (const name of ["play", "step", "back", "help"]) {
      find(`#${name}`).addEventListener("click", (event) => {
        if (view) deeds[name]();
        letGo(event);
      });
    }
    find("#back").append(icon("back"));
    find("#step").append(icon("step"));
    const option = (id, request) => find(id).addEventListener("change", (event) => {
      send(request(event.currentTarget.value));
      letGo(event);
    });
    option("#mode", (mode) => ({ do: "options", mode }));
    option("#rate", (rate) => ({ do: "options", rate: Number(rate) }));
    option("#horizon", (horizon) => ({ do: "options", horizon: Math.max(Math.round(Number(horizon)), 0) }));
    option("#temperature", (temperature) => ({ do: "options", temperature: Math.max(Number(temperature), 0) }));
    const time = find("#time");
    time.addEventListener("input", () => {
      dragging = true;
      setText(find("#clock"), `to step ${time.value}`);
    });
    time.addEventListener("change", (event) => {
      dragging = false;
      send({ do: "goto", time: Number(time.value) });
      letGo(event);
    });
    bindStart();
    find("#speed").after(ui.themeButton());
    document.addEventListener("themechange", () => view && draw());
    addEventListener("resize", () => view && cards.forEach(fit));
  }

  // -- start dialog --------------------------------------------------------------------------------------------------

  const MOST_ROWS = 300;
  let episode = null;

  function bindStart() {
    const dialog = find("#starting"), slider = find("#frame");
    find("#startSeed").addEventListener("click", () => {
      const seed = find("#seed").value;
      send({ do: "restart", seed: seed === "" ? null : Math.max(Math.round(Number(seed)), 0) });
      dialog.close();
    });
    find("#startEpisode").addEventListener("click", () => {
      send({ do: "start", episode: episode.number, frame: Number(slider.value) });
      dialog.close();
    });
    slider.addEventListener("input", () => setText(find("#frameNumber"), slider.value));
    find("#filter").addEventListener("input", listEpisodes);
    find("#filter").addEventListener("keydown", (event) => { if (event.key === "Enter") event.preventDefault(); });
  }

  function openStart(event) {
    letGo(event);
    find("#starting").showModal();
  }

  function listEpisodes() {
    const words = find("#filter").value.toLowerCase().split(/\s+/).filter(Boolean);
    const matches = hello.episodes.filter((each) => words.every((word) => `${each.number} ${each.source}`.toLowerCase().includes(word)));
    const rows = matches.slice(0, MOST_ROWS).map((each) => {
      const row = el("tr", { class: "link", tabindex: 0, "aria-selected": each === episode, onclick: () => choose(each, row), onkeydown: (event) => { if (event.key === "Enter") { event.preventDefault(); choose(each, row); } } },
        el("td", { class: "number" }, each.number), el("td", { class: "number" }, each.frames), el("td", { class: "number" }, number(each.return)), el("td", {}, each.source));
      return row;
    });
    if (matches.length > MOST_ROWS) rows.push(el("tr", {}, el("td", { colspan: 4, class: "muted" }, `${matches.length - MOST_ROWS} more: type a number or a source above`)));
    if (!matches.length) rows.push(el("tr", {}, el("td", { colspan: 4, class: "muted" }, "no episode like that")));
    find("#episodes").replaceChildren(...rows);
  }

  function choose(each, row) {
    episode = each;
    for (const other of find("#episodes").children) other.setAttribute("aria-selected", other === row);
    Object.assign(find("#frame"), { max: each.frames - 1, value: 0 });
    setText(find("#frameNumber"), 0);
    find("#startEpisode").disabled = false;
  }

  // -- your actions --------------------------------------------------------------------------------------------------

  // In real time an action holds from keydown to keyup, and counts for one step at least.
  // In turns each keydown counts once.
  const acting = (() => {
    let down = []; // ids of keys, oldest first
    let current = null; // the action that holds
    let pending = null; // {id, time}: sent, and no step was made with it yet
    let chord = null; // timer
    let chosen = null; // of several numbers

    const inTurns = () => view.options.mode === "turns";

    function change(released) {
      markPad();
      if (!view || !keymap) return;
      const action = keymap.actionOf(down);
      if (inTurns()) {
        if (released || action === null) return;
        clearTimeout(chord);
        chord = setTimeout(() => send({ do: "act", action: keymap.actionOf(down) ?? action, hold: false }), keymap.chords ? CHORD_MS : 0);
        return;
      }
      if (action === current) return;
      if (action !== null) {
        if (released && pending) return; // the chord counts first
        current = action;
        pending = { id: send({ do: "act", action, hold: true }), time: view.time };
      } else {
        send({ do: "act", action: null, hold: true });
        current = pending = null;
      }
    }

    function markPad() {
      for (const button of find("#pad").querySelectorAll("button[data-key]")) button.classList.toggle("down", down.includes(button.dataset.key));
    }

    return {
      press(id) {
        if (down.includes(id)) return;
        down.push(id);
        change(false);
      },
      release(id) {
        if (!down.includes(id)) return;
        down = down.filter((each) => each !== id);
        change(true);
      },
      releaseAll() {
        if (!down.length) return;
        down = [];
        change(true);
      },
      taken(head) {
        if (!pending || (head.echo !== pending.id && head.time < pending.time + SURE)) return;
        pending = null;
        change(true);
      },
      // After a lost connection the session may still hold what was held then.
      reset() {
        if (current !== null || chosen !== null) send({ do: "act", action: null, hold: true });
        down = [];
        current = pending = chosen = null;
      },
      choose(numbers) {
        chosen = numbers;
        send({ do: "act", action: numbers, hold: !inTurns() });
      },
      choice: () => chosen ?? hello.idle,
    };
  })();

  function buildPad() {
    const pad = find("#pad"), { kind } = hello.actions;
    keymap = keys.map(kind === "discrete" ? hello.actions.names : []);
    pad.className = kind === "discrete" ? "keys" : "";
    find("#play").dataset.playing = ""; // its title names the key
    if (kind === "discrete") {
      pad.replaceChildren(...keymap.list.map((key) => keyButton(key)));
      if (keymap.chords) pad.append(el("span", { class: "muted small" }, "hold several together"));
    } else if (kind === "categories") pad.replaceChildren(...hello.actions.sizes.map((size, row) => categoryRow(size, row)));
    else pad.replaceChildren(...hello.actions.low.map((low, index) => sliderRow(low, hello.actions.high[index], index)));
    const list = [["play", keymap.usesSpace ? "P" : "Space"], ["step", "."], ["back", ","], ["branch", "B"], ["wake", "W"], ["restart", "R"], ["record", "O"], ["help", "?"]];
    const about = { play: "play or pause", step: "one step", back: "one step back", branch: "copy the dream; your keys then steer the copy", wake: "dreams start again from the real frames", restart: "a new game", record: "record your steps", help: "this help" };
    find("#shortcuts").replaceChildren(...[...keymap.list.map((key) => [key.name, key.shown]), ...list.map(([name, key]) => [about[name], key])]
      .filter(([, key]) => key).flatMap(([name, key]) => [el("dt", {}, el("kbd", {}, key)), el("dd", {}, name)]));
  }

  function keyButton({ id, shown, name }) {
    const button = el("button", { data: { key: id }, title: shown ? `${name} (${shown})` : name }, shown ? el("kbd", { class: id.startsWith("Arrow") ? "arrow" : null }, shown) : null, el("span", {}, name));
    button.addEventListener("pointerdown", (event) => {
      event.preventDefault();
      button.setPointerCapture(event.pointerId);
      acting.press(id);
    });
    for (const end of ["pointerup", "pointercancel", "lostpointercapture"]) button.addEventListener(end, () => acting.release(id));
    button.addEventListener("contextmenu", (event) => event.preventDefault());
    button.addEventListener("click", (event) => { // by the keyboard
      if (event.detail > 0) return;
      acting.press(id);
      acting.release(id);
    });
    return button;
  }

  function categoryRow(size, row) {
    const buttons = Array.from({ length: size }, (_, value) => el("button", { title: `Number ${row + 1}: ${value}`, "aria-pressed": "false", onclick: () => {
      const numbers = [...acting.choice()];
      numbers[row] = value;
      acting.choose(numbers);
      buttons.forEach((button, index) => button.setAttribute("aria-pressed", index === value));
    } }, String(value)));
    buttons[hello.idle[row]]?.setAttribute("aria-pressed", "true");
    return el("span", { class: "number-row", role: "group", "aria-label": `Number ${row + 1}` }, el("span", { class: "muted small" }, `${row + 1}`), buttons);
  }

  const sliders = [];

  function sliderRow(low, high, index) {
    const input = el("input", { type: "range", min: low, max: high, step: (high - low) / 200, "aria-label": `Number ${index + 1}` });
    const output = el("output", { class: "number small" });
    input.value = hello.idle[index];
    setText(output, number(Number(input.value), 2));
    input.addEventListener("input", () => moveSlider(index, Number(input.value)));
    input.addEventListener("change", (event) => letGo(event));
    sliders[index] = { input, output, low, high };
    const hint = index === 0 ? "← →" : index === 1 ? "↓ ↑" : null;
    return el("span", { class: "number-row" }, el("span", { class: "muted small" }, `${index + 1}`), hint ? el("kbd", {}, hint) : null, input, output);
  }

  function moveSlider(index, value) {
    const numbers = [...acting.choice()];
    numbers[index] = value;
    sliders[index].input.value = value;
    setText(sliders[index].output, number(value, 2));
    acting.choose(numbers);
  }

  const STICK = { ArrowLeft: [0, "low"], ArrowRight: [0, "high"], ArrowDown: [1, "low"], ArrowUp: [1, "high"] };

  // Arrow keys push the first two numbers to an end; let go, they come to rest.
  function moveStick(key, isDown) {
    const [index, end] = STICK[key], slider = sliders[index];
    if (!slider) return;
    moveSlider(index, isDown ? slider[end] : hello.idle[index]);
  }

  const held = new Map(); // code of a physical key -> what it holds

  function bindKeys() {
    addEventListener("keydown", (event) => {
      if (!view || event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
      if (event.target.closest("input, select")) {
        if (event.key === "Enter" || event.key === "Escape") event.target.blur(); // and keys play again
        return;
      }
      if ((event.key === " " || event.key === "Enter") && event.target.closest("button, a, tr")) return;
      const stick = hello.actions.kind === "continuous" && STICK[event.key] ? event.key : null;
      const id = stick ?? keymap.of(event);
      if (id !== null) {
        event.preventDefault();
        if (event.repeat || held.has(event.code)) return;
        held.set(event.code, id);
        if (stick) moveStick(stick, true);
        else acting.press(id);
        return;
      }
      const deed = SHORTCUTS[event.key.toLowerCase()] ?? (event.key === " " ? "play" : null);
      if (!deed) return;
      event.preventDefault();
      if (!event.repeat || deed === "step" || deed === "back") if (!find(`#${deed}`)?.disabled) deeds[deed]();
    });
    const up = (code) => {
      const id = held.get(code);
      if (id === undefined) return;
      held.delete(code);
      if (hello.actions.kind === "continuous") moveStick(id, false);
      else acting.release(id);
    };
    addEventListener("keyup", (event) => up(event.code));
    const releaseAll = () => {
      for (const code of [...held.keys()]) up(code);
      acting.releaseAll();
    };
    addEventListener("blur", releaseAll);
    document.addEventListener("visibilitychange", () => { if (document.hidden) releaseAll(); });
  }

  bindControls();
  bindKeys();
  setInterval(drawSpeed, 500);
  link = ui.connect({ command: "wm play --browser", receive });
  window.wm = {
    get fps() { return framesPerSecond(); },
    get latencies() { return latencies; },
    get view() { return view; },
    get tracks() { return Object.fromEntries(tracks); },
    send,
  };
})();
