"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const { page } = data;
  const rows = { ...data.rows, why: page.why };
  const size = rows.scope.codes.length;
  const byId = (id) => document.getElementById(id);

  const make = (tag, attributes = {}, ...children) => {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (value === null || value === undefined || value === false) continue;
      if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else element.setAttribute(name, value);
    }
    element.append(...children);
    return element;
  };

  const UNITS = ["", "k", "M", "G", "T", "P", "E"];
  const si = (number) => {
    let unit = 0;
    while (number >= 999.5 && unit < UNITS.length - 1) [number, unit] = [number / 1000, unit + 1];
    return `${Number(number.toPrecision(3))} ${UNITS[unit]}`;
  };
  const whole = (number) => number.toLocaleString("en");
  const value = (name, i) => rows[name].values[rows[name].codes[i]];
  const text = (name, i) => page.texts[name][rows[name].codes[i]];
  const dtype = (i) => page.ran_in.values[page.ran_in.codes[i]];
  const family = (i) => page.families[page.ran_in.codes[i]];
  const familyOf = (name) => page.families[page.ran_in.values.indexOf(name)] ?? "none";
  const pathOf = (source) => (source ? `${source.file}:${source.line} in ${source.function}` : "");

  // -- what is shown: the filters, and the rows that pass them

  const PHASES = ["forward", "backward"];
  const KINDS = ["matmul", "cast", "not entered", "other"];
  const SETS = { wide: new Set(page.wide), wasteful: new Set(page.wasteful) };
  const TITLES = { wide: `matmuls not in ${data.compute_dtype}`, wasteful: "dimensions that waste tensor cores" };
  const state = {
    words: "", phases: new Set(PHASES), kinds: new Set(KINDS), only: null, // a name in SETS
    scope: "", line: null, // a line of the map: {scope, source}, with source as an index into its column
    sort: "flops", down: true, merge: true,
  };
  let passed = []; // indices of the rows that pass
  let view = new Int32Array(0); // of them, in order, those that are shown: one of each group of equal layers
  let chosen = null; // the index of the row whose details are shown

  const SEARCHED = ["scope", "primitive", "phase", "kind", "written", "run", "rule", "reason", "source"];
  const lowered = Object.fromEntries(
    SEARCHED.map((name) => [name, (page.texts[name] ?? rows[name].values).map((one) => String(one).toLowerCase())]));

  // Words are matched against the few distinct values of a column; a row only looks up the result.
  const matches = (words) => words.map((word) =>
    SEARCHED.map((name) => [rows[name].codes, lowered[name].map((one) => one.includes(word))]));

  const inScope = (name, scope) => scope === "" || name === scope || name.startsWith(`${scope}/`);

  function select() {
    const words = matches(state.words.toLowerCase().split(/\s+/).filter(Boolean));
    const scopes = rows.scope.values.map((name) =>
      state.line ? name === state.line.scope : inScope(name, state.scope));
    const phases = rows.phase.values.map((name) => state.phases.has(name));
    const kinds = rows.kind.values.map((name) => state.kinds.has(name));
    const only = state.only && SETS[state.only];
    const left = [];
    for (let i = 0; i < size; i++) {
      if (scopes[rows.scope.codes[i]] && phases[rows.phase.codes[i]] && kinds[rows.kind.codes[i]]
        && (!only || only.has(i)) && (!state.line || rows.source.codes[i] === state.line.source)
        && words.every((columns) => columns.some(([codes, found]) => found[codes[i]]))) left.push(i);
    }
    passed = left;
    const first = gather(left);
    const keys = SUMMED.includes(state.sort) ? sums[state.sort] : keysOf(state.sort);
    const sign = state.down ? -1 : 1;
    view = Int32Array.from(first.sort((a, b) => sign * (keys[a] - keys[b]) || a - b));
  }

  // -- equal layers as one: operations that differ only in the number of a layer, as the 3 of block_3

  const SUMMED = ["times", "flops", "bytes"];
  const ALIKE = ["primitive", "phase", "kind", "written", "run", "rule", "why", "source", "dims"];
  const sums = Object.fromEntries(SUMMED.map((name) => [name, new Float64Array(size)])); // by the first of a group
  const layers = new Int32Array(size); // by the first of a group: how many scopes it has
  const starred = rows.scope.values.map((name) => name.replace(/\d+(?=\]?(\/|$))/g, "*"));
  const groupOf = (() => { // for each row, the number of its group
    const numbers = new Map();
    return Int32Array.from({ length: size }, (_, i) => {
      const key = `${starred[rows.scope.codes[i]]}\n${ALIKE.map((name) => rows[name].codes[i]).join()}`;
      if (!numbers.has(key)) numbers.set(key, numbers.size);
      return numbers.get(key);
    });
  })();

  function gather(left) {
    const first = new Map(), scopes = new Map();
    for (const i of left) {
      const group = state.merge ? groupOf[i] : i;
      if (!first.has(group)) {
        first.set(group, i);
        scopes.set(group, new Set());
        for (const name of SUMMED) sums[name][i] = 0;
      }
      scopes.get(group).add(rows.scope.codes[i]);
      for (const name of SUMMED) sums[name][first.get(group)] += value(name, i);
    }
    for (const [group, i] of first) layers[i] = scopes.get(group).size;
    return [...first.values()];
  }
  const scopeText = (i) => (layers[i] > 1 ? starred[rows.scope.codes[i]] : value("scope", i)) || "(no scope)";

  // The numbers that a column is sorted by; for text, the rank among its distinct values.
  const collator = new Intl.Collator("en", { numeric: true }); // block_2 before block_10
  const cache = {};
  function keysOf(name) {
    return (cache[name] ??= (() => {
      if (name === "order") return Float64Array.from({ length: size }, (_, i) => i);
      const { values, codes } = rows[name];
      if (typeof values[0] === "number") return Float64Array.from(codes, (code) => values[code]);
      const texts = page.texts[name] ?? values;
      const order = texts.map((_, code) => code).sort((a, b) => collator.compare(texts[a], texts[b]));
      const ranks = new Float64Array(order.length);
      for (let k = 1; k < order.length; k++) {
        ranks[order[k]] = ranks[order[k - 1]] + (texts[order[k]] === texts[order[k - 1]] ? 0 : 1);
      }
      return Float64Array.from(codes, (code) => ranks[code]);
    })());
  }

  // -- the table: the document only holds the rows in view

  // Wide enough for the longest text, in a font of 12 px; a table wider than the window scrolls.
  const widthOf = (texts) => Math.max(148, Math.ceil(7.3 * texts.reduce((most, one) => Math.max(most, one.length), 0)) + 18);
  const COLUMNS = [
    { name: "order", title: "#", width: 58, number: true, show: (i) => whole(i + 1) },
    { name: "scope", title: "scope", width: 166, show: (i) => scopeText(i) },
    { name: "primitive", title: "operation", width: 160 },
    { name: "phase", title: "phase", width: 76 },
    { name: "times", title: "times", width: 54, number: true, show: (i) => whole(sums.times[i]) },
    { name: "flops", title: "FLOPs", width: 68, number: true, show: (i) => si(sums.flops[i]) },
    { name: "bytes", title: "bytes", width: 74, number: true, show: (i) => `${si(sums.bytes[i])}B` },
    { name: "written", title: "dtypes as written", width: 126, show: (i) => text("written", i) },
    { name: "run", title: "dtypes as run", width: 164, show: (i) => text("run", i) },
    { name: "rule", title: "rule", width: 74, show: (i) => shortRule(value("rule", i)) },
    { name: "why", title: "reason", width: widthOf(rows.why.values) },
    { name: "source", title: "source", width: 132, show: (i) => text("source", i) },
  ];
  const shortRule = (name) => name.replace(/^use_(\w+)_precision$/, "$1");
  const scroller = byId("scroller"), table = byId("table"), body = table.tBodies[0];
  let rowHeight = 0;
  const measure = () => { rowHeight = parseFloat(getComputedStyle(document.documentElement).getPropertyValue("--row")); };
  measure();

  table.querySelector("colgroup").append(...COLUMNS.map((column) => make("col", { style: `width:${column.width}px` })));
  table.style.setProperty("--width", `${COLUMNS.reduce((sum, column) => sum + column.width, 0)}px`);
  table.tHead.append(make("tr", {}, ...COLUMNS.map((column) => {
    column.header = make("th", { scope: "col", class: column.number && "n", "aria-sort": "none", "data-column": column.name },
      make("button", { type: "button", onclick: () => sortBy(column) }, column.title));
    return column.header;
  })));

  function sortBy(column) {
    state.down = state.sort === column.name ? !state.down : Boolean(column.number) && column.name !== "order";
    state.sort = column.name;
    update({ map: false });
  }

  function cell(column, i) {
    const shown = column.show ? column.show(i) : value(column.name, i);
    const full = { source: () => pathOf(value("source", i)), rule: () => value("rule", i), why: () => value("reason", i) };
    const same = column.name === "written" && shown === text("run", i);
    const element = make("td", { class: `${column.name}${column.number ? " n" : same ? " faint" : ""}`, title: column.number ? null : full[column.name]?.() ?? shown });
    if (column.name === "run" && family(i) !== "none") element.append(make("i", { class: `swatch ${family(i)}` }));
    element.append(column.name === "scope" ? make("bdi", { dir: "ltr" }, shown) : shown);
    return element;
  }

  const gap = (height) => make("tr", { class: "gap", "aria-hidden": "true" },
    make("td", { colspan: COLUMNS.length, style: `height:${height}px` }));

  let painted = "";
  function paint(force = false) {
    const first = Math.max(0, Math.floor(scroller.scrollTop / rowHeight) - 10);
    const last = Math.min(view.length, first + Math.ceil(scroller.clientHeight / rowHeight) + 20);
    if (!force && painted === `${first}-${last}-${rowHeight}`) return;
    painted = `${first}-${last}-${rowHeight}`;
    const shown = Array.from(view.subarray(first, last), (i, k) => make("tr",
      { id: `row-${i}`, class: value("phase", i), "data-row": i, "aria-rowindex": first + k + 2, "aria-current": i === chosen && "true" },
      ...COLUMNS.map((column) => cell(column, i))));
    if (!view.length) shown.push(make("tr", {}, make("td", { colspan: COLUMNS.length, class: "faint nothing" }, "No operation matches the filters.")));
    body.replaceChildren(gap(first * rowHeight), ...shown, gap((view.length - last) * rowHeight));
  }

  let waiting = false;
  scroller.addEventListener("scroll", () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => { waiting = false; paint(); });
  }, { passive: true });
  new ResizeObserver(() => { measure(); paint(); }).observe(scroller);

  body.addEventListener("click", (event) => {
    const row = event.target.closest("tr[data-row]");
    if (row) choose(Number(row.dataset.row));
  });
  scroller.addEventListener("keydown", (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (event.key === "Escape") return choose(null);
    if (!step || event.target !== scroller || !view.length) return;
    event.preventDefault();
    const at = view.indexOf(chosen);
    const next = at < 0 ? 0 : Math.min(view.length - 1, Math.max(0, at + step));
    const top = next * rowHeight, room = scroller.clientHeight - table.tHead.offsetHeight - rowHeight;
    if (top < scroller.scrollTop) scroller.scrollTop = top;
    else if (top > scroller.scrollTop + room) scroller.scrollTop = top - room;
    choose(view[next]);
  });

  function choose(i) {
    chosen = i;
    const details = byId("details");
    details.hidden = i === null;
    scroller.removeAttribute("aria-activedescendant");
    paint(true);
    if (i === null) return;
    scroller.setAttribute("aria-activedescendant", `row-${i}`);
    const dims = value("dims", i);
    const facts = {
      "operation": `${value("primitive", i)}, ${value("phase", i)}, ${value("kind", i)}`,
      "scope": layers[i] > 1 ? `${scopeText(i)}, ${whole(layers[i])} layers` : scopeText(i),
      "dtypes as written": text("written", i) || "not in your program",
      "dtypes as run": text("run", i),
      "rule": value("rule", i) || "none",
      "reason": value("reason", i),
      "source": pathOf(value("source", i)) || "unknown",
      "times": whole(sums.times[i]),
      "FLOPs": whole(sums.flops[i]),
      "bytes": whole(sums.bytes[i]),
      ...(dims && { "dimensions": Object.entries(dims).map((pair) => pair.join(" ")).join("  ") }),
    };
    details.replaceChildren(make("dl", {}, ...Object.entries(facts).flatMap(([name, fact]) =>
      [make("dt", {}, name), make("dd", {}, fact)])));
  }

  // -- the map of scopes: the work of a scope itself is split by source line

  const newNode = (name, scope, line = null) =>
    ({ name, scope, line, flops: 0, dtypes: new Map(), children: new Map(), lines: new Map() });
  const tree = newNode("all", "");
  const partsOf = (scope) => (scope ? scope.split("/") : []);
  const parentOf = (scope) => partsOf(scope).slice(0, -1).join("/");

  function add(node, flops, name) {
    node.flops += flops;
    node.dtypes.set(name, (node.dtypes.get(name) ?? 0) + flops);
  }

  for (let i = 0; i < size; i++) {
    const flops = value("flops", i);
    if (!flops) continue;
    const scope = value("scope", i), source = rows.source.codes[i];
    let node = tree;
    add(node, flops, dtype(i));
    partsOf(scope).forEach((part, k, parts) => {
      if (!node.children.has(part)) node.children.set(part, newNode(part || "(unnamed)", parts.slice(0, k + 1).join("/")));
      node = node.children.get(part);
      add(node, flops, dtype(i));
    });
    if (!node.lines.has(source)) {
      node.lines.set(source, newNode(page.texts.source[source] || "(no source)", scope, { scope, source }));
    }
    add(node.lines.get(source), flops, dtype(i));
  }

  // The largest first; those of about the same size in the order in which they run.
  const sizeOf = (node) => Number(node.flops.toPrecision(2));
  const childrenOf = (node) => [...node.children.values(), ...node.lines.values()].sort((a, b) => sizeOf(b) - sizeOf(a));
  // A scope that does nearly all of its work in one line is not split further.
  const isLeaf = (node) => node !== tree && node.children.size === 0
    && [...node.lines.values()].every((line) => line.flops > 0.99 * node.flops || line.flops < 0.01 * node.flops);
  const most = (node) => [...node.dtypes].reduce((a, b) => (b[1] > a[1] ? b : a), ["", -1])[0];
  const find = (scope) => partsOf(scope).reduce((node, part) => node?.children.get(part), tree);

  // Squarified (Bruls, Huizing, van Wijk 2000): rows of cells along the shorter side, as square as possible.
  function squarify(nodes, x, y, width, height) {
    const cells = [];
    let left = nodes.reduce((sum, node) => sum + node.flops, 0);
    let k = 0;
    while (k < nodes.length && left > 0 && width > 0 && height > 0) {
      const side = Math.min(width, height), scale = (width * height) / left;
      let sum = 0, worst = Infinity, end = k;
      while (end < nodes.length) {
        const next = sum + nodes[end].flops, thick = (next * scale) / side;
        const ratio = Math.max(...[nodes[k], nodes[end]].map((node) => {
          const long = (node.flops * scale) / thick;
          return Math.max(long / thick, thick / long);
        }));
        if (ratio > worst) break;
        [sum, worst, end] = [next, ratio, end + 1];
      }
      const thick = (sum * scale) / side;
      let along = 0;
      for (; k < end; k++) {
        const long = (nodes[k].flops * scale) / thick;
        cells.push(width >= height ? [nodes[k], x, y + along, thick, long] : [nodes[k], x + along, y, long, thick]);
        along += long;
      }
      if (width >= height) [x, width] = [x + thick, width - thick];
      else [y, height] = [y + thick, height - thick];
      left -= sum;
    }
    return cells;
  }

  const map = byId("map");
  const SMALLEST = 5, HEAD = 19, DEPTH = 4;

  function drawMap() {
    const scope = find(state.scope) ?? tree;
    const root = isLeaf(scope) ? find(parentOf(state.scope)) : scope;
    const cells = [];
    const isChosen = (node) => (state.line
      ? node.line?.scope === state.line.scope && node.line.source === state.line.source
      : state.scope !== "" && node.line === null && node.scope === state.scope);
    const place = (nodes, x, y, width, height, depth) => {
      for (const [node, left, top, w, h] of squarify(nodes, x, y, width, height)) {
        if (w < SMALLEST || h < SMALLEST) continue;
        const named = h >= 24 && w >= Math.min(60, 7.3 * node.name.length + 14);
        const parent = !isLeaf(node) && depth < DEPTH && w > 60 && h > 44;
        const share = `${((100 * node.flops) / tree.flops).toFixed(1)} %`;
        const said = [...node.dtypes].sort((a, b) => b[1] - a[1])
          .map(([name, flops]) => `${((100 * flops) / node.flops).toFixed(1)} % ${name || "no float"}`).join(", ");
        const label = `${node.line ? `${node.scope || "(no scope)"}, ${node.name}` : node.scope}: ${si(node.flops)}FLOP, ${share} of all; ${said}`;
        const cell = make("button", {
          type: "button", tabindex: "-1", title: label, "aria-label": label, "aria-pressed": String(isChosen(node)),
          class: `cell ${parent ? "parent" : familyOf(most(node))}${isChosen(node) ? " chosen" : ""}`,
          style: `left:${left + 1}px;top:${top + 1}px;width:${Math.max(1, w - 2)}px;height:${Math.max(1, h - 2)}px${named ? "" : ";padding:0"}`,
          onclick: () => (isChosen(node) ? show({ scope: node.line ? state.scope : parentOf(node.scope), line: null })
            : show({ scope: node.line ? state.scope : node.scope, line: node.line })),
        });
        if (named) {
          cell.append(make("span", {}, node.name));
          if (parent ? w >= 6.7 * node.name.length + 66 : w >= 64 && h >= 40) cell.append(make("small", {}, `${si(node.flops)}${parent ? "" : ` ${most(node)}`}`));
        }
        cells.push(cell);
        if (parent) place(childrenOf(node), left + 3, top + HEAD + 1, w - 6, h - HEAD - 4, depth + 1);
      }
    };
    if (tree.flops) place(childrenOf(root), 0, 0, map.clientWidth, map.clientHeight, 1);
    if (cells.length) (cells.find((cell) => cell.classList.contains("chosen")) ?? cells[0]).tabIndex = 0;
    else cells.push(make("p", { class: "quiet" }, "No operation here has FLOPs."));
    const had = map.contains(document.activeElement);
    map.replaceChildren(...cells);
    if (had) map.querySelector('[tabindex="0"]')?.focus({ preventScroll: true });
    drawCrumbs(root);
  }

  function drawCrumbs(root) {
    const parts = partsOf(root.scope);
    const steps = [["all scopes", ""], ...parts.map((part, k) => [part, parts.slice(0, k + 1).join("/")])];
    byId("crumbs").replaceChildren(...steps.flatMap(([name, scope], k) => [
      ...(k ? [make("i", { "aria-hidden": "true" }, "/")] : []),
      k === steps.length - 1 && state.scope === scope && !state.line ? make("span", {}, name)
        : make("button", { type: "button", onclick: () => show({ scope, line: null }) }, name),
    ]));
  }

  // The tab key stops at the map once; arrow keys go from cell to cell.
  map.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const cells = [...map.querySelectorAll("button")];
    const at = cells.indexOf(document.activeElement);
    const next = cells[Math.min(cells.length - 1, Math.max(0, at + step))];
    for (const cell of cells) cell.tabIndex = cell === next ? 0 : -1;
    next.focus();
  });

  let mapWidth = 0;
  new ResizeObserver(() => {
    if (map.clientWidth !== mapWidth) { mapWidth = map.clientWidth; drawMap(); }
  }).observe(map);

  byId("key").append(...[...tree.dtypes].filter(([, flops]) => flops >= tree.flops / 2000).sort((a, b) => b[1] - a[1]).map(([name, flops]) => make("li", {},
    make("i", { class: `swatch ${familyOf(name)}` }), `${name || "no float"} `, make("b", {}, `${((100 * flops) / tree.flops).toFixed(1)} %`))));

  // -- filters

  function boxes(id, names, set, column) {
    const counts = new Map(names.map((name) => [name, 0]));
    for (const code of rows[column].codes) {
      const name = rows[column].values[code];
      counts.set(name, (counts.get(name) ?? 0) + 1);
    }
    byId(id).append(...names.map((name) => make("label", {}, make("input", {
      type: "checkbox", name: column, value: name, checked: "",
      onchange: (event) => { set[event.target.checked ? "add" : "delete"](name); update({ map: false }); },
    }), `${name} `, make("small", {}, whole(counts.get(name))))));
  }
  boxes("phases", PHASES, state.phases, "phase");
  boxes("kinds", KINDS, state.kinds, "kind");

  const words = byId("words");
  words.addEventListener("input", () => { state.words = words.value; update({ map: false }); });
  byId("filters").addEventListener("submit", (event) => event.preventDefault());

  const merge = byId("merge");
  merge.addEventListener("change", () => { state.merge = merge.checked; update({ map: false }); });

  // -- the address keeps the filters, so that a link shows what its sender saw

  const SORTS = COLUMNS.map((column) => column.name);
  function toAddress() {
    const parts = new URLSearchParams();
    const some = (name, set, all) => { if (set.size < all.length) parts.set(name, all.filter((one) => set.has(one)).join()); };
    if (state.words) parts.set("words", state.words);
    some("phase", state.phases, PHASES);
    some("kind", state.kinds, KINDS);
    if (state.only) parts.set("only", state.only);
    if (state.scope) parts.set("scope", state.scope);
    if (state.line) parts.set("line", JSON.stringify([state.line.scope, state.line.source]));
    if (state.sort !== "flops" || !state.down) parts.set("sort", `${state.down ? "-" : ""}${state.sort}`);
    if (!state.merge) parts.set("layers", "each");
    const hash = parts.toString();
    if (hash !== location.hash.slice(1)) history.replaceState(null, "", hash ? `#${hash}` : location.pathname + location.search);
  }

  function fromAddress() {
    const parts = new URLSearchParams(location.hash.slice(1));
    const some = (name, all) => (parts.has(name) ? all.filter((one) => parts.get(name).split(",").includes(one)) : all);
    clear();
    state.words = words.value = parts.get("words") ?? "";
    check(state.phases, some("phase", PHASES));
    check(state.kinds, some("kind", KINDS));
    if (Object.hasOwn(SETS, parts.get("only"))) state.only = parts.get("only");
    if (find(parts.get("scope") ?? "")) state.scope = parts.get("scope") ?? "";
    try {
      const [scope, source] = JSON.parse(parts.get("line"));
      if (find(scope)?.lines.has(source)) state.line = { scope, source };
    } catch { /* none, or not one of ours */ }
    const sort = parts.get("sort") ?? "-flops", name = sort.replace(/^-/, "");
    if (SORTS.includes(name)) Object.assign(state, { sort: name, down: sort.startsWith("-") });
    state.merge = merge.checked = parts.get("layers") !== "each";
  }
  addEventListener("hashchange", () => { fromAddress(); update(); });

  function show(change) {
    Object.assign(state, change);
    update();
  }

  function check(set, names) {
    set.clear();
    for (const name of names) set.add(name);
    for (const box of document.querySelectorAll("#filters input[type=checkbox]")) {
      box.checked = (box.name === "phase" ? state.phases : state.kinds).has(box.value);
    }
  }

  function clear() {
    check(state.phases, PHASES);
    check(state.kinds, KINDS);
    words.value = "";
    Object.assign(state, { words: "", only: null, scope: "", line: null });
  }

  for (const button of document.querySelectorAll("[data-show]")) {
    button.addEventListener("click", () => {
      const what = button.dataset.show;
      clear();
      if (what in SETS) state.only = what;
      else check(state.kinds, [what]);
      Object.assign(state, { sort: what === "cast" ? "bytes" : "flops", down: true });
      update();
      byId("operations").scrollIntoView();
      scroller.focus({ preventScroll: true });
    });
  }

  function drawStatus() {
    let flops = 0;
    for (const i of passed) flops += value("flops", i);
    const lines = view.length < passed.length ? ` in ${whole(view.length)} lines` : "";
    byId("count").textContent = `${whole(passed.length)} of ${whole(size)} operations${lines}, ${si(flops)}FLOP`;
    const chips = [];
    const chip = (label, change) => chips.push(make("button",
      { type: "button", class: "chip", title: "Remove this filter", onclick: () => show(change) }, label));
    if (state.scope) chip(`scope ${state.scope}`, { scope: "", line: null });
    if (state.line) {
      const where = state.line.scope === state.scope ? "" : ` in ${state.line.scope || "(no scope)"}`;
      chip(`line ${page.texts.source[state.line.source] || "(no source)"}${where}`, { line: null });
    }
    if (state.only) chip(TITLES[state.only], { only: null });
    const all = state.phases.size === PHASES.length && state.kinds.size === KINDS.length && !state.words;
    if (chips.length || !all) {
      chips.push(make("button", { type: "button", class: "show", style: "margin:0", onclick: () => { clear(); update(); } }, "Clear filters"));
    }
    byId("chips").replaceChildren(...chips);
  }

  function update({ map: redraw = true } = {}) {
    select();
    for (const column of COLUMNS) {
      column.header.setAttribute("aria-sort", state.sort !== column.name ? "none" : state.down ? "descending" : "ascending");
    }
    table.setAttribute("aria-rowcount", view.length + 1);
    table.setAttribute("aria-colcount", COLUMNS.length);
    drawStatus();
    if (chosen !== null && !view.includes(chosen)) choose(null);
    scroller.scrollTop = 0;
    paint(true);
    if (redraw) drawMap();
    toAddress();
  }

  fromAddress();
  update();
})();
