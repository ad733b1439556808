"use strict";
// The live page. The server streams every step of a request (see server/live/watch.py); the page
// plays them back on one clock, so that two panes compare like two equal machines, also in slow
// motion. Text of a model enters the page as text only.

const CHATS = {
  "a question": "Why is the sky blue?",
  "a list": "List ten animals and one fact about each.",
  "a rewrite": "Rewrite in simple words: The council resolved to prohibit motor traffic in the old town in order to reduce noise and improve the air.",
};
const TEXTS = {
  "a function": "def fibonacci(n):\n",
  "a class": "class Stack:\n    \"\"\"A last-in, first-out stack.\"\"\"\n\n    def __init__(self):\n",
  "something repetitive": "NAMES = {\n    \"jan\": 1,\n    \"feb\": 2,\n    \"mar\": 3,\n",
};
const PLAIN = "off";
const NONE = "";

const $ = (id) => document.getElementById(id);
const number = (value, digits) => value.toLocaleString("en", {
  minimumFractionDigits: digits, maximumFractionDigits: digits,
});
const percent = (share) => `${Math.round(100 * share)} %`;
const plural = (count, noun, ending = "s") => `${count} ${noun}${count === 1 ? "" : ending}`;

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

// Changes only what is different: drawing takes time from an engine on the same machine.
function say(where, text) {
  if (where.textContent !== text) where.textContent = text;
}

// Makes white space visible, as `outrider generate --trace` does.
function visible(text) {
  return text.replace(/ {4,}/g, (run) => `·×${run.length}`)
    .replaceAll(" ", "·").replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll("\r", "␍");
}

// Text in a style; line breaks and indentation have no style, because underlines look like text.
function spans(text, className) {
  return text.split(/(\s{2,}|\n)/).filter(Boolean)
    .map((part) => element("span", /^\s+$/.test(part) ? "" : className, part));
}

function chip(token) {
  const made = element("span", `chip ${token.kind}`, visible(token.text));
  made.title = token.kind === "target" ? "written without drafts" : token.kind;
  return made;
}

// --- one pane -----------------------------------------------------------------------------------

class Pane {
  constructor(letter, proposers, chosen, mayBeEmpty) {
    const root = $("pane").content.firstElementChild.cloneNode(true);
    this.root = root;
    this.part = (name) => root.querySelector(`.${name}`);
    this.part("letter").textContent = letter;
    this.part("output").setAttribute("aria-label", `Text of pane ${letter}`);
    this.select = this.part("proposer");
    this.select.id = `proposer-${letter}`;
    const options = [...proposers, [PLAIN, "none (plain decoding)"]];
    if (mayBeEmpty) options.push([NONE, "– no comparison –"]);
    for (const [value, label] of options) this.select.add(new Option(label, value));
    this.select.value = chosen;
    this.part("timeline").addEventListener("keydown", (event) => this.onKey(event));
    for (const name of ["timeline", "written"]) {
      this.part(name).addEventListener("click", (event) => {
        const of = event.target.closest("[data-index]");
        if (of) this.inspect(Number(of.dataset.index));
      });
    }
    this.clear("");
  }

  get isUsed() { return this.select.value !== NONE; }
  get isPlain() { return this.select.value === PLAIN; }

  clear(prompt) {
    this.steps = []; // as they arrived
    this.end = null;
    this.isStopped = false;
    this.prompt = prompt;
    this.rewind();
    this.state("");
  }

  // Back to the first step, to play them again.
  rewind() {
    this.numShown = 0;
    this.ghostOf = -1;
    this.pinned = -1; // the step chosen by hand; -1: the latest
    this.part("given").textContent = this.prompt;
    for (const name of ["written", "ghost", "tree", "timeline", "positions", "rates"]) {
      this.part(name).replaceChildren();
    }
    for (const name of ["per-pass", "speed", "ratio", "rate"]) this.part(name).textContent = "–";
    this.part("step-title").textContent = "\u00a0";
    this.part("why").textContent = this.isPlain
      ? "No drafts here: one token per pass."
      : "Press Generate to see how much is drafted, and why.";
  }

  state(text) { say(this.part("state"), text); }

  // --- playing ---

  get isPlayed() { return this.numShown === this.steps.length; }
  get shown() { return this.steps[this.numShown - 1]; }
  get text() { return this.steps.map((step) => step.pieces.join("")).join(""); }

  // Shows all steps before `clock`, in seconds since the first token. True if there were any.
  play(clock, withGhosts) {
    let step = this.steps[this.numShown];
    const before = this.numShown;
    while (step && step.at_s <= clock) {
      this.write(step);
      this.numShown += 1;
      step = this.steps[this.numShown];
    }
    if (this.numShown > before) {
      this.part("ghost").replaceChildren();
      if (this.pinned < 0) this.inspect(this.numShown - 1, false);
      this.figures();
      this.scroll();
    }
    if (withGhosts && step && this.ghostOf !== this.numShown
        && step.at_s - step.timing.verify_s - step.timing.other_s <= clock) {
      this.ghostOf = this.numShown;
      this.part("ghost").replaceChildren(
        ...step.nodes.filter((node, i) => onFirstBranch(step.nodes, i))
          .flatMap((node) => spans(node.text, "guess")));
      this.scroll();
    }
    return this.numShown > before;
  }

  write(step) {
    const kinds = [...step.path.map(() => "accepted"), ...step.own.map((token) => token.kind)];
    const written = this.part("written");
    step.pieces.forEach((piece, i) => {
      for (const token of spans(piece, `token ${kinds[i]}`)) {
        token.dataset.index = String(this.numShown);
        written.append(token);
      }
    });
    this.column(step);
  }

  // A pass as a column: tokens that it added are above the line, rejected ones below.
  column(step) {
    const column = element("div", "column");
    column.dataset.index = String(this.numShown);
    column.id = `${this.select.id}-step-${step.step}`;
    column.setAttribute("role", "option");
    column.setAttribute("aria-label", sentence(step));
    column.title = sentence(step);
    const above = element("div", "above");
    for (const token of step.own) above.append(element("i", token.kind));
    for (const _ of step.path) above.append(element("i", "accepted"));
    const below = element("div", "below");
    const refused = step.nodes.length - step.path.length;
    for (let i = 0; i < Math.min(refused, 16); i++) below.append(element("i", "rejected"));
    column.append(above, below);
    this.part("timeline").append(column);
  }

  scroll() {
    const output = this.part("output");
    output.scrollTop = output.scrollHeight;
    if (this.pinned < 0) this.part("timeline").scrollLeft = 1e9;
  }

  // --- one step ---

  onKey(event) {
    const moves = { ArrowLeft: -1, ArrowRight: 1, Home: -1e9, End: 1e9 };
    if (!(event.key in moves) || !this.numShown) return;
    event.preventDefault();
    const at = this.pinned < 0 ? this.numShown - 1 : this.pinned;
    this.inspect(Math.max(0, Math.min(this.numShown - 1, at + moves[event.key])));
  }

  inspect(index, byHand = true) {
    const step = this.steps[index];
    if (byHand) this.pinned = index === this.numShown - 1 ? -1 : index;
    const timeline = this.part("timeline");
    timeline.querySelector("[aria-selected]")?.removeAttribute("aria-selected");
    const column = timeline.children[index];
    column.setAttribute("aria-selected", "true");
    timeline.setAttribute("aria-activedescendant", column.id);
    if (byHand) column.scrollIntoView({ block: "nearest", inline: "nearest" });
    this.part("step-title").textContent = sentence(step);
    this.part("tree").replaceChildren(tree(step));
    this.why(index);
  }

  // The controller's reasons at that step; the last step of a request has none.
  why(index) {
    const chart = this.part("rates");
    chart.replaceChildren();
    const choice = this.steps.slice(0, index + 1).findLast((step) => step.choice)?.choice;
    if (choice) {
      const most = Math.max(...choice.rates);
      choice.rates.forEach((rate, k) => {
        const bar = element("div", "bar");
        bar.classList.toggle("decided", k === choice.decided);
        bar.title = `K = ${k}: ${Math.round(rate)} tokens per second expected`;
        const fill = element("i");
        fill.style.height = `${100 * rate / most}%`;
        bar.append(fill, element("span", "", k % 4 && k !== choice.decided ? "\u00a0" : k));
        chart.append(bar);
      });
    }
    this.part("why").textContent = reason(choice, this);
  }

  // --- figures ---

  // Tokens per second after the first step, because that step's time is the prompt's.
  get speed() {
    const step = this.shown;
    if (!step || !step.at_s) return null;
    return (step.stats.num_tokens - this.steps[0].stats.num_tokens) / step.at_s;
  }

  figures() {
    const stats = this.shown.stats;
    say(this.part("per-pass"), number(stats.tokens_per_pass, 2));
    if (this.speed) say(this.part("speed"), number(this.speed, 0));
    if (stats.num_drafted) {
      say(this.part("rate"), percent(stats.acceptance_rate));
      say(this.part("rate-note"), `${stats.num_accepted} of ${stats.num_drafted}`);
    } else if (this.isPlain) {
      say(this.part("rate-note"), "none drafted");
    }
    this.positions(stats);
  }

  compare(other) {
    let ratio = null;
    let note = "";
    if (this.isPlain) {
      note = "this is plain";
    } else if (other.isUsed && other.isPlain && other.speed && this.speed) {
      ratio = this.speed / other.speed;
      note = "measured";
    } else if (this.speed) {
      const known = this.steps.slice(0, this.numShown).map((s) => s.plain_step_s).filter(Boolean);
      if (known.length) {
        ratio = this.speed * known.reduce((a, b) => a + b) / known.length;
        note = "estimated";
      }
    }
    say(this.part("ratio"), ratio === null ? "–" : `${number(ratio, 2)} ×`);
    say(this.part("ratio-note"), note || "\u00a0");
  }

  positions(stats) {
    const list = this.part("positions");
    const shares = stats.unconditional_acceptance;
    while (list.childElementCount < shares.length) {
      const row = element("li");
      const bar = element("span", "track");
      bar.append(element("i"));
      row.append(bar, element("b"));
      list.append(row);
    }
    shares.forEach((share, i) => {
      const row = list.children[i];
      row.querySelector("i").style.width = `${100 * share}%`;
      say(row.querySelector("b"), percent(share));
    });
    say(this.part("positions-note"), this.isPlain
      ? "Nothing is drafted in plain decoding."
      : "How often the 1st, 2nd, … draft of a step was kept.");
  }
}

// --- a step in words -------------------------------------------------------------------------------

// The branch of a tree that the ghost text shows: the first child of every node.
function onFirstBranch(nodes, index) {
  for (let i = index; i >= 0; i = nodes[i].parent) {
    if (nodes.findIndex((node) => node.parent === nodes[i].parent) !== i) return false;
  }
  return true;
}

function sentence(step) {
  const drafted = step.nodes.length;
  const kept = step.path.length;
  const start = `Step ${step.step}`;
  if (!drafted) return `${start}: nothing drafted, the model wrote one token`;
  const who = `${start}: ${step.source} drafted ${drafted}`;
  const own = step.own[0];
  if (!own) return `${who}, ${kept} kept, and the text ended`;
  if (own.kind === "bonus") return `${who}, ${kept} kept, plus a bonus token`;
  return `${who}, ${kept || "none"} kept, then a correction`;
}

// The draft as nested lists: a chain is one line, a tree forks. The model's own token follows the
// accepted path.
function tree(step) {
  const children = new Map();
  step.nodes.forEach((node, i) => {
    if (!children.has(node.parent)) children.set(node.parent, []);
    children.get(node.parent).push(i);
  });
  const end = step.path.length ? step.path[step.path.length - 1] : -1;
  const accepted = new Set(step.path);
  const grow = (index) => {
    const list = element("ul");
    const below = [...(children.get(index) || [])].sort((a, b) => accepted.has(b) - accepted.has(a));
    if (index === end) {
      for (const token of step.own) {
        const item = element("li");
        item.append(chip(token));
        list.append(item);
      }
    }
    for (const child of below) {
      const item = element("li");
      item.append(chip(step.nodes[child]));
      const more = grow(child);
      if (more.childElementCount) item.append(more);
      list.append(item);
    }
    return list;
  };
  const root = element("li", "root");
  const dot = element("span", "so-far");
  dot.title = "the text so far";
  root.append(dot, grow(-1));
  const all = element("ul");
  all.append(root);
  return all;
}

function reason(choice, pane) {
  if (pane.isPlain) return "No drafts here: one token per pass.";
  if (pane.asked !== "auto") return `K = ${pane.asked}: you fixed it. Let the controller choose to see its reasons.`;
  if (!choice) return "K is the controller's choice.";
  const k = choice.decided;
  const rates = choice.rates.map(Math.round);
  const best = choice.rates.indexOf(Math.max(...choice.rates));
  const trial = choice.asked === k ? ""
    : k === 0 ? ` This step tries ${choice.asked}, to measure whether drafts pay again.`
      : choice.asked === 0 ? " This step is plain, to measure its cost."
        : ` This step tries ${choice.asked}, to measure another K.`;
  if (k === 0 && best > 0) return `K = 0: ${best} drafts are expected to bring ${rates[best]} tokens per second instead of ${rates[0]}, which is not measured yet.${trial}`;
  if (k === 0) return `K = 0: drafting does not pay here. Plain: ${rates[0]} tokens per second, with one draft: ${rates[1]}.${trial}`;
  const held = choice.survival[k - 1];
  const further = choice.survival[k];
  const curve = further === undefined ? ""
    : ` Draft ${k} is expected to be accepted in ${percent(held)} of the steps, draft ${k + 1} in ${percent(further)}.`;
  const doubt = best === k || choice.rates[best] < 1.005 * choice.rates[k] ? ""
    : ` K = ${best} is slightly better now, too little for a change.`;
  const limit = choice.stops_itself ? `At most ${k}, and the drafter stops at low confidence` : `K = ${k}`;
  return `${limit}: ${rates[k]} tokens per second expected, ${rates[0]} without drafts.${curve}${doubt}${trial}`;
}

// --- the streams -------------------------------------------------------------------------------------

// With an explicit origin: a page whose address contains the key cannot fetch relative URLs.
async function ask(path, options) {
  const response = await fetch(location.origin + path, options);
  if (response.ok) return response;
  let message = `the server answered ${response.status}`;
  try { message = (await response.json()).error.message; } catch { /* no body of ours */ }
  throw new Error(message);
}

// The events of a stream, as they arrive.
async function* events(path, body, signal) {
  const response = await ask(path, {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new Error("the connection was lost");
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (part === "data: [DONE]") return;
      const event = JSON.parse(part.slice("data: ".length));
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

// --- the page -----------------------------------------------------------------------------------------

class Page {
  constructor(info) {
    this.info = info;
    this.run = null; // what is under way: { controller }
    this.clock = 0;
    this.frame = 0;
    $("model").textContent = info.model;
    this.isChat = info.is_chat; // then the prompt is a message, and the server applies the template
    const examples = this.isChat ? CHATS : TEXTS;
    const proposers = info.proposers.map((name) => [name, name]);
    this.panes = [
      new Pane("A", proposers, info.proposer ?? PLAIN, false),
      new Pane("B", proposers, info.proposer === null ? NONE : PLAIN, true),
    ];
    $("panes").replaceChildren(...this.panes.map((pane) => pane.root));
    $("max-tokens").max = String(info.max_model_len - 1);
    $("k").max = String(info.max_draft_tokens);
    if (info.num_draft_tokens !== "auto" && info.num_draft_tokens) {
      $("auto").checked = false;
      $("k").value = String(info.num_draft_tokens);
    }
    if (matchMedia("(prefers-reduced-motion: reduce)").matches) $("pace").value = "0";
    for (const [name, prompt] of Object.entries(examples)) {
      const button = element("button", "link", name);
      button.type = "button";
      button.addEventListener("click", () => { $("prompt").value = prompt; });
      $("examples").append(button);
    }
    $("prompt").value = Object.values(examples)[0];
    $("controls").addEventListener("submit", (event) => { event.preventDefault(); this.generate(); });
    $("controls").addEventListener("input", () => this.showSettings());
    $("stop").addEventListener("click", () => this.stop());
    $("replay").addEventListener("click", () => this.replay());
    addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
        event.preventDefault();
        this.generate();
      }
      if (event.key === "Escape") this.stop();
    });
    for (const pane of this.panes) {
      pane.select.addEventListener("change", () => {
        this.stop();
        pane.clear("");
        this.showSettings();
        this.invite();
      });
    }
    this.showSettings();
    this.invite();
  }

  // Says in one sentence what Generate will do.
  invite() {
    const [a, b] = this.panes.map((pane) => (pane.isPlain ? "decodes plainly" : `drafts with ${pane.select.value}`));
    $("verdict").className = "verdict invitation";
    $("verdict").textContent = this.panes[1].isUsed
      ? `Press Generate: A ${a}, B ${b}, on the same prompt and seed. Watch where they differ: never in the text.`
      : `Press Generate: A ${a}.`;
  }

  get used() { return this.panes.filter((pane) => pane.isUsed); }

  showSettings() {
    const temperature = Number($("temperature").value);
    $("temperature-shown").textContent = temperature ? number(temperature, 2) : "0, greedy";
    $("k").disabled = $("auto").checked;
    $("k-shown").textContent = $("auto").checked ? "auto" : $("k").value;
    $("panes").classList.toggle("single", this.used.length === 1);
    const second = this.panes[1];
    second.root.classList.toggle("empty", !second.isUsed);
  }

  busy(isBusy) {
    $("generate").disabled = isBusy;
    $("stop").disabled = !isBusy;
    $("replay").disabled = isBusy || !this.used.some((pane) => pane.steps.length);
  }

  fail(message) {
    $("error").textContent = message;
    $("error").hidden = !message;
  }

  body(pane, prompt) {
    const k = $("auto").checked ? "auto" : Number($("k").value);
    pane.asked = k;
    return {
      ...(this.isChat ? { messages: [{ role: "user", content: prompt }] } : { prompt }),
      cache_salt: `live ${Date.now()} ${Math.random()}`, // a repeat must not replay its own output
      max_tokens: Number($("max-tokens").value) || 1,
      temperature: Number($("temperature").value),
      seed: Number($("seed").value) || 0,
      speculation: pane.isPlain ? { off: true } : { proposer: pane.select.value, num_draft_tokens: k },
    };
  }

  // One after the other: neither pane slows down the other, so their clocks can be compared.
  async generate() {
    if (this.run) return;
    const run = this.run = { controller: new AbortController() };
    const prompt = $("prompt").value;
    const panes = this.used;
    this.fail("");
    this.busy(true);
    $("verdict").className = "verdict invitation";
    $("verdict").textContent = panes.length < 2 ? "Running."
      : "Running: first A, then B, so that neither slows the other. Both panes play on the engine's own clock.";
    const bodies = panes.map((pane) => this.body(pane, prompt)); // settings may change on the way
    for (const pane of panes) { pane.clear(this.isChat ? `${prompt}\n\n` : prompt); pane.state("waiting"); }
    this.play();
    let current = null;
    try {
      for (const [i, pane] of panes.entries()) {
        current = pane;
        pane.state("generating");
        const path = this.isChat ? "/live/chat" : "/live/completion";
        const stream = events(path, bodies[i], run.controller.signal);
        for await (const event of stream) {
          if (event.end) pane.end = event.end;
          else if (event.step) pane.steps.push(event);
        }
        pane.state("");
      }
    } catch (error) {
      const stopped = run.controller.signal.aborted;
      if (!stopped) this.fail(error.message);
      for (const pane of panes) {
        if (pane.end) continue;
        pane.isStopped = true;
        pane.state(stopped ? "stopped" : pane === current ? "failed" : "");
      }
    }
    run.isOver = true;
  }

  stop() {
    if (!this.run) return;
    this.run.controller.abort();
    this.clock = Infinity; // show what there is
  }

  replay() {
    if (this.run) return;
    for (const pane of this.used) pane.rewind();
    this.run = { controller: new AbortController(), isOver: true };
    this.busy(true);
    this.play();
  }

  // Seconds of the engine's clock per second of the viewer's.
  get rate() {
    const target = Number($("pace").value); // seconds that a step should be seen for
    const steps = this.used[0].steps;
    if (!target || steps.length < 2) return target ? 0.05 : 1;
    return Math.min(1, steps.at(-1).at_s / (steps.length - 1) / target);
  }

  play() {
    cancelAnimationFrame(this.frame);
    this.clock = 0;
    let last = performance.now();
    const tick = (now) => {
      this.clock += this.rate * (now - last) / 1000;
      last = now;
      const panes = this.used;
      const ghosts = Number($("pace").value) > 0;
      const changed = panes.map((pane) => pane.play(this.clock, ghosts)).some(Boolean);
      for (const pane of panes) {
        if (changed) pane.compare(this.panes[1 - this.panes.indexOf(pane)]);
        if (pane.end && pane.isPlayed) pane.state(pane.end.finish_reason === "length" ? "length reached" : "ended by itself");
      }
      if (this.run.isOver && panes.every((pane) => pane.isPlayed)) this.finish();
      else this.frame = requestAnimationFrame(tick);
    };
    this.frame = requestAnimationFrame(tick);
  }

  finish() {
    this.run = null;
    this.busy(false);
    for (const pane of this.used) pane.part("ghost").replaceChildren();
    if (this.used.some((pane) => !pane.end)) {
      this.invite();
      return;
    }
    $("verdict").textContent = this.verdict();
    $("verdict").className = this.used.every((pane) => pane.text === this.panes[0].text) ? "verdict" : "verdict bad";
  }

  verdict() {
    const [a, b] = this.panes;
    const seed = `seed ${a.end.seed}`;
    const passes = (pane) => plural(pane.shown.stats.num_steps, "pass", "es");
    if (!b.isUsed) return `${plural(a.shown.stats.num_tokens, "token")} in ${passes(a)}, ${seed}.`;
    if (a.text !== b.text) return `The texts differ (${seed}): two tokens were as good as equally likely, or this is a bug.`;
    const count = plural(a.shown.stats.num_tokens, "token");
    const speeds = a.speed && b.speed ? [a.speed / b.speed, b.speed / a.speed] : [1, 1];
    const [faster, ratio] = speeds[0] >= speeds[1] ? ["A", speeds[0]] : ["B", speeds[1]];
    return `Same seed, same text: both wrote the same ${count} (${seed}). `
      + `A took ${passes(a)} of the model, B ${passes(b)}; ${faster} was ${number(ratio, 2)} × as fast.`;
  }
}

// --- the operator's line -------------------------------------------------------------------------------

class Load {
  constructor(page) {
    this.page = page;
    this.before = null;
    this.seconds = 0;
    this.refresh();
    setInterval(() => this.refresh(), 1000);
  }

  async refresh() {
    const isIdle = !this.page.run && this.seconds++ % 5; // every look is a line of the server's log
    if (document.hidden || isIdle) return;
    try {
      await this.show();
    } catch {
      $("load-running").textContent = "no answer";
    }
  }

  async show() {
    const load = await (await ask("/live/load")).json();
    const now = performance.now();
    $("load-running").textContent = `${load.num_running} of ${load.max_running}`;
    $("load-waiting").textContent = String(load.num_waiting);
    $("load-kv").value = load.kv_usage;
    $("load-kv-text").textContent = `${number(100 * load.kv_usage, 1)} % of ${number(load.kv_tokens, 0)}`;
    if (this.before) {
      const tokens = load.num_generation_tokens - this.before.tokens;
      $("load-speed").textContent = `${number(1000 * tokens / (now - this.before.now), 0)} tok/s`;
    }
    this.before = { now, tokens: load.num_generation_tokens };
  }
}

async function main() {
  try {
    const info = await (await ask("/live/info")).json();
    window.page = new Page(info);
  } catch (error) {
    $("error").textContent = `This page cannot reach its server: ${error.message}`;
    $("error").hidden = false;
    return;
  }
  new Load(window.page);
  document.body.classList.add("ready");
}

main();
