//! Reading a request: all of it is checked before anything runs.

use crate::error::{ApiError, quoted};
use crate::fields::Fields;
use serde_json::{Map, Value, json};

/// Most options of a question.
const MAX_OPTIONS: usize = 256;
/// Most questions of a request.
const MAX_QUESTIONS: usize = 256;

/// A checked request.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Decide {
    pub(super) model: Option<String>,
    /// The evidence.
    pub(super) state: State,
    /// Images in the evidence.
    pub(super) images: usize,
    /// Questions in the request's order.
    pub(super) questions: Vec<Question>,
    /// Prompts share cached prefixes only with those of the same salt.
    pub(super) salt: Option<String>,
    /// Fields that change nothing and are named to the client.
    pub(super) ignored: Vec<String>,
}

/// The evidence.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum State {
    /// Any JSON value.
    Value(Value),
    /// Content parts as OpenAI has them; they lead the user's turn.
    Parts(Vec<Value>),
}

/// One question.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Question {
    pub(super) id: String,
    /// What is asked.
    pub(super) criterion: Value,
    pub(super) kind: Kind,
}

/// What kind of answer it has.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Kind {
    /// Yes or no, each described.
    Noul { yes: String, no: String },
    /// One of several options, with descriptions.
    Choice { options: Vec<(String, Option<String>)> },
    /// A level of a scale, lowest first.
    Score { levels: Vec<String> },
    /// A whole number of this many digits.
    Number { digits: usize },
    /// A signed decimal of at most this many digits.
    Scalar { digits: usize },
    /// A place in an image.
    Point { digits: usize },
    /// An area of an image.
    Box { digits: usize },
}

impl Kind {
    /// The descriptions that labels stand for.
    pub(super) fn options(&self) -> Vec<String> {
        match self {
            Self::Noul { yes, no } => vec![yes.clone(), no.clone()],
            Self::Choice { options } => options
                .iter()
                .map(|(name, about)| {
                    about.as_ref().map_or_else(|| name.clone(), |about| format!("{name}: {about}"))
                })
                .collect(),
            Self::Score { levels } => levels.clone(),
            _ => Vec::new(),
        }
    }
}

impl Question {
    /// An error of this question.
    pub(super) fn error(&self, code: &'static str, message: String) -> ApiError {
        at(&self.id, "", code, message)
    }
}

fn at(id: &str, field: &str, code: &'static str, message: String) -> ApiError {
    let param = if field.is_empty() { format!("questions.{id}") } else { format!("questions.{id}.{field}") };
    let id = quoted(&id.into());
    ApiError { param: Some(param), ..ApiError::new(400, code, format!("question {id}: {message}")) }
}

/// Reads a body.
///
/// # Errors
/// The first thing that is wrong with it.
pub(super) fn parse(body: Value) -> Result<Decide, ApiError> {
    let mut fields = Fields::new("", body)?;
    refuse_thinking(&mut fields)?;
    let model = fields.string("model")?;
    let salt = fields.string("cache_salt")?;
    let (state, images) = state(fields.need("state")?)?;
    let list = fields
        .object("questions")?
        .ok_or_else(|| ApiError::at(400, "missing_required_parameter", "questions", "is required"))?;
    if list.is_empty() || list.len() > MAX_QUESTIONS {
        return Err(ApiError::at(
            400,
            "invalid_question",
            "questions",
            format!("has {} questions, 1 to {MAX_QUESTIONS} are possible", list.len()),
        ));
    }
    let questions = list.into_iter().map(|(id, value)| question(id, value)).collect::<Result<_, _>>()?;
    Ok(Decide { model, state, images, questions, salt, ignored: fields.rest() })
}

fn refuse_thinking(fields: &mut Fields) -> Result<(), ApiError> {
    let refuse = |param: &str| {
        let message = format!("decide answers without thinking: remove {param}");
        Err(ApiError { param: Some(param.to_owned()), ..ApiError::new(400, "thinking_unsupported", message) })
    };
    for name in ["enable_thinking", "thinking", "reasoning", "reasoning_effort", "thinking_budget"] {
        let asks = match fields.take(name) {
            None => false,
            Some(Value::Bool(on)) => on,
            Some(Value::String(word)) => word != "none",
            Some(Value::Object(map)) => {
                map.get("type").is_some_and(|t| t != "disabled")
                    || map.get("effort").is_some_and(|e| e != "none")
            }
            Some(other) => other.as_f64() != Some(0.0),
        };
        if asks {
            return refuse(name);
        }
    }
    let kwargs = fields.object("chat_template_kwargs")?.unwrap_or_default();
    if kwargs.get("enable_thinking") == Some(&Value::Bool(true)) {
        return refuse("chat_template_kwargs.enable_thinking");
    }
    Ok(())
}

/// The evidence and the number of its images.
fn state(value: Value) -> Result<(State, usize), ApiError> {
    let Value::Array(list) = &value else {
        return match value {
            Value::String(_) | Value::Object(_) => Ok((State::Value(value), 0)),
            other => Err(crate::fields::wrong("state", "a string, an object or a list", &other)),
        };
    };
    let kind = |part: &Value| part.get("type").and_then(Value::as_str).map(str::to_owned);
    let is_part = |part: &Value| {
        matches!(
            kind(part).as_deref(),
            Some("text" | "input_text" | "image_url" | "input_image" | "image" | "video_url" | "input_video")
        )
    };
    if list.is_empty() || !list.iter().all(is_part) {
        return Ok((State::Value(value), 0));
    }
    let images = list.iter().filter(|p| !matches!(kind(p).as_deref(), Some("text" | "input_text"))).count();
    if images > 0 {
        return Err(ApiError::at(
            400,
            "vision_disabled",
            "state",
            "has an image, but this server cannot see",
        ));
    }
    let mut parts = Vec::with_capacity(list.len());
    for (i, part) in list.iter().enumerate() {
        let text = part
            .get("text")
            .and_then(Value::as_str)
            .ok_or_else(|| ApiError::invalid(format!("state[{i}].text"), "must be a string"))?;
        parts.push(json!({"type": "text", "text": text}));
    }
    Ok((State::Parts(parts), 0))
}

fn question(id: String, value: Value) -> Result<Question, ApiError> {
    let Value::Object(mut map) = value else {
        return Err(at(&id, "", "invalid_question", "must be an object".to_owned()));
    };
    let bad = |field: &str, message: String| at(&id, field, "invalid_question", message);
    let kind = match map.shift_remove("type") {
        Some(Value::String(kind)) => kind,
        _ => return Err(bad("type", "type must be a string".to_owned())),
    };
    let criterion = one_of(&mut map, "instructions", "question").map_err(|m| bad("instructions", m))?;
    let criterion = match criterion {
        Some(value @ (Value::String(_) | Value::Object(_) | Value::Array(_))) => value,
        Some(_) => return Err(bad("instructions", "must be a string, an object or a list".to_owned())),
        None => return Err(bad("instructions", "instructions are required".to_owned())),
    };
    let criteria = one_of(&mut map, "criteria", "options").map_err(|m| bad("criteria", m))?;
    let digits = map.shift_remove("digits").filter(|v| !v.is_null());
    let digits_of = |default: usize, most: usize| match &digits {
        None => Ok(default),
        Some(value) => value
            .as_u64()
            .and_then(|n| usize::try_from(n).ok())
            .filter(|n| (1..=most).contains(n))
            .ok_or_else(|| bad("digits", format!("digits must be 1 to {most}"))),
    };
    let has_criteria = criteria.is_some();
    let kind = match kind.as_str() {
        "noul" | "boolean" => noul(criteria).map_err(|m| bad("criteria", m))?,
        "choice" => {
            let Some(Value::Object(options)) = criteria else {
                return Err(bad("criteria", "criteria must be an object of options".to_owned()));
            };
            too_many(&id, options.len())?;
            if options.is_empty() {
                return Err(bad("criteria", "at least one option is needed".to_owned()));
            }
            Kind::Choice { options: described(options).map_err(|m| bad("criteria", m))? }
        }
        "score" => {
            let Some(Value::Array(list)) = criteria else {
                return Err(bad("criteria", "criteria must be a list of levels, lowest first".to_owned()));
            };
            too_many(&id, list.len())?;
            let levels: Option<Vec<String>> = list.iter().map(|v| v.as_str().map(str::to_owned)).collect();
            match levels {
                Some(levels) if levels.len() >= 2 => Kind::Score { levels },
                _ => return Err(bad("criteria", "at least two levels are needed, each a string".to_owned())),
            }
        }
        "number" => Kind::Number { digits: digits_of(3, 6)? },
        "scalar" => Kind::Scalar { digits: digits_of(8, 15)? },
        "point" => Kind::Point { digits: digits_of(3, 6)? },
        "box" => Kind::Box { digits: digits_of(3, 6)? },
        other => {
            let known = "noul, boolean, choice, score, number, scalar, point, box";
            return Err(bad("type", format!("unknown type {other:?}; known: {known}")));
        }
    };
    let generated =
        matches!(kind, Kind::Number { .. } | Kind::Scalar { .. } | Kind::Point { .. } | Kind::Box { .. });
    if generated && has_criteria {
        return Err(bad("criteria", "unknown field \"criteria\" for this type".to_owned()));
    }
    if !generated && digits.is_some() {
        return Err(bad("digits", "unknown field \"digits\" for this type".to_owned()));
    }
    if let Some((name, _)) = map.iter().find(|(_, v)| !v.is_null()) {
        return Err(at(&id, name, "invalid_question", format!("unknown field {name:?}")));
    }
    Ok(Question { id, criterion, kind })
}

fn too_many(id: &str, count: usize) -> Result<(), ApiError> {
    if count > MAX_OPTIONS {
        return Err(at(
            id,
            "criteria",
            "too_many_options",
            format!("{count} options, at most {MAX_OPTIONS}"),
        ));
    }
    Ok(())
}

/// A member under either of its names, not both.
fn one_of(map: &mut Map<String, Value>, name: &str, alias: &str) -> Result<Option<Value>, String> {
    let first = map.shift_remove(name).filter(|v| !v.is_null());
    let second = map.shift_remove(alias).filter(|v| !v.is_null());
    match (first, second) {
        (Some(_), Some(_)) => Err(format!("{name} and {alias} are the same; give one")),
        (first, second) => Ok(first.or(second)),
    }
}

fn noul(criteria: Option<Value>) -> Result<Kind, String> {
    let (mut yes, mut no) = ("Yes".to_owned(), "No".to_owned());
    match criteria {
        None => {}
        Some(Value::Object(map)) => {
            for (name, value) in map {
                let text = match value {
                    Value::String(text) => text,
                    Value::Null => continue,
                    _ => return Err(format!("the description of {name:?} must be a string")),
                };
                match name.as_str() {
                    "true" => yes = text,
                    "false" => no = text,
                    other => {
                        return Err(format!("unknown field {other:?}; true and false are described here"));
                    }
                }
            }
        }
        Some(_) => return Err("criteria must be an object with true and false".to_owned()),
    }
    Ok(Kind::Noul { yes, no })
}

fn described(options: Map<String, Value>) -> Result<Vec<(String, Option<String>)>, String> {
    options
        .into_iter()
        .map(|(name, value)| match value {
            Value::Null => Ok((name, None)),
            Value::String(text) => Ok((name, Some(text))),
            _ => Err(format!("the description of {name:?} must be a string or null")),
        })
        .collect()
}
