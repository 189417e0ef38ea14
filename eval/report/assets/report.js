"use strict";
// Charts, themes and the trace viewer of a report. Text of models and prompts goes in by textContent only.

const read = (id) => JSON.parse(document.getElementById(id).textContent);
const charts = read("charts");
const themes = read("themes");
const treeSpecification = read("tree");
const root = document.documentElement;
const NUMBER = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });

// Themes: what the system prefers, until the reader says otherwise. Paper is always light.

const prefersDark = matchMedia("(prefers-color-scheme: dark)");
let chosenTheme = null;
let printing = false;

function theme() {
  if (printing) return "light";
  return chosenTheme ?? (prefersDark.matches ? "dark" : "light");
}

function applyTheme() {
  const dark = theme() === "dark";
  root.dataset.theme = theme();
  const button = document.getElementById("theme");
  button.textContent = dark ? "Light" : "Dark";
  button.setAttribute("aria-pressed", String(dark));
  button.setAttribute("aria-label", dark ? "Use light colors" : "Use dark colors");
  return Promise.all([drawCharts(), ...viewers.map((viewer) => viewer.redrawTree())]);
}

// Charts: one specification for both themes, drawn again with another configuration.

const drawn = new Map();
let drawing = 0;

// Pixels that a name beside an axis may take; what is longer is cut, and whole under the pointer.
function labelLimit(width) {
  return Math.max(90, Math.min(340, width * 0.42));
}

const NARROW = 600; // legends stand below each other
const LEAST_PANEL = 110;

function sized(specification, width) {
  const copy = structuredClone(specification);
  const { panels = 1 } = copy.usermeta ?? {};
  const beside = Math.min(labelLimit(width), 6.8 * (copy.usermeta?.names ?? 6)) + 50; // the axis and its title
  if (copy.facet) {
    const most = Math.max(1, Math.min(copy.columns ?? 3, Math.floor(width / 270)));
    copy.columns = Math.ceil(panels / Math.ceil(panels / most));
    const room = Math.floor((width - beside) / copy.columns) - 26;
    copy.spec.width = Math.min(380, Math.max(LEAST_PANEL, room));
    copy.facet.header.labelLimit = copy.spec.width;
  } else if (copy.width) {
    copy.width = Math.min(copy.width, width - 120);
  } else {
    copy.width = "container";
    copy.autosize = { type: "fit-x", contains: "padding" };
  }
  return copy;
}

// As many entries of a legend beside each other as fit.
function legendColumns(specification, width) {
  const longest = Math.min(60, Math.max(3, specification.usermeta?.entry ?? 12));
  return Math.max(1, Math.floor((width - 100) / (longest * 6.8 + 36)));
}

async function drawChart(element) {
  const specification = charts[element.dataset.chart];
  const width = element.parentElement.clientWidth || 600;
  const config = structuredClone(themes[theme()].config);
  config.axis.labelLimit = labelLimit(width);
  config.legend.columns = legendColumns(specification, width);
  config.legend.labelLimit = Math.min(config.legend.labelLimit, width - 60);
  config.legend.titleLimit = width - 60;
  config.axisX = { titleLimit: width - 80 };
  if (width < NARROW) config.legend.layout = { bottom: { anchor: "start", direction: "vertical", margin: 10 } };
  const result = await vegaEmbed(element, sized(specification, width), {
    config,
    renderer: "svg",
    actions: { export: true, source: false, compiled: false, editor: false },
    downloadFileName: element.dataset.chart,
    tooltip: { theme: theme() === "dark" ? "dark" : "light" },
  });
  drawn.get(element)?.finalize();
  drawn.set(element, result);
}

async function drawCharts() {
  const mine = ++drawing;
  delete root.dataset.charts;
  for (const element of document.querySelectorAll("[data-chart]")) {
    await drawChart(element);
    if (mine !== drawing) return; // the theme has changed meanwhile
  }
  root.dataset.charts = "ready";
}

// The trace viewer.

const KIND_WORDS = {
  accepted: "accepted draft",
  bonus: "bonus after a draft that was kept whole",
  correction: "the target's own in place of a drafted token",
  alone: "the target's own, nothing drafted",
};
const MANY_DISCARDED = 8;

function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "class") element.className = value;
    else if (name in element && !name.startsWith("aria")) element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

// A token as it can be seen on one line.
function visible(text) {
  return text.replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/^ | $/g, "␣") || "∅";
}

class Viewer {
  constructor(element) {
    this.element = element;
    this.data = read(element.dataset.trace);
    this.open = null; // [round, token] that the panel shows
    this.tree = null;
    this.choice = (name) => element.querySelector(`[data-choose="${name}"]`);
    this.part = (name) => element.querySelector(`[data-role="${name}"]`);
    const { prompts, answers } = this.data;
    const options = (name, values) =>
      this.choice(name).append(...values.map(([value, text]) => make("option", { value, textContent: text })));
    const several = prompts.some((prompt) => prompt.turn > 1);
    options("prompt", prompts.map((prompt, number) => [
      String(number),
      [prompt.task, prompt.id, several ? `turn ${prompt.turn}` : ""].filter(Boolean).join(" · "),
    ]));
    const temperatures = [...new Set(answers.map((answer) => answer.temperature))].sort();
    options("temperature", temperatures.map((value) => [String(value), value === 0 ? "0 (greedy)" : String(value)]));
    this.part("temperatures").hidden = temperatures.length < 2;
    options("method", this.data.methods.map((name, number) => [String(number), name]));
    // Autoregressive decoding, which comes first, has nothing to show.
    this.choice("method").value = String(this.data.first);
    for (const name of ["prompt", "method", "temperature"]) {
      this.choice(name).addEventListener("change", () => this.show());
    }
    this.choice("discarded").addEventListener("change", () => this.showDiscarded());
    const text = this.part("text");
    text.addEventListener("click", (event) => this.openToken(event.target.closest(".token")));
    text.addEventListener("keydown", (event) => this.key(event));
    text.addEventListener("focusin", (event) => this.rove(event.target.closest(".token")));
    this.show();
  }

  answer() {
    const [prompt, method] = [this.choice("prompt").value, this.choice("method").value].map(Number);
    const temperature = Number(this.choice("temperature").value);
    return this.data.answers.find(
      (answer) => answer.prompt === prompt && answer.method === method && answer.temperature === temperature,
    );
  }

  text(token) {
    return this.data.tokens[token] ?? `<${token}>`;
  }

  show() {
    const answer = this.answer();
    const prompt = this.data.prompts[Number(this.choice("prompt").value)];
    const box = this.element.querySelector("details.prompt");
    box.hidden = !prompt?.text;
    this.part("prompt").textContent = prompt?.text ?? "";
    this.closeRound();
    const text = this.part("text");
    text.replaceChildren();
    this.tokens = [];
    if (!answer) {
      this.part("tally").textContent = "";
      text.append(make("p", { class: "empty", textContent: "This answer was not traced." }));
      return;
    }
    answer.rounds.forEach((round, number) => this.addRound(text, round, number));
    this.tokens[0]?.setAttribute("tabindex", "0");
    this.showDiscarded();
    // The first round with a draft is open from the start.
    const first = this.tokens.find((token) => answer.rounds[Number(token.dataset.round)].drafted?.length);
    if (first) this.openRound(Number(first.dataset.round), first);
    const sum = (key) => answer.rounds.reduce((total, round) => total + (round[key] ?? 0), 0);
    const tokens = answer.rounds.reduce((total, round) => total + round.emitted.length, 0);
    this.part("tally").textContent =
      `${tokens} tokens in ${answer.rounds.length} target calls (τ ${(tokens / answer.rounds.length).toFixed(2)}); ` +
      `target ${NUMBER.format(sum("target_ms"))} ms, drafting ${NUMBER.format(sum("draft_ms"))} ms`;
  }

  addRound(parent, round, number) {
    const group = make("span", { class: "group" });
    round.emitted.forEach((token, index) => {
      const kind = round.kinds[index];
      const text = this.text(token);
      const label = `Token ${this.tokens.length + 1}, ${visible(text)}: ${KIND_WORDS[kind]}, round ${number}`;
      // A line break is seen, and can be hit, by its sign.
      const shown = text.replace(/\n/g, "⏎\n") || "∅";
      const element = make("span", { class: `token ${kind}`, role: "button", tabIndex: -1, textContent: shown, "aria-label": label });
      element.dataset.round = number;
      element.dataset.index = index;
      this.tokens.push(element);
      group.append(element);
      if (index === round.emitted.length - 1 && kind !== "alone") this.addDiscarded(group, element, round);
    });
    parent.append(group);
  }

  // Behind the accepted tokens, where the draft left the answer: before the target's own token.
  addDiscarded(group, last, round) {
    const lost = round.drafted.filter((_, node) => !round.accepted.includes(node));
    if (!lost.length) return;
    const words = lost.slice(0, MANY_DISCARDED).map((token) => visible(this.text(token))).join(" ");
    const rest = lost.length > MANY_DISCARDED ? ` +${lost.length - MANY_DISCARDED}` : "";
    const element = make("del", { class: "token discarded", textContent: words + rest, "aria-label": `Thrown away: ${words}${rest}` });
    const own = round.kinds.at(-1) !== "accepted";
    group.insertBefore(element, own ? last : null);
  }

  showDiscarded() {
    this.part("text").classList.toggle("with-discarded", this.choice("discarded").checked);
  }

  rove(token) {
    if (!token || token.classList.contains("discarded")) return;
    for (const other of this.tokens) other.tabIndex = other === token ? 0 : -1;
  }

  key(event) {
    const token = event.target.closest(".token");
    const at = this.tokens.indexOf(token);
    if (at < 0) return;
    const round = Number(token.dataset.round);
    const first = (number) => this.tokens.findIndex((other) => Number(other.dataset.round) === number);
    const moves = { ArrowRight: at + 1, ArrowLeft: at - 1, ArrowDown: first(round + 1), ArrowUp: first(round - 1), Home: 0, End: this.tokens.length - 1 };
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      this.openToken(token);
    } else if (event.key in moves) {
      event.preventDefault();
      this.tokens[moves[event.key]]?.focus();
    }
  }

  openToken(token) {
    if (!token) return;
    const group = token.closest(".group");
    const own = token.classList.contains("discarded") ? group.querySelector("[data-round]") : token;
    this.openRound(Number(own.dataset.round), own);
  }

  closeRound() {
    this.open = null;
    this.dropTree();
    this.part("round").replaceChildren(make("p", { class: "empty", textContent: "Choose a token to see its round." }));
  }

  dropTree() {
    this.tree?.finalize();
    this.tree = null;
  }

  openRound(number, token = null) {
    const rounds = this.answer().rounds;
    const round = rounds[number];
    this.open = number;
    for (const other of this.tokens) {
      const inside = Number(other.dataset.round) === number;
      other.classList.toggle("of-round", inside);
      other.classList.toggle("chosen", other === token);
      if (inside) other.setAttribute("aria-current", "true");
      else other.removeAttribute("aria-current");
    }
    const panel = this.part("round");
    this.dropTree();
    const step = (text, to) => {
      const button = make("button", { type: "button", textContent: text, disabled: to < 0 || to >= rounds.length });
      button.addEventListener("click", () => {
        this.openRound(to);
        this.part("round").querySelector(`button[data-step="${text}"]`)?.focus();
      });
      button.dataset.step = text;
      return button;
    };
    const head = make("div", { class: "round-head" }, make("h4", { textContent: `Round ${number}` }), step("Previous", number - 1), step("Next", number + 1));
    panel.replaceChildren(head, ...this.roundBody(round));
    this.redrawTree();
  }

  roundBody(round) {
    const facts = make("dl", { class: "numbers" });
    const fact = (name, value) => {
      if (value !== undefined && value !== null) facts.append(make("div", {}, make("dt", { textContent: name }), make("dd", { textContent: value })));
    };
    if (round.prefill) fact("kind", "prefill: the target reads the prompt");
    fact("emitted", String(round.emitted.length));
    if (round.drafted) {
      fact("drafted", String(round.drafted.length));
      fact("accepted", String(round.kinds.filter((kind) => kind === "accepted").length));
    }
    fact("target", round.target_ms == null ? null : `${NUMBER.format(round.target_ms)} ms`);
    if (round.drafted) {
      const calls = round.draft_calls ? ` in ${round.draft_calls} call${round.draft_calls === 1 ? "" : "s"}` : "";
      fact("drafting", round.draft_ms == null ? null : `${NUMBER.format(round.draft_ms)} ms${calls}`);
    }
    const parts = [facts];
    if (!round.drafted) {
      parts.push(make("p", { class: "empty", textContent: "Nothing was drafted." }));
      return parts;
    }
    if (round.parents) {
      parts.push(make("div", { class: "scroll", tabIndex: 0, role: "region", "aria-label": "The draft as a tree" }, make("div", { class: "tree" })));
      parts.push(make("details", {}, make("summary", { textContent: "The nodes as a table" }), this.nodeTable(round)));
    } else {
      parts.push(this.nodeTable(round));
    }
    const own = round.kinds.at(-1);
    if (own !== "accepted") {
      parts.push(make("p", { class: "own" }, "Then the target's own token: ", make("span", { class: `token ${own}`, textContent: visible(this.text(round.emitted.at(-1))) })));
    }
    return parts;
  }

  fate(round, node) {
    if (round.accepted.includes(node)) return "accepted";
    const parent = round.parents ? round.parents[node] : node - 1;
    return parent === -1 || round.accepted.includes(parent) ? "rejected" : "not reached";
  }

  nodeTable(round) {
    const optional = [["q", "q"], ["entropy", "entropy"], ["head", "head"], ["value", "value"], ["accept_prob", "accept"]];
    const columns = optional.filter(([key]) => round[key]);
    const headings = ["#", ...(round.parents ? ["after"] : []), "token", "fate", ...columns.map(([, title]) => title)];
    const table = make("table", { class: "nodes" });
    const heading = (title) => make("th", { scope: "col", textContent: title, class: ["token", "fate"].includes(title) ? "" : "number" });
    table.append(make("thead", {}, make("tr", {}, ...headings.map(heading))));
    const body = make("tbody");
    round.drafted.forEach((token, node) => {
      const fate = this.fate(round, node);
      const cells = [make("td", { class: "number", textContent: String(node + 1) })];
      if (round.parents) cells.push(make("td", { class: "number", textContent: round.parents[node] < 0 ? "root" : String(round.parents[node] + 1) }));
      cells.push(make("td", {}, make("span", { class: `token ${fate === "accepted" ? "accepted" : "discarded"}`, textContent: visible(this.text(token)) })));
      cells.push(make("td", { textContent: fate }));
      for (const [key] of columns) {
        const value = round[key][node];
        const cell = make("td", { class: "number", textContent: value == null ? "" : NUMBER.format(value) });
        const share = key === "q" || key === "head" || key === "accept_prob";
        if (share && value != null) {
          cell.classList.add("share");
          cell.style.setProperty("--share", String(value));
        }
        cells.push(cell);
      }
      body.append(make("tr", { class: fate.replace(" ", "-") }, ...cells));
    });
    table.append(body);
    return make("div", { class: "scroll" }, table);
  }

  async redrawTree() {
    const place = this.part("round").querySelector(".tree");
    if (!place || this.open === null) return;
    const round = this.answer().rounds[this.open];
    const { colors } = themes[theme()];
    const nodes = [{ id: -1, parent: null, text: "", kept: true, ink: colors.ink, behind: colors.quiet, about: { node: "root" } }];
    const depth = [];
    round.drafted.forEach((token, node) => {
      const parent = round.parents[node];
      depth.push(parent < 0 ? 1 : depth[parent] + 1);
      const fate = this.fate(round, node);
      const kind = fate === "accepted" ? "accepted" : "discarded";
      const about = { token: visible(this.text(token)), fate };
      for (const key of ["q", "value", "accept_prob"]) if (round[key]?.[node] != null) about[key] = round[key][node];
      nodes.push({ id: node, parent, text: visible(this.text(token)), kept: fate === "accepted", ink: colors[`${kind}-ink`], behind: colors[`${kind}-behind`], about });
    });
    const parents = new Set(round.parents);
    const leaves = round.drafted.filter((_, node) => !parents.has(node)).length;
    const specification = structuredClone(treeSpecification);
    specification.data[0].values = nodes;
    const levels = Math.max(...depth);
    specification.height = Math.max(90, leaves * 22);
    specification.width = Math.max(levels * 60, Math.min(levels * 120, place.clientWidth - 120));
    for (const signal of specification.signals) signal.value = colors[signal.name];
    const options = { mode: "vega", renderer: "svg", actions: false, tooltip: { theme: theme() } };
    const result = await vegaEmbed(place, specification, options);
    this.dropTree();
    this.tree = result;
  }
}

const viewers = [...document.querySelectorAll("[data-trace]")].map((element) => new Viewer(element));

// A command to the clipboard; where there is none for this page, its text is selected, to be copied by hand.
for (const button of document.querySelectorAll("[data-copy]")) {
  const command = button.previousElementSibling;
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(command.textContent);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(command);
      button.textContent = "Selected";
    }
  });
}

document.getElementById("theme").addEventListener("click", () => {
  chosenTheme = theme() === "dark" ? "light" : "dark";
  applyTheme();
});
prefersDark.addEventListener("change", () => {
  if (chosenTheme === null && !printing) applyTheme();
});
// Closed details would be missing on paper.
function onPrint(begins) {
  const before = theme();
  printing = begins;
  if (theme() !== before) applyTheme();
  for (const element of document.querySelectorAll("details.facts")) {
    if (begins) {
      element.dataset.open = String(element.open);
      element.open = true;
    } else {
      element.open = element.dataset.open === "true";
    }
  }
}
addEventListener("beforeprint", () => onPrint(true));
addEventListener("afterprint", () => onPrint(false));

applyTheme();
