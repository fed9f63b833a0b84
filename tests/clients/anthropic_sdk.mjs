// The JavaScript SDK of Anthropic over Messages, streamed and not, and count_tokens.
// usage: node anthropic_sdk.mjs text|tool
import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const from = createRequire(process.env.NODE_MODULES + "/anchor.js");
const loaded = await import(pathToFileURL(from.resolve("@anthropic-ai/sdk")));
const Anthropic = loaded.Anthropic ?? loaded.default?.Anthropic ?? loaded.default;
const client = new Anthropic({
  baseURL: process.env.BASE, apiKey: process.env.KEY ?? "none", maxRetries: 0, timeout: 120000,
});
const model = process.env.MODEL;
const scripted = (process.env.SCRIPTED ?? "1") === "1";
const max_tokens = scripted ? 2048 : 24;
const thinking = scripted ? { type: "enabled", budget_tokens: 1024 } : { type: "disabled" };
const tools = [{
  name: "Bash",
  description: "Runs one command.",
  input_schema: { type: "object", properties: { command: { type: "string" } }, required: ["command"] },
}];
const words = (message) => message.content.filter((b) => b.type === "text").map((b) => b.text).join(" ");

async function text() {
  const messages = [{ role: "user", content: "Say that the probe is done." }];
  assert.ok((await client.messages.countTokens({ model, messages, tools })).input_tokens > 0);
  const whole = await client.messages.create({ model, max_tokens, messages });
  assert.match(whole.stop_reason, /^(end_turn|max_tokens)$/);
  const final = await client.messages.stream({ model, max_tokens, messages, thinking }).finalMessage();
  assert.match(final.stop_reason, /^(end_turn|max_tokens)$/);
  console.log(words(final));
}

async function tool() {
  const content = "PROBE-TOOL: run the command echo probe-ok, then say that the probe is done.";
  const messages = [{ role: "user", content }];
  const tool_choice = { type: scripted ? "auto" : "any" };
  const made = await client.messages
    .stream({ model, max_tokens: scripted ? 2048 : 200, messages, tools, tool_choice, thinking })
    .finalMessage();
  const call = made.content.find((b) => b.type === "tool_use");
  if (!call && !scripted) return console.log("cut before the call was complete");
  assert.equal(made.stop_reason, "tool_use");
  assert.equal(typeof call.input, "object");
  const results = made.content
    .filter((b) => b.type === "tool_use")
    .map((b) => ({ type: "tool_result", tool_use_id: b.id, content: "probe-ok" }));
  messages.push({ role: "assistant", content: made.content }, { role: "user", content: results });
  console.log(words(await client.messages.create({ model, max_tokens, messages, tools, thinking })));
}

await { text, tool }[process.argv[2]]();
