//! Who may ask: keys, and on loopback the Host and Origin that a page of another site cannot forge.

use crate::error::ApiError;
use crate::options::ServeOptions;
use axum::http::{HeaderMap, Method, Uri, header};

/// Keys as hashes: comparing them takes the same time whatever is asked.
#[derive(Debug, Clone, Default)]
pub(crate) struct Keys {
    known: Vec<Known>,
}

#[derive(Debug, Clone)]
struct Known {
    name: String,
    hash: blake3::Hash,
    salt: String,
}

impl Keys {
    pub(crate) fn new(options: &ServeOptions) -> Self {
        let derived = |what: &str, key: &str| blake3::Hash::from(blake3::derive_key(what, key.as_bytes()));
        let known = |k: &crate::options::ApiKey| Known {
            name: k.name.clone(),
            hash: derived("infernix serve api key", &k.key),
            salt: derived("infernix serve prefix cache", &k.key).to_hex().to_string(),
        };
        Self { known: options.keys.iter().map(known).collect() }
    }

    /// The name of a key, for logs.
    pub(crate) fn name(&self, index: usize) -> &str {
        self.known.get(index).map_or("", |k| &k.name)
    }

    /// What keeps a key's cached prefixes apart, over restarts, too: it follows from the key alone, whatever its name and its
    /// place among the others, and the key does not follow from it.
    pub(crate) fn salt(&self, index: usize) -> &str {
        self.known.get(index).map_or("", |k| &k.salt)
    }

    /// Which key a request carries; `None` where there are no keys.
    pub(crate) fn check(&self, headers: &HeaderMap) -> Result<Option<usize>, ApiError> {
        if self.known.is_empty() {
            return Ok(None);
        }
        let Some(key) = presented(headers) else {
            return Err(ApiError::new(
                401,
                "missing_api_key",
                "this server needs a key: send `Authorization: Bearer KEY` or `x-api-key: KEY`",
            ));
        };
        let hash: blake3::Hash = blake3::derive_key("infernix serve api key", key).into();
        // Hashes compare in constant time; all are looked at, so the time does not tell which one it is.
        let mut found = None;
        for (i, known) in self.known.iter().enumerate() {
            if known.hash == hash {
                found = Some(i);
            }
        }
        found
            .map(Some)
            .ok_or_else(|| ApiError::new(401, "invalid_api_key", "the key is not one of this server's"))
    }
}

fn presented(headers: &HeaderMap) -> Option<&[u8]> {
    if let Some(value) = headers.get(header::AUTHORIZATION) {
        let bytes = value.as_bytes();
        let (scheme, key) = bytes.split_at_checked(7)?;
        return scheme.eq_ignore_ascii_case(b"bearer ").then(|| key.trim_ascii());
    }
    headers.get("x-api-key").map(|v| v.as_bytes().trim_ascii())
}

/// Refuses requests that a page of another site can cause. A page cannot set Host or Origin; a name that it rebinds to
/// this machine shows in Host.
/// `loopback` is whether only this machine reaches the address that was asked.
pub(crate) fn check_browser(
    options: &ServeOptions,
    loopback: bool,
    uri: &Uri,
    headers: &HeaderMap,
) -> Result<(), ApiError> {
    let text = |name: header::HeaderName| headers.get(name).map(|v| v.to_str().unwrap_or("\u{fffd}"));
    // Which of two would be meant depends on who reads them (RFC 9112, section 3.2).
    if headers.get_all(header::HOST).iter().count() > 1 {
        return Err(ApiError::new(400, "invalid_host", "the request has more than one Host"));
    }
    // A target with a host in it counts, whatever Host says (section 3.2.2).
    let host = uri.authority().map(|a| a.as_str()).or_else(|| text(header::HOST));
    if loopback {
        let name = host_name(host.unwrap_or(""));
        let known = is_loopback(name) || options.allowed_hosts.iter().any(|h| h.eq_ignore_ascii_case(name));
        if !known {
            return Err(ApiError::new(
                403,
                "host_not_allowed",
                format!(
                    "this server listens on loopback and does not answer to {}; see --allow-host",
                    shown(name)
                ),
            ));
        }
    }
    if let Some(origin) = text(header::ORIGIN)
        && !options.cors
    {
        let same = origin.split_once("://").is_some_and(|(scheme, rest)| {
            matches!(scheme, "http" | "https") && host.is_some_and(|h| h.eq_ignore_ascii_case(rest))
        });
        if !same {
            return Err(ApiError::new(
                403,
                "origin_not_allowed",
                format!("pages of {} may not use this server; see --cors", shown(origin)),
            ));
        }
    }
    Ok(())
}

/// Every body must say that it is JSON: forms and plain text are what a foreign page can send without asking first.
pub(crate) fn check_content_type(method: &Method, headers: &HeaderMap) -> Result<(), ApiError> {
    if *method != Method::POST {
        return Ok(());
    }
    if let Some(encoding) = headers.get(header::CONTENT_ENCODING)
        && encoding != "identity"
    {
        return Err(ApiError::new(415, "unsupported_media_type", "bodies must not be compressed"));
    }
    let kind = headers.get(header::CONTENT_TYPE).and_then(|v| v.to_str().ok()).unwrap_or("");
    let kind = kind.split(';').next().unwrap_or("").trim().to_ascii_lowercase();
    if kind == "application/json" || kind.starts_with("application/") && kind.ends_with("+json") {
        return Ok(());
    }
    let found = if kind.is_empty() { "none".to_owned() } else { shown(&kind) };
    Err(ApiError::new(
        415,
        "unsupported_media_type",
        format!("the content type must be application/json, not {found}"),
    ))
}

fn host_name(host: &str) -> &str {
    match host.strip_prefix('[') {
        Some(v6) => v6.split(']').next().unwrap_or(""),
        None => host.rsplit_once(':').map_or(host, |(name, _)| name),
    }
}

fn is_loopback(name: &str) -> bool {
    name.eq_ignore_ascii_case("localhost")
        || name.parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

fn shown(text: &str) -> String {
    crate::error::quoted(&serde_json::Value::from(text))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::ApiKey;
    use axum::http::HeaderValue;

    fn headers(list: &[(&'static str, &'static str)]) -> HeaderMap {
        list.iter().map(|(n, v)| (header::HeaderName::from_static(n), HeaderValue::from_static(v))).collect()
    }

    #[test]
    fn keys_come_as_bearer_or_header_and_only_known_ones_pass() {
        let key = |name: &str, key: &str| ApiKey { name: name.into(), key: key.into() };
        let options = ServeOptions { keys: vec![key("a", "k1"), key("b", "k2")], ..ServeOptions::default() };
        let keys = Keys::new(&options);
        assert_eq!(keys.check(&headers(&[("authorization", "bEaReR k2")])), Ok(Some(1)));
        assert_eq!(keys.check(&headers(&[("x-api-key", "k1")])), Ok(Some(0)));
        for (list, code) in [
            (headers(&[]), "missing_api_key"),
            (headers(&[("authorization", "Basic k1")]), "missing_api_key"),
            (headers(&[("authorization", "Bearer k3")]), "invalid_api_key"),
            (headers(&[("x-api-key", "")]), "invalid_api_key"),
        ] {
            assert_eq!(keys.check(&list).expect_err("refused").code, code);
        }
        assert_eq!(Keys::default().check(&headers(&[])), Ok(None));
    }

    #[test]
    fn rebound_names_and_foreign_origins_are_refused_on_loopback() {
        let options = ServeOptions { allowed_hosts: vec!["box.lan".into()], ..ServeOptions::default() };
        let origin = Uri::from_static("/v1/models");
        let check = |list: &[(&'static str, &'static str)]| {
            check_browser(&options, options.loopback, &origin, &headers(list)).map_err(|e| e.code)
        };
        for good in ["localhost:8080", "127.0.0.1:1", "[::1]:8080", "LOCALHOST", "box.lan:80", "127.9.9.9"] {
            assert_eq!(check(&[("host", good)]), Ok(()), "{good}");
        }
        for bad in ["evil.example:8080", "localhost.evil.example", "", "10.0.0.1", "[::2]:1"] {
            assert_eq!(check(&[("host", bad)]), Err("host_not_allowed"), "{bad}");
        }
        assert_eq!(check(&[("host", "localhost:1"), ("origin", "http://localhost:1")]), Ok(()));
        for bad in ["http://evil.example", "null", "http://localhost:2", "file://localhost:1"] {
            assert_eq!(
                check(&[("host", "localhost:1"), ("origin", bad)]),
                Err("origin_not_allowed"),
                "{bad}"
            );
        }
        let open = ServeOptions { cors: true, loopback: false, ..ServeOptions::default() };
        let evil = headers(&[("origin", "http://evil.example")]);
        assert!(check_browser(&open, open.loopback, &origin, &evil).is_ok());
    }

    #[test]
    fn a_host_in_the_target_counts_and_two_hosts_are_none() {
        let options = ServeOptions::default();
        let check = |uri: &'static str, list: &[(&'static str, &'static str)]| {
            let mut all = HeaderMap::new();
            for (name, value) in list {
                all.append(header::HeaderName::from_static(name), HeaderValue::from_static(value));
            }
            check_browser(&options, true, &Uri::from_static(uri), &all).map_err(|e| e.code)
        };
        let own = ("host", "localhost:1");
        assert_eq!(check("http://localhost:1/v1/models", &[own]), Ok(()));
        assert_eq!(check("http://evil.example/v1/models", &[own]), Err("host_not_allowed"));
        assert_eq!(check("http://localhost@evil.example/v1/models", &[own]), Err("host_not_allowed"));
        assert_eq!(check("/v1/models", &[own, ("host", "evil.example")]), Err("invalid_host"));
        assert_eq!(check("/v1/models", &[own, own]), Err("invalid_host"));
    }

    #[test]
    fn what_keeps_prefixes_apart_follows_from_the_key_alone() {
        let key = |name: &str, key: &str| ApiKey { name: name.into(), key: key.into() };
        let keys = |keys: Vec<ApiKey>| Keys::new(&ServeOptions { keys, ..ServeOptions::default() });
        let before = keys(vec![key("key-1", "one"), key("key-2", "two")]);
        let swapped = keys(vec![key("key-1", "two"), key("key-2", "one")]);
        assert_eq!((before.salt(0), before.salt(1)), (swapped.salt(1), swapped.salt(0)));
        let replaced = keys(vec![key("key-1", "three"), key("key-1", "two")]);
        assert_ne!(replaced.salt(0), before.salt(0));
        assert_ne!(replaced.salt(0), replaced.salt(1), "equal names share nothing");
        let told = before.salt(0);
        assert!(!told.contains("one") && told != before.known[0].hash.to_hex().as_str());
    }

    #[test]
    fn bodies_that_a_form_can_send_are_refused() {
        let check = |kind| check_content_type(&Method::POST, &headers(&[("content-type", kind)]));
        assert!(
            check("application/json; charset=utf-8").is_ok() && check("application/problem+json").is_ok()
        );
        for bad in ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""]
        {
            assert_eq!(check(bad).expect_err("refused").status, 415, "{bad}");
        }
        assert_eq!(check_content_type(&Method::POST, &headers(&[])).expect_err("refused").status, 415);
        assert!(check_content_type(&Method::GET, &headers(&[])).is_ok());
        let zipped = headers(&[("content-type", "application/json"), ("content-encoding", "zstd")]);
        assert_eq!(check_content_type(&Method::POST, &zipped).expect_err("refused").status, 415);
    }
}
