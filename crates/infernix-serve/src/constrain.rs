//! Grammars of requests: what the content must be and which calls may be made, as the engine's constraint.

use crate::error::ApiError;
use crate::tools::{ToolChoice, Tools};
use crate::turn::{ContentFormat, Turn};
use infernix_engine::sched::Constraint;
use infernix_text::grammar::{
    Answer, CallRules, Choice, Grammar, GrammarCompiler, GrammarError, Guide, GuideOptions, ToolRule,
};
use infernix_text::{Start, Tool};
use serde_json::{Value, json};
use std::sync::Arc;

/// A grammar and where the output begins.
#[derive(Debug, Clone)]
pub(crate) struct Constrained {
    grammar: Arc<Grammar>,
    start: Start,
}

impl Constrained {
    /// The constraint of one answer.
    pub(crate) fn constraint(&self) -> Box<dyn Constraint> {
        Box::new(Guided(self.grammar.guide(GuideOptions { start: self.start, ..GuideOptions::default() })))
    }
}

struct Guided(Guide);

impl Constraint for Guided {
    fn mask(&mut self, words: &mut [u32]) -> Result<(), String> {
        self.0.mask(words)
    }

    fn accept(&mut self, id: u32) -> Result<(), String> {
        self.0.accept(id)
    }

    fn rollback(&mut self, n: usize) -> Result<(), String> {
        self.0.rollback(n)
    }

    fn accepts(&mut self, ids: &[u32]) -> usize {
        self.0.accepts(ids)
    }

    fn finished(&self) -> bool {
        self.0.finished()
    }
}

/// The grammar that a turn asks for, if it asks for any.
///
/// # Errors
/// What cannot be enforced, at its place in the request.
pub(crate) fn constrained(
    compiler: &GrammarCompiler,
    turn: &Turn,
    start: Start,
) -> Result<Option<Constrained>, ApiError> {
    let rules = rules(&turn.tools, turn.constrain_frame);
    let (answer, path) = match &turn.format {
        None => (None, "tools"),
        Some(ContentFormat::JsonObject) => (Some(Answer::JsonObject), "response_format"),
        Some(ContentFormat::JsonSchema { schema, path }) => {
            (Some(Answer::Schema(schema.clone())), path.as_str())
        }
        Some(ContentFormat::Grammar(text)) => {
            (Some(Answer::Gbnf(text.clone())), "structured_outputs.grammar")
        }
        Some(ContentFormat::Regex(text)) => (Some(Answer::Regex(text.clone())), "structured_outputs.regex"),
        Some(ContentFormat::Choice(list)) => {
            (Some(Answer::Choice(list.clone())), "structured_outputs.choice")
        }
    };
    if answer.is_none() && rules.as_ref().is_none_or(|r| !r.restricts()) {
        return Ok(None);
    }
    let grammar = compiler.compile(answer.as_ref(), rules.as_ref()).map_err(|e| refused(path, &e))?;
    Ok(Some(Constrained { grammar, start }))
}

fn refused(path: &str, error: &GrammarError) -> ApiError {
    let path = if error.tool.is_some() { "tools" } else { path };
    ApiError::at(400, error.code, path, error.to_string())
}

/// What is enforced about calls; `None` where no tool is declared.
fn rules(tools: &Tools, frame: bool) -> Option<CallRules> {
    let declared: Vec<&Tool> = tools.prompt.iter().chain(&tools.deferred).chain(&tools.found).collect();
    if declared.is_empty() {
        return None;
    }
    let chosen: Option<&[String]> = match &tools.choice {
        ToolChoice::Named { names, .. } | ToolChoice::Allowed(names) => Some(names),
        _ => None,
    };
    let once = matches!(tools.choice, ToolChoice::Named { once: true, .. });
    Some(CallRules {
        tools: declared
            .into_iter()
            .filter(|tool| chosen.is_none_or(|names| names.iter().any(|n| n == tool.name())))
            .map(|tool| ToolRule {
                name: tool.name().to_owned(),
                parameters: tool.parameters().cloned().unwrap_or_else(empty_schema),
                strict: tools.strict.iter().any(|n| n == tool.name()),
            })
            .collect(),
        choice: match tools.choice {
            ToolChoice::None => Choice::None,
            ToolChoice::Required | ToolChoice::Named { .. } => Choice::Required,
            ToolChoice::Auto | ToolChoice::Allowed(_) => Choice::Auto,
        },
        parallel: tools.parallel && !once,
        frame,
    })
}

fn empty_schema() -> Value {
    json!({"type": "object", "properties": {}, "additionalProperties": false})
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tools::{Function, Identity};
    use infernix_text::{ChatFormat, Resources};
    use std::path::Path;

    fn compiler() -> GrammarCompiler {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/flash-demo-nvfp4");
        let format = ChatFormat::new(&Resources::from_folder(&folder).expect("is there")).expect("loads");
        GrammarCompiler::new(Arc::clone(format.tokenizer()), &format.stop_ids()).expect("prepares")
    }

    fn turn(strict: bool, parameters: Value) -> Turn {
        let mut turn = Turn::new();
        let function = Function {
            path: "tools[0]".into(),
            name: "f".into(),
            description: None,
            parameters: Some(parameters),
            strict,
            deferred: false,
        };
        turn.tools
            .function(function, Identity::Function { name: "f".into(), namespace: None })
            .expect("valid");
        turn
    }

    #[test]
    fn a_refusal_names_the_field_the_tool_and_the_place() {
        let compiler = compiler();
        let bad = turn(true, json!({"type": "object", "properties": {}}));
        let error = constrained(&compiler, &bad, Start::Content).expect_err("refused");
        assert_eq!((error.code, error.param.as_deref()), ("unsupported_json_schema", Some("tools")));
        assert!(
            error.message.contains("\"f\"") && error.message.contains("/additionalProperties"),
            "{error}"
        );
        let mut schema = Turn::new();
        let asked = json!({"properties": {"a": {"uniqueItems": true}}});
        schema.format = Some(ContentFormat::JsonSchema { schema: asked, path: "p.schema".into() });
        let error = constrained(&compiler, &schema, Start::Content).expect_err("refused");
        assert!(
            error.message.contains("/properties/a/uniqueItems") && error.param.as_deref() == Some("p.schema")
        );
    }

    #[test]
    fn choices_become_rules() {
        let compiler = compiler();
        let constrains =
            |turn: &Turn| constrained(&compiler, turn, Start::Content).expect("compiles").is_some();
        assert!(!constrains(&Turn::new()));
        let mut free = turn(false, json!({}));
        assert!(constrains(&free), "the frame of calls is enforced");
        free.constrain_frame = false;
        assert!(!constrains(&free));
        free.tools.choice = ToolChoice::Named { names: vec!["f".into()], once: true };
        let rules = rules(&free.tools, false).expect("has a tool");
        assert_eq!((rules.choice, rules.parallel, rules.tools.len()), (Choice::Required, false, 1));
        free.tools.choice = ToolChoice::None;
        assert!(constrains(&free));
    }
}
