//! The stream parser against the shared corpus of model outputs, whole and in every chunking.

use std::path::PathBuf;
use std::sync::Arc;

use infernix_text::{Diagnostics, Event, OutputOptions, OutputParser, Start, StopMatcher, Tool, ToolSet};
use proptest::prelude::*;
use serde_json::{Value, json};

/// Events joined: reasoning, content, calls.
#[derive(Debug, Clone, PartialEq, Default)]
struct Parsed {
    reasoning: Option<String>,
    content: String,
    calls: Vec<(String, String)>,
    /// Calls told while they were made: name and JSON text.
    begun: Vec<(String, String)>,
    diagnostics: Diagnostics,
    stopped: Option<usize>,
}

fn parse<'a>(options: &OutputOptions, pieces: impl IntoIterator<Item = &'a str>) -> Parsed {
    let mut parser = OutputParser::new(options.clone());
    let mut out = Parsed::default();
    let mut take = |events: Vec<Event>| {
        for event in events {
            match event {
                Event::Reasoning(text) => {
                    assert!(out.content.is_empty() && out.calls.is_empty(), "reasoning after content");
                    out.reasoning.get_or_insert_default().push_str(&text);
                }
                Event::Content(text) => {
                    assert!(out.calls.is_empty(), "content after calls");
                    out.content.push_str(&text);
                }
                Event::Call(call) | Event::CallEnd { call, .. } => out
                    .calls
                    .push((call.name.clone(), serde_json::to_string(&call.arguments).expect("serializes"))),
                Event::CallBegin(name) => out.begun.push((name, String::new())),
                Event::CallPart(part) => {
                    out.begun.last_mut().expect("a call has begun").1.push_str(&part.json);
                }
            }
        }
    };
    for piece in pieces {
        take(parser.push(piece));
    }
    take(parser.finish());
    out.diagnostics = parser.diagnostics();
    out.stopped = parser.stopped();
    out
}

/// Cuts text at character boundaries into pieces of `n` characters.
fn pieces(text: &str, n: usize) -> Vec<&str> {
    let mut bounds: Vec<usize> = text.char_indices().map(|(i, _)| i).step_by(n.max(1)).collect();
    bounds.push(text.len());
    bounds.windows(2).map(|w| &text[w[0]..w[1]]).collect()
}

fn tools() -> Vec<Tool> {
    vec![
        Tool::function(
            "look",
            "",
            json!({"properties": {"path": {"type": "string"}, "line": {"type": "integer"}}}),
        ),
        Tool::function("ping", "", json!({"properties": {}})),
    ]
}

fn options(start: Start, tolerant: bool) -> OutputOptions {
    OutputOptions { start, tools: Arc::new(ToolSet::new(&tools())), tolerant, ..OutputOptions::default() }
}

struct Case {
    id: String,
    options: [OutputOptions; 2],
    output: String,
    expected: [Value; 2],
    also: Vec<Value>,
}

fn corpus() -> Option<Vec<Case>> {
    let path =
        PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../../shared/clients/toolcalls/corpus.jsonl");
    let text = std::fs::read_to_string(path).ok()?;
    let cases = text.lines().map(|line| {
        let case: Value = serde_json::from_str(line).expect("parses");
        let tools: Vec<Tool> = serde_json::from_value(case["tools"].clone()).expect("tools");
        let tools = Arc::new(ToolSet::new(&tools));
        let start = if case["thinking"] == true { Start::Reasoning } else { Start::Content };
        let with = |tolerant| OutputOptions {
            start,
            tools: Arc::clone(&tools),
            tolerant,
            ..OutputOptions::default()
        };
        Case {
            id: case["id"].as_str().expect("id").to_owned(),
            options: [with(false), with(true)],
            output: case["output"].as_str().expect("output").to_owned(),
            expected: [case["expect"]["strict"].clone(), case["expect"]["tolerant"].clone()],
            also: case["also"].as_array().cloned().unwrap_or_default(),
        }
    });
    Some(cases.collect())
}

fn agrees(got: &Parsed, expected: &Value) -> bool {
    let calls: Vec<(String, String)> = expected["calls"]
        .as_array()
        .expect("calls")
        .iter()
        .map(|c| (c["name"].as_str().expect("name").to_owned(), c["arguments"].to_string()))
        .collect();
    let diagnostics = serde_json::to_value(got.diagnostics).expect("serializes");
    got.reasoning.as_deref() == expected["reasoning"].as_str()
        && expected["content"] == got.content.as_str()
        && got.calls == calls
        && expected["diagnostics"].as_object().is_none_or(|d| d.iter().all(|(k, v)| diagnostics[k] == *v))
}

#[test]
#[expect(clippy::print_stderr, reason = "says why it skipped")]
fn the_corpus_parses_as_stated_in_every_chunking() {
    let Some(cases) = corpus() else {
        eprintln!("skipped: the shared corpus of tool calls is not here");
        return;
    };
    let mut wrong = Vec::new();
    for case in &cases {
        for (options, expected) in case.options.iter().zip(&case.expected) {
            let whole = parse(options, [case.output.as_str()]);
            if !agrees(&whole, expected) {
                let also = case.also.iter().any(|e| agrees(&whole, e));
                wrong.push(format!(
                    "{} tolerant={} also={also}\n  got {whole:?}\n  not {expected}",
                    case.id, options.tolerant
                ));
            }
            for n in 1..6 {
                let cut = parse(options, pieces(&case.output, n));
                assert_eq!(cut, whole, "{} in pieces of {n}", case.id);
            }
            for at in case.output.char_indices().map(|(i, _)| i) {
                let (a, b) = case.output.split_at(at);
                assert_eq!(parse(options, [a, b]), whole, "{} cut at {at}", case.id);
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Fragments that make adversarial outputs when strung together.
const FRAGMENTS: &[&str] = &[
    "<tool_call>",
    "</tool_call>",
    "<function=look>",
    "<function=ping>",
    "<function=nope>",
    "<function",
    "</function>",
    "<parameter=path>",
    "<parameter=line>",
    "</parameter>",
    "<param=path>",
    "</param>",
    "<invoke name=\"ping\">",
    "</invoke>",
    "<function_calls>",
    "</function_calls>",
    "</think>",
    "<think>",
    "\n",
    "\n\n",
    " ",
    "x",
    "7",
    "é🦀",
    "<",
    ">",
    "=",
    "look",
    "</",
    "<function=look>\n<parameter=path>\na\n</parameter>\n</function>",
    "<tool_call>\n<function=ping>\n</function>\n</tool_call>",
];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]

    #[test]
    fn every_split_gives_the_same_events(
        picks in prop::collection::vec(0..FRAGMENTS.len(), 0..24),
        start in prop_oneof![Just(Start::Reasoning), Just(Start::Content), Just(Start::Detect)],
        tolerant: bool,
        in_reasoning: bool,
        stops in prop::collection::vec(prop_oneof![Just("x7"), Just("\n\n"), Just("<fun"), Just("é")], 0..2),
        n in 1usize..7,
    ) {
        let text: String = picks.iter().map(|&i| FRAGMENTS[i]).collect();
        let mut options = options(start, tolerant);
        options.calls_in_reasoning = in_reasoning;
        options.stops = stops.iter().map(|s| (*s).to_owned()).collect();
        let whole = parse(&options, [text.as_str()]);
        prop_assert_eq!(&parse(&options, pieces(&text, n)), &whole);
        prop_assert_eq!(&parse(&options, pieces(&text, 1)), &whole);
        if whole.calls.is_empty() && whole.stopped.is_none() && start == Start::Content {
            prop_assert_eq!(&whole.content, &text);
        }
        // Without stop strings nothing is lost: with them the text is cut where a matcher would cut it.
        if let (Some(_), Start::Content, true) = (whole.stopped, start, whole.calls.is_empty()) {
            let mut matcher = StopMatcher::new(&options.stops);
            let cut = matcher.push(&text) + &matcher.finish();
            prop_assert_eq!(&whole.content, &cut);
        }
    }
}

#[test]
fn text_that_cannot_become_a_call_streams_at_once() {
    let mut parser = OutputParser::new(options(Start::Content, false));
    assert_eq!(parser.push("Use a < b"), [Event::Content("Use a < b".into())]);
    assert_eq!(parser.push(" and <to"), [Event::Content(" and".into())]);
    assert_eq!(parser.push("ol_calls"), [Event::Content(" <tool_calls".into())]);
    assert_eq!(parser.push(">\n"), [Event::Content(">".into())]);
    assert_eq!(parser.push("<tool_call>`"), [Event::Content("\n<tool_call>`".into())]);
}

#[test]
fn a_parameter_tag_named_in_a_value_does_not_hide_its_end() {
    let text = "<tool_call>\n<function=look>\n<parameter=path>\nuse <parameter=x> here\n</parameter>\n</function>\n</tool_call>";
    for tolerant in [false, true] {
        let got = parse(&options(Start::Content, tolerant), [text]);
        assert_eq!(got.calls, [("look".to_owned(), r#"{"path":"use <parameter=x> here"}"#.to_owned())]);
        assert!(!got.diagnostics.tolerant_recovered);
    }
}

#[test]
fn calls_written_inside_reasoning_are_kept_on_request() {
    let text = "Let me look.\n<tool_call>\n<function=ping>\n</function>\n</tool_call>";
    let mut options = options(Start::Reasoning, false);
    let got = parse(&options, [text]);
    assert_eq!((got.reasoning.as_deref(), got.calls.len()), (Some(text), 0));
    assert!(got.diagnostics.marker_in_reasoning && !got.diagnostics.marker_seen);
    options.calls_in_reasoning = true;
    let got = parse(&options, pieces(text, 1));
    assert_eq!(got.reasoning.as_deref(), Some("Let me look."));
    assert_eq!(got.calls, [("ping".to_owned(), "{}".to_owned())]);
}

#[test]
fn tolerance_repairs_openers_and_lost_closers() {
    for text in [
        "<tool_call>\n<look>\n<parameter=path>\na\n</parameter>\n</look>\n</tool_call>",
        "<tool_call>\nlook>\n<parameter=path>\na\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>\n<tool=look>\n<parameter=path>\na\n</parameter>\n</tool>\n</tool_call>",
        "<tool_call>\n=look>\n<parameter=path>\na\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>\n<function=look>\n<parameter=path\na\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>\n<function=look>\n<parameter=path>\na\n</parameter>\n</tool_call>",
        "<tool_call>\n<function=look>\n<parameter=path>\na\n</parameter>\n</function>\n",
        "<tool_call>\n<function=look>\n<parameter=path>\na\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=lo",
        "<tool_call>\n<function=look>\n<parameter=path>\na\n</parameter>\n</function>\n</tool_call>\n<tool_call>\nsorry",
        "<tool_call>\n<function=look>\n<parameter=path>\na\n</par",
    ] {
        let strict = parse(&options(Start::Content, false), [text]);
        assert_eq!((strict.content.as_str(), strict.calls.len()), (text, 0));
        let tolerant = parse(&options(Start::Content, true), pieces(text, 1));
        assert_eq!(tolerant.calls, [("look".to_owned(), r#"{"path":"a"}"#.to_owned())], "{text}");
        assert!(tolerant.diagnostics.tolerant_recovered);
        assert_eq!(tolerant.diagnostics.truncated_call, text.ends_with("</par"));
    }
}

#[test]
fn names_with_other_characters_need_a_declaration() {
    let call = |name: &str| format!("<tool_call>\n<function={name}>\n</function>\n</tool_call>");
    let got = parse(&options(Start::Content, true), [call("a.b").as_str()]);
    assert!(got.calls.is_empty());
    assert_eq!(got.diagnostics.fallback, infernix_text::Fallback::InvalidToolName);
    let declared = OutputOptions {
        tools: Arc::new(ToolSet::new(&[Tool::function("a.b", "", json!({}))])),
        ..OutputOptions::default()
    };
    assert_eq!(parse(&declared, [call("a.b").as_str()]).calls.len(), 1);
}

#[test]
fn stop_strings_match_text_and_never_call_markup() {
    let mut with_stop = options(Start::Reasoning, false);
    with_stop.stops = vec!["</parameter>".into(), "STOP".into()];
    let text = "why\n</think>\n\nok <tool_call>\n<function=look>\n<parameter=path>\nSTOP\n</parameter>\n</function>\n</tool_call>";
    let got = parse(&with_stop, pieces(text, 1));
    assert_eq!((got.stopped, got.calls.len(), got.content.as_str()), (None, 1, "ok"));
    let got = parse(&with_stop, pieces("a STOP b\n</think>\nc", 2));
    assert_eq!((got.reasoning.as_deref(), got.content.as_str(), got.stopped), (Some("a "), "", Some(1)));
    let got = parse(&with_stop, pieces("a ST\n</think>\nOP STOP", 3));
    assert_eq!((got.reasoning.as_deref(), got.content.as_str(), got.stopped), (Some("a ST"), "OP ", Some(1)));
}

#[test]
fn many_calls_followed_by_words_cost_linear_time() {
    let text = "<tool_call>\n<function=ping>\n</function>\n</tool_call>\n".repeat(20_000) + "done";
    let start = std::time::Instant::now();
    let got = parse(&options(Start::Content, false), pieces(&text, 4096));
    assert_eq!(got.content, text);
    assert!(start.elapsed().as_secs() < 5, "{:?}", start.elapsed());
}

#[test]
fn endless_white_space_after_a_closer_costs_linear_time() {
    let text = format!("<tool_call><function=look><parameter=path>a</parameter>{}", " ".repeat(300_000));
    let start = std::time::Instant::now();
    let got = parse(&options(Start::Content, false), pieces(&text, 3));
    assert_eq!(got.content, text);
    assert!(start.elapsed().as_secs() < 5, "{:?}", start.elapsed());
}

/// Options for an output whose calls are held to their grammar.
fn held() -> OutputOptions {
    let schema = json!({"properties": {"path": {"type": "string"}, "line": {"type": "integer"},
        "tags": {"type": "array"}, "any": {}}});
    let set = ToolSet::new(&[Tool::function("edit", "", schema), Tool::function("ping", "", json!({}))]);
    OutputOptions { start: Start::Content, tools: Arc::new(set), held: true, ..OutputOptions::default() }
}

#[test]
fn a_held_call_is_told_while_it_is_made_and_says_the_same_however_it_is_cut() {
    let parameter = |name: &str, value: &str| format!("<parameter={name}>\n{value}\n</parameter>\n");
    let call = |body: &str| format!("<tool_call>\n<function=edit>\n{body}</function>\n</tool_call>");
    let ping = "<tool_call>\n<function=ping>\n</function>\n</tool_call>";
    for (text, json) in [
        (call(""), vec!["{}"]),
        (call(&parameter("path", "a\"b\n\né😀\\")), vec![r#"{"path": "a\"b\n\né😀\\"}"#]),
        (call(&parameter("path", "")), vec![r#"{"path": ""}"#]),
        (call(&parameter("path", "\n")), vec![r#"{"path": "\n"}"#]),
        (
            call(&parameter("path", "x </parameter> y <parameter=y> \n</function> z")),
            vec![r#"{"path": "x </parameter> y <parameter=y> \n</function> z"}"#],
        ),
        (
            call(&(parameter("line", "3") + &parameter("path", "p") + &parameter("tags", "[1, \"a\"]"))),
            vec![r#"{"line": 3, "path": "p", "tags": [1, "a"]}"#],
        ),
        (call(&(parameter("line", "") + &parameter("any", "True x"))), vec![r#"{"any": "True x"}"#]),
        (format!("{ping}\n{}", call(&parameter("path", "p"))), vec!["{}", r#"{"path": "p"}"#]),
    ] {
        let whole = parse(&OutputOptions { held: false, ..held() }, [text.as_str()]);
        for n in [1, 2, 3, 7, 1000] {
            let told = parse(&held(), pieces(&text, n));
            assert_eq!(
                told.begun.iter().map(|(_, j)| j.as_str()).collect::<Vec<_>>(),
                json,
                "{text:?} by {n}"
            );
            assert_eq!((&told.calls, &told.content), (&whole.calls, &whole.content), "{text:?} by {n}");
            assert_eq!(told.diagnostics, whole.diagnostics, "{text:?} by {n}");
            let said: Vec<Value> = told.begun.iter().map(|(_, j)| j.parse().expect("JSON")).collect();
            let calls: Vec<Value> = told.calls.iter().map(|(_, j)| j.parse().expect("JSON")).collect();
            assert_eq!(said, calls);
        }
    }
    // The text comes as it is written, and not at the end.
    let mut parser = OutputParser::new(held());
    let mut early = String::new();
    for event in parser.push("<tool_call>\n<function=edit>\n<parameter=path>\nfirst line\nsecond") {
        if let Event::CallPart(part) = event {
            early += &part.text.expect("of a text").1;
        }
    }
    assert_eq!(early, "first line\nsecond");
}

#[test]
fn a_held_call_that_is_cut_ends_with_what_is_whole_of_it() {
    let cut =
        "hm <tool_call>\n<function=edit>\n<parameter=line>\n3\n</parameter>\n<parameter=path>\nhalf\n</para";
    for n in [1, 5, 1000] {
        let told = parse(&held(), pieces(cut, n));
        assert_eq!(told.content, "hm");
        assert_eq!(told.begun, [("edit".to_owned(), r#"{"line": 3, "path": "half"#.to_owned())]);
        assert_eq!(told.calls, [("edit".to_owned(), r#"{"line":3}"#.to_owned())]);
        assert!(told.diagnostics.truncated_call && told.diagnostics.structured_call_count == 0);
    }
    // Before a call has begun nothing has been told, and what was read is text.
    let told = parse(&held(), ["hm <tool_call>\n<function=ed"]);
    assert_eq!((told.content.as_str(), told.begun.len()), ("hm <tool_call>\n<function=ed", 0));
}
