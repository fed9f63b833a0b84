//! One HTTP request at a time: redirects followed by hand, so that a token never leaves its origin, and bodies read with
//! a limit on silence.

use crate::FetchOptions;
use crate::error::{FetchError, Result};
use serde_json::Value;
use std::io::Read;
use std::time::Duration;

/// Most redirects of one request; largest JSON answer.
const MAX_REDIRECTS: usize = 5;
const MAX_JSON: u64 = 64 << 20;

/// Sends requests to one endpoint.
pub(crate) struct Client {
    endpoint: String,
    token: Option<String>,
    allow_http: bool,
    pub(crate) stall: Duration,
    pub(crate) attempts: u32,
    agent: ureq::Agent,
}

/// The part of a file that a response holds.
pub(crate) struct Body {
    /// Offset of its first byte in the file.
    pub(crate) start: u64,
    /// The bytes.
    pub(crate) reader: Box<dyn Read + Send>,
}

/// Why a transfer ended early, and whether trying again makes sense.
pub(crate) enum Broken {
    /// A connection that failed or fell silent, or a busy server.
    Again(String),
    /// Anything that would happen again.
    Final(FetchError),
}

impl Client {
    pub(crate) fn new(options: &FetchOptions) -> Result<Self> {
        let endpoint = options.endpoint.trim_end_matches('/').to_owned();
        let client = Self {
            endpoint,
            token: options.token.clone(),
            allow_http: options.allow_http,
            stall: options.stall,
            attempts: options.attempts.max(1),
            agent: ureq::Agent::config_builder()
                .http_status_as_error(false)
                .max_redirects(0)
                .max_redirects_will_error(false)
                .timeout_connect(Some(options.stall))
                .timeout_recv_response(Some(options.stall))
                .user_agent(concat!("infernix/", env!("CARGO_PKG_VERSION")))
                .build()
                .into(),
        };
        client.allowed(&client.endpoint)?;
        Ok(client)
    }

    pub(crate) fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// https anywhere; http on this machine, elsewhere only if asked for.
    fn allowed(&self, url: &str) -> Result<()> {
        if url.starts_with("https://") {
            return Ok(());
        }
        let Some(rest) = url.strip_prefix("http://") else {
            return Err(FetchError::Request(format!("{url:?} is no http:// or https:// address")));
        };
        let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
        if authority.contains('@') {
            return Err(FetchError::Request(format!("{url:?}: no credentials in an address, please")));
        }
        let host = authority.strip_prefix('[').map_or_else(
            || authority.split(':').next().unwrap_or_default(),
            |v6| v6.split(']').next().unwrap_or_default(),
        );
        let local = host == "localhost" || host.parse().is_ok_and(|ip: std::net::IpAddr| ip.is_loopback());
        if local || self.allow_http {
            return Ok(());
        }
        Err(FetchError::Request(format!("{url}: plain http beyond this machine needs --allow-http")))
    }

    /// A GET that follows redirects; the token goes to the endpoint's origin only.
    fn get(
        &self,
        url: &str,
        range: Option<u64>,
    ) -> std::result::Result<ureq::http::Response<ureq::Body>, Broken> {
        let mut url = url.to_owned();
        for _ in 0..=MAX_REDIRECTS {
            self.allowed(&url).map_err(Broken::Final)?;
            let mut request = self.agent.get(&url).header("accept-encoding", "identity");
            if let Some(token) = self.token.as_ref().filter(|_| origin(&url) == origin(&self.endpoint)) {
                request = request.header("authorization", format!("Bearer {token}"));
            }
            if let Some(from) = range {
                request = request.header("range", format!("bytes={from}-"));
            }
            let response = request.call().map_err(|e| Broken::Again(e.to_string()))?;
            let status = response.status().as_u16();
            if !(300..400).contains(&status) || status == 304 {
                return Ok(response);
            }
            let to = response.headers().get("location").and_then(|v| v.to_str().ok()).unwrap_or_default();
            let next = if to.starts_with('/') && !to.starts_with("//") {
                format!("{}{to}", origin(&url))
            } else {
                to.to_owned()
            };
            if url.starts_with("https://") && !next.starts_with("https://") {
                let what = "a redirect from https to plain http".into();
                return Err(Broken::Final(FetchError::Answer { url, what }));
            }
            url = next;
        }
        Err(Broken::Final(FetchError::Answer { url, what: "too many redirects".into() }))
    }

    fn refused(url: &str, status: u16) -> Broken {
        if status == 429 || status >= 500 {
            return Broken::Again(format!("status {status}"));
        }
        let hint = match status {
            401 | 403 => "; the repository needs a token (HF_TOKEN) whose account may read it",
            404 => "; no such repository, revision or file, or it is private",
            _ => "",
        };
        Broken::Final(FetchError::Status { url: url.to_owned(), status, hint })
    }

    /// A JSON document, tried again like files are.
    pub(crate) fn get_json(&self, url: &str) -> Result<Value> {
        let mut failures = 0;
        loop {
            let attempt = || -> std::result::Result<Value, Broken> {
                let mut response = self.get(url, None)?;
                if response.status() != 200 {
                    return Err(Self::refused(url, response.status().as_u16()));
                }
                let mut text = Vec::new();
                let reader = response.body_mut().as_reader();
                reader.take(MAX_JSON).read_to_end(&mut text).map_err(|e| Broken::Again(e.to_string()))?;
                serde_json::from_slice(&text).map_err(|e| {
                    Broken::Final(FetchError::Answer { url: url.to_owned(), what: format!("no JSON: {e}") })
                })
            };
            match attempt() {
                Ok(v) => return Ok(v),
                Err(Broken::Final(e)) => return Err(e),
                Err(Broken::Again(what)) => {
                    failures += 1;
                    if failures >= self.attempts {
                        return Err(FetchError::Network { url: url.to_owned(), what });
                    }
                    std::thread::sleep(pause(failures));
                }
            }
        }
    }

    /// A file's bytes from `from` on, of a file of `size` bytes. A server that ignores the range sends all of it.
    pub(crate) fn open(&self, url: &str, from: u64, size: u64) -> std::result::Result<Body, Broken> {
        let response = self.get(url, (from > 0).then_some(from))?;
        let status = response.status().as_u16();
        let wrong = |what: String| Broken::Final(FetchError::Answer { url: url.to_owned(), what });
        let header =
            |name: &str| response.headers().get(name).and_then(|v| v.to_str().ok().map(str::to_owned));
        let length = header("content-length").and_then(|v| v.trim().parse::<u64>().ok());
        let start = match status {
            200 => 0,
            206 => {
                let range = header("content-range").unwrap_or_default();
                if range != format!("bytes {from}-{}/{size}", size - 1) {
                    return Err(wrong(format!(
                        "bytes {from}-{} of {size} asked for, {range:?} answered",
                        size - 1
                    )));
                }
                from
            }
            _ => return Err(Self::refused(url, status)),
        };
        if let Some(length) = length.filter(|l| *l != size - start) {
            return Err(wrong(format!(
                "{} bytes announced by the listing, {length} by the file",
                size - start
            )));
        }
        Ok(Body { start, reader: Box::new(response.into_body().into_reader()) })
    }
}

/// Scheme, host and port of an address.
fn origin(url: &str) -> String {
    let (scheme, rest) = url.split_once("://").unwrap_or(("", url));
    let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
    format!("{}://{}", scheme.to_ascii_lowercase(), authority.to_ascii_lowercase())
}

/// Before the n-th new attempt: 0.2, 0.4, 0.8 ... 6.4 s.
pub(crate) fn pause(failures: u32) -> Duration {
    Duration::from_millis(100 << failures.clamp(1, 6))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_http_stays_on_this_machine() {
        let client = |endpoint: &str, allow_http| {
            Client::new(&FetchOptions {
                repo: "o/n".into(),
                revision: "main".into(),
                include: Vec::new(),
                exclude: Vec::new(),
                endpoint: endpoint.into(),
                token: None,
                hub: "x".into(),
                parallel: 1,
                allow_http,
                stall: Duration::from_secs(1),
                attempts: 1,
            })
        };
        for good in ["https://a.example", "http://127.0.0.1:80", "http://localhost", "http://[::1]:9"] {
            assert!(client(good, false).is_ok(), "{good}");
        }
        for bad in ["http://a.example", "http://127.0.0.1.example", "ftp://a", "http://u@localhost"] {
            assert!(client(bad, false).is_err(), "{bad}");
        }
        assert!(client("http://a.example", true).is_ok());
        assert_eq!(origin("HTTPS://A.b:1/c?d"), "https://a.b:1");
    }
}
