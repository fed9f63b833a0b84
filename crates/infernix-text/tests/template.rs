//! Templates and expressions against the output of Python's Jinja2 (see goldens/make_goldens.py).

use std::path::PathBuf;
use std::sync::Arc;

use infernix_text::{Clock, Template, TemplateLimits, TextError};
use serde_json::{Map, Value};

/// The goldens' clock: 2026-03-05 07:08:09.
const NOW: Clock = Clock { unix_seconds: 1_772_694_489, utc_offset_seconds: 0 };

/// Expressions whose output is known and accepted to differ, with the reason.
const DEPARTURES: &[(&str, &str)] = &[
    (
        "{{ 'x' ~ big ~ small }}",
        "the engine spells very large and very small floats without an exponent after ~",
    ),
    ("{{ '<b>x</b> y' | striptags }}", "no such filter"),
    ("{{ 'hello world foo' | truncate(9) }}", "no such filter"),
    ("{{ 'a b' | urlencode }}", "no such filter"),
    ("{{ text | wordwrap(5) }}", "no such filter"),
    ("{{ 1234567 | filesizeformat }}", "no such filter"),
    ("{{ {'a': 1} | xmlattr }}", "no such filter"),
    ("{{ list | pprint }}", "lists are broken into lines earlier"),
    ("{{ 'abc' | random | length }}", "no such filter: a prompt depends on its request alone"),
    (
        "{% macro k() %}{{ kwargs | length }}{{ varargs | length }}{% endmacro %}{{ k(1, 2, a=3) }}",
        "macros take what they declare",
    ),
    ("{% for x in nil %}a{% endfor %}", "none iterates as nothing instead of failing"),
    ("{{ lipsum is defined }} {{ cycler is defined }} {{ joiner is defined }}", "no such functions"),
    (
        "{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}{{ c.current }}{% set j = joiner(', ') %}{{ j() }}x{{ j() }}y",
        "no such functions",
    ),
    ("{{ self is defined }}", "templates have no blocks to refer to"),
    ("{{ \"\\U0001f980\" }}", "escapes of eight digits are not read"),
    ("{{ +1 }}", "no unary plus"),
];

fn render(source: &str, variables: &Map<String, Value>) -> Result<String, TextError> {
    Template::with(source, TemplateLimits::default(), Arc::new(|| NOW))?.render(variables)
}

/// What differs from the golden, if anything does.
fn difference(got: &Result<String, TextError>, case: &Value) -> Option<String> {
    match (got, case.get("output"), case.get("error")) {
        (Ok(text), Some(Value::String(expected)), _) if text == expected => None,
        (Ok(text), Some(expected), _) => Some(format!("got  {text:?}\n  want {expected}")),
        (Ok(text), None, _) => Some(format!("got  {text:?}\n  want an error")),
        (Err(error), Some(expected), _) => Some(format!("got  {error}\n  want {expected}")),
        (Err(TextError::TemplateRefused { message }), _, Some(Value::String(words))) if message == words => {
            None
        }
        // Other failures only have to fail; their words are the engine's own.
        (Err(error), _, Some(Value::String(words)))
            if words.is_empty() && !matches!(error, TextError::TemplateRefused { .. }) =>
        {
            None
        }
        (Err(error), _, words) => Some(format!("got  {error}\n  want {words:?}")),
    }
}

#[test]
fn expressions_equal_the_original() {
    let goldens: Value = serde_json::from_str(include_str!("goldens/expressions.json")).expect("parses");
    let context = goldens["context"].as_object().expect("context");
    let mut wrong = Vec::new();
    for case in goldens["cases"].as_array().expect("cases") {
        let source = case["source"].as_str().expect("source");
        let known = DEPARTURES.iter().find(|(s, _)| *s == source);
        match (difference(&render(source, context), case), known) {
            (Some(_), Some(_)) | (None, None) => {}
            (Some(difference), None) => wrong.push(format!("{source}\n  {difference}")),
            (None, Some((_, reason))) => wrong.push(format!("{source}\n  agrees now, though: {reason}")),
        }
    }
    assert!(wrong.is_empty(), "{} differ\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn templates_equal_the_original() {
    let goldens: Value = serde_json::from_str(include_str!("goldens/templates.json")).expect("parses");
    let here = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    let mut wrong = Vec::new();
    for case in goldens["cases"].as_array().expect("cases") {
        let name = case["template"].as_str().expect("template");
        let path = if name == "demo" {
            here.join("../../models/flash-demo-nvfp4/chat_template.jinja")
        } else {
            here.join("tests/goldens/templates").join(name)
        };
        let source = std::fs::read_to_string(path).expect("reads");
        let conversation = case["conversation"].as_str().expect("conversation");
        let setting = case["setting"].as_u64().expect("setting") as usize;
        let mut variables = goldens["settings"][setting].as_object().expect("setting").clone();
        variables.insert("messages".into(), goldens["conversations"][conversation].clone());
        variables.insert("bos_token".into(), "<s>".into());
        variables.insert("eos_token".into(), "</s>".into());
        if let Some(difference) = difference(&render(&source, &variables), case) {
            wrong.push(format!("{name} {conversation} {setting}\n  {difference}"));
        }
    }
    assert!(wrong.is_empty(), "{} differ\n{}", wrong.len(), wrong.join("\n"));
}
