"use strict";
// The chat at /. It uses /v1/chat/completions and /v1/models as any other client does. Text of a
// model enters the page as text only.

const $ = (id) => document.getElementById(id);
const conversation = []; // messages as the API takes them
let running = null; // the AbortController of the reply that is being written

function fail(text) {
  $("error").textContent = text;
  $("error").hidden = !text;
}

// --- turns ---------------------------------------------------------------------------------------

class Turn {
  constructor(role, text = "") {
    this.root = $("turn").content.firstElementChild.cloneNode(true);
    this.root.classList.add(role);
    this.part = (selector) => this.root.querySelector(selector);
    this.part("h2").textContent = role === "user" ? "You" : role === "tool" ? "Result" : "Model";
    this.part(".text").textContent = text;
    this.part(".copy").addEventListener("click", () => this.copy());
    this.calls = []; // of the API, with the element that shows them
    $("empty").hidden = true;
    $("log").append(this.root);
    this.follow();
  }

  // Shows the end of the conversation.
  follow() { $("log").scrollTop = $("log").scrollHeight; }

  get text() { return this.part(".text").textContent; }

  add(delta) {
    if (delta.reasoning_content) {
      this.part(".reasoning").hidden = false;
      this.part(".reasoning p").textContent += delta.reasoning_content;
    }
    if (delta.content) this.part(".text").textContent += delta.content;
    for (const piece of delta.tool_calls ?? []) this.addCall(piece);
    this.follow();
  }

  addCall(piece) {
    let call = this.calls[piece.index];
    if (!call) {
      const shown = $("call").content.firstElementChild.cloneNode(true);
      shown.querySelector("code").textContent = piece.function.name;
      this.root.append(shown);
      call = { id: piece.id, name: piece.function.name, arguments: "", shown };
      this.calls[piece.index] = call;
    }
    call.arguments += piece.function.arguments ?? "";
    call.shown.querySelector("pre").textContent = call.arguments;
  }

  message() {
    const said = { role: "assistant", content: this.text };
    if (this.calls.length) {
      said.tool_calls = this.calls.map((call) => ({
        id: call.id, type: "function", function: { name: call.name, arguments: call.arguments },
      }));
    }
    return said;
  }

  async copy() {
    const button = this.part(".copy");
    const calls = this.calls.map((call) => `${call.name}(${call.arguments})`);
    const text = [this.text, ...calls].filter(Boolean).join("\n");
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
    } catch {
      button.textContent = "Not allowed";
    }
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  }
}

// --- one reply -------------------------------------------------------------------------------------

function body() {
  const system = $("system").value.trim();
  const messages = system ? [{ role: "system", content: system }, ...conversation] : conversation;
  const asked = { model: $("model").value, messages, stream: true, stream_options: { include_usage: true } };
  if ($("temperature").value !== "") asked.temperature = Number($("temperature").value);
  if ($("max-tokens").value !== "") asked.max_tokens = Number($("max-tokens").value);
  const tools = $("tools").value.trim();
  if (tools) {
    asked.tools = JSON.parse(tools);
    if ($("must-call").checked) asked.tool_choice = "required";
  }
  return asked;
}

// The objects of a stream of server-sent events.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    rest += value;
    const lines = rest.split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}

async function reply(asked) {
  const turn = new Turn("assistant");
  turn.root.classList.add("writing");
  running = new AbortController();
  show();
  let begun = 0;
  let count = 0;
  try {
    const response = await fetch(`${location.origin}/v1/chat/completions`, {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify(asked),
      signal: running.signal,
    });
    if (!response.ok) throw new Error((await response.json()).error?.message ?? response.statusText);
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      if (!begun) begun = performance.now();
      if (event.choices?.length) turn.add(event.choices[0].delta);
      if (event.usage) count = event.usage.completion_tokens;
    }
  } catch (error) {
    if (error.name !== "AbortError") fail(error.message);
  } finally {
    running = null;
    turn.root.classList.remove("writing");
    const seconds = (performance.now() - begun) / 1000;
    if (count) turn.part(".figures").textContent = `${count} tokens, ${Math.round(count / seconds)} per second`;
    if (turn.text || turn.calls.length) {
      conversation.push(turn.message());
      lastTurn = turn;
    } else {
      turn.root.remove();
    }
    show();
  }
}

let lastTurn = null;

function show() {
  $("send").disabled = running !== null;
  $("stop").disabled = running === null;
  $("clear").disabled = running !== null;
}

// The results that the user gave for the calls of the last reply.
function addResults() {
  for (const call of lastTurn?.calls ?? []) {
    const field = call.shown.querySelector(".result");
    field.disabled = true;
    conversation.push({ role: "tool", tool_call_id: call.id, content: field.value });
  }
  lastTurn = null;
}

async function send() {
  const text = $("prompt").value.trim();
  if (running || (!text && !lastTurn?.calls.length)) return;
  fail("");
  const before = conversation.length;
  const calling = lastTurn;
  let asked;
  addResults();
  if (text) conversation.push({ role: "user", content: text });
  try {
    asked = body();
  } catch (error) {
    conversation.length = before;
    lastTurn = calling;
    fail(`Tools: ${error.message}`);
    return;
  }
  if (text) new Turn("user", text);
  $("prompt").value = "";
  await reply(asked);
}

function clear() {
  conversation.length = 0;
  lastTurn = null;
  for (const turn of $("log").querySelectorAll(".turn")) turn.remove();
  $("empty").hidden = false;
  fail("");
  $("prompt").focus();
}

// --- the page ----------------------------------------------------------------------------------------

async function begin() {
  try {
    const found = await (await fetch(`${location.origin}/v1/models`)).json();
    for (const model of found.data) $("model").append(new Option(model.id, model.id));
  } catch {
    fail("The list of models cannot be read.");
  }
  $("form").addEventListener("submit", (event) => { event.preventDefault(); send(); });
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });
  $("stop").addEventListener("click", () => running?.abort());
  $("clear").addEventListener("click", clear);
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") running?.abort(); });
  document.body.classList.add("ready");
  $("prompt").focus();
}

begin();
