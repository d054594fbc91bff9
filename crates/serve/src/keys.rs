//! Who may ask for what: keys and their scopes, and requests that a web page of another site makes a browser send.

use crate::app::{App, Shared};
use crate::error::ApiError;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use sha2::{Digest, Sha256};
use std::net::IpAddr;
use subtle::ConstantTimeEq;

/// What a route belongs to; a key has some of these.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    /// The page itself and whether the server lives, for everybody.
    Open,
    /// Texts, models, tokens.
    Chat,
    /// Files and jobs.
    FineTune,
    /// Adapters by path, deleting models, figures.
    Admin,
}

impl Scope {
    /// As keys are told of it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Open => "open",
            Self::Chat => "chat",
            Self::FineTune => "fine-tune",
            Self::Admin => "admin",
        }
    }

    fn of(method: &Method, path: &str) -> Self {
        if path == "/" || path == "/health" || path == "/ping" || path.starts_with("/ui/") {
            Self::Open
        } else if path.starts_with("/v1/files") || path.starts_with("/v1/fine_tuning") {
            Self::FineTune
        } else if path.contains("lora_adapter") || path == "/metrics" || *method == Method::DELETE {
            Self::Admin
        } else {
            Self::Chat
        }
    }
}

/// The hash under which a key is kept.
pub fn hash(key: &str) -> [u8; 32] {
    Sha256::digest(key.as_bytes()).into()
}

/// Lets a request through, or says why not.
pub async fn check(State(app): State<Shared>, request: Request, next: Next) -> Response {
    let scope = Scope::of(request.method(), request.uri().path());
    let checked = match comes_from_here(&app, request.method(), request.headers()) {
        Err(error) => Err(error),
        Ok(()) if scope == Scope::Open => Ok(()),
        Ok(()) => {
            let key = key_of(request.headers());
            app.blocking(move |app| app.allows(scope, key.as_deref())).await
        }
    };
    match checked {
        Ok(()) => next.run(request).await,
        Err(error) => error.into_response(),
    }
}

/// The key that a request brings, as OpenAI's or as Anthropic's clients do.
fn key_of(headers: &HeaderMap) -> Option<String> {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    let bearer = text("authorization").and_then(|value| {
        let (scheme, key) = value.split_once(' ')?;
        scheme.eq_ignore_ascii_case("bearer").then(|| key.trim())
    });
    bearer.or_else(|| text("x-api-key")).map(str::to_string)
}

impl App {
    /// Whether a key is asked for at all.
    fn has_keys(&self) -> Result<bool, ApiError> {
        Ok(!self.options.api_keys.is_empty() || !self.store.keys()?.is_empty())
    }

    fn allows(&self, scope: Scope, key: Option<&str>) -> Result<(), ApiError> {
        if !self.has_keys()? {
            return Ok(());
        }
        let refused = |message: &str| {
            let status = StatusCode::UNAUTHORIZED;
            ApiError::new(status, "authentication_error", message).coded("invalid_api_key")
        };
        let Some(key) = key else {
            return Err(refused("no API key: send it as `Authorization: Bearer KEY`"));
        };
        let hash = hash(key);
        let given = self.options.api_keys.iter().map(|key| self::hash(key));
        // All are looked at, whichever it is.
        if given.fold(0, |found, other| found | hash.ct_eq(&other).unwrap_u8()) == 1 {
            return Ok(());
        }
        let known = self.store.key_by_hash(&hash)?;
        let known = known.ok_or_else(|| refused("the API key is not one of this server's"))?;
        let admin = Scope::Admin.name();
        if known.scopes.iter().any(|of_key| of_key == scope.name() || of_key == admin) {
            return Ok(());
        }
        let message = format!("the API key {} may {} only", known.name, known.scopes.join(" and "));
        Err(ApiError::new(StatusCode::FORBIDDEN, "permission_error", message))
    }
}

/// Refuses what a browser sends for a page of another site: such a page may not ask unless its site was allowed, nor
/// reach a server without keys by a name that was made to lead here.
fn comes_from_here(app: &App, method: &Method, headers: &HeaderMap) -> Result<(), ApiError> {
    let refused =
        |message: String| Err(ApiError::new(StatusCode::FORBIDDEN, "permission_error", message));
    let text = |name: header::HeaderName| headers.get(name).and_then(|value| value.to_str().ok());
    let host = text(header::HOST);
    if let Some(origin) = text(header::ORIGIN)
        && *method != Method::OPTIONS
        && !app.options.cors_origins.iter().any(|allowed| allowed == origin || allowed == "*")
    {
        let site = origin.split_once("://").map(|(_, site)| site);
        if site.is_none() || site != host {
            let shown = metal_candle::readable(origin);
            return refused(format!("pages of {shown} may not ask this server"));
        }
    }
    let only_here = app.options.address.ip().is_loopback() && app.options.api_keys.is_empty();
    if only_here
        && let Some(host) = host
        && !is_local(host)
    {
        let shown = metal_candle::readable(host);
        return refused(format!(
            "this server is not {shown}; ask it as localhost or by its address"
        ));
    }
    Ok(())
}

/// Whether a host is this machine by its usual names, or an address.
fn is_local(host: &str) -> bool {
    let bare = match host.strip_prefix('[') {
        Some(rest) => rest.split_once(']').map_or(rest, |(address, _)| address),
        None => host.rsplit_once(':').map_or(host, |(name, _)| name),
    };
    bare.eq_ignore_ascii_case("localhost") || bare.parse::<IpAddr>().is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn routes_belong_to_scopes() {
        let of = |method, path| Scope::of(&method, path);
        assert_eq!(of(Method::GET, "/"), Scope::Open);
        assert_eq!(of(Method::GET, "/ui/app.js"), Scope::Open);
        assert_eq!(of(Method::GET, "/health"), Scope::Open);
        assert_eq!(of(Method::POST, "/v1/chat/completions"), Scope::Chat);
        assert_eq!(of(Method::GET, "/v1/models"), Scope::Chat);
        assert_eq!(of(Method::DELETE, "/v1/models/x"), Scope::Admin);
        assert_eq!(of(Method::DELETE, "/v1/files/x"), Scope::FineTune);
        assert_eq!(of(Method::POST, "/v1/fine_tuning/jobs"), Scope::FineTune);
        assert_eq!(of(Method::POST, "/v1/load_lora_adapter"), Scope::Admin);
        assert_eq!(of(Method::GET, "/metrics"), Scope::Admin);
    }

    #[test]
    fn names_that_lead_here_are_told_from_others() {
        for host in ["localhost", "localhost:8080", "127.0.0.1:1", "[::1]:80", "[::1]", "10.0.0.2"]
        {
            assert!(is_local(host), "{host}");
        }
        for host in ["evil.example", "localhost.evil.example:80", "", "127.0.0.1.nip.io"] {
            assert!(!is_local(host), "{host}");
        }
    }

    #[test]
    fn keys_come_as_both_kinds_of_clients_send_them() {
        let headers = |name: &'static str, value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(name, value.parse().expect("a header"));
            headers
        };
        assert_eq!(key_of(&headers("authorization", "Bearer abc")).as_deref(), Some("abc"));
        assert_eq!(key_of(&headers("authorization", "bearer abc ")).as_deref(), Some("abc"));
        assert_eq!(key_of(&headers("x-api-key", "abc")).as_deref(), Some("abc"));
        assert_eq!(key_of(&headers("authorization", "Basic abc")), None);
        assert_eq!(key_of(&HeaderMap::new()), None);
    }
}
