//! Who may ask for what: keys, their scopes and limits, and requests that a web page of another site makes a browser send.

pub use crate::store::{Key, Keys, Limits};

use crate::api;
use crate::app::{App, Shared};
use crate::error::ApiError;
use crate::server::Answer;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::Response;
use serde::Serialize;
use sha2::{Digest, Sha256};
use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use subtle::ConstantTimeEq;

const MINUTE: Duration = Duration::from_secs(60);
/// Where browsers say whether a page of the same site asks.
const FETCH_SITE: &str = "sec-fetch-site";
/// The paths for administrators, beside all that is deleted.
const ADMIN_PATHS: [&str; 3] = ["/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/metrics"];

/// What a key allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Scope {
    /// Texts, models, tokens.
    Chat,
    /// Files and jobs.
    FineTune,
    /// Everything: adapters by path, deleting models, figures, and what the others allow.
    Admin,
}

impl Scope {
    /// All that there are.
    pub const ALL: [Self; 3] = [Self::Chat, Self::FineTune, Self::Admin];

    /// As keys are told of it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Chat => "chat",
            Self::FineTune => "fine-tune",
            Self::Admin => "admin",
        }
    }

    /// That of this name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|scope| scope.name() == name)
    }

    /// What a route needs; `None` for the page itself and whether the server lives, which are for everybody.
    fn of(method: &Method, path: &str) -> Option<Self> {
        if path == "/" || path == "/health" || path == "/ping" || path.starts_with("/ui/") {
            None
        } else if path.starts_with("/v1/files") || path.starts_with("/v1/fine_tuning") {
            Some(Self::FineTune)
        } else if ADMIN_PATHS.contains(&path) || *method == Method::DELETE {
            Some(Self::Admin)
        } else {
            Some(Self::Chat)
        }
    }
}

/// The hash under which a key is kept.
pub(crate) type Hash = [u8; 32];

/// The hash of a key.
pub(crate) fn hash(key: &str) -> Hash {
    Sha256::digest(key.as_bytes()).into()
}

/// Lets a request through, or says why not.
pub(crate) async fn check(State(app): State<Shared>, request: Request, next: Next) -> Response {
    let path = request.uri().path().to_string();
    let scope = Scope::of(request.method(), &path);
    let checked = match comes_from_here(&app, scope, request.method(), request.headers()) {
        Err(error) => Err(error),
        Ok(()) => match scope {
            None => Ok(None),
            Some(scope) => {
                let key = key_of(request.headers());
                admit(&app, scope, key).await
            }
        },
    };
    match checked {
        Ok(None) => next.run(request).await,
        Ok(Some(permit)) => {
            next.run(request).await.map(|body| Body::new(Answer::new(body, permit)))
        }
        Err(error) => api::refusal(&path, error),
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

/// Lets a request through, with a place where its key has limits.
async fn admit(
    app: &Shared,
    scope: Scope,
    key: Option<String>,
) -> Result<Option<Permit>, ApiError> {
    let known = app.quick(move |app| app.allows(scope, key.as_deref())).await?;
    match known {
        Some((hash, key)) if key.limits != Limits::default() => {
            app.gate.enter(hash, &key, Instant::now())?;
            Ok(Some(Permit { app: app.clone(), hash }))
        }
        _ => Ok(None),
    }
}

impl App {
    /// Whether a key is asked for at all.
    fn asks_for_keys(&self) -> Result<bool, ApiError> {
        if !self.options.api_keys.is_empty() || self.gate.is_closed() {
            return Ok(true);
        }
        let has_keys = self.store.has_keys()?;
        if has_keys {
            self.gate.close();
        }
        Ok(has_keys)
    }

    /// Whether a key may do this; gives it if it is of the data folder.
    fn allows(&self, scope: Scope, key: Option<&str>) -> Result<Option<(Hash, Key)>, ApiError> {
        if !self.asks_for_keys()? {
            return Ok(None);
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
            return Ok(None);
        }
        let known = self.store.key_by_hash(&hash)?;
        let known = known.ok_or_else(|| refused("the API key is not one of this server's"))?;
        if known.scopes.iter().any(|of_key| [scope, Scope::Admin].contains(of_key)) {
            return Ok(Some((hash, known)));
        }
        let scopes: Vec<&str> = known.scopes.iter().map(|scope| scope.name()).collect();
        let message = format!(
            "the API key {} is for {} only, and this needs {}",
            known.name,
            scopes.join(" and "),
            scope.name()
        );
        Err(ApiError::new(StatusCode::FORBIDDEN, "permission_error", message))
    }
}

/// Whether keys are asked for, and what was asked with those that have limits.
#[derive(Debug)]
pub(crate) struct Gate {
    closed: AtomicBool,
    usage: Mutex<HashMap<Hash, Usage>>,
}

/// What was asked with a key.
#[derive(Debug, Default)]
struct Usage {
    under_way: u32,
    /// The requests of the last minute; none are noted for a key that may ask as often as it likes.
    begun: VecDeque<Instant>,
}

impl Usage {
    fn forget(&mut self, now: Instant) {
        while self.begun.front().is_some_and(|begun| now.duration_since(*begun) >= MINUTE) {
            self.begun.pop_front();
        }
    }

    fn is_empty(&self) -> bool {
        self.under_way == 0 && self.begun.is_empty()
    }
}

impl Gate {
    /// One that asks for keys, or one that does so once it has seen any.
    pub fn new(closed: bool) -> Self {
        Self { closed: AtomicBool::new(closed), usage: Mutex::default() }
    }

    /// Whether it asks for keys even if there are none left: to remove the last is not to let everybody in.
    fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Relaxed)
    }

    fn close(&self) {
        self.closed.store(true, Ordering::Relaxed);
    }

    fn usage(&self) -> MutexGuard<'_, HashMap<Hash, Usage>> {
        self.usage.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a request, or says after how many seconds it may come again.
    fn enter(&self, hash: Hash, key: &Key, now: Instant) -> Result<(), ApiError> {
        let mut all = self.usage();
        if !all.contains_key(&hash) {
            // Those of keys that were removed go, too.
            all.retain(|_, usage| {
                usage.forget(now);
                !usage.is_empty()
            });
        }
        let usage = all.entry(hash).or_default();
        usage.forget(now);
        let name = &key.name;
        if let Some(most) = key.limits.at_once
            && usage.under_way >= most
        {
            let message = format!(
                "at_once: {most} requests of the API key {name} are under way, the most it has"
            );
            return Err(ApiError::busy(message));
        }
        if let Some(most) = key.limits.per_minute {
            if usage.begun.len() >= most as usize
                && let Some(first) = usage.begun.front()
            {
                let wait = (*first + MINUTE).saturating_duration_since(now);
                let seconds = wait.as_millis().div_ceil(1000).max(1) as u64;
                let message = format!(
                    "per_minute: the API key {name} has asked {most} times within a minute, the most it may; it may \
                     again in {seconds} s"
                );
                return Err(ApiError { retry_after: Some(seconds), ..ApiError::busy(message) });
            }
            usage.begun.push_back(now);
        }
        usage.under_way += 1;
        Ok(())
    }

    fn leave(&self, hash: &Hash) {
        let mut all = self.usage();
        if let Some(usage) = all.get_mut(hash) {
            usage.under_way = usage.under_way.saturating_sub(1);
            if usage.is_empty() {
                all.remove(hash);
            }
        }
    }
}

/// A place among the requests of a key, which is given back when this is dropped.
struct Permit {
    app: Shared,
    hash: Hash,
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.app.gate.leave(&self.hash);
    }
}

/// Refuses what a browser sends for a page of another site: such a page may not ask unless its site was allowed, nor
/// reach a server without keys by a name that was made to lead here.
fn comes_from_here(
    app: &App,
    scope: Option<Scope>,
    method: &Method,
    headers: &HeaderMap,
) -> Result<(), ApiError> {
    let refused =
        |message: String| Err(ApiError::new(StatusCode::FORBIDDEN, "permission_error", message));
    let text = |name: header::HeaderName| headers.get(name).and_then(|value| value.to_str().ok());
    let host = text(header::HOST);
    let origin = text(header::ORIGIN);
    let allowed = &app.options.cors_origins;
    let is_allowed = allowed.iter().any(|it| it == "*" || Some(it.as_str()) == origin);
    let is_checked = *method != Method::OPTIONS && !is_allowed;
    if let Some(origin) = origin
        && is_checked
    {
        let site = origin.split_once("://").map(|(_, site)| site);
        if site.is_none() || site != host {
            let shown = metal_candle::readable(origin);
            return refused(format!("pages of {shown} may not ask this server"));
        }
    }
    let has_keys = !app.options.api_keys.is_empty() || app.gate.is_closed();
    // An origin isn't told of every request, and a proxy may take it away. Links may lead to the page itself.
    if let Some(site @ ("cross-site" | "same-site")) =
        text(header::HeaderName::from_static(FETCH_SITE))
        && is_checked
        && !has_keys
        && scope.is_some()
    {
        return refused(format!(
            "pages of other sites may not ask this server: {FETCH_SITE} is {site}, expected same-origin or none, or an \
             origin of --cors-origin, which links don't tell, but scripts do"
        ));
    }
    let only_here = app.options.address.ip().is_loopback() && !has_keys;
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
        assert_eq!(of(Method::GET, "/"), None);
        assert_eq!(of(Method::GET, "/ui/app.js"), None);
        assert_eq!(of(Method::GET, "/health"), None);
        assert_eq!(of(Method::POST, "/v1/chat/completions"), Some(Scope::Chat));
        assert_eq!(of(Method::GET, "/v1/models"), Some(Scope::Chat));
        assert_eq!(of(Method::DELETE, "/v1/models/x"), Some(Scope::Admin));
        assert_eq!(of(Method::DELETE, "/v1/files/x"), Some(Scope::FineTune));
        assert_eq!(of(Method::POST, "/v1/fine_tuning/jobs"), Some(Scope::FineTune));
        assert_eq!(of(Method::POST, "/v1/load_lora_adapter"), Some(Scope::Admin));
        assert_eq!(of(Method::POST, "/v1/unload_lora_adapter"), Some(Scope::Admin));
        assert_eq!(of(Method::GET, "/v1/models/my_lora_adapter"), Some(Scope::Chat));
        assert_eq!(of(Method::GET, "/metrics"), Some(Scope::Admin));
    }

    #[test]
    fn limits_hold_within_any_minute_and_at_once() {
        let gate = Gate::new(true);
        let key = |at_once, per_minute| Key {
            name: "k".into(),
            scopes: vec![Scope::Chat],
            limits: Limits { at_once, per_minute },
            created: 0,
        };
        let start = Instant::now();
        let at = |seconds: u64| start + Duration::from_secs(seconds);
        let (hash, limited) = ([1; 32], key(None, Some(2)));
        let wait = |seconds| match gate.enter(hash, &limited, at(seconds)) {
            Ok(()) => None,
            Err(error) => {
                assert_eq!((error.status.as_u16(), error.code), (429, Some("rate_limit_exceeded")));
                error.retry_after
            }
        };
        assert_eq!((wait(0), wait(10)), (None, None));
        assert_eq!((wait(20), wait(59)), (Some(40), Some(1)));
        assert_eq!((wait(60), wait(61), wait(70)), (None, Some(9), None));

        let (other, two) = ([2; 32], key(Some(2), None));
        gate.enter(other, &two, start).unwrap();
        gate.enter(other, &two, start).unwrap();
        assert_eq!(gate.enter(other, &two, start).unwrap_err().retry_after, Some(1));
        gate.leave(&other);
        gate.enter(other, &two, start).unwrap();
        gate.leave(&other);
        gate.leave(&other);
        // Nothing is kept of those who ask no more.
        assert_eq!(gate.usage().len(), 1);
        for _ in 0..4 {
            gate.leave(&hash);
        }
        gate.enter([3; 32], &two, at(1000)).unwrap();
        assert_eq!(gate.usage().len(), 1);
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
