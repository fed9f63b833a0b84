//! Chat templates, rendered as transformers renders them.
//!
//! The engine is minijinja; what it lacks of Jinja2's behaviour in chat templates is added here and held
//! to goldens made with the original. Templates are untrusted: fuel, output and nesting are limited.

mod clock;
mod filters;
mod methods;
mod printf;
mod rewrite;
mod values;

use std::sync::Arc;

use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, ErrorKind, Value};
use serde_json::{Map, Value as Json};

pub use clock::Clock;

use crate::error::{Result, TextError};
use filters::Raised;

/// Limits of one rendering.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TemplateLimits {
    /// Work: about one unit an instruction and 64 bytes of text produced or scanned.
    pub fuel: u64,
    /// Bytes of output.
    pub output_bytes: u64,
    /// Nesting of calls, loops and conditions.
    pub recursion: usize,
}

impl Default for TemplateLimits {
    /// Room for prompts of a million tokens; well under a second of work.
    fn default() -> Self {
        Self { fuel: 20_000_000, output_bytes: 64 << 20, recursion: 200 }
    }
}

/// A compiled chat template.
pub struct Template {
    env: Environment<'static>,
    limits: TemplateLimits,
    source: String,
}

impl std::fmt::Debug for Template {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Template")
            .field("bytes", &self.source.len())
            .field("limits", &self.limits)
            .finish_non_exhaustive()
    }
}

const NAME: &str = "chat_template";

impl Template {
    /// Compiles a template with the default limits and the system's clock.
    ///
    /// # Errors
    /// [`TextError::TemplateSyntax`] with the line.
    pub fn new(source: &str) -> Result<Self> {
        Self::with(source, TemplateLimits::default(), Arc::new(Clock::now))
    }

    /// Compiles a template.
    ///
    /// # Errors
    /// [`TextError::TemplateSyntax`] with the line.
    pub fn with(
        source: &str,
        limits: TemplateLimits,
        clock: Arc<dyn Fn() -> Clock + Send + Sync>,
    ) -> Result<Self> {
        let syntax = |e: minijinja::Error| TextError::TemplateSyntax { message: describe(&e) };
        let mut env = Environment::new();
        env.set_syntax(
            SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().map_err(syntax)?,
        );
        env.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
        env.set_fuel(Some(limits.fuel));
        env.set_recursion_limit(limits.recursion);
        env.set_debug(false);
        filters::install(&mut env);
        filters::install_clock(&mut env, clock);
        // Python's lexer folds all line ends before anything else.
        let folded = source.replace("\r\n", "\n").replace('\r', "\n");
        env.add_template_owned(NAME, rewrite::rewrite(&folded)).map_err(syntax)?;
        Ok(Self { env, limits, source: source.to_owned() })
    }

    /// The template's text.
    #[must_use]
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Renders with these variables; order inside them is kept.
    ///
    /// # Errors
    /// The template's own refusal, a limit, or a failure with its line.
    pub fn render(&self, variables: &Map<String, Json>) -> Result<String> {
        let context = Value::from_pairs(
            variables.iter().map(|(name, value)| (name.as_str(), values::from_json(value))),
        );
        let template = self.env.get_template(NAME).map_err(|e| self.error(&e))?;
        let mut out = Capped { bytes: Vec::new(), limit: self.limits.output_bytes, over: false };
        let result = template.render_captured_to(context, &mut out).map(|_| ());
        if out.over {
            return Err(TextError::TemplateLimit {
                what: "bytes of output",
                limit: self.limits.output_bytes,
            });
        }
        result.map_err(|e| self.error(&e))?;
        String::from_utf8(out.bytes).map_err(|e| TextError::TemplateRuntime { message: e.to_string() })
    }

    fn error(&self, error: &minijinja::Error) -> TextError {
        let mut source: Option<&(dyn std::error::Error + 'static)> = Some(error);
        while let Some(cause) = source {
            if let Some(Raised(message)) = cause.downcast_ref() {
                return TextError::TemplateRefused { message: message.clone() };
            }
            if let Some(inner) = cause.downcast_ref::<minijinja::Error>()
                && inner.kind() == ErrorKind::OutOfFuel
            {
                return TextError::TemplateLimit { what: "units of fuel", limit: self.limits.fuel };
            }
            source = cause.source();
        }
        TextError::TemplateRuntime { message: describe(error) }
    }
}

fn describe(error: &minijinja::Error) -> String {
    match error.line() {
        Some(line) => format!("line {line}: {}", error_text(error)),
        None => error_text(error),
    }
}

fn error_text(error: &minijinja::Error) -> String {
    match error.detail() {
        Some(detail) => format!("{}: {detail}", error.kind()),
        None => error.kind().to_string(),
    }
}

/// Output that refuses to grow past its limit.
struct Capped {
    bytes: Vec<u8>,
    limit: u64,
    over: bool,
}

impl std::io::Write for Capped {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        if (self.bytes.len() + bytes.len()) as u64 > self.limit {
            self.over = true;
            return Err(std::io::Error::other("output limit"));
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn render(source: &str, variables: Json) -> Result<String> {
        let Json::Object(variables) = variables else {
            panic!("variables are an object");
        };
        Template::new(source)?.render(&variables)
    }

    #[test]
    fn json_text_can_be_iterated_and_read() {
        let vars = json!({"a": "{\"z\": 1, \"b\": [true]}"});
        assert_eq!(
            render("{% for k, v in a|items %}{{ k }}={{ v|tojson }};{% endfor %}", vars.clone())
                .expect("renders"),
            "z=1;b=[true];"
        );
        assert_eq!(render("{{ (a|fromjson).b[0] }}{{ fromjson(a).z }}", vars).expect("renders"), "True1");
        assert!(render("{{ 'x'|fromjson }}", json!({})).is_err());
        assert!(render("{{ 'x'|items }}", json!({})).is_err());
    }

    #[test]
    fn refusals_carry_the_templates_words() {
        let error = render("\n{% if true %}{{ raise_exception('bad ' ~ 1) }}{% endif %}", json!({}))
            .expect_err("raises");
        assert!(matches!(&error, TextError::TemplateRefused { message } if message == "bad 1"), "{error}");
        let error =
            render("{% macro m() %}{{ raise_exception('deep') }}{% endmacro %}{% set x = m() %}", json!({}))
                .expect_err("raises");
        assert!(matches!(&error, TextError::TemplateRefused { message } if message == "deep"), "{error}");
    }

    #[test]
    fn errors_name_the_line_of_the_original() {
        let error = render("a\n{{ 1 % 2 }}\n{{ x.y.z }}", json!({})).expect_err("undefined");
        assert!(error.to_string().contains("line 3"), "{error}");
        let error = Template::new("a\n{% if %}").expect_err("syntax");
        assert!(error.to_string().contains("line 2"), "{error}");
    }

    proptest::proptest! {
        #[test]
        fn no_template_text_makes_it_panic(picks in proptest::collection::vec(0usize..28, 0..14)) {
            const PIECES: [&str; 28] = [
                "{{", "}}", "{%", "%}", "{#", "#}", "-", "+", " a ", "%", "'%s'", "(", ")", "[",
                "]", "{", "}", "|", "tojson", "'é", "\"\\", " if ", " endif ", " for x in ",
                " raw ", " endraw ", "世", " generation ",
            ];
            let source: String = picks.iter().map(|&i| PIECES[i]).collect();
            let _ = render(&source, json!({"a": "x"}));
        }
    }

    #[test]
    fn runaway_templates_hit_a_limit() {
        let limits = TemplateLimits { fuel: 100_000, output_bytes: 1000, recursion: 50 };
        let run = |source: &str| {
            Template::with(source, limits, Arc::new(Clock::now))
                .and_then(|t| t.render(&Map::new()))
                .expect_err("is limited")
                .to_string()
        };
        assert!(
            run("{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}")
                .contains("fuel")
        );
        assert!(run("{{ 'x' * 1001 }}").contains("bytes of output"));
        assert!(run("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}").contains("recursion"));
        assert!(run("{{ ('x' * 100000000) | length }}").contains("fuel"));
    }
}
