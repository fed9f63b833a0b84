// The JavaScript SDK of OpenAI over Chat Completions and Responses, streamed and not.
// usage: node openai_sdk.mjs text|tool     BASE, MODEL, KEY; NODE_MODULES holds the package
import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const from = createRequire(process.env.NODE_MODULES + "/anchor.js");
const loaded = await import(pathToFileURL(from.resolve("openai")));
const OpenAI = loaded.OpenAI ?? loaded.default?.OpenAI ?? loaded.default;
const client = new OpenAI({
  baseURL: process.env.BASE + "/v1", apiKey: process.env.KEY ?? "none", maxRetries: 0, timeout: 120000,
});
const model = process.env.MODEL;
const scripted = (process.env.SCRIPTED ?? "1") === "1";
const limit = scripted ? {} : { max_tokens: 24 };
const output = scripted ? {} : { max_output_tokens: 24 };
const parameters = {
  type: "object", properties: { command: { type: "string" } }, required: ["command"], additionalProperties: false,
};
const named = { name: "run_shell_command", description: "Runs one command.", parameters };
const question = "Say that the probe is done.";
const task = "PROBE-TOOL: run the command echo probe-ok, then say that the probe is done.";

async function text() {
  const messages = [{ role: "user", content: question }];
  const whole = await client.chat.completions.create({ model, messages, seed: 1, ...limit });
  const stream = client.chat.completions.stream({
    model, messages, seed: 1, stream_options: { include_usage: true }, ...limit,
  });
  const final = await stream.finalChatCompletion();
  assert.equal(final.choices[0].message.content ?? "", whole.choices[0].message.content ?? "");
  assert.ok(final.usage.total_tokens > 0);
  const kinds = [];
  const answer = client.responses.stream({ model, input: question, ...output });
  for await (const event of answer) kinds.push(event.type);
  assert.equal(kinds[0], "response.created");
  assert.match(kinds.at(-1), /^response\.(completed|incomplete)$/);
  assert.ok((await answer.finalResponse()).usage.total_tokens > 0);
  const pieces = await client.completions.create({ model, prompt: "one", max_tokens: 4, stream: true });
  for await (const piece of pieces) assert.equal(piece.object, "text_completion");
  console.log(final.choices[0].message.content);
}

async function tool() {
  const messages = [{ role: "user", content: task }];
  const tools = [{ type: "function", function: named }];
  const most = scripted ? {} : { max_tokens: 200 };
  const made = (await client.chat.completions
    .stream({ model, messages, tools, tool_choice: "required", ...most })
    .finalChatCompletion()
    .catch((error) => {
      if (scripted) throw error;
      return { choices: [{ message: {} }] };
    })).choices[0].message;
  if (!scripted && !made.tool_calls?.length) return console.log("cut before the call was complete");
  const call = made.tool_calls[0];
  assert.equal(typeof JSON.parse(call.function.arguments), "object");
  const { id, type, function: { name, arguments: args } } = call;
  messages.push(
    { role: "assistant", content: made.content, tool_calls: [{ id, type, function: { name, arguments: args } }] },
    { role: "tool", tool_call_id: id, content: "probe-ok" },
  );
  const done = await client.chat.completions.create({ model, messages, tools, ...limit });
  console.log(done.choices[0].message.content);
  if (!scripted) return;
  const flat = [{ type: "function", strict: true, ...named }];
  const first = await client.responses
    .stream({ model, input: task, tools: flat, tool_choice: "required" })
    .finalResponse();
  const item = first.output.find((o) => o.type === "function_call");
  assert.ok("command" in JSON.parse(item.arguments));
  const result = { type: "function_call_output", call_id: item.call_id, output: "probe-ok" };
  const second = await client.responses.create({ model, previous_response_id: first.id, input: [result], tools: flat });
  console.log(second.output_text);
}

await { text, tool }[process.argv[2]]();
