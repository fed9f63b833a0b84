//! Constraints against the shared corpora and against random walks over the demo model's vocabulary.

use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock};

use infernix_text::grammar::{
    Answer, CallRules, Choice, Grammar, GrammarCompiler, Guide, GuideOptions, InputForm, ToolRule,
};
use infernix_text::{
    ChatFormat, Event, OutputOptions, OutputParser, ParsedCall, Resources, Start, Tool, ToolSet,
};
use serde_json::{Value, json};

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

fn rules(strict: bool, choice: Choice, parallel: bool) -> CallRules {
    let parameters = json!({"type": "object", "properties": {
        "path": {"type": "string"}, "line": {"type": "integer", "minimum": 0}, "mode": {"type": "string", "enum": ["r", "w"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2}},
        "required": ["path", "mode"], "additionalProperties": false});
    CallRules {
        tools: vec![
            ToolRule { name: "look".into(), parameters, strict, input: None },
            ToolRule {
                name: "ping".into(),
                parameters: json!({"type": "object", "properties": {}, "additionalProperties": false}),
                strict,
                input: None,
            },
        ],
        choice,
        parallel,
        frame: true,
    }
}

fn look(body: &str) -> String {
    format!("<tool_call>\n<function=look>\n{body}</function>\n</tool_call>")
}

#[test]
fn calls_are_held_to_frame_names_and_strict_schemas() {
    let compiler = compiler();
    let path = "<parameter=path>\na\n</parameter>\n";
    let mode = "<parameter=mode>\nr\n</parameter>\n";
    let ping = "<tool_call>\n<function=ping>\n</function>\n</tool_call>";
    let strict = compiler.compile(None, Some(&rules(true, Choice::Auto, true))).expect("compiles");
    let free = compiler.compile(None, Some(&rules(false, Choice::Auto, true))).expect("compiles");
    let both = |text: &str| [fits(&free, text), fits(&strict, text)];
    assert_eq!(both("just text with < and </ in it"), [true, true]);
    assert_eq!(both(&format!("hm\n\n{}", look(&format!("{path}{mode}")))), [true, true]);
    assert_eq!(both(&format!("{ping}\n{ping}")), [true, true]);
    assert_eq!(both(&format!("{ping} and more")), [false, false]);
    assert_eq!(both(&look(path)), [true, false], "a required member is missing");
    assert_eq!(both(&look(&format!("{mode}{path}"))), [true, false], "the order is the declared one");
    assert_eq!(both(&look(&format!("{path}<parameter=line>\n3\n</parameter>\n{mode}"))), [true, true]);
    assert_eq!(both(&look(&format!("{path}<parameter=line>\n-3\n</parameter>\n{mode}"))), [true, false]);
    assert_eq!(both(&look(&format!("{path}{mode}<parameter=tags>\n[\"x\"]\n</parameter>\n"))), [true, true]);
    assert_eq!(both(&look(&format!("{path}<parameter=mode>\nx\n</parameter>\n"))), [true, false]);
    assert_eq!(both("<tool_call>\n<function=nope>\n</function>\n</tool_call>"), [false, false]);
    assert_eq!(both("<function=ping>\n</function>"), [true, false], "markup that the grammar does not know");
    let quoting = "<parameter=path>\nx </parameter> y </function>\n</parameter>\n";
    assert_eq!(both(&look(&format!("{quoting}{mode}"))), [true, true]);
}

#[test]
fn tool_choice_is_enforced() {
    let compiler = compiler();
    let ping = "<tool_call>\n<function=ping>\n</function>\n</tool_call>";
    let with =
        |choice, parallel| compiler.compile(None, Some(&rules(false, choice, parallel))).expect("compiles");
    let none = with(Choice::None, true);
    assert!(fits(&none, "text") && !fits(&none, ping) && !fits(&none, "a <tool_call>"));
    let required = with(Choice::Required, true);
    assert!(fits(&required, ping) && fits(&required, &format!("{ping}\n{ping}")) && !fits(&required, "text"));
    let one = with(Choice::Required, false);
    assert!(fits(&one, ping) && !fits(&one, &format!("{ping}\n{ping}")));
    let json = compiler
        .compile(Some(&Answer::JsonObject), Some(&rules(false, Choice::Auto, true)))
        .expect("compiles");
    assert!(fits(&json, "{\"a\":1}") && fits(&json, ping) && !fits(&json, "text"));
    let error = compiler
        .compile(Some(&Answer::Regex("a".into())), Some(&rules(false, Choice::Auto, true)))
        .expect_err("refused");
    assert_eq!(error.code, "invalid_grammar");
    let nothing = CallRules { choice: Choice::Required, ..CallRules::default() };
    assert!(compiler.compile(None, Some(&nothing)).is_err());
}

#[test]
fn random_strict_calls_parse_into_their_schema() {
    let compiler = compiler();
    let rules = rules(true, Choice::Required, true);
    let grammar = compiler.compile(None, Some(&rules)).expect("compiles");
    let tools: Vec<Tool> =
        rules.tools.iter().map(|t| Tool::function(&t.name, "", t.parameters.clone())).collect();
    let set = Arc::new(ToolSet::new(&tools));
    let mut random = Random(5);
    let mut seen = 0;
    for _ in 0..60 {
        let options = GuideOptions { start: Start::Reasoning, budget: Some(3), ..GuideOptions::default() };
        let Some(text) = walk(&grammar, options, &mut random, 160) else { continue };
        let options =
            OutputOptions { start: Start::Reasoning, tools: Arc::clone(&set), ..OutputOptions::default() };
        let calls = calls_of(&options, &text);
        // While they are made, they say the same.
        assert_eq!(calls_of(&OutputOptions { held: true, ..options }, &text), calls, "{text}");
        assert!(!calls.is_empty(), "{text}");
        for call in calls {
            let rule = rules.tools.iter().find(|t| t.name == call.name).expect("declared");
            assert!(valid(&rule.parameters, &Value::Object(call.arguments.clone())), "{text}");
            seen += 1;
        }
    }
    assert!(seen > 10, "only {seen} calls");
}

fn free_form(form: InputForm) -> Result<Arc<Grammar>, infernix_text::grammar::GrammarError> {
    let parameters =
        json!({"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]});
    let tool = ToolRule { name: "edit".into(), parameters, strict: false, input: Some(form) };
    // Not even the frame is asked for: a form that a tool declares is held in any case.
    let rules = CallRules { tools: vec![tool], choice: Choice::Auto, parallel: true, frame: false };
    compiler().compile(None, Some(&rules))
}

fn edit(input: &str) -> String {
    format!(
        "<tool_call>\n<function=edit>\n<parameter=input>\n{input}\n</parameter>\n</function>\n</tool_call>"
    )
}

/// Shaped like the grammars that coding agents send for patches.
const PATCH: &str = r#"
start: begin hunk+ end
begin: "*** Begin" LF
end: "*** End" LF?

hunk: add | change
add: "*** Add: " name LF added+   // a new file
name: /(.+)/
added: "+" /(.*)/ LF -> line
change: "*** Change: " name LF (context | line)+ last?
context: ("@@" | "@@ " /(.+)/) LF
line: ("+" | "-" | " ") /(.*)/ LF
last: "*** End of file" LF

%import common.LF
"#;

/// Recursive, with what may stand between.
const SUM: &str = r#"
?start: sum
?sum: product | sum "+" product -> add
?product: atom ("*" atom)~0..3
?atom: NUMBER | "(" sum ")" | NAME
NAME: ("a".."z" | "_")+
%import common.INT -> NUMBER
%import common.WS_INLINE
%ignore WS_INLINE
"#;

#[test]
fn texts_of_free_form_tools_are_held_to_their_grammar() {
    let patch = free_form(InputForm::Lark(PATCH.into())).expect("compiles");
    for good in [
        "*** Begin\n*** Add: a.txt\n+one\n+\n*** End\n",
        "*** Begin\n*** Change: b\n@@ fn x\n-old\n+new </parameter>\n \n*** End of file\n*** End",
    ] {
        assert!(fits(&patch, &edit(good)), "{good}");
    }
    for bad in ["", "*** Begin\n*** End", "*** Begin\n*** Add: a\none\n*** End\n", "text"] {
        assert!(!fits(&patch, &edit(bad)), "{bad}");
    }
    assert!(fits(&patch, "no call at all"));
    let sum = free_form(InputForm::Lark(SUM.into())).expect("compiles");
    for good in ["1", "  a + (b*2 )", "((((1))))*x", "1*1*1*1"] {
        assert!(fits(&sum, &edit(good)), "{good}");
    }
    for bad in ["", "1+", "(1", "1 1", "1*1*1*1*1", "A"] {
        assert!(!fits(&sum, &edit(bad)), "{bad}");
    }
    let regex = free_form(InputForm::Regex(r"^\d{4}-\d\d$".into())).expect("compiles");
    assert!(fits(&regex, &edit("2026-11")) && !fits(&regex, &edit("2026-1")));
    let folded = free_form(InputForm::Lark("start: \"Get\"i [\" \" /[a-z]/]".into())).expect("compiles");
    assert!(fits(&folded, &edit("gET")) && fits(&folded, &edit("GET x")) && !fits(&folded, &edit("GO")));
    let error = free_form(InputForm::Lark("start: x\n".into())).expect_err("refused");
    assert_eq!((error.tool.as_deref(), error.position), (Some("edit"), Some((1, 8))));
    assert_eq!(free_form(InputForm::Regex("(".into())).expect_err("refused").code, "invalid_regex");
}

#[test]
fn random_free_form_calls_parse_into_texts_of_their_grammar() {
    let mut random = Random(11);
    let tool =
        Tool::function("edit", "", json!({"type": "object", "properties": {"input": {"type": "string"}}}));
    let set = Arc::new(ToolSet::new([&tool]));
    let mut seen = 0;
    for source in
        [SUM, "start: line+\nline: /[+-]/ /[^\\n]*/ \"\\n\"", "start: (\"<\" | \"/\" | \"\\n\")~3..9"]
    {
        let form = InputForm::Lark(source.into());
        let call = free_form(form).expect("compiles");
        for _ in 0..40 {
            // Free text is left at once, so that the walk is about the call.
            let mut guide = call.guide(GuideOptions::default());
            let open = "<tool_call>\n<function=edit>\n<parameter=input>\n";
            for id in FORMAT.tokenizer().encode(open).expect("encodes") {
                guide.accept(id).expect("the frame");
            }
            let Some(rest) = walk_on(&mut guide, &mut random, 60) else { continue };
            let text = format!("{open}{rest}");
            assert!(fits(&call, &text), "{text:?}");
            let options =
                OutputOptions { start: Start::Content, tools: Arc::clone(&set), ..OutputOptions::default() };
            let mut parser = OutputParser::new(options);
            let mut events = parser.push(&text);
            events.extend(parser.finish());
            let input = events.iter().find_map(|e| match e {
                Event::Call(call) => call.arguments["input"].as_str().map(str::to_owned),
                _ => None,
            });
            let input = input.unwrap_or_else(|| panic!("no call in {text:?}"));
            assert!(fits(&call, &edit(&input)), "{input:?} of {text:?}");
            seen += 1;
        }
    }
    assert!(seen > 30, "only {seen} calls came to an end");
}

/// The calls that an output is made of.
fn calls_of(options: &OutputOptions, text: &str) -> Vec<ParsedCall> {
    let mut parser = OutputParser::new(options.clone());
    let mut events = parser.push(text);
    events.extend(parser.finish());
    let call = |event| match event {
        Event::Call(call) | Event::CallEnd { call, whole: true } => Some(call),
        Event::Content(_) | Event::CallEnd { .. } => panic!("not calls alone: {event:?} of {text:?}"),
        Event::Reasoning(_) | Event::CallBegin(_) | Event::CallPart(_) => None,
    };
    events.into_iter().filter_map(call).collect()
}

/// A tool with one required member of this schema, strict and demanded.
fn strict_member(name: &str, member: Value) -> Result<(Arc<Grammar>, ToolSet), String> {
    let parameters = json!({"type": "object", "properties": {name: member, "z": {"type": "boolean"}},
        "required": [name], "additionalProperties": false});
    let set = ToolSet::new([&Tool::function("f", "", parameters.clone())]).strict([&"f".to_owned()]);
    let tools = vec![ToolRule { name: "f".into(), parameters, strict: true, input: None }];
    let rules = CallRules { tools, choice: Choice::Required, parallel: false, frame: true };
    compiler().compile(None, Some(&rules)).map(|grammar| (grammar, set)).map_err(|e| e.to_string())
}

/// The arguments of the call that an output is.
fn arguments(set: &ToolSet, text: &str) -> serde_json::Map<String, Value> {
    let options =
        OutputOptions { start: Start::Content, tools: Arc::new(set.clone()), ..OutputOptions::default() };
    let calls = calls_of(&options, text);
    assert_eq!(calls_of(&OutputOptions { held: true, ..options }, text), calls, "{text:?}");
    let [call] = calls.as_slice() else { panic!("not one call: {calls:?} of {text:?}") };
    call.arguments.clone()
}

#[test]
fn a_text_with_a_length_is_held_for_one_request_as_for_the_next() {
    let dense = "<parameter=a>\n".repeat(4) + "\n</parameter>\n<".repeat(9).as_str();
    for member in [
        json!({"maxLength": 200}),
        json!({"maxLength": 2000}),
        json!({"minLength": 100}),
        json!({"minLength": 128, "maxLength": 3000}),
        json!({"minLength": 1000, "maxLength": 30_000}),
        json!({"pattern": "^(.|\\n){0,800}$"}),
        json!({"pattern": "^[a-z ]*<.*$", "minLength": 20, "maxLength": 90}),
    ] {
        let mut schema = member.clone();
        schema["type"] = json!("string");
        let (grammar, set) = strict_member("a", schema).expect("compiles");
        for (round, body) in ["", "ab <b", &dense, "</parameter>\n", ""].into_iter().enumerate() {
            // As much of the text as may come, then at random to the end: no mask fails, whatever others have written.
            let mut guide = grammar.guide(GuideOptions::default());
            let mut ids = Vec::new();
            for id in bytewise(&format!("<tool_call>\n<function=f>\n<parameter=a>\n{body}")) {
                let mut words = FORMAT.tokenizer().vocabulary_mask(FORMAT.tokenizer().addressable() as usize);
                guide.mask(&mut words).unwrap_or_else(|e| panic!("{member} {round}: {e}"));
                if guide.accept(id).is_err() {
                    break;
                }
                ids.push(id);
            }
            let mut random = Random(31 + round as u64);
            let Some(rest) = walk_on(&mut guide, &mut random, 700) else { continue };
            let text = FORMAT.tokenizer().decode(&ids, false) + &rest;
            let value = arguments(&set, &text)["a"].as_str().expect("a text").chars().count() as u64;
            assert!(member["minLength"].as_u64().is_none_or(|n| n <= value), "{member}: {text:?}");
            assert!(member["maxLength"].as_u64().is_none_or(|n| n >= value), "{member}: {text:?}");
        }
    }
}

#[test]
fn a_closing_tag_ends_a_strict_text_where_the_reader_ends_it() {
    let call = |text: &str| {
        format!("<tool_call>\n<function=f>\n<parameter=a>\n{text}\n</parameter>\n</function>\n</tool_call>")
    };
    for (member, good, bad) in [
        (
            json!({"type": "string"}),
            vec!["", "x </parameter> y", "</parameter>x", "a\n</parameter>\nb"],
            vec!["x</parameter>", "x\n</parameter>\n"],
        ),
        (
            json!({"type": "string", "maxLength": 20}),
            vec!["", "12345678901234567890", "\n"],
            vec!["123456789012345678901"],
        ),
        (
            json!({"type": "string", "minLength": 1}),
            vec!["a", "\n", "x</parameter> y"],
            vec!["", "x</parameter>", "x\n</parameter>"],
        ),
        (json!({"type": "string", "pattern": "^[a-c]+$"}), vec!["abc"], vec!["", "abd", "a\n"]),
        (
            json!({"enum": ["a", "a\n", "\nb", "12", "x</parameter>y"]}),
            vec!["a", "a\n", "\nb", "12", "x</parameter>y"],
            vec!["", "b"],
        ),
        (
            json!({"type": "string", "enum": ["a", "bb", "ccc"], "minLength": 2, "pattern": "^b"}),
            vec!["bb"],
            vec!["a", "ccc"],
        ),
        (json!({"const": "7"}), vec!["7"], vec!["8"]),
    ] {
        let (grammar, set) = strict_member("a", member.clone()).expect("compiles");
        for text in good {
            assert!(fits(&grammar, &call(text)), "{member} {text:?}");
            assert_eq!(arguments(&set, &call(text))["a"], text, "{member}");
        }
        for text in bad {
            assert!(!fits(&grammar, &call(text)), "{member} {text:?}");
        }
        let early = "</parameter>\n</function>\n</tool_call>\n</parameter>\n</function>\n</tool_call>";
        assert!(!fits(&grammar, &call(early)), "{member}");
    }
    for (member, why) in [
        (json!({"type": "string", "pattern": "^a\n</parameter>\n<b$"}), "no text fits"),
        (json!({"type": "string", "pattern": "^[a-c]{3}$", "minLength": 4}), "no text fits"),
        (json!({"type": "string", "enum": ["</parameter>\n</function>"]}), "no text fits"),
        (json!({"type": "string", "minLength": 1001}), "at most 1000"),
        (json!({"enum": ["a", 1]}), "either text or not"),
    ] {
        let error = strict_member("a", member.clone()).err().unwrap_or_else(|| panic!("{member} compiles"));
        assert!(error.contains(why), "{member}: {error}");
    }
    assert!(strict_member("a", json!({"type": "string", "pattern": "^[a-c]*$", "minLength": 1001})).is_ok());
}

#[test]
fn the_word_null_of_a_strict_text_that_may_be_null_is_null() {
    let call = |text: &str| {
        format!("<tool_call>\n<function=f>\n<parameter=a>\n{text}\n</parameter>\n</function>\n</tool_call>")
    };
    for (text, good, bad) in [
        (json!({"type": "string"}), "x\ny", None),
        (json!({"type": "string", "maxLength": 2}), "xy", Some("xyz")),
        (json!({"type": "string", "pattern": "^[a-c]+$"}), "abc", Some("nul")),
        (json!({"type": "string", "minLength": 5}), "abcde", Some("abcd")),
        (json!({"type": "string", "enum": ["a", "b"]}), "a", Some("c")),
    ] {
        for union in [json!({"anyOf": [text, {"type": "null"}]}), json!({"oneOf": [{"type": "null"}, text]})]
        {
            let (grammar, set) = strict_member("a", union.clone()).expect("compiles");
            assert!(fits(&grammar, &call("null")) && fits(&grammar, &call(good)), "{union}");
            assert_eq!(arguments(&set, &call("null"))["a"], Value::Null, "{union}");
            assert_eq!(arguments(&set, &call(good))["a"], good, "{union}");
            assert!(bad.is_none_or(|bad| !fits(&grammar, &call(bad))), "{union}");
        }
    }
    let (grammar, set) = strict_member("a", json!({"type": ["null", "string"]})).expect("compiles");
    assert!(fits(&grammar, &call("null")) && fits(&grammar, &call("nullable")));
    assert_eq!(arguments(&set, &call("nullable"))["a"], "nullable");
    assert!(strict_member("a", json!({"type": ["string", "integer"]})).is_err());
}

#[test]
fn every_name_that_a_strict_tool_may_declare_is_read_back() {
    for name in ["a b", " a", "a ", "a\tb", "日 本", "\"a\"", "'a'", "name", "a=\"b\"", "é"] {
        let (grammar, set) = strict_member(name, json!({"type": "boolean"})).expect("compiles");
        let text = format!(
            "<tool_call>\n<function=f>\n<parameter={name}>\ntrue\n</parameter>\n</function>\n</tool_call>"
        );
        assert!(fits(&grammar, &text), "{name:?}");
        assert_eq!(arguments(&set, &text).get(name), Some(&json!(true)), "{name:?}");
        // However the output is cut.
        let options = OutputOptions { tools: Arc::new(set.clone()), ..OutputOptions::default() };
        let mut parser = OutputParser::new(options);
        let mut events: Vec<Event> = text.chars().flat_map(|c| parser.push(&c.to_string())).collect();
        events.extend(parser.finish());
        assert!(matches!(&events[..], [Event::Call(call)] if call.arguments.contains_key(name)), "{name:?}");
    }
    for name in ["", "a>b", "a<b", "a\nb", &"x".repeat(257)] {
        assert!(strict_member(name, json!({"type": "boolean"})).is_err(), "{name:?}");
    }
    // Free calls are held to names that can be read, too.
    let mut free = rules(false, Choice::Required, true);
    free.tools[0].parameters["properties"]["a b"] = json!({"type": "string"});
    let grammar = compiler().compile(None, Some(&free)).expect("compiles");
    let named = |name: &str| fits(&grammar, &look(&format!("<parameter={name}>\nx\n</parameter>\n")));
    assert!(named("path") && named("other") && named("a b") && !named("b a") && !named("é"));
}

#[test]
fn a_free_form_tool_without_a_format_takes_its_input_whole() {
    let grammar = {
        let tool = ToolRule {
            name: "edit".into(),
            parameters: json!({}),
            strict: false,
            input: Some(InputForm::Any),
        };
        let rules = CallRules { tools: vec![tool], choice: Choice::Required, parallel: true, frame: true };
        assert!(CallRules { choice: Choice::Auto, ..rules.clone() }.restricts());
        compiler().compile(None, Some(&rules)).expect("compiles")
    };
    assert!(fits(&grammar, &edit("")) && fits(&grammar, &edit("any\ntext <b> </parameter> x")));
    assert!(!fits(&grammar, &edit("x").replace("input", "path")));
    let void = InputForm::Regex("a\n</parameter>\n<b".into());
    assert_eq!(free_form(void).expect_err("no such text").tool.as_deref(), Some("edit"));
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
            if let Err(error) = free_form(InputForm::Lark(lark)) {
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
