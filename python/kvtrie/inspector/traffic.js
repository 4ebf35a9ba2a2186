// A log: one bar per request, in the order of arrival or by session, and the life of one of them.

const REASONS = {
  first_seen: "not one whole block of the prompt was cached",
  new: "after the last token that was cached",
  diverged: "other tokens were cached there: the history was edited, or another conversation branches off",
  evicted: "cached after the same tokens before, and had left",
  dead_reasoning: "had left as dead reasoning, which this prompt keeps",
  other_adapter: "cached under another adapter",
  other_salt: "the latest prompt with the same first block had another salt",
  exact_asked: "approximate KV was there, but the request asked for exact reuse, or shadow mode was on",
  uncalibrated: "approximate KV was there, but no gate covers the adapter",
  not_cleared: "approximate KV was there, but the gate does not clear this kind of edit",
  limited: "a moved run that the policy's limits forbid",
  out_of_scope: "a moved run of another conversation",
  recomputed: "tokens of a moved run that the policy computes anyway",
  after_gap: "KV was there, after the first gap",
  short: "KV of too few tokens in a row",
  no_room: "KV was there, but there was no room next to its sources",
  stale: "the plan was given up",
  not_copied: "the copy failed or was not made in time",
  not_read: "the request reads no cache",
  last_token: "the last token, which is computed for its logits",
};

const showTraffic = async (place, doc) => {
  const requests = await unpackedJson(doc.requests);
  const total = requests.length, began = requests[0].arrived;
  const sums = requests.map((one) => {
    const of = (what) => one.reused.reduce((sum, [from, to, name]) => sum + (name === what ? to - from : 0), 0);
    return { exact: of("exact"), moved: of("moved") };
  });
  const MOVED = { ...LOOKS.approximate, name: "moved: approximate" };
  const REPLY = { dashed: true, name: "reply" };
  const across = requests.reduce((most, one) => Math.max(most, one.tokens), 1);
  const bySession = new Map();
  requests.forEach((one, at) => {
    const key = one.session === null ? `alone ${at}` : `${one.space} ${one.session}`;
    if (!bySession.has(key)) bySession.set(key, []);
    bySession.get(key).push(at);
  });
  const sessionOf = (at) => bySession.get(requests[at].session === null ? `alone ${at}` : `${requests[at].space} ${requests[at].session}`);
  let order = requests.map((_, at) => at), place_ = order.slice(), selected = -1;
  const LEFT = 190;
  const clock = (seconds) => {
    const since = seconds - began;
    return since < 3600 ? `+${since.toFixed(since < 100 ? 2 : 0)} s` : `+${(since / 3600).toFixed(2)} h`;
  };
  const nameOf = (one) => (one.session === null ? `request ${one.request.slice(0, 6)}` : `session ${doc.sessions[one.session].slice(0, 6)}`);

  const canvas = make("canvas", { class: "tall", id: "requests", tabindex: "0", role: "application", "aria-label": "Requests. Arrow keys go from request to request.", "aria-describedby": "details" });
  const draw = (pen, view) => {
    const first = Math.max(0, Math.floor(view.y)), last = Math.min(total, Math.ceil(view.y + view.height / view.ky));
    const family = selected < 0 ? new Set() : new Set(sessionOf(selected));
    let drawn = 0;
    if (view.ky < 2) {
      // Several requests per line of pixels: their mean.
      for (let at = first; at < last;) {
        const y = Math.floor(view.py(at));
        let exact = 0, moved = 0, prompt = 0, many = 0;
        for (; at < last && Math.floor(view.py(at)) === y; at += 1) {
          exact += sums[order[at]].exact; moved += sums[order[at]].moved; prompt += requests[order[at]].prompt; many += 1;
        }
        const high = Math.max(1, Math.ceil(view.ky)), stack = [[0, exact, LOOKS.exact], [exact, exact + moved, MOVED], [exact + moved, prompt, LOOKS.compute]];
        for (const [from, to, look] of stack) fill(pen, look, view.px(from / many), y, (to - from) / many * view.kx, high);
        drawn += 1;
      }
    } else {
      for (let at = first; at < last; at += 1) {
        const one = requests[order[at]], y = view.py(at), high = Math.max(view.ky - (view.ky > 4 ? 1 : 0), 1);
        const part = (from, to, look) => {
          const x = Math.max(view.px(from), view.left), right = Math.min(view.px(to), view.width);
          if (right > x) fill(pen, look, x, y, Math.max(right - x, 0.5), high);
        };
        part(0, one.prompt, LOOKS.compute);
        for (const [from, to, what] of one.reused) part(from, to, what === "exact" ? LOOKS.exact : MOVED);
        part(one.prompt, one.tokens, REPLY);
        if (view.ky >= 7 && one.prefix && one.prefix[1] < one.prompt) {
          const x = view.px(one.prefix[1]);
          if (x > view.left) { pen.fillStyle = palette.ink; pen.fillRect(x - 1, y, 2, high); }
        }
        if (view.ky >= 11) {
          pen.fillStyle = palette.paper;
          pen.fillRect(0, y, view.left, high);
          inside(pen, `${clock(one.arrived)} ${nameOf(one)}`, 0, y, view.left - 4, high, family.has(order[at]) ? palette.ink : palette.faint);
        }
        if (family.has(order[at]) && view.ky >= 4) { pen.fillStyle = palette.ink; pen.fillRect(view.left - 5, y, 4, high); }
        drawn += 1;
      }
    }
    if (selected >= 0) {
      pen.strokeStyle = palette.ink;
      pen.lineWidth = 3;
      pen.strokeRect(view.left - 2, view.py(place_[selected]), Math.max(requests[selected].tokens * view.kx, 4), Math.max(view.ky, 4));
      pen.lineWidth = 1;
    }
    canvas.dataset.drawn = drawn;
  };

  const details = make("aside", { id: "details", "aria-live": "polite" });
  const life = make("section", { id: "life" });
  const fact = (name, value) => [make("dt", {}, name), make("dd", {}, value)];
  const share = (part, one) => `${number(part)} (${(100 * part / Math.max(one.prompt, 1)).toFixed(0)} %)`;
  const earlier = (at) => (at < 0 ? "an earlier request that this page leaves out" : `request ${requests[at].request.slice(0, 6)} (${clock(requests[at].arrived)})`);
  const describe = () => {
    if (selected < 0) {
      details.replaceChildren(make("h2", {}, "Nothing is selected"), make("p", { class: "note" }, "Click a request, or press an arrow key in the picture."));
      life.replaceChildren();
      return;
    }
    const one = requests[selected], sum = sums[selected], family = sessionOf(selected);
    const computed = one.prompt - sum.exact - sum.moved;
    const list = make("dl", {},
      ...fact("request", one.request), ...fact("session", one.session === null ? "not named" : `${doc.sessions[one.session]}, request ${number(family.indexOf(selected) + 1)} of ${number(family.length)}`),
      ...fact("namespace", doc.spaces[one.space]),
      ...fact("prompt", count(one.prompt, "token")), ...fact("reply", count(one.tokens - one.prompt, "token")),
      ...fact("exact", share(sum.exact, one)), ...fact("moved", `${share(sum.moved, one)}${sum.moved ? ", approximate" : ""}`), ...fact("computed", share(computed, one)),
      ...fact("ended", one.ended));
    if (one.would) list.append(...fact("would", `${number(one.would.exact)} exact, ${number(one.would.moved)} moved (approximate), ${number(one.would.computed)} computed${one.would.cleared ? "" : "; the gate does not clear the edit"}`));
    const reasons = Object.entries(one.computed).sort((a, b) => b[1] - a[1]).map(([name, many]) => make("li", {}, `${number(many)} ${name}: ${REASONS[name] ?? "a reason that this page does not know"}`));
    const session = family.slice(0, 200).map((at) => make("li", {}, make("button", { type: "button", "aria-current": String(at === selected), onclick: () => select(at) }, `${clock(requests[at].arrived)}: ${count(requests[at].prompt, "token")}, ${number(sums[at].exact)} exact, ${number(sums[at].moved)} moved`)));
    details.replaceChildren(make("h2", {}, nameOf(one)), list,
      make("h2", {}, "Why tokens were computed"), reasons.length ? make("ul", {}, ...reasons) : make("p", { class: "note" }, "The engine wrote no reasons."),
      make("h2", {}, "Its session"), make("ol", { class: "life" }, ...session), family.length > 200 ? make("p", { class: "note" }, `The first 200 of ${number(family.length)}.`) : "");
    showLife(one);
    canvas.dataset.selected = selected;
  };

  // The life of a request: its times, what was reused, what earlier requests had, what its tokens are.
  const showLife = (one) => {
    const tall = 210, picture = make("canvas", { id: "one", tabindex: "0", role: "img", "aria-label": "The selected request: times, reuse, what earlier requests had, kinds. The list has each run." });
    picture.style.height = `${tall}px`;
    const moments = [[0, one.first ?? one.took, one.first === null ? "until its end" : "to the first token"], ...(one.first === null ? [] : [[one.first, one.took, "decoding"]])];
    const SEEN = { colour: "#56b4e9", name: "in an earlier request at the same position" };
    const ELSEWHERE = { colour: "#e69f00", pattern: "hatch", name: "in an earlier request at another position: could be moved, approximate" };
    const NEW = { ...LOOKS.unused, name: "in no earlier request" };
    const view = new View(picture, [one.tokens, 0], (pen, view_) => {
      const strip = (y, title, parts) => {
        for (const [from, to, look, words] of parts) {
          const x = Math.max(view_.px(from), -9), right = Math.min(view_.px(to), view_.width + 9);
          if (right < x) continue;
          fill(pen, look, x, y, Math.max(right - x, 1), 22);
          if (words && right - x > 40) {
            pen.fillStyle = "#ffffffd8";
            pen.fillRect(x + 2, y + 4, Math.min(words.length * CHARACTER + 4, right - x - 4), 14);
            inside(pen, words, x, y, right - x, 22, "#000000");
          }
        }
        pen.fillStyle = palette.ink;
        pen.textAlign = "left";
        pen.fillText(title, 4, y - 8);
      };
      axis(pen, view_, 2);
      strip(40, "what the engine did", [[0, one.prompt, LOOKS.compute], ...one.reused.map(([from, to, what]) => [from, to, what === "exact" ? LOOKS.exact : MOVED, what === "exact" ? "exact" : "moved, approximate"]), [one.prompt, one.tokens, REPLY]]);
      const prefix = one.prefix ? one.prefix[1] : 0;
      strip(90, "what earlier requests had", [[0, one.prompt, NEW], [0, prefix, SEEN, "same position"], ...one.seen.map(([from, to, old]) => [from, to, ELSEWHERE, `moved by ${signed(from - old)}`])]);
      strip(140, "what its tokens are", one.spans.map(([from, to, kind]) => [from, to, several(kind), doc.kinds[kind]]));
      const scale = (view_.width - 8) / Math.max(one.took, 1e-9);
      pen.fillStyle = palette.ink;
      for (const [from, to, name] of moments) {
        pen.strokeStyle = palette.ink;
        pen.strokeRect(4 + from * scale, 172, Math.max((to - from) * scale, 1), 10);
        pen.textAlign = from ? "right" : "left";
        pen.fillText(`${name} ${(to - from).toFixed(3)} s`, from ? view_.width - 8 : 6, 194);
      }
    });
    picture.addEventListener("keydown", (event) => view.key(event));
    const words = [];
    if (one.prefix) words.push(`tokens 0–${number(one.prefix[1])}: begin as in ${earlier(one.prefix[0])}`);
    for (const [from, to, old, at] of one.seen) words.push(`tokens ${number(from)}–${number(to)}: in ${earlier(at)} from ${number(old)} on, moved by ${signed(from - old)}`);
    if (one.seenMore) words.push(`${count(one.seenMore, "token")} more in shorter runs`);
    life.replaceChildren(make("h2", {}, `The life of ${nameOf(one)}, ${clock(one.arrived)}`), legend([LOOKS.exact, MOVED, LOOKS.compute, SEEN, ELSEWHERE, NEW]), picture,
      make("ul", {}, ...(words.length ? words : ["no earlier request has a block or a run of it"]).map((text) => make("li", {}, text))),
      make("p", { class: "note" }, `That an earlier request had tokens does not mean that their KV was still cached. ${doc.content === "digests" ? `Runs shorter than ${doc.minRun} tokens may be missing, and less than ${doc.minRun / 2} tokens at each end of a run.` : ""}`));
  };
  const select = (at) => {
    selected = at;
    view.show([0, 0], [place_[at], place_[at] + 1], false);
    describe();
  };
  const sort = make("select", { id: "order", "aria-label": "Order" }, make("option", { value: "time" }, "arrival"), make("option", { value: "session" }, "session"), make("option", { value: "computed" }, "most computed first"));
  sort.addEventListener("change", () => {
    order = requests.map((_, at) => at);
    if (sort.value === "session") order = [...bySession.values()].flat();
    if (sort.value === "computed") order.sort((a, b) => requests[b].prompt - sums[b].exact - sums[b].moved - (requests[a].prompt - sums[a].exact - sums[a].moved));
    place_ = new Array(total);
    order.forEach((at, row) => { place_[at] = row; });
    view.ask();
  });
  const said = make("output", { id: "found", role: "status" });
  const asked = make("input", { type: "search", id: "query", "aria-label": "Search", placeholder: "digest of a request or session, or a reason" });
  let hits = [], hit = -1;
  const step = (by) => {
    if (!hits.length) return;
    hit = (hit + by + hits.length) % hits.length;
    said.textContent = `${number(hit + 1)} of ${number(hits.length)}`;
    select(hits[hit]);
  };
  asked.addEventListener("change", () => {
    const wanted = asked.value.trim();
    hits = wanted ? order.filter((at) => requests[at].request.startsWith(wanted) || (requests[at].session !== null && doc.sessions[requests[at].session].startsWith(wanted)) || wanted in requests[at].computed) : [];
    hit = -1;
    said.textContent = wanted && !hits.length ? "not found" : "";
    step(1);
  });
  place.append(
    make("div", { class: "tools" }, make("label", {}, "Order by ", sort), asked,
      make("button", { type: "button", id: "before", onclick: () => step(-1) }, "Previous"), make("button", { type: "button", id: "after", onclick: () => step(1) }, "Next"), said, ...zoomButtons(() => view)),
    legend([LOOKS.exact, MOVED, { ...LOOKS.compute, name: "computed" }, REPLY]),
    make("div", { class: "panes" }, canvas, details),
    make("p", { class: "note" }, "A bar is a prompt and its reply, tokens from left to right. The line in a bar is where it stops beginning as an earlier request does. Bars of less than two pixels are drawn as their mean."), life);
  const view = new View(canvas, [across, total], draw, { left: LEFT });
  view.pick = (_, y) => { const row = Math.floor(y); if (row >= 0 && row < total) { selected = order[row]; describe(); view.ask(); } };
  canvas.addEventListener("keydown", (event) => {
    if (view.key(event)) return;
    const row = selected < 0 ? -1 : place_[selected];
    if (event.key === "ArrowDown") select(order[Math.min(row + 1, total - 1)]);
    else if (event.key === "ArrowUp") select(order[Math.max(row - 1, 0)]);
    else if (event.key === "Enter" && selected >= 0) view.show([0, requests[selected].tokens], [row, row + 1], true);
    else if (event.key === "/") asked.focus();
    else if (event.key === "n") step(1);
    else if (event.key === "p") step(-1);
    else return;
    event.preventDefault();
  });
  describe();
  view.paint();
  painted();
};
