// From the names of actions to keys, and from the keys that are down to an action.
"use strict";

const keys = (() => {
  const SHOWN = { ArrowUp: "↑", ArrowDown: "↓", ArrowLeft: "←", ArrowRight: "→", " ": "Space" };
  const DIRECTIONS = {
    UP: "ArrowUp", NORTH: "ArrowUp", FORWARD: "ArrowUp", DOWN: "ArrowDown", SOUTH: "ArrowDown", BACKWARD: "ArrowDown",
    BACK: "ArrowDown", LEFT: "ArrowLeft", WEST: "ArrowLeft", RIGHT: "ArrowRight", EAST: "ArrowRight", FIRE: " ",
  };
  const AXIS = { ArrowUp: "vertical", ArrowDown: "vertical", ArrowLeft: "horizontal", ArrowRight: "horizontal", " ": "fire" };
  const PREFERRED = { NOOP: "n", STAY: "n", NOTHING: "n", NONE: "n", WAIT: "n", DO: " ", TOGGLE: "t", PICKUP: "g", DROP: "d", DONE: "e" };
  const SHORTCUTS = "bworp"; // of the page
  const OTHERS = "1234567890abcdefghijklmnopqrstuvwxyz";

  // "UPRIGHTFIRE", "move_left", "FORWARD_LEFT" -> ids of the keys to hold; null if the name has other words.
  function partsOf(name) {
    let rest = name.toUpperCase().replace(/^(MOVE|TURN|GO|ROTATE)[ _-]/, "");
    const found = [];
    while (rest) {
      const word = Object.keys(DIRECTIONS).filter((each) => rest.startsWith(each)).sort((a, b) => b.length - a.length)[0];
      if (!word || found.some((id) => AXIS[id] === AXIS[DIRECTIONS[word]])) return null;
      found.push(DIRECTIONS[word]);
      rest = rest.slice(word.length).replace(/^[ _-]/, "");
    }
    return found.length ? found : null;
  }

  // names: of all actions. Returns {list, actionOf, of, usesSpace, chords}:
  //   list: [{id, shown, name}], the keys with what each does alone; of(event): the id of the key, or null
  //   actionOf(down): the action of the ids of keys that are down, oldest first; null if there is none
  //   chords: whether some actions take several keys at once
  function map(names) {
    const single = new Map(); // id -> action
    const together = new Map(); // sorted ids, joined -> action
    const joined = (ids) => [...ids].sort().join("+");
    const rest = [];
    names.forEach((name, action) => {
      const parts = partsOf(name);
      if (!parts || together.has(joined(parts))) return rest.push(action);
      together.set(joined(parts), action);
      if (parts.length === 1) single.set(parts[0], action);
    });
    const taken = new Set([...SHORTCUTS, ...[...together.keys()].flatMap((each) => each.split("+"))]);
    const firing = taken.has(" ");
    if (firing) taken.add("f");
    for (const action of rest) {
      const name = names[action].toUpperCase(), letters = name.toLowerCase().replace(/[^a-z0-9]/g, "");
      const initials = name.toLowerCase().split(/[^a-z0-9]+/).map((word) => word.charAt(0)).reverse();
      const wanted = [PREFERRED[name.replace(/[ _-]/g, "")], ...initials, ...letters, ...OTHERS];
      const id = wanted.find((each) => each && !taken.has(each)) ?? `#${action}`; // more actions than keys: a button alone
      taken.add(id);
      single.set(id, action);
    }
    const order = ["ArrowUp", "ArrowLeft", "ArrowDown", "ArrowRight", " "];
    const used = order.filter((id) => taken.has(id));
    const list = [...used, ...[...single.keys()].filter((id) => !order.includes(id))].map((id) => {
      const word = Object.keys(DIRECTIONS).find((each) => DIRECTIONS[each] === id);
      return { id, shown: SHOWN[id] ?? (id.startsWith("#") ? "" : id.toUpperCase()), name: single.has(id) ? names[single.get(id)] : word };
    });

    function actionOf(down) {
      const last = down.at(-1);
      if (last === undefined) return null;
      if (!AXIS[last] || (last === " " && !firing)) return single.get(last) ?? null;
      const axes = new Map(); // the newest key of each axis
      for (const id of down) if (AXIS[id]) {
        axes.delete(AXIS[id]);
        axes.set(AXIS[id], id);
      }
      for (const ids = [...axes.values()]; ids.length; ids.shift()) {
        const action = together.get(joined(ids));
        if (action !== undefined) return action;
      }
      return null;
    }

    function of(event) {
      const key = event.key.length === 1 ? event.key.toLowerCase() : event.key;
      const id = key === "f" && firing ? " " : key;
      return list.some((each) => each.id === id) ? id : null;
    }

    return { list, actionOf, of, usesSpace: taken.has(" "), chords: [...together.keys()].some((each) => each.includes("+")) };
  }

  return { map };
})();
