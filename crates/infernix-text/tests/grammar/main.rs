//! Constraints against the shared corpora and against random walks over the demo model's vocabulary.

use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock};

use infernix_text::grammar::{Answer, Grammar, GrammarCompiler, Guide, GuideOptions, InputForm};
use infernix_text::{ChatFormat, Resources, Start};
use serde_json::{Value, json};

mod calls;

static FORMAT: LazyLock<ChatFormat> = LazyLock::new(|| {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/flash-demo-nvfp4");
    ChatFormat::new(&Resources::from_folder(&folder).expect("the demo model is there")).expect("loads")
});

fn compiler() -> GrammarCompiler {
    GrammarCompiler::new(Arc::clone(FORMAT.tokenizer()), &FORMAT.stop_ids()).expect("prepares")
}

fn answer(compiler: &GrammarCompiler, answer: &Answer) -> Arc<Grammar> {
    compiler.compile(Some(answer), None).unwrap_or_else(|e| panic!("{answer:?}: {e}"))
}

/// Whether the text is a whole output under the grammar, tokenized as usual and byte by byte.
fn fits(grammar: &Arc<Grammar>, text: &str) -> bool {
    let tokenizer = FORMAT.tokenizer();
    let usual = tokenizer.encode(text).expect("encodes");
    // Normalization may have changed the text.
    let usual = if tokenizer.decode(&usual, false) == text { usual } else { bytewise(text) };
    let results = [usual, bytewise(text)].map(|ids| {
        let mut guide = grammar.guide(GuideOptions::default());
        ids.iter().all(|&id| guide.accept(id).is_ok()) && guide.complete()
    });
    assert_eq!(results[0], results[1], "tokenization must not matter: {text:?}");
    results[0]
}

fn bytewise(text: &str) -> Vec<u32> {
    let tokenizer = FORMAT.tokenizer();
    static BYTES: LazyLock<Vec<u32>> = LazyLock::new(|| {
        let tokenizer = FORMAT.tokenizer();
        let mut ids = vec![0; 256];
        for id in 0..tokenizer.addressable() {
            if let Some([byte]) = tokenizer.token_bytes(id) {
                ids[usize::from(*byte)] = id;
            }
        }
        ids
    });
    let ids: Vec<u32> = text.bytes().map(|b| BYTES[usize::from(b)]).collect();
    assert_eq!(tokenizer.decode(&ids, false), text);
    ids
}

fn corpus(name: &str) -> Option<Vec<Value>> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../../shared/clients/schemas").join(name);
    let text = std::fs::read_to_string(path).ok()?;
    Some(text.lines().map(|l| serde_json::from_str(l).expect("parses")).collect())
}

#[expect(clippy::print_stderr, reason = "says why it skipped")]
fn skipped(what: &str) {
    eprintln!("skipped: the shared corpus of {what} is not here");
}

#[test]
fn the_schema_corpus_gives_the_stated_results() {
    let Some(cases) = corpus("schemas.jsonl") else { return skipped("schemas") };
    let compiler = compiler();
    let mut wrong = Vec::new();
    for case in &cases {
        let name = case["name"].as_str().expect("name");
        let expect = case["expect"].as_str().expect("expect");
        match compiler.compile(Some(&Answer::Schema(case["schema"].clone())), None) {
            Ok(grammar) => {
                if expect == "refused" {
                    wrong.push(format!("{name}: compiles"));
                }
                for (list, good) in [("valid", true), ("invalid", false)] {
                    for instance in case[list].as_array().expect("a list") {
                        let text = instance.to_string();
                        if fits(&grammar, &text) != good {
                            wrong.push(format!("{name}: {list} {text}"));
                        }
                    }
                }
            }
            Err(error) => {
                let pointer = case["pointer"].as_str();
                if expect == "supported" || error.pointer.as_deref() != pointer {
                    wrong.push(format!(
                        "{name}: {error} ({:?}), expected {expect} {pointer:?}",
                        error.pointer
                    ));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn the_grammar_and_expression_corpora_give_the_stated_results() {
    let compiler = compiler();
    for (file, field) in [("gbnf.jsonl", "grammar"), ("regex.jsonl", "regex")] {
        let Some(cases) = corpus(file) else { return skipped(file) };
        let mut wrong = Vec::new();
        for case in &cases {
            let source = case[field].as_str().expect("source").to_owned();
            let asked = if field == "regex" { Answer::Regex(source) } else { Answer::Gbnf(source) };
            match (compiler.compile(Some(&asked), None), case["expect"] == "refused") {
                (Err(error), true) => assert_eq!(case["error"]["code"], error.code),
                (Ok(grammar), false) => {
                    for (list, good) in [("accept", true), ("reject", false)] {
                        for text in case[list].as_array().expect("a list") {
                            let text = text.as_str().expect("text");
                            if fits(&grammar, text) != good {
                                wrong.push(format!("{} {list} {text:?}", case["name"]));
                            }
                        }
                    }
                }
                (result, _) => wrong.push(format!("{}: {:?}", case["name"], result.err())),
            }
        }
        assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    }
}

#[test]
fn a_greedy_lexer_would_misread_these() {
    let compiler = compiler();
    for (source, good, bad) in [
        (
            "root ::= \"(\" root \")x\" | [a-z]+ | root \"x\"",
            vec!["(ab)x", "abxx", "((x)x)xx"],
            vec!["(ab)", "()x"],
        ),
        (
            "root ::= (\"a\" | \"ab\") \"bc\" | \"[\" root \"]\"",
            vec!["abc", "abbc", "[abc]"],
            vec!["bc", "[ab]"],
        ),
        (
            "root ::= \"'\" [^']* \"'\" ws | \"(\" root \")\"\nws ::= | \" \" ws",
            vec!["'' ", "('a(b')"],
            vec!["'", "(' )"],
        ),
        ("root ::= s | s root\ns ::= [ab]* \"c\"", vec!["c", "abcac"], vec!["", "ab"]),
    ] {
        let grammar = answer(&compiler, &Answer::Gbnf(source.into()));
        for text in good {
            assert!(fits(&grammar, text), "{source}: {text}");
        }
        for text in bad {
            assert!(!fits(&grammar, text), "{source}: {text}");
        }
    }
}

#[test]
fn the_usual_json_grammar_compiles_and_reads_json() {
    let source = r#"
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"#;
    let grammar = answer(&compiler(), &Answer::Gbnf(source.into()));
    for text in ["{}", r#"{"a": [1, -2.5e3, {"b": null}], "c\u00e9": "x\"y"}"#, "{\n  \"a\": true\n}\n"] {
        assert!(fits(&grammar, text), "{text}");
    }
    for text in ["[]", "{\"a\":}", "{\"a\": 01}"] {
        assert!(!fits(&grammar, text), "{text}");
    }
}

#[test]
fn an_answer_is_never_empty() {
    let compiler = compiler();
    for form in [Answer::Regex("[ab]*".into()), Answer::Gbnf("root ::= \"a\" root | \"\"".into())] {
        let mut guide = answer(&compiler, &form).guide(GuideOptions::default());
        let stop = FORMAT.stop_ids()[0];
        let mut words = FORMAT.tokenizer().vocabulary_mask(FORMAT.tokenizer().addressable() as usize);
        guide.mask(&mut words).expect("masks");
        assert!(words[stop as usize / 32] >> (stop % 32) & 1 == 0 && guide.accept(stop).is_err(), "{form:?}");
        guide.accept(bytewise("a")[0]).expect("fits");
        guide.accept(stop).expect("may end");
    }
    for form in
        [Answer::Regex("^$".into()), Answer::Regex(String::new()), Answer::Gbnf("root ::= \"\"".into())]
    {
        let error = compiler.compile(Some(&form), None).expect_err("refused");
        assert!(error.message.contains("only the empty text"), "{form:?}: {error}");
    }
}

#[test]
fn choices_are_whole() {
    let list = ["red", "reddish", "verde", "red"].map(str::to_owned).to_vec();
    let grammar = answer(&compiler(), &Answer::Choice(list));
    assert!(fits(&grammar, "red") && fits(&grammar, "reddish") && fits(&grammar, "verde"));
    assert!(!fits(&grammar, "redd") && !fits(&grammar, "") && !fits(&grammar, "red "));
    for bad in [vec![], vec![String::new()], vec!["x".repeat(70_000)]] {
        let error = compiler().compile(Some(&Answer::Choice(bad)), None).expect_err("refused");
        assert_eq!(error.code, "invalid_choice");
    }
}

#[test]
fn names_of_an_object_differ_and_numbers_end() {
    let compiler = compiler();
    let open = answer(
        &compiler,
        &Answer::Schema(
            json!({"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 2}),
        ),
    );
    assert!(fits(&open, r#"{"a":1,"b":2}"#) && !fits(&open, r#"{"a":1,"a":2}"#));
    let any = answer(&compiler, &Answer::JsonObject);
    assert!(fits(&any, r#"{"a":{"a":123456789012345678},"b":[1e99]}"#));
    assert!(!fits(&any, r#"{"a":1,"b":{"c":1,"c":2}}"#));
    assert!(!fits(&any, r#"{"a":1234567890123456789}"#) && !fits(&any, r#"{"a":1e100}"#));
    assert!(!fits(&any, "[1]"));
}

/// A small xorshift, for walks that repeat.
struct Random(u64);

impl Random {
    fn next(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as usize % n.max(1)
    }
}

/// Walks at random where the mask allows, with drafts tried and taken back; the text, if it came to an end.
fn walk(grammar: &Arc<Grammar>, options: GuideOptions, random: &mut Random, steps: usize) -> Option<String> {
    walk_on(&mut grammar.guide(options), random, steps)
}

/// The same from where a guide is.
fn walk_on(guide: &mut Guide, random: &mut Random, steps: usize) -> Option<String> {
    let tokenizer = FORMAT.tokenizer();
    let stops = FORMAT.stop_ids();
    let full = tokenizer.vocabulary_mask(tokenizer.addressable() as usize);
    let mut ids = Vec::new();
    for step in 0..steps {
        if guide.finished() {
            return Some(tokenizer.decode(&ids, true));
        }
        let mut words = full.clone();
        guide.mask(&mut words).unwrap_or_else(|e| panic!("{e} after {:?}", tokenizer.decode(&ids, false)));
        let allowed: Vec<u32> = (0..tokenizer.addressable())
            .filter(|&id| words[id as usize / 32] >> (id % 32) & 1 == 1)
            .collect();
        assert!(!allowed.is_empty());
        let only = allowed.iter().all(|id| stops.contains(id));
        if allowed.iter().any(|id| stops.contains(id)) && (only || step > 20 || random.next(4) == 0) {
            let stop = *allowed.iter().find(|id| stops.contains(id)).expect("there is one");
            guide.accept(stop).expect("the mask allowed it");
            assert!(guide.finished());
            return Some(tokenizer.decode(&ids, true));
        }
        // Towards the end short tokens close what is open; before, anything goes.
        let weight = |id: &u32| tokenizer.token_bytes(*id).map_or(9, <[u8]>::len);
        let ending =
            |id: &u32| tokenizer.token_bytes(*id).is_some_and(|b| b.iter().all(|b| b"\"}]),\n".contains(b)));
        let plain: Vec<u32> = allowed.iter().copied().filter(|id| !stops.contains(id)).collect();
        let pick = match plain.iter().filter(|id| ending(id)).min_by_key(|id| weight(id)) {
            Some(&id) if step > 12 && random.next(3) > 0 => id,
            _ => plain[random.next(plain.len())],
        };
        // A wrong draft never sticks.
        let draft: Vec<u32> =
            (0..random.next(4)).map(|_| random.next(tokenizer.addressable() as usize) as u32).collect();
        let n = guide.accepts(&draft);
        for &id in &draft[..n] {
            guide.accept(id).expect("was said to fit");
        }
        guide.rollback(n).expect("was accepted");
        let mut again = full.clone();
        guide.mask(&mut again).expect("masks");
        assert_eq!(again, words, "a draft that was taken back changes nothing");
        guide.accept(pick).expect("the mask allowed it");
        ids.push(pick);
    }
    None
}

/// A validator of its own for the keywords that random schemas use.
fn valid(schema: &Value, v: &Value) -> bool {
    let Some(s) = schema.as_object() else { return schema == &Value::Bool(true) };
    let number = |key: &str| s.get(key).and_then(Value::as_f64);
    let list = |key: &str| s.get(key).and_then(Value::as_array);
    let kind = |t: &str| match t {
        "null" => v.is_null(),
        "boolean" => v.is_boolean(),
        "integer" => v.as_f64().is_some_and(|x| x.fract() == 0.0),
        "number" => v.is_number(),
        "string" => v.is_string(),
        "array" => v.is_array(),
        _ => v.is_object(),
    };
    let kinds = match s.get("type") {
        Some(Value::String(t)) => kind(t),
        Some(Value::Array(ts)) => ts.iter().any(|t| kind(t.as_str().expect("a type"))),
        _ => true,
    };
    let numbers = v
        .as_f64()
        .is_none_or(|x| number("minimum").is_none_or(|m| x >= m) && number("maximum").is_none_or(|m| x <= m));
    let texts = v.as_str().is_none_or(|t| {
        let n = t.chars().count() as f64;
        number("minLength").is_none_or(|m| n >= m) && number("maxLength").is_none_or(|m| n <= m)
    });
    let arrays = v.as_array().is_none_or(|a| {
        let n = a.len() as f64;
        number("minItems").is_none_or(|m| n >= m)
            && number("maxItems").is_none_or(|m| n <= m)
            && s.get("items").is_none_or(|i| a.iter().all(|v| valid(i, v)))
    });
    let objects = v.as_object().is_none_or(|o| {
        let p = s.get("properties").and_then(Value::as_object);
        list("required").is_none_or(|r| r.iter().all(|n| o.contains_key(n.as_str().expect("a name"))))
            && o.iter().all(|(k, v)| match p.and_then(|p| p.get(k)) {
                Some(member) => valid(member, v),
                None => s.get("additionalProperties").is_none_or(|a| valid(a, v)),
            })
    });
    kinds
        && numbers
        && texts
        && arrays
        && objects
        && list("enum").is_none_or(|e| e.contains(v))
        && list("anyOf").is_none_or(|e| e.iter().any(|s| valid(s, v)))
}

fn random_schema(random: &mut Random, depth: usize) -> Value {
    let small = |r: &mut Random| r.next(4) as i64;
    match random.next(if depth == 0 { 6 } else { 9 }) {
        0 => json!({"type": "integer", "minimum": -small(random), "maximum": small(random) + 20}),
        1 => json!({"type": "number"}),
        2 => json!({"type": "boolean"}),
        3 => json!({"type": "string", "minLength": random.next(3), "maxLength": random.next(6) + 2}),
        4 => json!({"enum": ["a", 1, null, "é\"", [true]]}),
        5 => json!({"type": ["string", "null"]}),
        6 => {
            json!({"type": "array", "items": random_schema(random, depth - 1), "minItems": random.next(2), "maxItems": random.next(3) + 1})
        }
        7 => json!({"anyOf": [random_schema(random, depth - 1), random_schema(random, depth - 1)]}),
        _ => {
            let names = ["a", "b c", "ключ", "d\"e"];
            let count = random.next(names.len()) + 1;
            let members: serde_json::Map<String, Value> =
                names[..count].iter().map(|n| ((*n).to_owned(), random_schema(random, depth - 1))).collect();
            let required: Vec<&str> =
                names[..count].iter().copied().filter(|_| random.next(2) == 0).collect();
            json!({"type": "object", "properties": members, "required": required, "additionalProperties": random.next(2) == 0})
        }
    }
}

#[test]
fn random_walks_under_random_schemas_are_valid() {
    let compiler = compiler();
    let mut random = Random(7);
    let (mut ended, mut all) = (0, 0);
    for _ in 0..250 {
        let schema = random_schema(&mut random, 3);
        let grammar = answer(&compiler, &Answer::Schema(schema.clone()));
        all += 1;
        let thinking = random.next(3) == 0;
        let options = GuideOptions {
            start: if thinking { Start::Reasoning } else { Start::Content },
            budget: thinking.then_some(random.next(6)),
            ..GuideOptions::default()
        };
        let Some(text) = walk(&grammar, options, &mut random, 150) else { continue };
        ended += 1;
        let text = if thinking {
            // JSON never lands in the reasoning.
            let (_, rest) = text.split_once("</think>").expect("the reasoning was closed");
            rest.strip_prefix("\n\n").expect("the border is canonical").to_owned()
        } else {
            text
        };
        let value: Value = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {text}\n{schema}"));
        assert!(valid(&schema, &value), "{text}\n{schema}");
    }
    assert!(ended * 2 > all, "only {ended} of {all} walks came to an end");
}

#[test]
fn random_walks_under_random_grammars_are_read_back() {
    let compiler = compiler();
    let mut random = Random(11);
    let mut ended = 0;
    for _ in 0..150 {
        // Three rules that refer to each other; the first always has a way out.
        let atom = |r: &mut Random| match r.next(6) {
            0 => "\"ab\"".to_owned(),
            1 => "[a-c]".to_owned(),
            2 => "[^a\\n]{1,3}".to_owned(),
            3 => "\"é\"?".to_owned(),
            4 => "(\"(\" x \")\")".to_owned(),
            _ => ["x", "y", "[ab]*", "\",\""][r.next(4)].to_owned(),
        };
        let rule = |r: &mut Random| {
            let alternatives: Vec<String> = (0..r.next(2) + 1)
                .map(|_| (0..r.next(3) + 1).map(|_| atom(r)).collect::<Vec<_>>().join(" "))
                .collect();
            alternatives.join(" | ")
        };
        let source = format!(
            "root ::= {} \";\"\nx ::= \"z\" | {}\ny ::= \"\" | {}\n",
            rule(&mut random),
            rule(&mut random),
            rule(&mut random)
        );
        let grammar = match compiler.compile(Some(&Answer::Gbnf(source.clone())), None) {
            Ok(grammar) => grammar,
            Err(e) => panic!("{e}\n{source}"),
        };
        let Some(text) = walk(&grammar, GuideOptions::default(), &mut random, 60) else { continue };
        ended += 1;
        assert!(fits(&grammar, &text), "{text:?}\n{source}");
    }
    assert!(ended > 50, "only {ended} walks came to an end");
}

#[test]
fn multiples_never_run_into_the_end_of_their_digits() {
    let compiler = compiler();
    for step in [json!(2), json!(7), json!(13), json!(100), json!(2.5), json!(19_997), json!(0.25)] {
        for kind in ["integer", "number"] {
            let schema = json!({"type": "array", "items": {"type": kind, "multipleOf": step}, "minItems": 1, "maxItems": 2});
            let grammar = answer(&compiler, &Answer::Schema(schema));
            for seed in 1..6 {
                // No mask fails; towards the end the walk closes what it can.
                let Some(text) = walk(&grammar, GuideOptions::default(), &mut Random(seed), 90) else {
                    continue;
                };
                let list: Vec<f64> = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {text}"));
                let step = step.as_f64().expect("a number");
                // The remainder is exact in binary64 for what is short enough to be.
                assert!(list.iter().all(|x| x.abs() > 1e15 || x % step == 0.0), "{text} by {step}");
            }
        }
    }
}

#[test]
fn reasoning_ends_before_the_answer_begins() {
    let tokenizer = FORMAT.tokenizer();
    let grammar = answer(&compiler(), &Answer::JsonObject);
    let mut guide = grammar.guide(GuideOptions { start: Start::Reasoning, ..GuideOptions::default() });
    let feed = |guide: &mut infernix_text::grammar::Guide, text: &str| {
        tokenizer.encode(text).expect("encodes").into_iter().all(|id| guide.accept(id).is_ok())
    };
    assert!(feed(&mut guide, "{\"not\": json <tool_call> <"), "reasoning is free");
    assert!(guide.in_reasoning() && guide.accept(FORMAT.stop_ids()[0]).is_err(), "and cannot end the turn");
    let close = tokenizer.token_id("</think>").expect("is a token");
    guide.accept(close).expect("closes");
    assert!(!feed(&mut guide, "{"), "the border comes first");
    assert!(feed(&mut guide, "\n\n") && !guide.in_reasoning() && feed(&mut guide, "{}"));
    assert!(guide.complete());
    // Taken back over every border, it is as it was.
    let n = tokenizer.encode("\n\n{}").expect("encodes").len() + 1;
    guide.rollback(n).expect("is remembered");
    assert!(guide.in_reasoning() && feed(&mut guide, "more"));
}

#[test]
fn a_budget_closes_with_the_message_and_the_flag_at_once() {
    let tokenizer = FORMAT.tokenizer();
    let compiler = compiler();
    let open = compiler.compile(None, None).expect("compiles");
    let text = "\n\nEnough.\n</think>\n\n";
    let flag = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let options = GuideOptions {
        start: Start::Reasoning,
        budget: Some(2),
        closing: text.into(),
        conclude: Some(Arc::clone(&flag)),
    };
    let run = |guide: &mut infernix_text::grammar::Guide, mut left: usize| {
        let mut ids = Vec::new();
        while guide.in_reasoning() {
            let mut words = tokenizer.vocabulary_mask(tokenizer.addressable() as usize);
            guide.mask(&mut words).expect("masks");
            let free = words.iter().map(|w| w.count_ones()).sum::<u32>() > 1;
            let id = if free {
                assert!(left > 0, "the budget is spent");
                left -= 1;
                tokenizer.token_id("a").expect("is a token")
            } else {
                (0..tokenizer.addressable())
                    .find(|&id| words[id as usize / 32] >> (id % 32) & 1 == 1)
                    .expect("one")
            };
            guide.accept(id).expect("fits");
            ids.push(id);
        }
        tokenizer.decode(&ids, false)
    };
    assert_eq!(run(&mut open.guide(options.clone()), 2), format!("aa{text}"));
    flag.store(true, std::sync::atomic::Ordering::Relaxed);
    assert_eq!(run(&mut open.guide(options), 2), text);
}

#[test]
fn guides_move_between_threads_and_compilers_are_shared() {
    fn send<T: Send>() {}
    fn sync<T: Send + Sync>() {}
    send::<infernix_text::grammar::Guide>();
    sync::<GrammarCompiler>();
    sync::<Arc<Grammar>>();
}

#[test]
fn compiled_grammars_are_kept() {
    let compiler = compiler();
    let first = answer(&compiler, &Answer::Regex("[ab]+".into()));
    assert!(Arc::ptr_eq(&first, &answer(&compiler, &Answer::Regex("[ab]+".into()))));
    for i in 0..80 {
        answer(&compiler, &Answer::Regex(format!("a{i}")));
    }
    assert!(!Arc::ptr_eq(&first, &answer(&compiler, &Answer::Regex("[ab]+".into()))));
}

#[test]
fn sources_that_are_all_depth_or_all_breadth_are_answered_on_a_small_stack() {
    // As a server compiles: on threads with two megabytes.
    let small = std::thread::Builder::new().stack_size(2 << 20).spawn(|| {
        let compiler = compiler();
        let chain = |n: usize, end: &str| -> String {
            (0..n).map(|i| format!("a{i} ::= a{}\n", i + 1)).chain([format!("a{n} ::= {end}\n")]).collect()
        };
        let nested: String =
            (0..1700).map(|i| format!("a{i} ::= \"x\" | \"y\" a{} \"z\"\n", i + 1)).collect();
        let words: String = (0..2500).map(|i| format!("\"w{i}\" root | ")).collect();
        let mut sources = vec![
            format!("root ::= a0\n{}", chain(3500, "\"x\"")),
            format!("root ::= a0 \"y\" | \"(\" root \")\"\n{}", chain(3500, "\"x\" root | \"z\"")),
            format!("root ::= a0\n{nested}a1700 ::= \"x\"\n"),
            format!("root ::= {words}\".\""),
            format!("root ::= \"a\"{}", "?".repeat(60_000)),
            format!("root ::= {}\"a\"{}", "(".repeat(60), ")*".repeat(60)),
        ];
        sources.push("root ::= ((\"a\"{4096}){4096}){4096} | \"b\" root".to_owned());
        sources.push("root ::= ((\"a\"{4096}){4096}){4096}".to_owned());
        let power = Answer::Regex("((a{1000}){1000}){1000}".to_owned());
        assert_eq!(compiler.compile(Some(&power), None).expect_err("too large").code, "invalid_regex");
        for source in sources {
            let start = &source[..source.len().min(60)];
            match compiler.compile(Some(&Answer::Gbnf(source.clone())), None) {
                Ok(grammar) => drop(grammar.guide(GuideOptions::default()).accepts(&bytewise("xyz"))),
                Err(error) => assert!(!error.message.is_empty(), "{start}"),
            }
            let lark = source.replace("::=", ":").replace("root", "start");
            if let Err(error) = calls::free_form(InputForm::Lark(lark)) {
                assert!(!error.message.is_empty(), "{start}");
            }
        }
        let refs: serde_json::Map<String, Value> =
            (0..8000).map(|i| (format!("d{i}"), json!({"$ref": format!("#/$defs/d{}", i + 1)}))).collect();
        let mut schema = json!({"$ref": "#/$defs/d0", "$defs": refs});
        schema["$defs"]["d8000"] = json!({"type": "string"});
        if let Err(error) = compiler.compile(Some(&Answer::Schema(schema)), None) {
            assert!(!error.message.is_empty());
        }
    });
    small.expect("a thread").join().expect("no panic");
}
