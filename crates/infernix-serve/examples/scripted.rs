//! A server whose engine plays prepared turns, for tests with real clients: their prompts are longer than the demo
//! model's context, and what they do must not depend on what a small model says.
//!
//! A user text with PROBE-FAIL gets the beginning of an answer and a failure; one with PROBE-TOOL gets a call of the first shell tool that the prompt declares; everything else, and the
//! turn after a tool's result, gets a sentence. The engine sees token ids only, so the turn is read from the prompt's
//! text, as a model would read it.
#![expect(clippy::print_stdout, reason = "tells the base URL to whoever started it")]

use infernix_engine::cache::{Excerpt, Miss, MissCause};
use infernix_engine::sched::{
    Event, Finish, Request, RequestError, Sampled, ScriptedEngine, Status, Timings, Usage,
};
use infernix_serve::{App, ModelInfo, ServeOptions, serve};
use infernix_text::{ChatFormat, Resources};
use serde_json::Value;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

const MARK: &str = "PROBE-TOOL";
const FAIL: &str = "PROBE-FAIL";
const TOOLS: [&str; 5] = ["exec_command", "shell", "shell_command", "Bash", "run_shell_command"];

/// The turn that a prompt gets, without the reasoning's opening.
fn turn(prompt: &str) -> String {
    let user = prompt.rfind("<|im_start|>user").unwrap_or(0);
    let last = &prompt[user..];
    let mut text = String::new();
    if prompt.ends_with("<think>\n") {
        text += "The user wants a short probe answer.\n</think>\n\n";
    }
    // A result comes in a turn of the user's side, too.
    let answered = last.contains("<tool_response>");
    match tool(prompt).filter(|_| last.contains(MARK) && !answered || asked_before(prompt, user)) {
        Some((name, arguments)) => {
            text += &format!(
                "I will run the tool.\n\n<tool_call>\n<function={name}>\n{arguments}</function>\n</tool_call>"
            );
        }
        None => text += "All done: the probe finished.",
    }
    text
}

/// Some clients put further user turns behind the question.
fn asked_before(prompt: &str, user: usize) -> bool {
    let model = prompt[..user].rfind("<|im_start|>assistant").unwrap_or(0);
    let since = &prompt[model..];
    since.contains(MARK) && !since.contains("<tool_response>")
}

/// The shell tool among the declarations, with arguments that run `echo probe-ok`.
fn tool(prompt: &str) -> Option<(String, String)> {
    let block = prompt.split_once("<tools>\n")?.1.split_once("\n</tools>")?.0;
    let tools: Vec<Value> = block.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    let name = |t: &Value| t["function"]["name"].as_str().unwrap_or_default().to_owned();
    let found = TOOLS.iter().find_map(|n| tools.iter().find(|t| name(t) == *n))?;
    let schema = &found["function"]["parameters"];
    let mut out = String::new();
    for required in schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str) {
        let value = match (required, schema["properties"][required]["type"].as_str()) {
            ("command" | "cmd", Some("array")) => "[\"bash\", \"-lc\", \"echo probe-ok\"]",
            ("command" | "cmd", _) => "echo probe-ok",
            (_, Some("boolean")) => "false",
            (_, Some("integer" | "number")) => "1",
            _ => "probe",
        };
        out += &format!("<parameter={required}>\n{value}\n</parameter>\n");
    }
    Some((name(found), out))
}

fn play(format: &ChatFormat, request: &Request) -> Vec<Event> {
    let tokenizer = format.tokenizer();
    let prompt = tokenizer.decode(&request.prompt, false);
    let ids = tokenizer.encode(&turn(&prompt)).unwrap_or_default();
    let given = ids.len().min(request.max_tokens);
    let top = |id: u32, n: Option<u8>| n.map_or_else(Vec::new, |n| vec![(id, -0.25); usize::from(n).min(1)]);
    let sampled = |id: u32, n: Option<u8>| Sampled {
        id,
        logprob: n.map(|_| -0.25),
        top: top(id, n),
        watched: vec![-1.0; request.watch.len()],
    };
    // A cache that always holds a third of the prompt, and knows why not more.
    let (n, mut other) = (request.prompt.len(), request.prompt.clone());
    other[n / 2..].reverse();
    let excerpt = |ids: &[u32]| Excerpt {
        ids: ids[n / 2 - (n / 2).min(4)..(n / 2 + 4).min(n)].to_vec(),
        before: (n / 2).min(4),
    };
    let miss = Miss {
        shared: n / 2,
        reused: n / 3,
        cause: MissCause::Diverged,
        cached: excerpt(&other),
        prompt: excerpt(&request.prompt),
    };
    let cached_tokens = if request.prompt_logprobs.is_some() { 0 } else { n / 3 };
    let mut events =
        vec![Event::Admitted { queued: Duration::ZERO, cached_tokens, miss: Some(Box::new(miss)) }];
    if request.prompt_logprobs.is_some() {
        let scores = request.prompt.iter().enumerate().map(|(i, &id)| Sampled {
            logprob: (i > 0).then_some(-0.25),
            ..sampled(id, request.prompt_logprobs)
        });
        events.push(Event::PromptLogprobs(scores.collect()));
    }
    events.push(Event::PromptProgress { done: request.prompt.len(), total: request.prompt.len() });
    events.extend(ids[..given].iter().map(|&id| Event::Tokens(vec![sampled(id, request.logprobs)])));
    if prompt.contains(FAIL) {
        events.truncate(events.len() - given / 2);
        events.push(Event::Failed(RequestError::Engine("a planted failure".to_owned())));
        return events;
    }
    let stop = request.stop_tokens.first().copied().unwrap_or_default();
    let reason =
        if given < ids.len() || request.max_tokens == 0 { Finish::Length } else { Finish::Stop(stop) };
    let usage = Usage { prompt: n, cached: cached_tokens, output: given, ..Usage::default() };
    events.push(Event::Finished { reason, usage, timings: Timings::default() });
    events
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let port = args.next().unwrap_or_else(|| "0".to_owned());
    let folder = args.next().map_or_else(
        || PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../models/flash-demo-nvfp4"),
        PathBuf::from,
    );
    let format = Arc::new(ChatFormat::new(&Resources::from_folder(&folder)?)?);
    let player = Arc::clone(&format);
    let engine = ScriptedEngine::new(move |request| Ok(play(&player, request)));
    *engine.status.lock().map_err(|_| "the engine's status")? =
        Status { context: 262_144, max_lanes: 4, max_queued: 16, ..Status::default() };
    let model = ModelInfo { id: "probe-model".to_owned(), trained_context: 262_144, ..ModelInfo::default() };
    let app = App::new(engine, format, model, ServeOptions::default())?;
    let listener = tokio::net::TcpListener::bind(format!("127.0.0.1:{port}")).await?;
    println!("http://{}", listener.local_addr()?);
    serve(app, listener, None, std::future::pending()).await?;
    Ok(())
}
