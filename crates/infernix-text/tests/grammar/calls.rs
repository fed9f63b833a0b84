//! Calls as the grammar holds them and as the parser of outputs reads them.

use std::sync::Arc;

use infernix_text::grammar::{Answer, CallRules, Choice, Grammar, GuideOptions, InputForm, ToolRule};
use infernix_text::{Event, OutputOptions, OutputParser, ParsedCall, Start, Tool, ToolSet};
use serde_json::{Value, json};

use super::{FORMAT, Random, bytewise, compiler, fits, valid, walk, walk_on};

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

pub(super) fn free_form(form: InputForm) -> Result<Arc<Grammar>, infernix_text::grammar::GrammarError> {
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
