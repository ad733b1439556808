// What npm's client libraries do with a server; `client_libraries.py --node FOLDER` runs it.
//
//   node client_libraries.mjs URL MODEL FOLDER      FOLDER has node_modules
//
// Prints a row of the table for each thing: "works", or the error.

import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { join } from "node:path";
import { pathToFileURL } from "node:url";

const [url, model, folder] = process.argv.slice(2);
const require = createRequire(join(folder, "package.json"));
const load = (name) => import(pathToFileURL(require.resolve(name)).href);
const version = (name) =>
  JSON.parse(readFileSync(join(folder, "node_modules", name, "package.json"), "utf8")).version;

const schema = {
  type: "object",
  properties: { city: { enum: ["Oslo", "Bergen"] } },
  required: ["city"],
  additionalProperties: false,
};
const messages = [{ role: "user", content: "What is the weather in Oslo?" }];
const tools = [{ type: "function", function: { name: "get_weather", parameters: schema } }];

function check(holds, what) {
  if (!holds) throw new Error(what);
}

async function openai() {
  const { default: OpenAI } = await load("openai");
  return new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
}

async function ollama() {
  const { Ollama } = await load("ollama");
  return new Ollama({ host: url });
}

async function sdk(name) {
  const [ai, provider] = [await load("ai"), await load(`@ai-sdk/${name}`)];
  const made = { openai: provider.createOpenAI, anthropic: provider.createAnthropic }[name];
  return [ai, made({ baseURL: `${url}/v1`, apiKey: "none" })(model)];
}

async function streamed(name) {
  const [ai, chat] = await sdk(name);
  const reply = ai.streamText({ model: chat, prompt: "Hello", maxOutputTokens: 16, maxRetries: 0 });
  let text = "";
  for await (const piece of reply.textStream) text += piece;
  check(text, "no text");
  check((await reply.usage).outputTokens > 0, "no usage");
}

async function called(name) {
  const [ai, chat] = await sdk(name);
  const reply = await ai.generateText({
    model: chat,
    prompt: messages[0].content,
    tools: { get_weather: ai.tool({ inputSchema: ai.jsonSchema(schema) }) },
    toolChoice: "required",
    maxOutputTokens: 100,
    maxRetries: 0,
  });
  check(reply.toolCalls[0].toolName === "get_weather", "no call");
  check(schema.properties.city.enum.includes(reply.toolCalls[0].input.city), "wrong arguments");
}

const CHECKS = [
  ["openai", "chat and tools, streamed", async () => {
    const client = await openai();
    const stream = client.chat.completions.stream({
      model, messages, tools, tool_choice: "required", parallel_tool_calls: false, max_tokens: 100,
    });
    const reply = await stream.finalChatCompletion();
    const call = reply.choices[0].message.tool_calls[0].function;
    check(schema.properties.city.enum.includes(JSON.parse(call.arguments).city), "wrong arguments");
  }],
  ["openai", "responses, streamed", async () => {
    const stream = (await openai()).responses.stream({ model, input: "Hello", max_output_tokens: 16 });
    check((await stream.finalResponse()).output_text, "no text");
  }],
  ["ollama", "chat, streamed", async () => {
    const stream = await (await ollama()).chat({
      model, messages, stream: true, options: { num_predict: 16 },
    });
    let last;
    for await (const part of stream) last = part;
    check(last.done && last.eval_count > 0, "no end");
  }],
  ["ollama", "format, list, embed", async () => {
    const client = await ollama();
    const options = { num_predict: 60 };
    const reply = await client.generate({ model, prompt: "A city.", format: schema, options });
    check(JSON.parse(reply.response).city, "no city");
    check((await client.list()).models.length > 0, "no models");
    check((await client.embed({ model, input: "hello" })).embeddings[0].length > 0, "no vector");
  }],
  ["@ai-sdk/openai", "streamText", () => streamed("openai")],
  ["@ai-sdk/openai", "generateText with a tool", () => called("openai")],
  ["@ai-sdk/anthropic", "streamText", () => streamed("anthropic")],
  ["@ai-sdk/anthropic", "generateText with a tool", () => called("anthropic")],
];

let failures = 0;
for (const [name, what, run] of CHECKS) {
  let found = "works";
  try {
    await run();
  } catch (error) {
    failures += 1;
    found = `${error.name}: ${error.message}`.replace(/\s+/g, " ").slice(0, 160).replaceAll("|", "/");
  }
  console.log(`| npm ${name} | ${version(name)} | ${what} | ${found} |`);
}
process.exit(failures ? 1 : 0);
