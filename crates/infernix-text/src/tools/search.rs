//! Searches over names, descriptions and arguments of tools.

use std::collections::HashMap;

use regex_automata::meta::Regex;
use serde_json::Value;

use crate::message::Tool;

/// Tools that a search gives at most.
pub const FOUND: usize = 5;
/// Longest pattern, in characters.
pub const PATTERN_LIMIT: usize = 200;

/// BM25's usual parameters (Robertson and Zaragoza 2009).
const K1: f64 = 1.2;
const B: f64 = 0.75;
/// How much more a word counts in a tool's name than elsewhere.
const NAME_WEIGHT: usize = 3;

/// Why a search was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SearchError {
    /// The pattern is no regular expression, or uses look-around or back-references.
    #[error("the pattern is not a regular expression that can be searched for: {0}")]
    InvalidPattern(String),
    /// The pattern is longer than [`PATTERN_LIMIT`].
    #[error("the pattern has {0} characters, at most {PATTERN_LIMIT} are possible")]
    PatternTooLong(usize),
}

impl SearchError {
    /// The error's name in the protocols.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            Self::InvalidPattern(_) => "invalid_pattern",
            Self::PatternTooLong(_) => "pattern_too_long",
        }
    }
}

/// Tools, ready to be searched. Answers depend on the declarations and their order alone.
#[derive(Debug, Clone, Default)]
pub struct ToolIndex {
    names: Vec<String>,
    texts: Vec<String>,
    /// Word counts by tool.
    counts: Vec<HashMap<String, usize>>,
    lengths: Vec<usize>,
    /// Tools that have a word.
    spread: HashMap<String, usize>,
}

impl ToolIndex {
    /// Reads declarations.
    #[must_use]
    pub fn new<'t>(tools: impl IntoIterator<Item = &'t Tool>) -> Self {
        let mut index = Self::default();
        for tool in tools {
            let function = tool.as_map().get("function");
            let description =
                function.and_then(|f| f.get("description")).and_then(Value::as_str).unwrap_or_default();
            let mut text = format!("{}\n{description}\n", tool.name());
            if let Some(parameters) = tool.parameters() {
                arguments(parameters, 0, &mut text);
            }
            let mut counts: HashMap<String, usize> = HashMap::new();
            for word in words(&text) {
                *counts.entry(word).or_default() += 1;
            }
            for word in words(tool.name()) {
                *counts.entry(word).or_default() += NAME_WEIGHT - 1;
            }
            for word in counts.keys() {
                *index.spread.entry(word.clone()).or_default() += 1;
            }
            index.names.push(tool.name().to_owned());
            index.lengths.push(counts.values().sum());
            index.counts.push(counts);
            index.texts.push(text);
        }
        index
    }

    /// Tools that fit the words best, at most `limit`; none that has no word of them.
    #[must_use]
    pub fn words(&self, query: &str, limit: usize) -> Vec<&str> {
        let count = self.names.len() as f64;
        let mean = self.lengths.iter().sum::<usize>() as f64 / count.max(1.0);
        let mut query: Vec<String> = words(query).collect();
        query.sort_unstable();
        query.dedup();
        let mut scored: Vec<(f64, usize)> = (0..self.names.len())
            .filter_map(|tool| {
                let norm = K1 * (1.0 - B + B * self.lengths[tool] as f64 / mean.max(1.0));
                let score: f64 = query
                    .iter()
                    .filter_map(|word| {
                        let n = *self.counts[tool].get(word)? as f64;
                        let having = self.spread[word] as f64;
                        let rare = ((count - having + 0.5) / (having + 0.5) + 1.0).ln();
                        Some(rare * n * (K1 + 1.0) / (n + norm))
                    })
                    .sum();
                (score > 0.0).then_some((score, tool))
            })
            .collect();
        // A stable sort: equal scores keep the declared order.
        scored.sort_by(|a, b| b.0.total_cmp(&a.0));
        scored.into_iter().take(limit).map(|(_, tool)| self.names[tool].as_str()).collect()
    }

    /// Tools that the expression is found in, those whose name has it first.
    ///
    /// # Errors
    /// [`SearchError`]; the time is linear in the catalogue whatever the pattern.
    pub fn regex(&self, pattern: &str, limit: usize) -> Result<Vec<&str>, SearchError> {
        let length = pattern.chars().count();
        if length > PATTERN_LIMIT {
            return Err(SearchError::PatternTooLong(length));
        }
        let regex = Regex::builder()
            .configure(Regex::config().nfa_size_limit(Some(1 << 20)).hybrid_cache_capacity(1 << 20))
            .build(pattern)
            .map_err(|e| {
                let message = e.syntax_error().map_or_else(|| e.to_string(), |s| s.to_string());
                SearchError::InvalidPattern(message.lines().last().unwrap_or_default().to_owned())
            })?;
        let (mut first, mut second) = (Vec::new(), Vec::new());
        for (name, text) in self.names.iter().zip(&self.texts) {
            if regex.is_match(name.as_str()) {
                first.push(name.as_str());
            } else if regex.is_match(text.as_str()) {
                second.push(name.as_str());
            }
        }
        first.extend(second);
        first.truncate(limit);
        Ok(first)
    }
}

/// Names and descriptions of arguments, nested ones included.
fn arguments(schema: &Value, depth: usize, out: &mut String) {
    if depth > 8 {
        return;
    }
    if let Some(members) = schema.get("properties").and_then(Value::as_object) {
        for (name, member) in members {
            out.push_str(name);
            out.push(' ');
            out.push_str(member.get("description").and_then(Value::as_str).unwrap_or_default());
            out.push('\n');
            arguments(member, depth + 1, out);
        }
    }
    if let Some(items) = schema.get("items") {
        arguments(items, depth + 1, out);
    }
}

/// Words in lower case: runs of letters and digits, cut where a capital begins a new word.
fn words(text: &str) -> impl Iterator<Item = String> + '_ {
    text.split(|c: char| !c.is_alphanumeric()).flat_map(|run| {
        let chars: Vec<char> = run.chars().collect();
        let mut out = Vec::new();
        let mut start = 0;
        for i in 1..chars.len() {
            let (before, here) = (chars[i - 1], chars[i]);
            let next_lower = chars.get(i + 1).is_some_and(|c| c.is_lowercase());
            if here.is_uppercase() && (before.is_lowercase() || before.is_numeric() || next_lower) {
                out.push(chars[start..i].iter().collect::<String>());
                start = i;
            }
        }
        out.push(chars[start..].iter().collect::<String>());
        out.into_iter().filter(|w| !w.is_empty()).map(|w| w.to_lowercase())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn index() -> ToolIndex {
        let tool = |name: &str, about: &str, argument: &str| {
            Tool::function(
                name,
                about,
                json!({"properties": {argument: {"type": "string", "description": "Which one."}}}),
            )
        };
        ToolIndex::new(&[
            tool("get_weather", "Tells the weather of a city.", "cityName"),
            tool("listIssues", "Lists open issues of a repository.", "repo"),
            tool("HTTPFetch", "Fetches a page.", "url"),
            tool("closeIssue", "Closes an issue.", "number"),
        ])
    }

    #[test]
    fn words_are_cut_at_capitals_and_underscores() {
        let cut = |s: &str| words(s).collect::<Vec<_>>();
        assert_eq!(
            cut("get_weatherNow HTTPFetch2Go é"),
            ["get", "weather", "now", "http", "fetch2", "go", "é"]
        );
    }

    #[test]
    fn the_best_fit_comes_first_and_order_breaks_ties() {
        let index = index();
        assert_eq!(index.words("weather in a city", 5)[0], "get_weather");
        assert_eq!(index.words("issue", 5), ["closeIssue"]);
        assert_eq!(index.words("city name", 1), ["get_weather"]);
        assert!(index.words("nothing that fits", 5).is_empty() && index.words("", 5).is_empty());
        let all = index.words("which one", 3);
        assert_eq!(all.len(), 3);
        assert_eq!(all, index.words("one which one", 3));
    }

    #[test]
    fn expressions_search_names_before_the_rest() {
        let index = index();
        assert_eq!(index.regex("(?i)issue", 5), Ok(vec!["listIssues", "closeIssue"]));
        assert_eq!(index.regex("city|Fetch", 5), Ok(vec!["HTTPFetch", "get_weather"]));
        assert_eq!(index.regex("x".repeat(201).as_str(), 5), Err(SearchError::PatternTooLong(201)));
        for bad in ["(?=a)", r"(a)\1", "(", "a{99999}{99999}"] {
            assert_eq!(index.regex(bad, 5).expect_err(bad).code(), "invalid_pattern");
        }
    }
}
