//! Whole requests over a scripted engine.

use super::*;
use infernix_engine::sched::{ScriptedEngine, Timings, Usage as EngineUsage};
use infernix_text::Resources;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

static FORMAT: LazyLock<ChatFormat> = LazyLock::new(|| {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/flash-demo-nvfp4");
    ChatFormat::new(&Resources::from_folder(&folder).expect("the demo model is there")).expect("loads")
});

/// An engine that prefers the second label and writes `text`, giving what is chosen 0.9 of the mass.
fn engine(text: &'static str) -> Arc<dyn EngineApi> {
    ScriptedEngine::new(move |request| {
        let usage = EngineUsage { prompt: request.prompt.len(), cached: 10, ..EngineUsage::default() };
        let watched = |chosen: usize| -> Vec<f32> {
            (0..request.watch.len()).map(|i| if i == chosen { 0.9f32.ln() } else { 0.001f32.ln() }).collect()
        };
        let tokens = if request.constraint.is_none() {
            vec![Sampled { id: request.watch[1], watched: watched(1), ..Sampled::default() }]
        } else {
            let ids = FORMAT.tokenizer();
            text.chars()
                .map(|c| {
                    let spelled = match c {
                        '+' => "\":".to_owned(),
                        '-' if ids.token_id("\":-").is_some() => "\":-".to_owned(),
                        c => c.to_string(),
                    };
                    let id = ids.token_id(&spelled).expect("is a token");
                    let at = request.watch.iter().rposition(|w| *w == id).expect("is watched");
                    Sampled { id, watched: watched(at), ..Sampled::default() }
                })
                .collect()
        };
        Ok(vec![
            Event::Admitted { queued: std::time::Duration::ZERO, cached_tokens: 10, miss: None },
            Event::Tokens(tokens),
            Event::Finished { reason: Finish::Constraint, usage, timings: Timings::default() },
        ])
    })
}

fn ask(body: Value, text: &'static str) -> Result<(Value, Value), ApiError> {
    let request = question::parse(body)?;
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("builds");
    let mut usage = TokenUsage::default();
    let plan = plan(&FORMAT, request)?;
    runtime.block_on(answer(&engine(text), &FORMAT, plan, &Asker::default(), &mut usage))
}

/// A written number as the vocabulary of the demo spells it: the sign is a free step or joined to the colon.
fn signed(text: &'static str) -> &'static str {
    let joined =
        FORMAT.tokenizer().token_id("\":").is_some() && FORMAT.tokenizer().token_id("\":-").is_some();
    match (joined, text.starts_with('-')) {
        (true, false) => Box::leak(format!("+{text}").into_boxed_str()),
        _ => text,
    }
}

#[test]
fn answers_come_under_their_ids_in_order_with_the_usage_of_all() {
    let body = json!({"state": ["a", "b"], "questions": {
        "on": {"type": "noul", "instructions": "x"}, "n": {"type": "number", "instructions": "y"},
        "w": {"type": "choice", "question": "z", "options": {"first": null, "second": "the other"}}}});
    let (answers, usage) = ask(body, "040").expect("answers");
    assert_eq!(answers.as_object().expect("an object").keys().collect::<Vec<_>>(), ["on", "n", "w"]);
    assert!(answers["on"]["noul"].as_f64().expect("a number") < 0.01);
    assert_eq!((&answers["w"]["choice"], &answers["n"]["number"]), (&json!("second"), &json!(40)));
    let p: f64 = 0.9 / (0.9 + 9.0 * 0.001);
    let expected = (1.0 - p) * 11.0;
    assert!((answers["n"]["uncertainty"].as_f64().expect("a number") - expected).abs() < 1e-5, "{answers}");
    assert_eq!((&usage["output_tokens"], &usage["cached_input_tokens"]), (&json!(3), &json!(30)));
}

#[test]
fn scalars_have_a_sign_a_point_and_an_end() {
    let body = |digits: usize| json!({"state": "s", "questions": {"t": {"type": "scalar", "instructions": "x", "digits": digits}}});
    let (answers, _) = ask(body(4), signed("-12.5}")).expect("answers");
    assert_eq!((&answers["t"]["value"], &answers["t"]["text"]), (&json!(-12.5), &json!("-12.5")));
    let (answers, _) = ask(body(4), signed("7}")).expect("answers");
    assert_eq!(answers["t"]["value"], 7.0);
    for (text, code) in [
        ("}", "malformed_scalar"),
        ("123", "too_many_digits"),
        ("1", "run_cut_short"),
        ("-}", "malformed_scalar"),
    ] {
        assert_eq!(ask(body(2), signed(text)).expect_err(text).code, code, "{text}");
    }
}

#[test]
fn the_evidence_is_shared_by_questions_of_every_kind() {
    let body = json!({"state": "some long evidence", "questions": {
        "a": {"type": "noul", "instructions": "x"}, "b": {"type": "scalar", "instructions": "y"}}});
    let request = question::parse(body).expect("reads");
    let questions = plan(&FORMAT, request).expect("prepares").questions;
    let tasks: Vec<Task> = questions.into_iter().map(|(_, task)| task.expect("can be asked")).collect();
    let shared = shared_prefix(tasks.iter().map(|t| t.ids.as_slice()));
    let text = FORMAT.tokenizer().decode(&tasks[0].ids[..shared], false);
    assert!(text.contains("some long evidence"), "{text}");
}

#[test]
fn labels_are_single_tokens_and_distinct() {
    let labels = prompt::labels(FORMAT.tokenizer(), 62).expect("there are enough");
    assert_eq!((labels[0].0.as_str(), labels[61].0.as_str()), ("A", "9"));
    assert!(prompt::labels(FORMAT.tokenizer(), 100_000).is_none());
}

#[test]
fn a_schedule_takes_back_what_it_tried() {
    let symbols = Symbols::of(FORMAT.tokenizer()).expect("has digits");
    let mut schedule = Schedule::new(Arc::clone(&symbols), Form::Number { digits: 2 });
    let digit = |n: usize| symbols.watched()[n];
    assert_eq!(schedule.accepts(&[digit(1), digit(2), digit(3)]), 2);
    assert_eq!(schedule.accepts(&[symbols.watched()[schedule::END]]), 0);
    schedule.accept(digit(1)).expect("fits");
    let mut words = vec![u32::MAX; FORMAT.tokenizer().addressable() as usize / 32 + 1];
    schedule.mask(&mut words).expect("masks");
    assert_eq!(words.iter().map(|w| w.count_ones()).sum::<u32>(), 10);
    schedule.accept(digit(0)).expect("fits");
    assert!(schedule.finished() && schedule.accept(digit(0)).is_err());
    schedule.rollback(2).expect("was accepted");
    assert!(!schedule.finished() && schedule.rollback(1).is_err());
}

#[test]
fn the_shared_examples_have_the_stated_status_and_shape() {
    let path =
        PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../../shared/clients/decide/examples.jsonl");
    let Ok(text) = std::fs::read_to_string(path) else { return };
    for line in text.lines() {
        let case: Value = serde_json::from_str(line).expect("parses");
        let name = case["name"].as_str().expect("a name");
        let written = match name {
            "several" => "040",
            "scalar" => signed("-12.5}"),
            "mixed-failure" => signed("}"),
            _ => "",
        };
        let result = ask(case["request"].clone(), written);
        if let Some(expected) = case.get("without_vision") {
            assert_eq!(result.expect_err(name).code, expected["code"], "{name}");
            continue;
        }
        if case["status"] != 200 {
            let error = result.expect_err(name);
            let stated = &case["response"]["error"];
            assert_eq!(case["status"], error.status, "{name}");
            assert_eq!(
                (&stated["code"], &stated["param"]),
                (&json!(error.code), &json!(error.param)),
                "{name}"
            );
            assert_eq!(stated["message"], error.message.as_str(), "{name}");
            for refused in case["also_refused"].as_array().into_iter().flatten() {
                let body = json!({"state": "x", "questions": {"c": refused}});
                assert_eq!(ask(body, "").expect_err("refused").code, "invalid_question", "{refused}");
            }
            assert!(ask(json!({"state": "x", "questions": {}}), "").is_err());
            continue;
        }
        let (answers, usage) = result.unwrap_or_else(|e| panic!("{name}: {e}"));
        let keys = |v: &Value| v.as_object().expect("an object").keys().cloned().collect::<Vec<_>>();
        assert_eq!(keys(&usage), keys(&case["response"]["usage"]), "{name}");
        let stated = &case["response"]["answers"];
        assert_eq!(keys(&answers), keys(stated), "{name}");
        for (id, answer) in answers.as_object().expect("an object") {
            assert_eq!(keys(answer), keys(&stated[id]), "{name} {id}");
            assert_eq!(
                (&answer["type"], &answer["code"]),
                (&stated[id]["type"], &stated[id]["code"]),
                "{name} {id}"
            );
        }
    }
}
