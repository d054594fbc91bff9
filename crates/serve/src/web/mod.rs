//! The page for people: files that are part of the program, and no others. It talks to the same API as every client.

use crate::app::Shared;
use axum::Router;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use sha2::{Digest, Sha256};

const CSS: &str = "text/css; charset=utf-8";
const HTML: &str = "text/html; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";
const SVG: &str = "image/svg+xml";

/// Where each file is served, what it is, and what it holds.
const ASSETS: [(&str, &str, &str); 15] = [
    ("/", HTML, include_str!("index.html")),
    ("/ui/answer.js", SCRIPT, include_str!("answer.js")),
    ("/ui/api.js", SCRIPT, include_str!("api.js")),
    ("/ui/app.js", SCRIPT, include_str!("app.js")),
    ("/ui/chart.js", SCRIPT, include_str!("chart.js")),
    ("/ui/chat.js", SCRIPT, include_str!("chat.js")),
    ("/ui/compare.js", SCRIPT, include_str!("compare.js")),
    ("/ui/dom.js", SCRIPT, include_str!("dom.js")),
    ("/ui/icon.svg", SVG, include_str!("icon.svg")),
    ("/ui/job.js", SCRIPT, include_str!("job.js")),
    ("/ui/load.js", SCRIPT, include_str!("load.js")),
    ("/ui/models.js", SCRIPT, include_str!("models.js")),
    ("/ui/style.css", CSS, include_str!("style.css")),
    ("/ui/text.js", SCRIPT, include_str!("text.js")),
    ("/ui/tune.js", SCRIPT, include_str!("tune.js")),
];

/// What the page may do: load from here, talk to here, and make no markup out of text.
const POLICY: &str = "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; \
    frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'";

/// The routes.
pub fn routes() -> Router<Shared> {
    ASSETS.iter().fold(Router::new(), |router, &(path, kind, text)| {
        let tag = tag(text);
        let handler = move |headers: HeaderMap| async move { asset(kind, text, &tag, &headers) };
        router.route(path, get(handler))
    })
}

/// The name of these bytes for caches.
fn tag(text: &str) -> String {
    let hash = Sha256::digest(text);
    let digits: String = hash.iter().take(16).map(|byte| format!("{byte:02x}")).collect();
    format!("\"{digits}\"")
}

/// A file, or that the browser has it already. It asks each time, so a newer server's page is seen at once.
fn asset(kind: &'static str, text: &'static str, tag: &str, headers: &HeaderMap) -> Response {
    let caching = [(header::ETAG, tag), (header::CACHE_CONTROL, "no-cache")];
    let known =
        headers.get_all(header::IF_NONE_MATCH).iter().filter_map(|value| value.to_str().ok());
    let mut known =
        known.flat_map(|value| value.split(',')).map(|value| value.trim().trim_start_matches("W/"));
    if known.any(|value| value == tag || value == "*") {
        return (StatusCode::NOT_MODIFIED, caching).into_response();
    }
    let rules = [
        (header::CONTENT_TYPE, kind),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    ];
    (caching, rules, text).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::HeaderValue;
    use std::collections::BTreeSet;

    /// What stands between `before` and the next quotation mark.
    fn named<'a>(text: &'a str, before: &'a str) -> impl Iterator<Item = &'a str> {
        text.split(before).skip(1).filter_map(|rest| rest.split('"').next())
    }

    #[test]
    fn every_file_is_served_and_used() {
        let served: BTreeSet<String> =
            ASSETS.iter().map(|(path, _, _)| (*path).to_owned()).collect();
        let mut used = BTreeSet::from(["/".to_owned()]);
        for (path, kind, text) in ASSETS {
            used.extend(named(text, " from \"./").map(|name| format!("/ui/{name}")));
            used.extend(named(text, "=\"/").chain(named(text, ": \"/ui")).filter_map(|name| {
                let name = name.trim_start_matches("ui/").trim_start_matches('/');
                name.contains('.').then(|| format!("/ui/{name}"))
            }));
            assert!(
                kind != HTML || !text.contains("<style"),
                "{path}: the policy allows no style in HTML"
            );
        }
        assert_eq!(served, used);
    }

    #[test]
    fn a_file_that_the_browser_has_is_not_sent_again() {
        let (_, kind, text) = ASSETS[0];
        let tag = tag(text);
        let asked = |value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::IF_NONE_MATCH, HeaderValue::from_str(value).expect("a header"));
            asset(kind, text, &tag, &headers).status()
        };
        assert_eq!(asset(kind, text, &tag, &HeaderMap::new()).status(), StatusCode::OK);
        assert_eq!(asked("\"other\""), StatusCode::OK);
        assert_eq!(asked(&tag), StatusCode::NOT_MODIFIED);
        assert_eq!(asked(&format!("\"other\", W/{tag}")), StatusCode::NOT_MODIFIED);
    }
}
