"use strict";
(() => {
  const root = document.documentElement;
  const stored = (theme) => {
    try {
      if (theme) localStorage.setItem("theme", theme);
      return localStorage.getItem("theme");
    } catch {
      return null; // no storage for files in this browser
    }
  };
  const first = stored();
  if (first === "light" || first === "dark") root.dataset.theme = first; // before the first paint

  const button = (text, name, act) => {
    const made = document.createElement("button");
    made.type = "button";
    made.className = name;
    made.textContent = text;
    made.addEventListener("click", () => act(made));
    return made;
  };

  function switchTheme() {
    const dark = matchMedia("(prefers-color-scheme: dark)");
    const now = () => root.dataset.theme ?? (dark.matches ? "dark" : "light");
    const other = () => (now() === "dark" ? "light" : "dark");
    const toggle = button("", "theme", () => {
      root.dataset.theme = other();
      stored(root.dataset.theme);
      label();
    });
    const label = () => { toggle.textContent = other() === "dark" ? "Dark" : "Light"; };
    dark.addEventListener("change", label);
    label();
    toggle.setAttribute("aria-description", "colors of the page");
    document.querySelector("header").append(toggle);
  }

  function contents() {
    const list = document.querySelector("nav details");
    const wide = matchMedia("(min-width: 68rem)");
    const fit = () => { list.open = wide.matches; };
    wide.addEventListener("change", fit);
    fit();
    const links = [...list.querySelectorAll("a")];
    const sections = links.map((link) => document.getElementById(link.hash.slice(1)));
    const mark = () => {
      const passed = sections.filter((section) => section.getBoundingClientRect().top < innerHeight * 0.4).length;
      const atEnd = scrollY > 0 && scrollY + innerHeight > root.scrollHeight - 2; // the last ones may be short
      const current = atEnd ? links.length - 1 : Math.max(passed - 1, 0);
      links.forEach((link, place) => { link.ariaCurrent = place === current ? "true" : null; });
    };
    addEventListener("scroll", mark, { passive: true });
    mark();
  }

  // -- tables

  const SHOWN = 30;
  const SIZES = { k: 1e3, M: 1e6, G: 1e9, T: 1e12, "": 1 };

  const number = (text) => {
    const [, digits, unit] = /^([-+]?[\d.]+(?:e[-+]?\d+)?|[-+]?inf) ?([kMGT]?)/.exec(text.replaceAll(",", "")) ?? [];
    return digits === undefined ? NaN : Number(digits.replace("inf", "Infinity")) * SIZES[unit];
  };

  function sort(table, place, descending, numeric) {
    const key = (row) => row.cells[place].dataset.v ?? row.cells[place].textContent;
    const order = (a, b) => {
      const [x, y] = [a, b].map(key).map((text) => (numeric ? number(text) : text));
      const [gap, other] = numeric ? [Number.isNaN(x), Number.isNaN(y)] : [x === "-", y === "-"];
      if (gap || other) return gap - other; // empty cells last, either way
      const sign = numeric ? Math.sign(x - y) || 0 : x.localeCompare(y, "en", { numeric: true });
      return descending ? -sign : sign;
    };
    for (const body of table.tBodies) body.append(...[...body.rows].sort(order));
  }

  // The digits of numbers stay as they were written: JavaScript would round large ones and write others differently.
  function csv(text) {
    const marked = text.replace(/"(?:[^"\\]|\\.)*"|-?\d[\d.eE+-]*/g, (token) =>
      token.startsWith('"') ? `"s${token.slice(1)}` : `"n${token}"`);
    const rows = JSON.parse(marked);
    const plain = (value) => (value === null ? "" : String(value).replace(/^s|^n/, "").trim().replace(/\s+/g, " "));
    const quoted = (cell) => (/[",\n\r]/.test(cell) ? `"${cell.replaceAll('"', '""')}"` : cell);
    const names = Object.keys(rows[0] ?? {});
    const lines = [names.map((name) => name.slice(1)), ...rows.map((row) => names.map((name) => plain(row[name])))];
    return lines.map((cells) => cells.map(quoted).join(",") + "\n").join("");
  }

  function save(name, type, text) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type }));
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60000);
  }

  function equip(figure) {
    const table = figure.querySelector("table");
    const rows = () => [...table.tBodies].flatMap((body) => [...body.rows]);
    const tools = document.createElement("div");
    tools.className = "tools";
    let all = rows().length <= SHOWN;
    const collapse = () => rows().forEach((row, place) => row.classList.toggle("beyond", !all && place >= SHOWN));
    if (!all) {
      const names = { false: `Show all ${rows().length} rows`, true: `Show ${SHOWN} rows` };
      tools.append(button(names[all], "more", (made) => {
        all = !all;
        made.textContent = names[all];
        made.setAttribute("aria-expanded", all);
        collapse();
      }));
      tools.firstChild.setAttribute("aria-expanded", false);
      collapse();
    }
    [...table.tHead.rows[0].cells].forEach((head, place) => {
      const made = document.createElement("span"); // on paper, no browser repeats a heading with a real button in it
      made.role = "button";
      made.tabIndex = 0;
      const act = () => {
        const numeric = head.classList.contains("n");
        const before = head.ariaSort;
        const descending = before ? before === "ascending" : numeric;
        for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", descending ? "descending" : "ascending");
        sort(table, place, descending, numeric);
        collapse();
      };
      made.addEventListener("click", act);
      made.addEventListener("keydown", (event) => {
        if (event.key !== "Enter" && event.key !== " ") return;
        event.preventDefault();
        act();
      });
      made.append(...head.childNodes);
      head.append(made);
    });
    const data = figure.querySelector("script");
    const { name } = data.dataset;
    tools.append(
      button("CSV", "", () => save(`${name}.csv`, "text/csv", csv(data.textContent))),
      button("JSON", "", () => save(`${name}.json`, "application/json", data.textContent + "\n")),
    );
    for (const made of [...tools.children].slice(-2)) made.setAttribute("aria-label", `${made.textContent} of ${name}`);
    figure.append(tools);
  }

  // -- the rest

  function hint(box) { // that there is more to the right
    const update = () => box.classList.toggle("more", box.scrollLeft + box.clientWidth < box.scrollWidth - 2);
    box.addEventListener("scroll", update, { passive: true });
    new ResizeObserver(update).observe(box);
  }

  function film(picture) {
    const still = picture.querySelector("source");
    let playing = !matchMedia("(prefers-reduced-motion: reduce)").matches;
    const set = (made) => {
      still.media = playing ? "print" : "all";
      made.textContent = playing ? "Pause" : "Play";
      made.ariaLabel = `${made.textContent} the film`;
    };
    const made = button("", "", () => {
      playing = !playing;
      set(made);
    });
    set(made);
    picture.after(made);
    picture.parentElement.classList.add("film");
  }

  function copying(block) {
    block.append(button("Copy", "copy", async (made) => {
      const code = block.querySelector("code");
      try {
        await navigator.clipboard.writeText(code.textContent);
        made.textContent = "Copied";
      } catch { // not allowed for files in this browser
        getSelection().selectAllChildren(code);
        made.textContent = "Selected";
      }
      setTimeout(() => { made.textContent = "Copy"; }, 1500);
    }));
  }

  document.addEventListener("DOMContentLoaded", () => {
    switchTheme();
    contents();
    document.querySelectorAll("figure.table").forEach(equip);
    document.querySelectorAll(".scroll").forEach(hint);
    document.querySelectorAll("picture:has(source)").forEach(film);
    document.querySelectorAll(".commands").forEach(copying);
    const closed = new Set();
    addEventListener("beforeprint", () => document.querySelectorAll("main details:not([open])").forEach((fold) => {
      closed.add(fold);
      fold.open = true;
    }));
    addEventListener("afterprint", () => {
      closed.forEach((fold) => { fold.open = false; });
      closed.clear();
    });
  });
})();
