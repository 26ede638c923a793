"use strict";
(() => {
  const source = document.getElementById("explorer-index");
  if (source === null) return;
  const get = (name) => document.getElementById("explorer-" + name);
  const list = get("list");
  const rows = get("rows");
  const view = get("detail");
  const form = list.closest("section").querySelector("form");
  const blocks = [...document.querySelectorAll(".explorer-block")];
  const ROW = 58; // pixels, as in report.css

  // Everything that a model or a tool wrote becomes a text node, never markup.
  const make = (tag, css, ...children) => {
    const node = document.createElement(tag);
    if (css) node.className = css;
    node.append(...children);
    return node;
  };
  const number = (value) => (value === null || value === undefined ? "–" : String(Number(value.toPrecision(4))));
  const signed = (value) => (value > 0 ? "+" : "") + number(value);
  const count = (value) => value.toLocaleString("en");
  const plural = (value, noun) => count(value) + " " + noun + (value === 1 ? "" : "s");

  const unpack = async (node) => {
    const packed = atob(node.textContent);
    const bytes = new Uint8Array(packed.length);
    for (let place = 0; place < packed.length; place += 1) bytes[place] = packed.charCodeAt(place);
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    return JSON.parse(await new Response(stream).text());
  };

  // ---- texts: blocks are unpacked one by one; only the text that the search reads is kept ----

  const haystack = []; // entry → all its texts in lower case; undefined until its block was read
  let data = null;
  let recent = { block: -1, details: null };
  const strings = (value, found) => {
    if (typeof value === "string") found.push(value);
    else if (value !== null && typeof value === "object") for (const each of Object.values(value)) strings(each, found);
    return found;
  };
  const blockOf = (entry) => {
    let low = 0;
    let high = data.starts.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (data.starts[middle] <= entry) low = middle;
      else high = middle - 1;
    }
    return low;
  };
  const detailOf = async (entry) => {
    const block = blockOf(entry);
    if (recent.block !== block) recent = { block, details: await unpack(blocks[block]) };
    return recent.details[entry - data.starts[block]];
  };
  const readTexts = async () => {
    for (let block = 0; block < blocks.length; block += 1) {
      const details = await unpack(blocks[block]);
      details.forEach((detail, place) => {
        haystack[data.starts[block] + place] = strings(detail, []).join("\n").toLowerCase();
      });
      if (block + 1 < blocks.length && form.elements["explorer-search"].value) refresh();
      await new Promise((resolve) => setTimeout(resolve)); // keys and the pointer come first
    }
    performance.mark("explorer-texts");
    refresh();
  };

  // ---- filters ----

  const control = (name) => get(name);
  const bound = (name, end, otherwise) => {
    const field = control(name + "-" + end);
    return field === null || field.value === "" || Number.isNaN(Number(field.value)) ? otherwise : Number(field.value);
  };
  const chosenOf = (name) => {
    const field = control(name);
    return field === null ? "" : field.value;
  };
  const bit = (name) => 1 << data.flagNames.indexOf(name);
  const inRange = (name, column) => {
    const low = bound(name, "low", -Infinity);
    const high = bound(name, "high", Infinity);
    if (low === -Infinity && high === Infinity) return null;
    return (entry) => column[entry] !== null && column[entry] >= low && column[entry] <= high;
  };
  const isNamed = (name) => {
    const wanted = chosenOf(name);
    if (!wanted) return null;
    const place = data[name + "Names"].indexOf(wanted);
    return (entry) => data[name][entry] === place;
  };
  const isResult = () => {
    const wanted = chosenOf("result");
    if (!wanted) return null;
    if (wanted === "fixed" || wanted === "broken") return (entry) => (data.flags[entry] & bit(wanted)) !== 0;
    const value = { right: 1, wrong: 0, unknown: null }[wanted];
    return (entry) => data.correct[entry] === value;
  };
  const hasFlag = () => {
    const wanted = chosenOf("flag");
    return wanted ? (entry) => (data.flags[entry] & bit(wanted)) !== 0 : null;
  };
  const hasText = () => {
    const wanted = control("search").value.trim().toLowerCase();
    return wanted ? (entry) => haystack[entry] !== undefined && haystack[entry].includes(wanted) : null;
  };
  const missingLast = (value, sign) => (value === null ? Infinity : sign * value);
  const orders = {
    latest: (entry) => -data.step[entry],
    low: (entry) => missingLast(data.reward[entry], 1),
    high: (entry) => missingLast(data.reward[entry], -1),
    turns: (entry) => -data.turns[entry],
    tokens: (entry) => -data.tokens[entry],
  };

  let visible = [];
  let chosen = -1; // place in visible
  let shown = -1; // entry in the detail

  const refresh = () => {
    const tests = [
      inRange("step", data.step), inRange("reward", data.reward), inRange("age", data.age), isNamed("kind"),
      isNamed("source"), isNamed("end"), isResult(), hasFlag(), hasText(),
    ].filter((test) => test !== null);
    const next = [];
    for (let entry = 0; entry < data.count; entry += 1) if (tests.every((test) => test(entry))) next.push(entry);
    const rank = orders[control("order").value];
    if (rank) next.sort((a, b) => rank(a) - rank(b));
    visible = next;
    const read = haystack.length === data.count;
    get("count").textContent = count(visible.length) + " of " + count(data.count) +
      (control("search").value && !read ? " (still reading)" : "");
    rows.style.height = visible.length * ROW + "px";
    const place = visible.indexOf(shown);
    drawn = [-1, -1];
    choose(place >= 0 ? place : visible.length ? 0 : -1, place < 0);
  };

  // ---- list: only the rows that can be seen are in the document ----

  let drawn = [-1, -1];
  const rowOf = (place) => {
    const entry = visible[place];
    const head = make("div", "head", make("b", "", number(data.reward[entry])));
    const correct = data.correct[entry];
    if (correct !== null) head.append(make("span", "pill " + (correct ? "good" : "bad"), correct ? "correct" : "wrong"));
    const end = data.endNames[data.end[entry]];
    const failed = (data.flags[entry] & bit("failure")) !== 0;
    if (end && (end !== "done" || failed)) head.append(make("span", "pill " + (failed ? "bad" : "warn"), end));
    const facts = ["step " + count(data.step[entry])];
    if (data.turns[entry]) facts.push(plural(data.turns[entry], "turn"));
    if (data.age[entry]) facts.push("age " + data.age[entry]);
    head.append(facts.join(" · "));
    const row = make("div", "item", head, make("div", "opening", data.opening[entry] || "(empty)"));
    row.id = "explorer-item-" + entry;
    row.dataset.place = place;
    row.style.top = place * ROW + "px";
    row.setAttribute("role", "option");
    row.setAttribute("aria-posinset", place + 1);
    row.setAttribute("aria-setsize", visible.length);
    row.setAttribute("aria-selected", String(place === chosen));
    return row;
  };
  const draw = () => {
    const first = Math.max(0, Math.floor(list.scrollTop / ROW) - 8);
    const last = Math.min(visible.length, Math.ceil((list.scrollTop + list.clientHeight) / ROW) + 8);
    if (first === drawn[0] && last === drawn[1]) return;
    drawn = [first, last];
    const next = [];
    for (let place = first; place < last; place += 1) next.push(rowOf(place));
    rows.replaceChildren(...next);
  };
  const choose = (place, scroll) => {
    chosen = place;
    if (place < 0) {
      shown = -1;
      list.removeAttribute("aria-activedescendant");
      rows.replaceChildren();
      view.replaceChildren(make("p", "empty", "Nothing matches these filters."));
      return;
    }
    if (scroll) {
      const top = place * ROW;
      if (top < list.scrollTop) list.scrollTop = top;
      else if (top + ROW > list.scrollTop + list.clientHeight) list.scrollTop = top + ROW - list.clientHeight;
    }
    drawn = [-1, -1];
    draw();
    const entry = visible[place];
    list.setAttribute("aria-activedescendant", "explorer-item-" + entry);
    if (entry !== shown) show(entry);
  };

  // ---- one entry ----

  const factList = (facts) =>
    make("dl", "", ...facts.map(([name, value]) => make("div", "", make("dt", "", name), make("dd", "", String(value)))));
  const textOf = (title, text, css) => {
    const node = make("article", css, make("div", "head", make("b", "", title)), make("div", "text", text || "(empty)"));
    return node;
  };
  const others = (entry) => {
    const same = [];
    for (let each = 0; each < data.count && same.length < 64; each += 1) {
      if (each !== entry && data.prompt[each] === data.prompt[entry]) same.push(each);
    }
    if (!same.length) return [];
    const isSample = data.kindNames[data.kind[entry]] === "sample";
    const node = make("div", "others", isSample ? "Other validations: " : "Same prompt: ");
    for (const each of same) {
      const mark = data.correct[each] === null ? number(data.reward[each]) : data.correct[each] ? "correct" : "wrong";
      const button = make("button", "", (isSample ? "step " + count(data.step[each]) + ", " : "reward ") + mark);
      button.type = "button";
      button.addEventListener("click", () => {
        const place = visible.indexOf(each);
        if (place >= 0) choose(place, true);
        else show(each); // a filter hides it in the list
        view.focus();
      });
      node.append(button);
    }
    return [node];
  };
  const sampleParts = (entry, detail) => {
    const facts = [["Step", count(data.step[entry])], ["Score", number(data.reward[entry])]];
    if (data.correct[entry] !== null) facts.push(["Result", data.correct[entry] ? "correct" : "wrong"]);
    if (data.endNames[data.end[entry]]) facts.push(["End", data.endNames[data.end[entry]]]);
    if (data.sourceNames[data.source[entry]]) facts.push(["Data source", data.sourceNames[data.source[entry]]]);
    for (const [name, value] of Object.entries(detail.more)) if (value) facts.push([name, value]);
    return [
      factList(facts), ...others(entry), textOf("Prompt", detail.prompt, "message-given"),
      textOf("Response", detail.response, "message-sampled"),
      ...(detail.truth ? [textOf("Expected", detail.truth, "message-given")] : []),
    ];
  };
  const factsOf = (entry, each) => {
    const facts = [
      ["Reward", number(data.reward[entry])],
      ["End", data.endNames[data.end[entry]]],
      ["Turns", data.turns[entry]],
      [each.trained ? "Trained tokens" : "Sampled, not trained", count(data.sampled[entry]) + " of " + count(data.tokens[entry])],
      ["Step", count(data.step[entry])],
      ["Group", each.group],
      ["Rollout", each.rollout],
    ];
    if (data.age[entry] !== null) facts.push(["Age", plural(data.age[entry], "weight version")]);
    if (data.sourceNames[data.source[entry]]) facts.push(["Data source", data.sourceNames[data.source[entry]]]);
    if (each.truth) facts.push(["Expected", each.truth]);
    const turns = Object.entries(each.turnRewards);
    if (turns.length) facts.push(["Rewards of turns", turns.map(([turn, value]) => turn + ": " + number(value)).join(", ")]);
    for (const values of [each.components, each.metrics]) {
      for (const [name, value] of Object.entries(values)) facts.push([name, number(value)]);
    }
    return factList(facts);
  };
  const sampledTokens = (each, value) => plural(value, (each.trained ? "trained" : "sampled") + " token");
  const badgesOf = (each, turn) => {
    const tokens = each.segments.reduce((sum, part) => sum + (part.sampled && part.turn === turn ? part.tokens : 0), 0);
    const badges = [make("span", "badge", "turn " + turn), make("span", each.trained ? "badge trained" : "badge", sampledTokens(each, tokens))];
    const reward = each.turnRewards[turn];
    if (reward !== undefined && reward !== null) badges.push(make("span", "badge", "reward " + signed(reward)));
    return badges;
  };
  const messageOf = (each, message) => {
    const role = message.role === "tool" && message.name ? "result of " + message.name : message.role;
    const head = make("div", "head", make("b", "", role));
    const isReply = message.turn !== undefined;
    if (isReply) head.append(...badgesOf(each, message.turn));
    else if (message.role === "assistant") head.append(make("span", "badge", "not sampled here"));
    const node = make("article", "message-" + (isReply ? "sampled" : "given"), head);
    if (message.reasoning) node.append(make("details", "", make("summary", "", "Reasoning"), make("div", "text", message.reasoning)));
    if (message.text) node.append(make("div", "text", message.text));
    for (const call of message.calls || []) {
      node.append(make("div", "call", make("b", "", call.name), " ", make("code", "", call.arguments)));
    }
    return node;
  };
  const tokensOf = (each) => {
    const text = make("div", "text tokens");
    for (const part of each.segments) {
      const words = part.text === null ? "⟨" + plural(part.tokens, "token") + "⟩" : part.text;
      if (!part.sampled) {
        text.append(make("span", "", words));
        continue;
      }
      const mark = make("mark", each.trained ? "" : "untrained", words);
      mark.title = ["turn " + part.turn, sampledTokens(each, part.tokens), "mean log-prob " + number(part.logProb),
        "weights " + part.versions.join(", ")].join(" · ");
      text.append(mark);
    }
    return text;
  };
  let tab = "conversation";
  const tabsOf = (each, redraw) => {
    const tabs = make("div", "tabs");
    tabs.setAttribute("role", "tablist");
    tabs.setAttribute("aria-label", "View of the trajectory");
    const current = each.messages.length ? tab : "tokens";
    for (const [name, label] of [["conversation", "Conversation"], ["tokens", "Tokens"]]) {
      const button = make("button", "", label);
      button.type = "button";
      button.setAttribute("role", "tab");
      button.setAttribute("aria-selected", String(name === current));
      button.tabIndex = name === current ? 0 : -1;
      button.disabled = name === "conversation" && !each.messages.length;
      const open = () => {
        tab = name;
        redraw();
        view.querySelector('[role="tab"][aria-selected="true"]').focus();
      };
      button.addEventListener("click", open);
      tabs.append(button);
    }
    tabs.addEventListener("keydown", (event) => {
      if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
      event.preventDefault();
      event.stopPropagation();
      const other = tabs.querySelector('[aria-selected="false"]:not(:disabled)');
      if (other) other.click();
    });
    return [tabs, current];
  };
  const trajectoryParts = (entry, each) => {
    const [tabs, current] = tabsOf(each, () => fill(entry, each));
    const parts = [];
    if (each.failure) parts.push(make("p", "message", "Failed in the " + each.failure[0] + ": " + each.failure[1]));
    parts.push(factsOf(entry, each), ...others(entry), tabs);
    if (current === "tokens") {
      const use = each.trained ? "and is trained" : "but took no part in the update";
      parts.push(make("p", "hint", `Marked text was sampled by the policy ${use}; the rest was given to it.`), tokensOf(each));
    } else {
      parts.push(...each.messages.map((message) => messageOf(each, message)));
    }
    return parts;
  };
  const fill = (entry, detail) => {
    const isSample = data.kindNames[data.kind[entry]] === "sample";
    view.replaceChildren(...(isSample ? sampleParts(entry, detail) : trajectoryParts(entry, detail)));
    view.scrollTop = 0;
    mark();
  };
  const show = async (entry) => {
    shown = entry;
    const detail = await detailOf(entry);
    if (shown === entry) fill(entry, detail); // the reader may have gone on meanwhile
  };
  // Highlights what was searched for, where the browser can do so without changing the text.
  const mark = () => {
    if (!("highlights" in CSS)) return;
    CSS.highlights.delete("found");
    const wanted = control("search").value.trim().toLowerCase();
    if (!wanted) return;
    const ranges = [];
    const walker = document.createTreeWalker(view, NodeFilter.SHOW_TEXT);
    for (let node = walker.nextNode(); node && ranges.length < 500; node = walker.nextNode()) {
      const text = node.data.toLowerCase();
      for (let at = text.indexOf(wanted); at >= 0 && at + wanted.length <= node.length; at = text.indexOf(wanted, at + 1)) {
        const range = document.createRange();
        range.setStart(node, at);
        range.setEnd(node, at + wanted.length);
        ranges.push(range);
      }
    }
    CSS.highlights.set("found", new Highlight(...ranges));
  };

  // ---- events ----

  list.addEventListener("scroll", draw, { passive: true });
  list.addEventListener("click", (event) => {
    const row = event.target.closest(".item");
    if (row) choose(Number(row.dataset.place), false);
  });
  list.addEventListener("keydown", (event) => {
    const page = Math.max(1, Math.floor(list.clientHeight / ROW) - 1);
    const move = { ArrowUp: -1, ArrowDown: 1, PageUp: -page, PageDown: page, Home: -Infinity, End: Infinity }[event.key];
    if (event.key === "Enter") view.focus();
    if (move === undefined || !visible.length) return;
    event.preventDefault();
    choose(Math.max(0, Math.min(visible.length - 1, chosen + move)), true);
  });
  view.addEventListener("keydown", (event) => {
    if (event.key === "Escape") list.focus();
  });
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", () => {
    refresh();
    mark();
  });
  form.addEventListener("reset", () => setTimeout(refresh));
  new ResizeObserver(() => {
    if (data !== null) draw();
  }).observe(list);

  if (typeof DecompressionStream === "undefined") {
    view.append(make("p", "empty", "This browser is too old to unpack the samples: it lacks DecompressionStream."));
    return;
  }
  unpack(source).then((index) => {
    data = index;
    refresh();
    performance.mark("explorer-ready");
    readTexts();
  });
})();
