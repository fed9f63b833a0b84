//! Requests of real clients, kept outside the repository: each gets the status that its index states, its stream is
//! well-formed, and its prompt extends the one that it is said to extend.

use super::checker;
use super::client::{FORMAT, Server, says};
use crate::options::ServeOptions;
use infernix_engine::sched::Finish;
use serde_json::Value;
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

fn folder() -> Option<PathBuf> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../../shared/clients/bodies");
    folder.is_dir().then_some(folder)
}

#[test]
fn captured_requests_get_their_status_and_keep_their_prefixes() {
    let Some(folder) = folder() else {
        #[expect(clippy::print_stderr, reason = "a skipped test says why")]
        {
            eprintln!("skipped: the shared folder with captured requests is not here");
        }
        return;
    };
    let prompts: Arc<Mutex<Vec<Vec<u32>>>> = Arc::default();
    let seen = Arc::clone(&prompts);
    let server = Server::new(ServeOptions::default(), move |request| {
        seen.lock().expect("lock").push(request.prompt.clone());
        let forced = request.constraint.is_some();
        Ok(says(request, if forced { "{}" } else { "Fine.\n</think>\n\nTwo files." }, 2, Finish::Stop(0)))
    });
    let read = |name: String| std::fs::read_to_string(folder.join(name)).expect("a file");
    let index = read("index.jsonl".into());
    let mut first_prompt: HashMap<String, Vec<u32>> = HashMap::new();
    let mut wrong = Vec::new();
    for line in index.lines() {
        let entry: Value = serde_json::from_str(line).expect("an entry");
        let name = entry["name"].as_str().expect("a name").to_owned();
        let head: Value = serde_json::from_str(&read(format!("{name}.headers.json"))).expect("headers");
        let body = if entry["method"] == "POST" { read(format!("{name}.json")) } else { String::new() };
        let headers: Vec<(&str, &str)> = head["headers"]
            .as_array()
            .expect("a list")
            .iter()
            .filter_map(|h| Some((h[0].as_str()?, h[1].as_str()?)))
            .filter(|(n, _)| !n.eq_ignore_ascii_case("connection"))
            .collect();
        prompts.lock().expect("lock").clear();
        let path = entry["path"].as_str().expect("a path");
        let answer =
            server.request(entry["method"].as_str().expect("a method"), path, &headers, body.as_bytes());
        let expect = entry["expect"].get("without_vision").unwrap_or(&entry["expect"]);
        if answer.status != expect["status"].as_u64().expect("a status") as u16 {
            wrong.push(format!("{name}: {} instead of {}: {}", answer.status, expect["status"], answer.body));
            continue;
        }
        if let Some(code) = expect["code"].as_str() {
            // Messages has no codes.
            if !path.contains("/messages") && answer.code() != code {
                wrong.push(format!("{name}: code {} instead of {code}", answer.code()));
            }
        }
        let first = prompts.lock().expect("lock").first().cloned();
        if let Some(protocol) = expect["stream"].as_str() {
            let asked: Value = serde_json::from_str(&body).expect("a body");
            let n = asked["n"].as_u64().unwrap_or(1) as usize;
            let checked = match protocol {
                "chat" => checker::chat(&answer.body, n, expect["usage"] == true).map(|_| ()),
                "messages" => checker::messages(&answer.body).map(|_| ()),
                "responses" => checker::responses(&answer.body).map(|_| ()),
                _ => checker::frames(&answer.body).map(|_| ()),
            };
            if let Err(error) = checked {
                wrong.push(format!("{name}: {error}\n{}", answer.body));
            }
        }
        if let Some(prompt) = first {
            for (relation, equal) in [("prefix_of", false), ("same_prompt", true)] {
                let Some(other) = expect[relation].as_str() else { continue };
                let before = &first_prompt[other];
                // As text: where reasoning is empty, the newlines around it are one token.
                let text = |ids: &[u32]| FORMAT.tokenizer().decode(ids, false);
                if !text(&prompt).starts_with(&text(before)) || equal && prompt != *before {
                    let at = prompt.iter().zip(before).take_while(|(a, b)| a == b).count();
                    wrong.push(format!("{name}: {relation} {other} fails at {at} of {}", before.len()));
                }
            }
            first_prompt.insert(name, prompt);
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
