// The chat page: one conversation, kept in memory, streamed from /v1/chat/completions.
// Everything that comes from the server is written as text, never as markup.
"use strict";

const at = (id) => document.getElementById(id);
const make = (name, className, text) => {
  const node = document.createElement(name);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
};

let messages = [];
let running = null;

function headers() {
  const key = at("key").value.trim();
  return key ? { authorization: "Bearer " + key } : {};
}

async function errorOf(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return "the server answered " + response.status;
  }
}

// ---- what the server is doing -------------------------------------------------------------------

async function connect() {
  try {
    const response = await fetch("v1/models", { headers: headers() });
    if (response.status === 401) {
      at("model").textContent = "an API key is needed";
      at("settings").open = true;
      at("key").focus();
      return;
    }
    if (!response.ok) throw new Error(await errorOf(response));
    const entry = (await response.json()).data[0];
    at("model").textContent = entry.id + ", context " + entry.max_model_len.toLocaleString("en");
  } catch (error) {
    at("model").textContent = "no connection: " + error.message;
  }
}

async function status() {
  try {
    const response = await fetch("v1/status", { headers: headers() });
    if (!response.ok) return null;
    const s = await response.json();
    const rate = s.rates.decode_tokens_per_second;
    at("server").textContent =
      s.lanes.length + " of " + s.max_lanes + " running, " + s.queued + " waiting" +
      (rate > 0 ? ", " + rate.toFixed(1) + " tokens/s in all" : "");
    return s;
  } catch {
    return null;
  }
}

const CAUSES = {
  cold: "Nothing like this prompt was read before.",
  diverged: "An earlier prompt begins like this one and then differs.",
  no_snapshot: "The beginning is known, but no state was kept at that place.",
  evicted: "What was kept had to make room for other prompts.",
  bypassed: "The request asked for no reuse.",
  extended: "The prompt goes on where what was kept ends.",
};

function showMiss(misses, request) {
  const miss = (misses || []).find((m) => m.request === request);
  if (!miss) {
    at("cause").textContent = "Nothing that was kept was missed.";
    at("texts").hidden = true;
    return;
  }
  at("cause").textContent =
    (CAUSES[miss.cause] || "Cause: " + miss.cause + ".") + " Of " + miss.prompt_tokens + " tokens, " +
    miss.shared_tokens + " agree with what was read before, and " + miss.reused_tokens + " were reused." +
    (miss.habit ? " Probably " + miss.habit + "." : "");
  const differs = miss.cached && miss.cached.different !== undefined && miss.prompt;
  at("texts").hidden = !differs;
  if (differs) {
    at("had").textContent = (miss.cached.same || "") + "\u2503" + miss.cached.different;
    at("has").textContent = (miss.prompt.same || "") + "\u2503" + miss.prompt.different;
  }
}

// ---- one answer ---------------------------------------------------------------------------------

// Whole events of a stream, as their parsed data.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    buffer += value;
    for (;;) {
      const end = buffer.search(/\r?\n\r?\n/);
      if (end < 0) break;
      const event = buffer.slice(0, end);
      buffer = buffer.slice(end).replace(/^\r?\n\r?\n/, "");
      const data = event
        .split(/\r?\n/)
        .filter((line) => line.startsWith("data:"))
        .map((line) => line.slice(5).trim())
        .join("\n");
      if (data === "[DONE]") return;
      if (data) yield JSON.parse(data);
    }
  }
}

function article(role, text) {
  const node = make("article", role);
  node.setAttribute("aria-label", role === "user" ? "You" : "Model");
  if (text !== undefined) node.append(make("div", "text", text));
  at("log").append(node);
  at("log").scrollTop = at("log").scrollHeight;
  return node;
}

function figures(usage, timings, started, first, count) {
  const set = (id, text) => { at(id).textContent = text; };
  const prompt = usage ? usage.prompt_tokens : timings ? timings.prompt_n + timings.cache_n : null;
  const cached = usage
    ? (usage.prompt_tokens_details || {}).cached_tokens || 0
    : timings ? timings.cache_n : null;
  if (prompt !== null) {
    set("prompt", prompt.toLocaleString("en") + " tokens");
    set("cached", cached.toLocaleString("en") + " (" + Math.round((100 * cached) / Math.max(prompt, 1)) + " %)");
  }
  if (first !== null) set("first", ((first - started) / 1000).toFixed(2) + " s");
  const out = usage ? usage.completion_tokens : timings ? timings.predicted_n : count;
  set("answer", out + " tokens");
  if (timings && timings.predicted_per_second) {
    set("speed", timings.predicted_per_second.toFixed(1) + " tokens/s");
  } else if (first !== null && count > 1) {
    set("speed", ((1000 * (count - 1)) / Math.max(performance.now() - first, 1)).toFixed(1) + " tokens/s");
  }
  if (timings && timings.draft_n) {
    set("drafts", timings.draft_n_accepted + " of " + timings.draft_n);
  }
}

async function send() {
  const text = at("input").value;
  if (running || !text.trim()) return;
  at("input").value = "";
  article("user", text);
  messages.push({ role: "user", content: text });
  const node = article("assistant");
  node.classList.add("running");
  const thought = make("details");
  thought.append(make("summary", "", "Thinking"), make("div", "text"));
  const answer = make("div", "text");
  running = new AbortController();
  at("send").disabled = true;
  at("stop").disabled = false;

  const system = at("system").value.trim();
  const body = {
    messages: (system ? [{ role: "system", content: system }] : []).concat(messages),
    stream: true,
    stream_options: { include_usage: true },
    timings_per_token: true,
    return_progress: true,
    chat_template_kwargs: { enable_thinking: at("thinking").checked },
  };
  if (at("temperature").value !== "") body.temperature = Number(at("temperature").value);
  if (at("tokens").value !== "") body.max_tokens = Number(at("tokens").value);

  const started = performance.now();
  let first = null;
  let count = 0;
  let usage = null;
  let timings = null;
  let request = "";
  const said = { role: "assistant", content: "" };
  try {
    const response = await fetch("v1/chat/completions", {
      method: "POST",
      headers: Object.assign({ "content-type": "application/json" }, headers()),
      body: JSON.stringify(body),
      signal: running.signal,
    });
    request = response.headers.get("x-request-id") || "";
    if (!response.ok) throw new Error(await errorOf(response));
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      const stay = at("log").scrollHeight - at("log").scrollTop - at("log").clientHeight < 80;
      usage = event.usage || usage;
      timings = event.timings || timings;
      const progress = event.prompt_progress;
      at("progress").hidden = !progress;
      if (progress) {
        at("progress").max = progress.total;
        at("progress").value = progress.processed;
      }
      const choice = (event.choices || [])[0];
      const delta = choice ? choice.delta : {};
      if (delta.reasoning_content) {
        if (!thought.isConnected) node.append(thought);
        thought.lastChild.textContent += delta.reasoning_content;
        said.reasoning_content = (said.reasoning_content || "") + delta.reasoning_content;
      }
      if (delta.content) {
        if (!answer.isConnected) node.append(answer);
        answer.textContent += delta.content;
        said.content += delta.content;
      }
      if (delta.reasoning_content || delta.content) {
        first = first === null ? performance.now() : first;
        count += 1;
      }
      if (choice && choice.finish_reason === "length") node.append(make("p", "error", "Cut at the limit of tokens."));
      figures(usage, timings, started, first, count);
      if (stay) at("log").scrollTop = at("log").scrollHeight;
    }
  } catch (error) {
    const stopped = error.name === "AbortError";
    node.append(make("p", "error", stopped ? "Stopped." : error.message));
  }
  node.classList.remove("running");
  at("progress").hidden = true;
  if (said.content || said.reasoning_content) {
    messages.push(said);
  } else {
    // Nothing came: the question can be asked again.
    messages.pop();
  }
  running = null;
  at("send").disabled = false;
  at("stop").disabled = true;
  at("input").focus();
  const s = await status();
  if (s) showMiss(s.misses, request);
}

function stop() {
  if (running) running.abort();
}

function clear() {
  stop();
  messages = [];
  at("log").replaceChildren();
  at("input").focus();
}

at("send").addEventListener("click", send);
at("stop").addEventListener("click", stop);
at("clear").addEventListener("click", clear);
at("key").addEventListener("change", connect);
at("input").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") stop();
  if (event.altKey && event.key.toLowerCase() === "n") {
    event.preventDefault();
    clear();
  }
});
connect();
status();
setInterval(status, 3000);
at("input").focus();
