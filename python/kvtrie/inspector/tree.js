// The trees of a snapshot: one bar per edge, from its first token to its last, as high as the paths below it.

const showTree = async (place, doc, plan) => {
  const names = ["parent", "blocks", "runs", "runBlocks", "runState", "runAge", "runHeld", "tags", "tagStart", "tagEnd", "tagLow", "tagHigh"];
  const columns = Object.fromEntries(await Promise.all(names.map(async (name) => [name, await numbers(doc.columns[name])])));
  const { parent, blocks, runs, runBlocks, runState, runAge, runHeld } = columns;
  const size = doc.blockSize, nodes = doc.nodes, ROOT = 0xffffffff;

  // Each node: the node after all below it, its first token, the last token below it, its rows, and what is below.
  const next = new Uint32Array(nodes), start = new Float64Array(nodes), deepest = new Float64Array(nodes);
  const row = new Uint32Array(nodes), rows = new Uint32Array(nodes), space = new Uint32Array(nodes);
  const firstRun = new Uint32Array(nodes + 1), firstTag = new Uint32Array(nodes + 1), firstBlock = new Float64Array(nodes + 1);
  const approximate = new Uint8Array(nodes), filled = new Uint8Array(nodes);
  let spaces = 0;
  for (let node = 0; node < nodes; node += 1) {
    const above = parent[node];
    start[node] = above === ROOT ? 0 : start[above] + blocks[above] * size;
    space[node] = above === ROOT ? spaces++ : space[above];
    firstRun[node + 1] = firstRun[node] + runs[node];
    firstTag[node + 1] = firstTag[node] + columns.tags[node];
    firstBlock[node + 1] = firstBlock[node] + blocks[node];
    deepest[node] = start[node] + blocks[node] * size;
    for (let run = firstRun[node]; run < firstRun[node + 1]; run += 1) {
      if ((runState[run] & 3) === 1) approximate[node] = 1;
      if ((runState[run] & 3) !== 2) filled[node] = 1;
    }
  }
  for (let node = nodes - 1; node >= 0; node -= 1) {
    next[node] = Math.max(next[node], node + 1);
    if (!rows[node]) rows[node] = 1;
    const above = parent[node];
    if (above === ROOT) continue;
    next[above] = Math.max(next[above], next[node]);
    rows[above] += rows[node];
    deepest[above] = Math.max(deepest[above], deepest[node]);
    approximate[above] |= approximate[node];
    filled[above] |= filled[node];
  }
  for (let node = 0, top = 0; node < nodes; node = next[node]) { row[node] = top; top += rows[node]; }
  for (let node = 0; node < nodes; node += 1) {
    let at = row[node];
    for (let child = node + 1; child < next[node]; child = next[child]) { row[child] = at; at += rows[child]; }
  }
  const end = (node) => start[node] + blocks[node] * size;
  let across = size, down = 0;
  for (let node = 0; node < nodes; node = next[node]) { across = Math.max(across, deepest[node]); down += rows[node]; }

  // --- colours ---------------------------------------------------------------------------------
  const NEVER = 0xffffffff;
  let oldest = 1;
  for (const age of runAge) if (age !== NEVER && age > oldest) oldest = age;
  const kindsOf = (tag) => doc.kinds.filter((_, bit) => ((bit < 32 ? columns.tagLow[tag] >>> bit : columns.tagHigh[tag] >>> (bit - 32)) & 1));
  const sessionName = (at) => doc.sessions[at].name ?? doc.sessions[at].digest.slice(0, 8);
  const LIGHT = { colour: "#d9dde3" };
  const looks = {
    state: (run) => (runState[run] & 1 ? LOOKS.approximate : LOOKS.exact),
    age: (run) => ({ colour: AGES[Math.min(4, Math.floor(5 * Math.log1p(runAge[run]) / Math.log1p(oldest)))] }),
    holder: (run) => (doc.sets[runHeld[run]].length ? several(doc.sets[runHeld[run]][0]) : LIGHT),
    kind: () => LIGHT,
  };
  const keys = {
    state: () => [LOOKS.exact, LOOKS.approximate, LOOKS.hole, { ...LOOKS.dead, colour: BLUE }],
    age: () => [...AGES.map((colour, at) => ({ colour, name: ["used last", "", "", "", `${number(oldest)} uses ago`][at] })), LOOKS.hole],
    holder: () => [...doc.sessions.slice(0, 12).map((_, at) => ({ ...several(at), name: sessionName(at) })), { ...LIGHT, name: "no session" }, LOOKS.hole],
    kind: () => [...doc.kinds.map((name, at) => ({ ...several(at), name })), { ...LIGHT, name: "no tag" }, LOOKS.hole],
  };

  // --- what is selected, found and used by a plan ------------------------------------------------
  let mode = "state", selected = -1, hits = [], hit = -1, tokens = null, ids = null, texts = new Texts(null);
  const onPath = new Set();
  const usedNodes = new Set((plan?.sources ?? []).map((one) => one.node).filter((node) => node !== null));
  for (let node of usedNodes) for (; node !== ROOT && !onPath.has(node); node = parent[node]) onPath.add(node);

  const firstToken = new Float64Array(nodes + 1);
  const kept = (node) => Math.min(blocks[node] * size, doc.tokensPerEdge ?? Infinity);
  for (let node = 0; node < nodes; node += 1) firstToken[node + 1] = firstToken[node] + kept(node);
  const tokensOf = (node, from = 0, most = Infinity) =>
    tokens.subarray(firstToken[node] + from, Math.min(firstToken[node + 1], firstToken[node] + from + most));

  // --- the picture -------------------------------------------------------------------------------
  const canvas = make("canvas", { class: "tall", id: "tree", tabindex: "0", role: "application", "aria-label": "Tree of cached tokens. Arrow keys go from edge to edge.", "aria-describedby": "details" });
  const draw = (pen, view) => {
    let drawn = 0, band = null;
    const flush = () => { if (band) { fill(pen, band.look, band.from, band.y, Math.max(band.to - band.from, 1), 1); drawn += 1; } band = null; };
    for (let node = 0; node < nodes;) {
      const top = view.py(row[node]), height = rows[node] * view.ky;
      if (top > view.height) break;
      const left = view.px(start[node]);
      if (top + height < 0 || left > view.width || view.px(deepest[node]) < view.left) { node = next[node]; continue; }
      if (height < 1.5 && blocks[node]) {
        // Paths of less than a pixel share one: never exact if one block of them is not.
        const y = Math.floor(top), run = firstRun[node];
        const look = mode === "state" ? (approximate[node] ? LOOKS.approximate : filled[node] ? LOOKS.exact : LOOKS.hole) : looks[mode](run);
        if (band && band.y !== y) flush();
        if (band) {
          band.from = Math.min(band.from, left); band.to = Math.max(band.to, view.px(deepest[node]));
          if (look === LOOKS.approximate) band.look = look;
        } else band = { y, from: left, to: view.px(deepest[node]), look };
        node = next[node];
        continue;
      }
      flush();
      if (blocks[node]) { edge(pen, view, node, left, top, Math.max(height - (height > 5 ? 1 : 0), 1)); drawn += 1; }
      else if (view.height > 30 && height > 14 && doc.spaces.length > 1) {
        pen.fillStyle = palette.faint; pen.fillRect(view.left, top, view.width, 1);
      }
      node += 1;
    }
    flush();
    for (let at = 0; at < hits.length; at += 1) mark(pen, view, hits[at], at === hit);
    if (selected >= 0) outline(pen, view, selected, palette.ink, 3);
    canvas.dataset.drawn = drawn;
  };

  const edge = (pen, view, node, left, top, height) => {
    blocksOf(pen, view, node, top, height, false);
    // After the others, so that none of less than a pixel is covered by an exact one.
    if (approximate[node]) blocksOf(pen, view, node, top, height, true);
    if (mode === "kind") {
      for (let tag = firstTag[node]; tag < firstTag[node + 1]; tag += 1) {
        const from = Math.max(view.px(columns.tagStart[tag]), -20), to = Math.min(view.px(columns.tagEnd[tag]), view.width + 20);
        const first = doc.kinds.indexOf(kindsOf(tag)[0]);
        if (to > from) fill(pen, several(first), from, top, Math.max(to - from, 1), height);
      }
    }
    if (height > 6) {
      // One level from the next.
      pen.fillStyle = palette.paper;
      pen.fillRect(left - 1, top, 1.5, height);
    }
    if (onPath.has(node)) outline(pen, view, node, "#000000", 1.5);
    if (height >= 11 && tokens) label(pen, view, node, left, top, height);
  };

  const blocksOf = (pen, view, node, top, height, areApproximate) => {
    let depth = start[node];
    for (let run = firstRun[node]; run < firstRun[node + 1]; run += 1) {
      const from = view.px(depth), to = view.px(depth += runBlocks[run] * size);
      if (to < view.left || from > view.width || ((runState[run] & 3) === 1) !== areApproximate) continue;
      const width = Math.max(to - from - (view.kx * size > 6 ? 0.5 : 0), 1);
      const x = Math.max(from, -20), wide = Math.min(from + width, view.width + 20) - x;
      if ((runState[run] & 3) === 2) { fill(pen, LOOKS.hole, x, top, wide, height); continue; }
      fill(pen, looks[mode](run), x, top, wide, height);
      if (runState[run] & 4 && mode === "state") fill(pen, LOOKS.dead, x, top, wide, height);
    }
  };

  const label = (pen, view, node, left, top, height) => {
    const right = Math.min(view.px(end(node)), view.width), low = Math.min(height, 22);
    const from = Math.max(0, Math.ceil((view.x - start[node]) - 1e-9));
    const x = Math.max(left, view.px(start[node] + from));
    // White letters are read on plain blue only. Elsewhere letters leave half of the pattern visible, and end where
    // the state changes.
    let plain = mode === "state", depth = start[node], same = null, until = right;
    for (let run = firstRun[node]; run < firstRun[node + 1]; run += 1) {
      plain &&= (runState[run] & 7) === 0;
      depth += runBlocks[run] * size;
      if (view.px(depth) <= x) continue;
      same ??= runState[run] & 7;
      if ((runState[run] & 7) !== same) break;
      until = Math.min(view.px(depth), right);
    }
    const ink = plain ? "#ffffff" : null;
    const wide = plain ? right - x : (until - x) / 2;
    if (wide < 24) return;
    const y = top + Math.max(0, (height - low) / 2);
    if (view.kx >= 26) {
      tokensOf(node, from, Math.ceil((right - x) / view.kx) + 1).forEach((id, at) => {
        const cell = x + at * view.kx;
        backed(pen, texts.of(id), cell, y, Math.min(view.kx, right - cell), low, ink);
        pen.fillStyle = "#00000050";
        pen.fillRect(cell, top, 0.5, height);
      });
    } else {
      const most = Math.ceil(wide / CHARACTER / (texts.pieces ? 1 : 2)) + 2;
      backed(pen, texts.join(tokensOf(node, from, most)), x, y, wide, low, ink);
    }
  };

  // Letters on a plate, so that they can be read on every colour and pattern.
  const backed = (pen, text, x, y, width, height, ink) => {
    if (ink) { inside(pen, text, x, y, width, height, ink); return; }
    const most = Math.floor((width - 6) / CHARACTER);
    if (most < 2) return;
    const long = Math.min(visible(text.slice(0, most + 8)).length, most);
    pen.fillStyle = "#ffffffd8";
    pen.fillRect(x + 2, y + height / 2 - 7, long * CHARACTER + 3, 14);
    inside(pen, text, x, y, width, height, "#000000");
  };

  const outline = (pen, view, node, colour, wide) => {
    const x = Math.max(view.px(start[node]), -9), right = Math.min(view.px(end(node)), view.width + 9);
    pen.strokeStyle = colour;
    pen.lineWidth = wide;
    pen.strokeRect(x, view.py(row[node]) + 1, Math.max(right - x, 3), Math.max(rows[node] * view.ky - 2, 3));
    pen.lineWidth = 1;
  };

  const mark = (pen, view, one, isThis) => {
    const x = view.px(one.at), y = view.py(row[one.node] + rows[one.node] / 2);
    if (x < -9 || x > view.width + 9 || y < -9 || y > view.height + 9) return;
    const high = isThis ? 9 : 5;
    pen.fillStyle = PURPLE;
    pen.strokeStyle = "#000000";
    pen.beginPath(); pen.moveTo(x, y); pen.lineTo(x - high, y - high * 1.6); pen.lineTo(x + high, y - high * 1.6); pen.closePath();
    pen.fill(); pen.stroke();
  };

  // --- details -----------------------------------------------------------------------------------
  const details = make("aside", { id: "details", "aria-live": "polite" });
  const fact = (name, value) => [make("dt", {}, name), make("dd", {}, value)];
  const word = (state) => [["exact", "approximate", "hole"][state & 3], state & 4 ? ", dead" : "", state >> 8 ? `, ${count(state >> 8, "hop")}` : ""].join("");
  const describe = () => {
    if (selected < 0) {
      details.replaceChildren(make("h2", {}, "Nothing is selected"), make("p", { class: "note" }, "Click an edge, or press an arrow key in the picture. From left to right: tokens of a prompt. Where a bar splits, prompts differ."));
      return;
    }
    const node = selected, where = doc.spaces[space[node]];
    const list = make("dl", {}, ...fact("namespace", [where.model, where.kvDtype, where.rope, where.adapter, where.tenant].filter(Boolean).join(" · ")));
    if (blocks[node]) {
      list.append(...fact("tokens", `${number(start[node])} to ${number(end(node))}`), ...fact("blocks", number(blocks[node])));
    }
    let below = 0;
    for (let child = node + 1; child < next[node]; child = next[child]) below += 1;
    if (below) list.append(...fact("below it", `${number(below)} ${below === 1 ? "branch" : "branches"}, ${count(next[node] - node - 1, "edge")}`));
    const stretches = [];
    let depth = start[node];
    for (let run = firstRun[node]; run < firstRun[node + 1] && stretches.length < 40; run += 1) {
      const to = depth + runBlocks[run] * size, age = runAge[run];
      const held = doc.sets[runHeld[run]].map(sessionName).join(", ");
      stretches.push(make("li", {}, `${number(depth)}–${number(to)}: ${word(runState[run])}${age === NEVER ? "" : `; last used ${age ? `${count(age, "use")} ago` : "by the latest call"}`}${held ? `; held by ${held}` : ""}`));
      depth = to;
    }
    if (runs[node] > 40) stretches.push(make("li", {}, `and ${number(runs[node] - 40)} more`));
    const tags = [];
    for (let tag = firstTag[node]; tag < Math.min(firstTag[node + 1], firstTag[node] + 60); tag += 1) {
      tags.push(`${number(columns.tagStart[tag])}–${number(columns.tagEnd[tag])} ${kindsOf(tag).join(" + ")}`);
    }
    if (tags.length) list.append(...fact("tags", tags.join("; ")));
    const items = doc.items.filter((one) => one[0] === node).map(([, from, to, digest]) => `${number(from)}–${number(to)} ${digest.slice(0, 16)}`);
    if (items.length) list.append(...fact("items", items.join("; ")));
    const parts = [make("h2", {}, blocks[node] ? "Edge" : "Namespace"), list];
    if (stretches.length) parts.push(make("ul", {}, ...stretches));
    if (tokens && blocks[node]) {
      const some = tokensOf(node, 0, 600), all = blocks[node] * size;
      parts.push(make("h2", {}, texts.pieces ? "Text" : "Token ids"), make("pre", { id: "text" }, visible(texts.join(some)) + (some.length < all ? ` … (${number(some.length)} of ${number(all)} tokens)` : "")));
      const own = Array.from(ids.subarray(firstBlock[node], Math.min(firstBlock[node + 1], firstBlock[node] + 200)), (id) => (id === NEVER ? "hole" : id));
      parts.push(make("h2", {}, "Block ids"), make("pre", {}, own.join(" ") + (blocks[node] > 200 ? " …" : "")));
    }
    details.replaceChildren(...parts);
    canvas.dataset.selected = node;
  };
  const select = (node, tight = false) => {
    if (node < 0 || node >= nodes) return;
    selected = node;
    const shown = blocks[node] ? [start[node], end(node)] : [0, deepest[node]];
    view.show(shown, [row[node], row[node] + rows[node]], tight);
    describe();
  };
  const previous = (node) => {
    const above = parent[node];
    let before = above === ROOT ? node - 1 : above;
    if (above === ROOT) { while (before > 0 && parent[before] !== ROOT) before -= 1; return before; }
    for (let child = above + 1; child < node; child = next[child]) before = child;
    return before;
  };

  // --- search ------------------------------------------------------------------------------------
  const said = make("output", { id: "found", role: "status" });
  const what = make("select", { id: "what", "aria-label": "Search for" });
  const asked = make("input", { type: "search", id: "query", "aria-label": "Search", placeholder: "token ids, text, block or session" });
  const MOST_HITS = 5000;

  // The hits are where the last token of the query is, so that a match may begin on an edge above.
  const findIds = (wanted) => {
    const found = [], last = wanted[wanted.length - 1];
    const before = (node, at) => {
      for (let back = wanted.length - 2; back >= 0; back -= 1) {
        at -= 1;
        while (at < 0) {
          if (parent[node] === ROOT || kept(parent[node]) < blocks[parent[node]] * size) return null;
          node = parent[node];
          at += kept(node);
        }
        if (tokens[firstToken[node] + at] !== wanted[back]) return null;
      }
      return start[node] + at;
    };
    for (let node = 0; node < nodes && found.length < MOST_HITS; node += 1) {
      for (let at = firstToken[node]; at < firstToken[node + 1]; at += 1) {
        if (tokens[at] !== last) continue;
        const begin = before(node, at - firstToken[node]);
        if (begin !== null) found.push({ node, at: begin < start[node] ? start[node] : begin });
      }
    }
    return found;
  };
  const findText = (wanted) => {
    const found = [], lower = wanted.toLowerCase(), tails = new Map();
    const pieces = new Map();
    for (let node = 0; node < nodes && found.length < MOST_HITS; node += 1) {
      const own = tokensOf(node), above = parent[node] === ROOT ? "" : tails.get(parent[node]) ?? "";
      let text = above;
      const ends = new Uint32Array(own.length);
      for (let at = 0; at < own.length; at += 1) {
        let piece = pieces.get(own[at]);
        if (piece === undefined) pieces.set(own[at], piece = texts.of(own[at]).toLowerCase());
        text += piece;
        ends[at] = text.length;
      }
      tails.set(node, lower.length > 1 ? text.slice(1 - lower.length) : "");
      for (let at = text.indexOf(lower); at >= 0; at = text.indexOf(lower, at + 1)) {
        // The token in which the match begins; one of an edge above is shown at the start of this one.
        let low = 0, high = own.length;
        while (low < high) { const middle = (low + high) >> 1; if (ends[middle] <= at) low = middle + 1; else high = middle; }
        if (at + lower.length > above.length) found.push({ node, at: start[node] + Math.min(low, Math.max(own.length - 1, 0)) });
      }
    }
    return found;
  };
  const findBlock = (wanted) => {
    const at = ids.indexOf(wanted);
    if (at < 0) return [];
    let node = 0;
    while (firstBlock[node + 1] <= at) node += 1;
    return [{ node, at: start[node] + (at - firstBlock[node]) * size }];
  };
  const findSession = (wanted) => {
    const those = new Set(doc.sessions.flatMap((one, at) => (one.name === wanted || one.digest.startsWith(wanted) ? [at] : [])));
    const found = [];
    for (let node = 0; node < nodes && found.length < MOST_HITS; node += 1) {
      let depth = start[node];
      for (let run = firstRun[node]; run < firstRun[node + 1]; run += 1) {
        if (doc.sets[runHeld[run]].some((one) => those.has(one))) { found.push({ node, at: depth }); break; }
        depth += runBlocks[run] * size;
      }
    }
    return found;
  };
  const search = () => {
    const query = asked.value, listed = query.match(/\d+/g)?.map(Number);
    hits = []; hit = -1;
    if (!query.trim()) said.textContent = "";
    else if (!tokens) said.textContent = "still loading";
    else if (["ids", "block"].includes(what.value) && !/^[\s,[\]]*\d+([\s,]+\d+)*[\s,\]]*$/.test(query)) said.textContent = "these are not numbers";
    else {
      hits = { ids: () => findIds(listed), text: () => findText(query), block: () => findBlock(listed[0]), session: () => findSession(query.trim()) }[what.value]();
      said.textContent = hits.length ? "" : "not found";
      if (hits.length) { step(1); return; }
    }
    view.ask();
  };
  const step = (by) => {
    if (!hits.length) return;
    hit = (hit + by + hits.length) % hits.length;
    const one = hits[hit];
    said.textContent = `${number(hit + 1)} of ${hits.length >= MOST_HITS ? "more than " : ""}${number(hits.length)}`;
    selected = one.node;
    const wide = Math.max(60, 12 / view.kx);
    view.show([one.at - wide / 2, one.at + wide / 2], [row[one.node], row[one.node] + Math.min(rows[one.node], 8)], true);
    describe();
  };
  asked.addEventListener("change", search);
  asked.addEventListener("keydown", (event) => { if (event.key === "Enter" && hits.length && asked.value) { event.preventDefault(); step(event.shiftKey ? -1 : 1); } });
  what.addEventListener("change", search);

  // --- the page ----------------------------------------------------------------------------------
  const by = make("select", { id: "colour", "aria-label": "Colour by" }, ...Object.entries({ state: "exact, approximate, hole", age: "age", holder: "session", kind: "tag" }).map(([value, name]) => make("option", { value }, name)));
  const key = make("div", { id: "legend" });
  const colourBy = () => { mode = by.value; key.replaceChildren(legend(keys[mode]())); view.ask(); };
  by.addEventListener("change", colourBy);
  place.append(
    make("div", { class: "tools" },
      make("label", {}, "Find ", what), asked,
      make("button", { type: "button", id: "before", onclick: () => step(-1) }, "Previous"),
      make("button", { type: "button", id: "after", onclick: () => step(1) }, "Next"), said,
      make("label", {}, "Colour by ", by), ...zoomButtons(() => view)),
    key, make("div", { class: "panes" }, canvas, details),
    make("p", { class: "note" }, `A bar is an edge: tokens from left to right, branches from top to bottom, the largest first. Bars of less than a pixel are drawn as one, approximate if any block of theirs is.${doc.tokensPerEdge === null ? "" : ` This page has the first ${number(doc.tokensPerEdge)} tokens of each edge; a search looks at these only.`}`));
  const view = new View(canvas, [across, down], draw);
  view.pick = (x, y) => {
    for (let node = 0; node < nodes;) {
      if (y < row[node] || y >= row[node] + rows[node] || x >= deepest[node]) node = next[node];
      else if (blocks[node] && x >= start[node] && x < end(node)) { selected = node; describe(); view.ask(); return; }
      else node += 1;
    }
  };
  canvas.addEventListener("keydown", (event) => {
    if (view.key(event)) return;
    const moves = {
      ArrowRight: () => (selected < 0 ? 0 : selected + 1 < next[selected] ? selected + 1 : selected),
      ArrowLeft: () => (selected < 0 || parent[selected] === ROOT ? selected : parent[selected]),
      ArrowDown: () => (selected < 0 ? 0 : next[selected] < nodes ? next[selected] : selected),
      ArrowUp: () => (selected < 0 ? 0 : previous(selected)),
    };
    if (moves[event.key]) select(moves[event.key]());
    else if (event.key === "Enter") select(selected, true);
    else if (event.key === "/") asked.focus();
    else if (event.key === "n") step(1);
    else if (event.key === "p") step(-1);
    else return;
    event.preventDefault();
  });
  describe();
  colourBy();
  view.paint();
  painted();
  // What the first picture does not need.
  setTimeout(async () => {
    [tokens, ids] = await Promise.all(["tokens", "ids"].map(async (name) => numbers(await later(name))));
    if (doc.hasTexts) texts = new Texts(await unpackedJson(await later("texts")));
    what.append(...Object.entries({ ...(doc.hasTexts ? { text: "text" } : {}), ids: "token ids", block: "block id", session: "session" }).map(([value, name]) => make("option", { value }, name)));
    describe();
    view.ask();
    document.documentElement.dataset.loaded = performance.now().toFixed(0);
  });
  return { select };
};
