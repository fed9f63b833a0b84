//! Keeps secrets out of reports: values of options, variables and headers that hold keys, and what stands before the host of
//! an address.

use serde_json::Value;

/// What stands where a secret stood.
const HIDDEN: &str = "***";

/// How names of secrets end, in small letters and without separators: `--api-key`, `HF_TOKEN=`, `"password":`.
const ENDINGS: [&str; 8] =
    ["key", "token", "password", "passwd", "secret", "authorization", "credential", "credentials"];

/// First words of a header's value that say what follows.
const SCHEMES: [&str; 3] = ["bearer", "basic", "token"];

fn is_secret(name: &str) -> bool {
    let plain: String =
        name.chars().filter(char::is_ascii_alphanumeric).map(|c| c.to_ascii_lowercase()).collect();
    ENDINGS.iter().any(|e| plain.ends_with(e))
}

/// An address, or a text with addresses in it, without user names and passwords.
pub fn address(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find("://") {
        let (head, tail) = rest.split_at(at + 3);
        out.push_str(head);
        let ends = |c: char| c.is_whitespace() || matches!(c, '/' | '?' | '#' | '\'' | '"');
        let authority = &tail[..tail.find(ends).unwrap_or(tail.len())];
        rest = match authority.rfind('@') {
            Some(end) => {
                out.push_str(HIDDEN);
                &tail[end..]
            }
            None => tail,
        };
    }
    out + rest
}

/// A JSON value without the values of keys and the secrets in addresses.
pub fn fields(value: &Value) -> Value {
    match value {
        Value::Object(map) => {
            let shown = |(name, v): (&String, &Value)| {
                (name.clone(), if is_secret(name) { Value::from(HIDDEN) } else { fields(v) })
            };
            map.iter().map(shown).collect()
        }
        Value::Array(list) => list.iter().map(fields).collect(),
        Value::String(text) => address(text).into(),
        other => other.clone(),
    }
}

/// A command line without the secrets in it, also those of commands that are quoted inside.
pub fn command(text: &str) -> String {
    let text = address(text);
    let mut out = String::with_capacity(text.len());
    let mut rest = text.as_str();
    while !rest.is_empty() {
        let in_name = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_');
        let end = rest.find(|c| !in_name(c)).unwrap_or(rest.len());
        if end == 0 {
            let next = rest.chars().next().map_or(1, char::len_utf8);
            out.push_str(&rest[..next]);
            rest = &rest[next..];
            continue;
        }
        let (name, after) = rest.split_at(end);
        out.push_str(name);
        rest = after;
        if is_secret(name) {
            rest = hide(name.starts_with('-'), after, &mut out);
        }
    }
    out
}

/// Takes what follows the name of a secret, up to the secret's end; gives what comes after it.
fn hide<'a>(option: bool, after: &'a str, out: &mut String) -> &'a str {
    // `"name": "value"`.
    let bare = after.trim_start_matches(['"', '\'', '\\']).trim_start();
    let assigned = bare.strip_prefix(['=', ':']).filter(|_| !bare.starts_with("://"));
    if let Some(value) = assigned {
        let value = value.trim_start();
        out.push_str(&after[..after.len() - value.len()]);
        let mut rest = one(value, out);
        let word = &value[..value.len() - rest.len()];
        if SCHEMES.contains(&word.to_ascii_lowercase().as_str()) {
            // The scheme was taken for the secret.
            let next = rest.trim_start();
            out.push(' ');
            rest = one(next, out);
        }
        return rest;
    }
    if !option || !after.starts_with(char::is_whitespace) {
        return after;
    }
    // Some servers take several keys after one option.
    let mut rest = after;
    loop {
        let word = rest.trim_start();
        let ends = word.is_empty() || word.starts_with(['-', ';', '&', '|', '#', '<', '>', ')']);
        if ends || word.len() == rest.len() {
            return rest;
        }
        out.push_str(&rest[..rest.len() - word.len()]);
        rest = one(word, out);
    }
}

/// Hides one value, in quotes or up to what ends a word.
fn one<'a>(value: &'a str, out: &mut String) -> &'a str {
    let ends = |c: char| c.is_whitespace() || matches!(c, '"' | '\'' | ';' | '&' | '|' | '}');
    let end = match value.chars().next() {
        Some(quote @ ('"' | '\'')) => value[1..].find(quote).map(|i| i + 2),
        _ => value.find(ends),
    };
    let end = end.unwrap_or(value.len());
    if end > 0 {
        out.push_str(HIDDEN);
    }
    &value[end..]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_of_fields_are_hidden_and_all_else_stays() {
        let given =
            serde_json::json!({ "a": [{ "api_key": ["K"], "n": 1 }, "http://u:p@h"], "max_tokens": 5 });
        let shown =
            serde_json::json!({ "a": [{ "api_key": "***", "n": 1 }, "http://***@h"], "max_tokens": 5 });
        assert_eq!(fields(&given), shown);
    }

    #[test]
    fn keys_of_commands_and_addresses_are_hidden_and_all_else_stays() {
        for (text, shown) in [
            ("serve --api-key K --port {port}", "serve --api-key *** --port {port}"),
            ("serve --api-key=K,L m", "serve --api-key=*** m"),
            ("serve --api-key K1 K2 --port 1", "serve --api-key *** *** --port 1"),
            ("x='serve --api-key \"a b\" --port 1'", "x='serve --api-key *** --port 1'"),
            ("a=VLLM_API_KEY=K serve; HF_TOKEN='x y' z", "a=VLLM_API_KEY=*** serve; HF_TOKEN=*** z"),
            ("serve -H 'Authorization: Bearer K' -p 1", "serve -H 'Authorization: *** ***' -p 1"),
            (
                r#"--extra-body {"api_key":"K","max_tokens":5,"n":1}"#,
                r#"--extra-body {"api_key":***,"max_tokens":5,"n":1}"#,
            ),
            ("--arms 'x=serve --api-key K'", "--arms 'x=serve --api-key ***'"),
            ("--url http://h/v1?api_key=K&x=1", "--url http://h/v1?api_key=***&x=1"),
            ("a=http://user:PW@host:1/v1 b", "a=http://***@host:1/v1 b"),
            ("https://u:a@b@host/x@y http://h", "https://***@host/x@y http://h"),
        ] {
            assert_eq!(command(text), shown);
        }
        for plain in [
            "infernix serve m.infernix --api-key-file key.txt --max-tokens 5 --draft-tokens auto",
            "x=llama-server -m m.gguf --port {port} -c 4096 --jinja",
            "bench -p 512 --metadata gpu=H200 --label \u{e9} --url http://127.0.0.1:8080/v1",
        ] {
            assert_eq!(command(plain), plain);
        }
        assert_eq!(address("http://u@h: no; key=K"), "http://***@h: no; key=K");
    }
}
