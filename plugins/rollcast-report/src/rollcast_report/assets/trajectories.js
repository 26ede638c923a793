"use strict";
(() => {
  const source = document.getElementById("trajectory-data");
  if (source === null) return;
  const all = JSON.parse(source.textContent);
  const get = (name) => document.getElementById("trajectory-" + name);
  const list = get("list");
  const view = document.getElementById("trajectory");
  const controls = { search: get("search"), step: get("step"), end: get("end"), kind: get("kind"), order: get("order") };

  // Everything that a model or a tool wrote becomes a text node, never markup.
  const make = (tag, css, ...children) => {
    const node = document.createElement(tag);
    if (css) node.className = css;
    node.append(...children);
    return node;
  };
  const number = (value) => (value === null ? "–" : String(Number(value.toPrecision(4))));
  const signed = (value) => (value > 0 ? "+" : "") + number(value);
  const plural = (count, noun) => count.toLocaleString("en") + " " + noun + (count === 1 ? "" : "s");

  const contexts = new Map();
  for (const each of all) {
    const key = each.step + " " + each.rollout;
    each.key = key;
    contexts.set(key, (contexts.get(key) || 0) + 1);
  }
  const has = {
    calls: (each) => (each.metrics.tool_calls || 0) > 0 || each.messages.some((message) => message.calls),
    errors: (each) => (each.metrics.tool_errors || 0) > 0,
    failure: (each) => each.failure !== null,
    contexts: (each) => contexts.get(each.key) > 1,
    positive: (each) => each.reward !== null && each.reward > 0,
    other: (each) => each.reward !== null && each.reward <= 0,
    unscored: (each) => each.reward === null,
    untrained: (each) => !each.trained,
  };
  const low = (each) => (each.reward === null ? Infinity : each.reward);
  const high = (each) => (each.reward === null ? Infinity : -each.reward);
  const orders = { low, high, turns: (each) => -each.turns, tokens: (each) => -each.tokens };

  const words = (each) => {
    const texts = [each.rollout, each.group, each.truth, ...(each.failure || [])];
    for (const message of each.messages) {
      texts.push(message.text, message.reasoning || "", message.name || "");
      for (const call of message.calls || []) texts.push(call.name, call.arguments);
    }
    for (const segment of each.segments) texts.push(segment.text || "");
    return texts.join("\n").toLowerCase();
  };
  const opening = (each) => {
    const user = each.messages.find((message) => message.role === "user") || each.messages[0];
    return ((user ? user.text : (each.segments[0] || {}).text) || each.rollout).slice(0, 140);
  };

  // ---- list ----

  const rowOf = (each, index) => {
    const pill = make("span", "pill " + (each.failure ? "bad" : each.end === "done" ? "plain" : "warn"), each.end);
    const reward = make("b", "", number(each.reward));
    const head = make("div", "head", reward, pill, "step " + each.step + " · " + plural(each.turns, "turn"));
    const row = make("div", "item", head, make("div", "opening", opening(each)));
    row.id = "trajectory-item-" + index;
    row.setAttribute("role", "option");
    return row;
  };
  const items = all.map((each, index) => {
    const sampled = each.segments.filter((segment) => segment.sampled);
    each.turns = new Set(sampled.map((segment) => segment.turn)).size;
    each.tokens = each.segments.reduce((sum, segment) => sum + segment.tokens, 0);
    each.sampled = sampled.reduce((sum, segment) => sum + segment.tokens, 0);
    return { each, row: rowOf(each, index), words: null };
  });
  let visible = items;
  let chosen = null;

  const choose = (item) => {
    if (chosen !== null) chosen.row.setAttribute("aria-selected", "false");
    chosen = item;
    if (item === null) {
      list.removeAttribute("aria-activedescendant");
      view.replaceChildren(make("p", "empty", "No trajectory matches."));
      return;
    }
    item.row.setAttribute("aria-selected", "true");
    list.setAttribute("aria-activedescendant", item.row.id);
    show(item.each);
  };
  const refresh = () => {
    const wanted = controls.search.value.trim().toLowerCase();
    const { step, end, kind, order } = controls;
    visible = items.filter((item) => {
      const { each } = item;
      if (step.value && each.step !== Number(step.value)) return false;
      if (end.value && each.end !== end.value) return false;
      if (kind.value && !has[kind.value](each)) return false;
      if (!wanted) return true;
      if (item.words === null) item.words = words(each);
      return item.words.includes(wanted);
    });
    const rank = orders[order.value];
    if (rank) visible.sort((a, b) => rank(a.each) - rank(b.each));
    list.replaceChildren(...visible.map((item) => item.row));
    get("count").textContent = visible.length.toLocaleString("en") + " of " + items.length.toLocaleString("en");
    if (chosen === null || !visible.includes(chosen)) choose(visible[0] || null);
  };

  // ---- one trajectory ----

  const factsOf = (each) => {
    const facts = [
      ["Reward", number(each.reward)],
      ["End", each.end],
      ["Turns", each.turns],
      [each.trained ? "Trained tokens" : "Sampled, not trained", each.sampled.toLocaleString("en") + " of " + each.tokens.toLocaleString("en")],
      ["Group", each.group],
      ["Rollout", each.rollout],
    ];
    if (each.truth) facts.push(["Expected", each.truth]);
    const turns = Object.entries(each.turnRewards);
    if (turns.length) facts.push(["Rewards of turns", turns.map(([turn, value]) => turn + ": " + number(value)).join(", ")]);
    for (const values of [each.components, each.metrics]) {
      for (const [name, value] of Object.entries(values)) facts.push([name, number(value)]);
    }
    return make("dl", "", ...facts.map(([name, value]) => make("div", "", make("dt", "", name), make("dd", "", String(value)))));
  };
  const sampledTokens = (each, count) => plural(count, (each.trained ? "trained" : "sampled") + " token");
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
      const shown = part.text === null ? "⟨" + plural(part.tokens, "token") + "⟩" : part.text;
      if (!part.sampled) {
        text.append(make("span", "", shown));
        continue;
      }
      const mark = make("mark", each.trained ? "" : "untrained", shown);
      mark.title = ["turn " + part.turn, sampledTokens(each, part.tokens), "mean log-prob " + number(part.logProb),
        "weights " + part.versions.join(", ")].join(" · ");
      text.append(mark);
    }
    return text;
  };
  let tab = "conversation";
  const show = (each) => {
    const parts = [];
    if (each.failure) parts.push(make("p", "message", "Failed in the " + each.failure[0] + ": " + each.failure[1]));
    parts.push(factsOf(each));
    const shownTab = each.messages.length ? tab : "tokens";
    const tabs = make("div", "tabs");
    tabs.setAttribute("role", "tablist");
    for (const [name, label] of [["conversation", "Conversation"], ["tokens", "Tokens"]]) {
      const button = make("button", "", label);
      button.type = "button";
      button.setAttribute("role", "tab");
      button.setAttribute("aria-selected", String(name === shownTab));
      button.disabled = name === "conversation" && !each.messages.length;
      button.addEventListener("click", () => {
        tab = name;
        show(each);
      });
      tabs.append(button);
    }
    parts.push(tabs);
    if (shownTab === "tokens") {
      const use = each.trained ? "and is trained" : "but took no part in the update";
      parts.push(make("p", "hint", `Marked text was sampled by the policy ${use}; the rest was given to it.`), tokensOf(each));
    } else {
      parts.push(...each.messages.map((message) => messageOf(each, message)));
    }
    view.replaceChildren(...parts);
    view.scrollTop = 0;
  };

  list.addEventListener("click", (event) => {
    const row = event.target.closest(".item");
    if (row) choose(visible.find((item) => item.row === row));
  });
  list.addEventListener("keydown", (event) => {
    const move = { ArrowUp: -1, ArrowDown: 1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity }[event.key];
    if (move === undefined || !visible.length) return;
    event.preventDefault();
    choose(visible[Math.max(0, Math.min(visible.length - 1, visible.indexOf(chosen) + move))]);
    chosen.row.scrollIntoView({ block: "nearest" });
  });
  for (const control of Object.values(controls)) control.addEventListener("input", refresh);
  refresh();
})();
