// A plan: cached paths above, the prompt below, and what goes where.

const showPlan = async (place, doc, tree) => {
  const tokens = await numbers(doc.prompt.tokens);
  const paths = await Promise.all(doc.sources.map((one) => numbers(one.tokens)));
  const texts = new Texts(doc.texts ? await unpackedJson(doc.texts) : null);
  const BAR = 30, ROOM = 22, BETWEEN = 120;
  const shown = doc.segments.map((one) => ({ ...one, length: one.end - one.start }));
  const bottom = ROOM + Math.max(paths.length, 1) * (BAR + ROOM) + BETWEEN;
  const titleOf = (one) => (one.class === "compute" ? "computed" : `${one.class}, ${one.inPlace ? "in place" : one.delta ? `moved by ${signed(one.delta)}` : "copied"}`);
  // Under M-RoPE, K is rotated by positions, of which an image takes fewer than tokens.
  const deltaOf = (one) => signed(one.delta) + (one.positionDelta === one.delta ? "" : ` (positions: ${signed(one.positionDelta)})`);
  const why = doc.why;

  const cells = (pen, view, ids, from, to, offset, y) => {
    const first = Math.max(from, Math.floor(view.x)), last = Math.min(to, Math.ceil(view.x + view.width / view.kx));
    if (view.kx < 14) return;
    for (let at = first; at < last; at += 1) {
      pen.fillStyle = "#00000060";
      pen.fillRect(view.px(at), y, 0.5, BAR);
      if (view.kx < 26) continue;
      const text = texts.of(ids[at]), most = Math.floor((view.kx - 6) / CHARACTER);
      pen.fillStyle = "#ffffffd8";
      pen.fillRect(view.px(at) + 2, y + BAR / 2 - 7, Math.min(visible(text).length, most) * CHARACTER + 3, 14);
      inside(pen, text, view.px(at), y, view.kx, BAR, "#000000");
    }
  };
  const box = (pen, view, look, from, to, y) => {
    const x = Math.max(view.px(from), -20), right = Math.min(view.px(to), view.width + 20);
    if (right < x) return;
    fill(pen, look, x, y, Math.max(right - x, 1), BAR);
    pen.strokeStyle = "#00000080";
    pen.strokeRect(x, y, Math.max(right - x, 1), BAR);
  };
  const plate = (pen, text, x, y) => {
    const wide = pen.measureText(text).width + 10;
    pen.fillStyle = palette.paper;
    pen.fillRect(x - wide / 2, y - 9, wide, 18);
    pen.strokeStyle = palette.line;
    pen.strokeRect(x - wide / 2, y - 9, wide, 18);
    pen.fillStyle = palette.ink;
    pen.textAlign = "center";
    pen.fillText(text, x, y);
  };
  const draw = (pen, view) => {
    axis(pen, view, 2);
    const rowOf = (number) => ROOM + number * (BAR + ROOM) + ROOM;
    doc.sources.forEach((one, number) => {
      pen.fillStyle = palette.ink;
      pen.textAlign = "left";
      pen.fillText(`${visible(one.name)}, ${count(one.length, "token")}`, 4, rowOf(number) - 9);
      box(pen, view, LOOKS.unused, 0, one.length, rowOf(number));
    });
    if (!doc.sources.length) { pen.fillStyle = palette.faint; pen.textAlign = "left"; pen.fillText("nothing cached is used", 4, rowOf(0)); }
    const labels = [];
    for (const one of shown) {
      if (one.source === null) continue;
      const top = rowOf(one.source), look = LOOKS[one.class];
      box(pen, view, look, one.oldStart, one.oldStart + one.length, top);
      const [a, b, c, d] = [one.oldStart, one.oldStart + one.length, one.end, one.start].map((at) => Math.min(Math.max(view.px(at), -4000), view.width + 4000));
      const y0 = top + BAR, y1 = bottom, middle = (y0 + y1) / 2;
      pen.beginPath();
      pen.moveTo(a, y0); pen.bezierCurveTo(a, middle, d, middle, d, y1); pen.lineTo(c, y1); pen.bezierCurveTo(c, middle, b, middle, b, y0);
      pen.closePath();
      pen.globalAlpha = one.class === "exact" ? 0.14 : 0.3;
      pen.fillStyle = look.colour;
      pen.fill();
      pen.globalAlpha = 1;
      const [from, to] = [(a + b) / 2, (c + d) / 2];
      if (from < -50 && to < -50 || from > view.width + 50 && to > view.width + 50) continue;
      // The arrow.
      pen.strokeStyle = palette.ink;
      pen.lineWidth = 1.5;
      pen.setLineDash(one.class === "approximate" ? [7, 4] : []);
      pen.beginPath(); pen.moveTo(from, y0); pen.bezierCurveTo(from, middle, to, middle, to, y1 - 3); pen.stroke();
      pen.setLineDash([]);
      pen.beginPath(); pen.moveTo(to, y1); pen.lineTo(to - 5, y1 - 9); pen.lineTo(to + 5, y1 - 9); pen.closePath();
      pen.fillStyle = palette.ink;
      pen.fill();
      pen.lineWidth = 1;
      labels.push([titleOf(one), Math.min(Math.max((from + to) / 2, 80), view.width - 90), middle]);
    }
    for (const one of shown) box(pen, view, LOOKS[one.class], one.start, one.end, bottom);
    paths.forEach((ids, number) => cells(pen, view, ids, 0, ids.length, 0, rowOf(number)));
    cells(pen, view, tokens, 0, tokens.length, 0, bottom);
    // Labels that would cover another are left out; the table has all.
    let right = -Infinity;
    for (const [text, x, y] of labels.sort((one, other) => one[1] - other[1])) {
      const wide = pen.measureText(text).width / 2 + 8;
      if (x - wide < right) continue;
      right = x + wide;
      plate(pen, text, x, y);
    }
    pen.fillStyle = palette.ink;
    pen.textAlign = "left";
    if (why.reason !== "complete") {
      const x = view.px(why.position);
      pen.strokeStyle = palette.ink;
      pen.lineWidth = 2;
      pen.beginPath(); pen.moveTo(x, bottom - 6); pen.lineTo(x, bottom + BAR + 26); pen.stroke();
      pen.lineWidth = 1;
      pen.textAlign = x > view.width - 260 ? "right" : "left";
      pen.fillText(`${why.reason.replace("_", " ")} at token ${number(why.position)}`, x + (pen.textAlign === "left" ? 5 : -5), bottom + BAR + 30);
    }
    const title = `prompt ${visible(doc.prompt.name)}, ${count(doc.prompt.length, "token")}`;
    pen.fillStyle = palette.paper;
    pen.fillRect(2, bottom + BAR + 6, pen.measureText(title).width + 6, 16);
    pen.fillStyle = palette.ink;
    pen.textAlign = "left";
    pen.fillText(title, 4, bottom + BAR + 14);
  };

  const canvas = make("canvas", { id: "plan", tabindex: "0", role: "img", "aria-label": `${number(doc.counts.exact)} tokens exact, ${number(doc.counts.approximate)} approximate, ${number(doc.counts.compute)} computed. The table has each segment.` });
  canvas.style.height = `${bottom + BAR + 42}px`;
  const longest = Math.max(tokens.length, ...paths.map((ids) => ids.length), 1);
  const at = why.position - why.start;
  const side = (title, ids) => make("div", {}, make("small", {}, title), make("pre", {}, visible(texts.join(ids.slice(0, at))) + (texts.pieces ? "" : " "), make("mark", {}, visible(texts.join(ids.slice(at))) || "(nothing)")));
  const contextOf = (one) => doc.movedRuns.find((run) => run.start <= one.start && one.end <= run.end);
  const row = (one) => {
    const run = one.class === "approximate" && !one.inPlace ? contextOf(one) : null;
    return make("tr", {},
      make("td", {}, make("button", { type: "button", onclick: () => { view.show([one.start, one.end], [0, 0], true); canvas.scrollIntoView({ block: "nearest" }); } }, `${number(one.start)}–${number(one.end)}`)),
      make("td", { class: "n" }, number(one.length)), make("td", {}, titleOf(one)),
      make("td", { class: "n" }, one.class === "compute" ? "" : number(one.oldStart)),
      make("td", { class: "n" }, one.class === "compute" ? "" : deltaOf(one)),
      make("td", { class: "n" }, one.hops ? number(one.hops) : ""),
      make("td", {}, run ? `${count(run.cuts, "cut")}, ${(100 * run.lostContext).toFixed(0)} % of its context lost, ${(100 * run.newContext).toFixed(0)} % new${run.sameConversation ? "" : ", another conversation"}` : ""),
      make("td", {}, one.kinds.join(" + ")),
      make("td", {}, tree && one.source !== null && doc.sources[one.source].node !== null ? make("button", { type: "button", onclick: () => tree.select(doc.sources[one.source].node, true) }, "Show in the tree") : ""),
      make("td", {}, visible(texts.join(tokens.slice(one.start, Math.min(one.end, one.start + 12)))).slice(0, 60)));
  };
  place.append(
    make("section", {},
      make("h2", {}, "Where the prompt's KV comes from"),
      make("p", { id: "counts" }, `Of ${count(doc.prompt.length, "token")}: ${number(doc.counts.exact)} exact, ${number(doc.counts.approximate)} approximate, ${number(doc.counts.compute)} computed.`),
      make("div", { class: "tools" }, ...(tree ? [] : zoomButtons(() => view))),
      legend([LOOKS.exact, LOOKS.approximate, LOOKS.compute, LOOKS.unused]), canvas,
      make("div", { class: why.reason === "complete" ? "why good" : "why", id: "why" }, make("p", {}, why.message),
        why.reason === "complete" ? null : make("div", { class: "sides" }, side("cached", why.theirs), side("prompt", why.ours))),
      make("div", { class: "scroll" }, make("table", { id: "segments" },
        make("thead", {}, make("tr", {}, ...["tokens", "count", "KV", "from", "delta", "hops", "context", "tags", "", texts.pieces ? "text" : "ids"].map((name) => make("th", {}, name)))),
        make("tbody", {}, ...shown.slice(0, 2000).map(row)))),
      shown.length > 2000 ? make("p", { class: "note" }, `The table has the first 2,000 of ${number(shown.length)} segments.`) : null));
  const view = new View(canvas, [longest, 0], draw);
  canvas.addEventListener("keydown", (event) => {
    if (view.key(event)) return;
    const by = { ArrowLeft: -80, ArrowRight: 80 }[event.key];
    if (by) { view.pan(by, 0); event.preventDefault(); }
  });
  view.paint();
};
