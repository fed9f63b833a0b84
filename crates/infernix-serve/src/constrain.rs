//! What an answer is held to: its form, rules for calls, and limits on its reasoning.
//!
//! The grammar's guide masks tokens and ends reasoning at its budget. The guard beside it looks at the reasoning now
//! and then, and tells the guide to conclude when it goes round in circles.

use crate::error::ApiError;
use crate::options::ReasoningLoop;
use crate::tools::{ToolChoice, Tools};
use crate::turn::ContentFormat;
use infernix_engine::sched::Constraint;
use infernix_text::Tokenizer;
use infernix_text::grammar::{
    Answer, CallRules, Choice, Grammar, GrammarCompiler, GrammarError, Guide, GuideOptions, ToolRule,
};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::hash::{BuildHasher as _, BuildHasherDefault, DefaultHasher};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Tokens between two looks at the reasoning.
const GUARD_STEP: usize = 512;
/// Words of a passage that is compared.
const PASSAGE: usize = 12;
/// Words looked back over.
const WINDOW: usize = 30_000;
/// The last words that are judged; fewer are not.
const RECENT: usize = 2_000;
/// Times that a passage must come to count as repeated.
const REPEATS: u32 = 3;

/// What the answers to a request are held to.
#[derive(Clone)]
pub(crate) struct ConstraintPlan {
    pub(crate) grammar: Arc<Grammar>,
    pub(crate) guide: GuideOptions,
    pub(crate) guard: ReasoningLoop,
    pub(crate) tokenizer: Arc<Tokenizer>,
}

impl ConstraintPlan {
    /// The constraint of one answer, and where it says that the guard cut the answer.
    pub(crate) fn constraint(&self) -> (Box<dyn Constraint>, Arc<AtomicBool>) {
        let conclude = Arc::new(AtomicBool::new(false));
        let cut = Arc::new(AtomicBool::new(false));
        let options = GuideOptions { conclude: Some(Arc::clone(&conclude)), ..self.guide.clone() };
        let held = Held {
            guide: self.grammar.guide(options),
            guard: self.guard,
            conclude,
            cut: Arc::clone(&cut),
            tokenizer: Arc::clone(&self.tokenizer),
            ids: Vec::new(),
        };
        (Box::new(held), cut)
    }
}

/// A guide and the guard beside it.
struct Held {
    guide: Guide,
    guard: ReasoningLoop,
    conclude: Arc<AtomicBool>,
    cut: Arc<AtomicBool>,
    tokenizer: Arc<Tokenizer>,
    /// The output so far, for the guard only.
    ids: Vec<u32>,
}

impl Held {
    /// Looks at the reasoning where it is time to: a function of the tokens alone, so drafts change nothing.
    fn look(&self) {
        let n = self.ids.len();
        if n == 0 || n % GUARD_STEP != 0 || !self.guide.in_reasoning() {
            return;
        }
        if goes_in_circles(&self.tokenizer.decode(&self.ids, true)) {
            let flag = if self.guard == ReasoningLoop::Conclude { &self.conclude } else { &self.cut };
            flag.store(true, Ordering::Relaxed);
        }
    }
}

impl Constraint for Held {
    fn mask(&mut self, words: &mut [u32]) -> Result<(), String> {
        self.guide.mask(words)
    }

    fn accept(&mut self, id: u32) -> Result<(), String> {
        self.guide.accept(id)?;
        if self.guard != ReasoningLoop::Off {
            self.ids.push(id);
            self.look();
        }
        Ok(())
    }

    fn rollback(&mut self, n: usize) -> Result<(), String> {
        self.guide.rollback(n)?;
        if self.guard != ReasoningLoop::Off {
            let left = self.ids.len().saturating_sub(n);
            // A look at what is taken back did not happen.
            if left / GUARD_STEP < self.ids.len() / GUARD_STEP {
                self.conclude.store(false, Ordering::Relaxed);
                self.cut.store(false, Ordering::Relaxed);
            }
            self.ids.truncate(left);
        }
        Ok(())
    }

    fn accepts(&mut self, ids: &[u32]) -> usize {
        if self.guard == ReasoningLoop::Off {
            return self.guide.accepts(ids);
        }
        // Up to the next look nothing but the guide decides.
        let until = GUARD_STEP - self.ids.len() % GUARD_STEP;
        self.guide.accepts(&ids[..ids.len().min(until)])
    }

    fn finished(&self) -> bool {
        self.cut.load(Ordering::Relaxed) || self.guide.finished()
    }
}

/// The grammar of a request.
pub(crate) fn compile(
    compiler: &GrammarCompiler,
    format: Option<&ContentFormat>,
    tools: &Tools,
) -> Result<Arc<Grammar>, ApiError> {
    let path = match format {
        Some(ContentFormat::JsonSchema { path, .. }) => path.as_str(),
        Some(ContentFormat::JsonObject) => "response_format",
        Some(ContentFormat::Grammar(_)) => "structured_outputs.grammar",
        Some(ContentFormat::Regex(_)) => "structured_outputs.regex",
        Some(ContentFormat::Choice(_)) => "structured_outputs.choice",
        None => "tools",
    };
    let answer = format.map(|format| match format {
        ContentFormat::JsonObject => Answer::JsonObject,
        ContentFormat::JsonSchema { schema, .. } => Answer::Schema(schema.clone()),
        ContentFormat::Grammar(text) => Answer::Gbnf(text.clone()),
        ContentFormat::Regex(text) => Answer::Regex(text.clone()),
        ContentFormat::Choice(list) => Answer::Choice(list.clone()),
    });
    let rules = call_rules(tools);
    compiler.compile(answer.as_ref(), rules.as_ref()).map_err(|e| refused(path, e))
}

fn refused(path: &str, error: GrammarError) -> ApiError {
    let path = if error.tool.is_some() { "tools" } else { path };
    ApiError::at(400, error.code, path, error.to_string())
}

/// The arguments of a tool that declares none.
fn empty_schema() -> Value {
    json!({"type": "object", "properties": {}, "additionalProperties": false})
}

/// What is enforced about calls; `None` where the request has no tools.
pub(crate) fn call_rules(tools: &Tools) -> Option<CallRules> {
    if !tools.any() {
        return None;
    }
    let (choice, names, parallel) = match &tools.choice {
        ToolChoice::Auto => (Choice::Auto, None, true),
        ToolChoice::None => (Choice::None, None, true),
        ToolChoice::Required => (Choice::Required, None, true),
        ToolChoice::Named { names, once } => (Choice::Required, Some(names), !once),
        ToolChoice::Allowed(names) => (Choice::Auto, Some(names), true),
    };
    let rule = |tool: &infernix_text::Tool| ToolRule {
        name: tool.name().to_owned(),
        parameters: tool.parameters().cloned().unwrap_or_else(empty_schema),
        strict: tools.strict.iter().any(|n| n == tool.name()),
        input: tools.forms.get(tool.name()).cloned(),
    };
    let rules = tools
        .prompt
        .iter()
        .chain(&tools.found)
        .filter(|tool| names.is_none_or(|names| names.iter().any(|n| n == tool.name())))
        .map(rule)
        .collect();
    // A list of what may be called is enforced whether or not more is asked for.
    let frame = tools.frame || matches!(tools.choice, ToolChoice::Allowed(_));
    Some(CallRules { tools: rules, choice, parallel: parallel && tools.parallel, frame })
}

/// Whether at least a quarter of the last words stand in passages that came several times.
fn goes_in_circles(text: &str) -> bool {
    let hasher = BuildHasherDefault::<DefaultHasher>::default();
    let mut words: Vec<u64> = Vec::new();
    let mut word = String::new();
    for c in text.chars() {
        if c.is_alphanumeric() || c == '_' {
            word.extend(c.to_lowercase());
            continue;
        }
        if !word.is_empty() {
            words.push(hasher.hash_one(&word));
            word.clear();
        }
        if !c.is_whitespace() {
            words.push(hasher.hash_one(c));
        }
    }
    let words = &words[words.len().saturating_sub(WINDOW)..];
    if words.len() < RECENT {
        return false;
    }
    let mut counts: HashMap<&[u64], u32> = HashMap::new();
    for passage in words.windows(PASSAGE) {
        *counts.entry(passage).or_default() += 1;
    }
    let from = words.len() - RECENT;
    let mut covered = vec![false; RECENT];
    for (start, passage) in words.windows(PASSAGE).enumerate().skip(from) {
        if counts[passage] >= REPEATS {
            covered[start - from..(start - from + PASSAGE).min(RECENT)].fill(true);
        }
    }
    covered.iter().filter(|c| **c).count() * 4 >= RECENT
}

#[cfg(test)]
mod tests {
    use super::*;
    use infernix_text::{ChatFormat, Resources, Start};

    fn format() -> ChatFormat {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/flash-demo-nvfp4");
        ChatFormat::new(&Resources::from_folder(&folder).expect("the bundled model")).expect("its format")
    }

    fn plan(format: &ChatFormat, budget: Option<usize>, guard: ReasoningLoop) -> ConstraintPlan {
        let tokenizer = Arc::clone(format.tokenizer());
        let compiler = GrammarCompiler::new(Arc::clone(&tokenizer), &format.stop_ids()).expect("a compiler");
        let grammar = compile(&compiler, None, &Tools::new()).expect("no form");
        let closing = "\n\nEnough.\n</think>\n\n".to_owned();
        let guide = GuideOptions { start: Start::Reasoning, budget, closing, conclude: None };
        ConstraintPlan { grammar, guide, guard, tokenizer }
    }

    /// What the constraint forces, token by token, until it forces nothing.
    fn forced(constraint: &mut dyn Constraint, tokenizer: &Tokenizer) -> String {
        let mut ids = Vec::new();
        loop {
            let mut words = vec![u32::MAX; tokenizer.addressable().div_ceil(32) as usize];
            constraint.mask(&mut words).expect("a mask");
            let allowed: Vec<u32> = (0..tokenizer.addressable())
                .filter(|id| words[*id as usize / 32] >> (id % 32) & 1 == 1)
                .collect();
            let [only] = allowed[..] else { return tokenizer.decode(&ids, false) };
            constraint.accept(only).expect("the forced token");
            ids.push(only);
        }
    }

    #[test]
    fn at_the_budget_the_reasoning_is_closed_with_the_message() {
        let format = format();
        let (mut constraint, _) = plan(&format, Some(3), ReasoningLoop::Off).constraint();
        for id in format.tokenizer().encode("aaa bbb ccc").expect("ids").into_iter().take(3) {
            constraint.accept(id).expect("free");
        }
        assert_eq!(forced(constraint.as_mut(), format.tokenizer()), "\n\nEnough.\n</think>\n\n");
    }

    #[test]
    fn circles_end_the_reasoning_however_they_were_drafted() {
        let format = format();
        let sentence = "Wait, let me think about this once more, and then I decide what to do next. ";
        let ids = format.tokenizer().encode(&sentence.repeat(300)).expect("ids");
        let plan = plan(&format, None, ReasoningLoop::Conclude);
        let end_of = |draft: usize| {
            let (mut constraint, _) = plan.constraint();
            let mut at = 0;
            while at < ids.len() {
                let taken = constraint.accepts(&ids[at..(at + draft).min(ids.len())]);
                if taken == 0 {
                    return at;
                }
                for &id in &ids[at..at + taken] {
                    constraint.accept(id).expect("was accepted");
                }
                at += taken;
            }
            at
        };
        let end = end_of(1);
        assert!(end < ids.len() && end % GUARD_STEP == 0, "{end}");
        assert_eq!((end_of(3), end_of(7)), (end, end));
    }

    #[test]
    fn circles_are_seen_and_long_prose_is_not() {
        let prose: String = (0..4000).map(|i| format!("word{} is {} here. ", i * 7919 % 4001, i)).collect();
        assert!(!goes_in_circles(&prose));
        let circle = "Wait, let me think about this once more and then decide what to do next. ".repeat(200);
        assert!(goes_in_circles(&format!("{prose}{circle}")));
        assert!(!goes_in_circles(&circle[..2000]), "too short to judge");
    }

    #[test]
    fn a_named_tool_is_the_only_one_and_once() {
        use crate::tools::{Function, Identity};
        let mut tools = Tools::new();
        assert!(call_rules(&tools).is_none());
        for name in ["a", "b"] {
            let function = Function {
                path: "tools".into(),
                name: name.into(),
                description: None,
                parameters: None,
                strict: false,
                deferred: false,
                form: None,
            };
            tools.function(function, Identity::Custom { name: name.into() }).expect("valid");
        }
        assert!(call_rules(&tools).expect("rules").restricts(), "the frame of calls is enforced");
        tools.frame = false;
        assert!(!call_rules(&tools).expect("rules").restricts());
        tools.choice = ToolChoice::Named { names: vec!["b".into()], once: true };
        let rules = call_rules(&tools).expect("rules");
        assert_eq!((rules.tools.len(), rules.choice, rules.parallel), (1, Choice::Required, false));
        tools.choice = ToolChoice::None;
        assert!(call_rules(&tools).expect("rules").restricts());
    }

    #[test]
    fn a_refusal_names_the_field_the_tool_and_the_place() {
        use crate::tools::{Function, Identity};
        let format = format();
        let compiler =
            GrammarCompiler::new(Arc::clone(format.tokenizer()), &format.stop_ids()).expect("a compiler");
        let mut tools = Tools::new();
        let function = Function {
            path: "tools[0]".into(),
            name: "f".into(),
            description: None,
            parameters: Some(json!({"type": "object", "properties": {}})),
            strict: true,
            deferred: false,
            form: None,
        };
        tools.function(function, Identity::Custom { name: "f".into() }).expect("valid");
        let error = compile(&compiler, None, &tools).expect_err("refused");
        assert_eq!((error.code, error.param.as_deref()), ("unsupported_json_schema", Some("tools")));
        assert!(
            error.message.contains("\"f\"") && error.message.contains("/additionalProperties"),
            "{error}"
        );
        let schema = json!({"properties": {"a": {"uniqueItems": true}}});
        let format = ContentFormat::JsonSchema { schema, path: "p.schema".into() };
        let error = compile(&compiler, Some(&format), &Tools::new()).expect_err("refused");
        assert_eq!(error.param.as_deref(), Some("p.schema"));
        assert!(error.message.contains("/properties/a/uniqueItems"));
    }
}
