//! From log-probabilities to answers.

use super::question::{Kind, Question};
use super::schedule::{END, Form, MINUS, POINT, Symbols, too_many};
use crate::error::ApiError;
use infernix_engine::sched::Sampled;
use infernix_text::Tokenizer;
use serde_json::{Map, Value, json};

/// Probabilities over the permitted ones, and the mass they have in the whole vocabulary.
fn normalized(logs: &[f64]) -> (Vec<f64>, f64) {
    let most = logs.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    if !most.is_finite() {
        let even = 1.0 / logs.len().max(1) as f64;
        return (vec![even; logs.len()], 0.0);
    }
    let weights: Vec<f64> = logs.iter().map(|l| (l - most).exp()).collect();
    let sum: f64 = weights.iter().sum();
    (weights.into_iter().map(|w| w / sum).collect(), (most.exp() * sum).min(1.0))
}

/// The answer to a question that is read from labels, which stand in the order of its options.
pub(super) fn labels(question: &Question, watched: &[f32]) -> Result<Value, ApiError> {
    let count = question.kind.options().len();
    if watched.len() != count {
        return Err(ApiError::internal(format!(
            "the engine gave {} of {count} probabilities",
            watched.len()
        )));
    }
    let logs: Vec<f64> = watched.iter().map(|l| f64::from(*l)).collect();
    let (p, mass) = normalized(&logs);
    let most = p.iter().copied().fold(0.0, f64::max);
    Ok(match &question.kind {
        Kind::Choice { options } => {
            let best = p.iter().position(|x| *x == most).unwrap_or(0);
            let probabilities: Map<String, Value> =
                options.iter().zip(&p).map(|((name, _), p)| (name.clone(), json!(p))).collect();
            json!({
                "type": "choice", "choice": options[best].0, "probabilities": probabilities, "confidence": most,
                "answer_mass": mass,
            })
        }
        Kind::Score { levels } => {
            let mean: f64 = p.iter().enumerate().map(|(i, p)| i as f64 * p).sum();
            let variance: f64 = p.iter().enumerate().map(|(i, p)| p * (i as f64 - mean).powi(2)).sum();
            // No spread is certain, the spread of the two ends is not at all.
            let widest = (levels.len() - 1) as f64 / 2.0;
            let keyed = |values: Vec<Value>| -> Map<String, Value> {
                values.into_iter().enumerate().map(|(i, v)| (i.to_string(), v)).collect()
            };
            json!({
                "type": "score", "score": mean,
                "legend": keyed(levels.iter().map(|l| json!(l)).collect()),
                "probabilities": keyed(p.iter().map(|p| json!(p)).collect()),
                "confidence": (1.0 - variance.sqrt() / widest).clamp(0.0, 1.0), "answer_mass": mass,
            })
        }
        _ => json!({"type": "noul", "noul": p[0], "answer_mass": mass}),
    })
}

/// A free step: what was chosen, its probability among the permitted, and their mass.
struct Step {
    symbol: usize,
    probability: f64,
}

/// The answer to a question whose number was generated. `whole` says that nobody stopped it.
pub(super) fn number(
    question: &Question,
    symbols: &Symbols,
    form: Form,
    tokenizer: &Tokenizer,
    tokens: &[Sampled],
    whole: bool,
) -> Result<Value, ApiError> {
    let mut steps: Vec<Step> = Vec::with_capacity(tokens.len());
    let mut so_far: Vec<usize> = Vec::with_capacity(tokens.len());
    let mut mass = 1.0f64;
    for token in tokens {
        let allowed = symbols.allowed(form, &so_far);
        let Some(symbol) = symbols.symbol(token.id).filter(|s| allowed.contains(s)) else {
            return Err(ApiError::internal("the engine left the schedule"));
        };
        if token.watched.len() != symbols.watched().len() {
            return Err(ApiError::internal("the engine gave no probabilities"));
        }
        let logs: Vec<f64> = allowed.iter().map(|&s| f64::from(token.watched[s])).collect();
        let (p, here) = normalized(&logs);
        mass = mass.min(here);
        let at = allowed.iter().position(|s| *s == symbol).unwrap_or(0);
        steps.push(Step { symbol, probability: p[at] });
        so_far.push(symbol);
    }
    let cut = || question.error("run_cut_short", "the answer was cut before its end".to_owned());
    match form {
        Form::Number { digits } => {
            if steps.len() < digits || !whole {
                return Err(cut());
            }
            let value = steps.iter().fold(0u64, |n, s| n * 10 + s.symbol as u64);
            let padding = steps.iter().take_while(|s| s.symbol == 0).count();
            let uncertainty: f64 = steps
                .iter()
                .enumerate()
                .skip(padding)
                .map(|(i, s)| (1.0 - s.probability) * 10f64.powi((digits - 1 - i) as i32))
                .sum();
            let list: Vec<Value> =
                steps.iter().map(|s| json!({"digit": s.symbol, "probability": s.probability})).collect();
            Ok(json!({
                "type": "number", "number": value, "digits": list, "uncertainty": uncertainty, "answer_mass": mass,
            }))
        }
        Form::Scalar { digits } => {
            if too_many(&so_far, digits) {
                let message = format!("the number has more than {digits} digits");
                return Err(question.error("too_many_digits", message));
            }
            if so_far.last() != Some(&END) || !whole {
                return Err(cut());
            }
            let ids: Vec<u32> =
                steps.iter().filter(|s| s.symbol <= POINT).map(|s| symbols.watched()[s.symbol]).collect();
            let sign = if so_far.first() == Some(&MINUS) { "-" } else { "" };
            let text = format!("{sign}{}", tokenizer.decode(&ids, false));
            let Some(value) = text.parse::<f64>().ok().filter(|v| v.is_finite()) else {
                return Err(
                    question.error("malformed_scalar", "the generated text is not a number".to_owned())
                );
            };
            let numeric: Vec<&Step> = steps.iter().filter(|s| s.symbol <= POINT).collect();
            let whole_digits = numeric.iter().position(|s| s.symbol == POINT).unwrap_or(numeric.len());
            let padding = numeric[..whole_digits]
                .iter()
                .take_while(|s| s.symbol == 0)
                .count()
                .min(whole_digits.saturating_sub(1));
            let mut place = whole_digits as i32;
            let mut uncertainty = 0.0;
            for (i, step) in numeric.iter().enumerate() {
                if step.symbol == POINT {
                    continue;
                }
                place -= 1;
                if i >= padding {
                    uncertainty += (1.0 - step.probability) * 10f64.powi(place);
                }
            }
            Ok(json!({
                "type": "scalar", "value": value, "text": text, "uncertainty": uncertainty, "answer_mass": mass,
            }))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn question(kind: Kind) -> Question {
        Question { id: "q".into(), criterion: json!("c"), kind }
    }

    fn close(value: &Value, expected: f64) -> bool {
        value.as_f64().is_some_and(|v| (v - expected).abs() < 1e-5)
    }

    #[test]
    fn a_score_is_the_mean_and_its_confidence_falls_with_the_spread() {
        let levels = ["Calm", "Slightly annoyed", "Annoyed", "Angry"].map(str::to_owned).to_vec();
        let logs: Vec<f32> = [0.1f32, 0.5, 0.3, 0.1].iter().map(|p| (p * 0.962).ln()).collect();
        let answer = labels(&question(Kind::Score { levels }), &logs).expect("reads");
        assert!(close(&answer["score"], 1.4) && close(&answer["confidence"], 0.466_667), "{answer}");
        assert!(close(&answer["answer_mass"], 0.962) && answer["legend"]["3"] == "Angry");
    }

    #[test]
    fn a_choice_keeps_the_order_of_its_options_and_sums_to_one() {
        let options = ["b", "a", "c"].map(|n| (n.to_owned(), None)).to_vec();
        let answer = labels(&question(Kind::Choice { options }), &[-3.0, -0.5, -2.0]).expect("reads");
        assert_eq!(answer["choice"], "a");
        let p = answer["probabilities"].as_object().expect("an object");
        assert_eq!(p.keys().collect::<Vec<_>>(), ["b", "a", "c"]);
        assert!((p.values().filter_map(Value::as_f64).sum::<f64>() - 1.0).abs() < 1e-12);
        let nothing =
            labels(&question(Kind::Noul { yes: "y".into(), no: "n".into() }), &[f32::NEG_INFINITY; 2]);
        assert!(close(&nothing.expect("reads")["answer_mass"], 0.0));
    }
}
