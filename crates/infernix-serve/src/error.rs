//! What can go wrong with a request, and how each protocol says it.

use axum::body::Body;
use axum::http::{HeaderValue, Response, StatusCode, header};
use infernix_text::TextError;
use serde_json::{Value, json};

/// Whose error form and status codes a route uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wire {
    /// `{"error": {"message", "type", "param", "code"}}`.
    OpenAi,
    /// `{"type": "error", "error": {"type", "message"}, "request_id"}`.
    Anthropic,
}

impl Wire {
    /// The form a path answers in.
    pub(crate) fn of_path(path: &str) -> Self {
        if path.contains("/v1/messages") { Self::Anthropic } else { Self::OpenAi }
    }
}

/// A request that is not answered.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub(crate) struct ApiError {
    /// Status on OpenAI routes; [`ApiError::status`] gives the one of a protocol.
    pub(crate) status: u16,
    /// Machine-readable cause.
    pub(crate) code: &'static str,
    /// Where in the request, in the form `messages[2].content`.
    pub(crate) param: Option<String>,
    /// For people: what is wrong and what would be accepted.
    pub(crate) message: String,
    /// Seconds after which trying again makes sense.
    pub(crate) retry_after: Option<u64>,
    /// Prompt tokens and limit, where the context is the matter: Messages clients read them out of the text.
    pub(crate) context: Option<(usize, usize)>,
}

impl ApiError {
    pub(crate) fn new(status: u16, code: &'static str, message: impl Into<String>) -> Self {
        Self { status, code, param: None, message: message.into(), retry_after: None, context: None }
    }

    /// 400 at a place of the request.
    pub(crate) fn invalid(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self::at(400, "invalid_value", param, message)
    }

    /// Any status at a place of the request.
    pub(crate) fn at(
        status: u16,
        code: &'static str,
        param: impl Into<String>,
        message: impl Into<String>,
    ) -> Self {
        let param = shortened(param.into(), MAX_PARAM);
        let message = format!("{param}: {}", message.into());
        Self { param: Some(param), ..Self::new(status, code, message) }
    }

    pub(crate) fn context_length(tokens: usize, limit: usize) -> Self {
        let message = format!(
            "the prompt has {tokens} tokens and this server's context holds {limit}; shorten the conversation or \
             start the server with a larger --max-context"
        );
        Self { context: Some((tokens, limit)), ..Self::new(400, "context_length_exceeded", message) }
    }

    pub(crate) fn overloaded(retry_after: u64) -> Self {
        let message = format!("every lane and the whole queue are taken; try again in {retry_after} s");
        Self { retry_after: Some(retry_after), ..Self::new(429, "server_overloaded", message) }
    }

    pub(crate) fn queue_timeout() -> Self {
        let message = "the request waited longer than --pending-timeout-ms for a free lane";
        Self { retry_after: Some(5), ..Self::new(503, QUEUE_TIMEOUT, message) }
    }

    pub(crate) fn unavailable(message: impl Into<String>) -> Self {
        Self { retry_after: Some(5), ..Self::new(503, "service_unavailable", message) }
    }

    pub(crate) fn internal(message: impl Into<String>) -> Self {
        Self::new(500, "internal_error", message)
    }

    pub(crate) fn not_found(message: impl Into<String>) -> Self {
        Self::new(404, "not_found", message)
    }

    /// The status in a protocol: Messages has its own for a full queue (529) and a queue timeout (504).
    pub(crate) fn status(&self, wire: Wire) -> u16 {
        match (wire, self.code) {
            (Wire::Anthropic, "server_overloaded") => 529,
            (Wire::Anthropic, QUEUE_TIMEOUT) => 504,
            _ => self.status,
        }
    }

    /// `type` of an OpenAI error.
    fn openai_type(&self) -> &'static str {
        match self.status {
            401 => "authentication_error",
            403 => "permission_error",
            404 => "not_found_error",
            429 => "rate_limit_error",
            500.. => "server_error",
            _ => "invalid_request_error",
        }
    }

    /// `error.type` of a Messages error.
    fn anthropic_type(&self) -> &'static str {
        match self.status(Wire::Anthropic) {
            401 => "authentication_error",
            403 => "permission_error",
            404 => "not_found_error",
            413 => "request_too_large",
            429 => "rate_limit_error",
            504 => "timeout_error",
            529 => "overloaded_error",
            500.. => "api_error",
            _ => "invalid_request_error",
        }
    }

    /// The error's JSON document in a protocol.
    pub(crate) fn body(&self, wire: Wire, request_id: &str) -> Value {
        match wire {
            Wire::OpenAi => json!({"error": {
                "message": shortened(self.message.clone(), MAX_MESSAGE), "type": self.openai_type(),
                "param": self.param.clone().map(|p| shortened(p, MAX_PARAM)), "code": self.code,
            }}),
            Wire::Anthropic => {
                let message = shortened(self.anthropic_message(), MAX_MESSAGE);
                let mut error = json!({"type": self.anthropic_type(), "message": message});
                if self.code == THREADS_UNSUPPORTED {
                    error["details"] = json!({"error_code": self.code});
                }
                json!({"type": "error", "error": error, "request_id": request_id})
            }
        }
    }

    /// The same of a protocol whose conversation stands elsewhere and whose thinking is turned off otherwise than Chat's,
    /// in whose words the template's own complaints are.
    pub(crate) fn said_as(mut self, conversation: &str, thinking_off: &str) -> Self {
        let Some(old) = self.param.take_if(|p| self.code == "invalid_prompt" && p.starts_with("messages"))
        else {
            return self;
        };
        let rest = self.message.strip_prefix(&old).unwrap_or(&self.message);
        self.message = format!("{conversation}{}", rest.replace("enable_thinking: false", thinking_off));
        self.param = Some(conversation.to_owned());
        self
    }

    /// Claude Code reads the numbers out of exactly this form.
    fn anthropic_message(&self) -> String {
        match self.context {
            Some((tokens, limit)) => format!("prompt is too long: {tokens} tokens > {limit} maximum"),
            None => self.message.clone(),
        }
    }

    /// The whole response.
    pub(crate) fn response(&self, wire: Wire, request_id: &str) -> Response<Body> {
        let mut response = Response::new(Body::from(self.body(wire, request_id).to_string()));
        *response.status_mut() =
            StatusCode::from_u16(self.status(wire)).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if let Some(seconds) = self.retry_after {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.status == 401 {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

impl From<TextError> for ApiError {
    fn from(error: TextError) -> Self {
        let message = error.to_string();
        match error {
            TextError::Conversation { location, .. } => {
                let code = if location.starts_with("chat_template_kwargs") {
                    "conflicting_template_option"
                } else {
                    "invalid_prompt"
                };
                Self { param: Some(location), ..Self::new(400, code, message) }
            }
            TextError::TemplateRefused { .. }
            | TextError::TemplateLimit { .. }
            | TextError::TemplateRuntime { .. }
            | TextError::Pattern { .. } => Self::new(400, "invalid_prompt", message),
            _ => Self::internal(message),
        }
    }
}

/// Longest place and longest words of an error in bytes: both may quote the request.
const MAX_PARAM: usize = 256;
const MAX_MESSAGE: usize = 4096;

/// The code that tells Anthropic's clients to go on with whole histories.
pub(crate) const THREADS_UNSUPPORTED: &str = "thread_unsupported_request";
/// The code of a request for which no lane became free in time.
pub(crate) const QUEUE_TIMEOUT: &str = "request_queue_timeout";

/// A text cut to at most this many bytes, and so marked.
fn shortened(mut text: String, most: usize) -> String {
    if text.len() > most {
        let mut end = most - 3;
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        text.truncate(end);
        text.push_str("...");
    }
    text
}

/// A value of the request as an error quotes it: ASCII, at most 60 characters.
pub(crate) fn quoted(value: &Value) -> String {
    let text: String = value.to_string().chars().take(61).flat_map(escape_ascii).collect();
    if text.len() > 60 { format!("{}...", &text[..57]) } else { text }
}

fn escape_ascii(c: char) -> impl Iterator<Item = char> {
    let escaped =
        if c.is_ascii_graphic() || c == ' ' { c.to_string() } else { c.escape_unicode().to_string() };
    escaped.chars().collect::<Vec<_>>().into_iter()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_protocol_has_its_own_codes_for_a_full_queue() {
        let full = ApiError::overloaded(3);
        assert_eq!((full.status(Wire::OpenAi), full.status(Wire::Anthropic)), (429, 529));
        assert_eq!(full.body(Wire::Anthropic, "req_1")["error"]["type"], "overloaded_error");
        assert_eq!(full.response(Wire::OpenAi, "r").headers()[header::RETRY_AFTER], "3");
        let late = ApiError::queue_timeout();
        assert_eq!((late.status(Wire::OpenAi), late.status(Wire::Anthropic)), (503, 504));
    }

    #[test]
    fn the_context_error_has_the_words_that_clients_read() {
        let error = ApiError::context_length(9000, 4096);
        assert_eq!(
            error.body(Wire::Anthropic, "req_1")["error"]["message"],
            "prompt is too long: 9000 tokens > 4096 maximum"
        );
        assert_eq!(error.body(Wire::OpenAi, "")["error"]["code"], "context_length_exceeded");
    }

    #[test]
    fn an_error_is_short_whatever_it_quotes() {
        let long = "ü".repeat(3 << 20);
        let place = ApiError::at(400, "invalid_value", format!("questions.{long}"), long.clone());
        let words = ApiError { param: Some(long.clone()), ..ApiError::new(400, "invalid_value", long) };
        for error in [place, words] {
            for wire in [Wire::OpenAi, Wire::Anthropic] {
                assert!(error.body(wire, "r").to_string().len() < 5000);
            }
            assert_eq!(error.body(Wire::OpenAi, "r")["error"]["param"].as_str().map(str::len), Some(255));
        }
    }

    #[test]
    fn quoted_values_are_short_and_ascii() {
        assert_eq!(quoted(&json!("é\n")), "\"\\u{e9}\\n\"");
        assert_eq!(quoted(&json!("x".repeat(500))).len(), 60);
        assert!(quoted(&json!("ü".repeat(500))).is_ascii());
    }
}
