//! The page at `/`: a chat in the browser, embedded in the program as it is written here.
//!
//! It loads nothing from elsewhere and its policy lets it: scripts and styles only from this server, no inline
//! code, no frames, no forms. What the model writes becomes text, never markup.

use axum::body::Body;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::Response;

const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'";

/// A file of the page by the last part of its path; the page itself for an empty one.
pub(crate) fn file(name: &str) -> Response {
    let (kind, body) = match name {
        "" => ("text/html; charset=utf-8", include_str!("index.html")),
        "page.css" => ("text/css; charset=utf-8", include_str!("page.css")),
        "page.js" => ("text/javascript; charset=utf-8", include_str!("page.js")),
        _ => {
            let mut response = Response::new(Body::empty());
            *response.status_mut() = StatusCode::NOT_FOUND;
            return response;
        }
    };
    let mut response = Response::new(Body::from(body));
    for (name, value) in [
        (header::CONTENT_TYPE, kind),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::X_FRAME_OPTIONS, "DENY"),
        // A newer program brings a newer page.
        (header::CACHE_CONTROL, "no-cache"),
    ] {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_has_nothing_that_its_policy_forbids() {
        let html = include_str!("index.html");
        for forbidden in
            ["<style", "style=\"", "onclick", "javascript:", "http://", "https://", "<form", "<iframe"]
        {
            assert!(!html.contains(forbidden), "{forbidden}");
        }
        // The script is a file, and the only one.
        assert_eq!(html.matches("<script").count(), 1);
        let script = include_str!("page.js");
        for forbidden in
            ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "localStorage"]
        {
            assert!(!script.contains(forbidden), "{forbidden}");
        }
        let response = file("");
        assert_eq!(response.headers()[header::CONTENT_SECURITY_POLICY], POLICY);
        assert_eq!(file("nothing").status(), StatusCode::NOT_FOUND);
    }
}
