//! What can go wrong with a server, told so that a person knows what to do.

use serde_json::Value;
use std::fmt;
use std::time::Duration;

/// Why a server did not do what it was asked.
#[derive(Debug)]
pub enum Failure {
    /// It cannot be reached, or it broke off.
    Unreachable(String),
    /// It said no.
    Refused {
        status: u16,
        message: String,
        /// When the same may be asked again.
        retry_after: Option<Duration>,
    },
    /// What answered is no server that this program knows.
    Strange(String),
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Self::Unreachable(message) | Self::Refused { message, .. } | Self::Strange(message)) =
            self;
        f.write_str(message)
    }
}

impl std::error::Error for Failure {}

impl Failure {
    /// Whether, and after how long, the same may succeed with no change on this side.
    pub fn may_pass(&self) -> Option<Duration> {
        const WHILE: Duration = Duration::from_secs(2);
        match self {
            Self::Unreachable(_) => Some(WHILE),
            Self::Refused { status: 408 | 429 | 500.., retry_after, .. } => {
                Some(retry_after.unwrap_or(WHILE))
            }
            Self::Refused { .. } | Self::Strange(_) => None,
        }
    }

    /// That the server at `base` could not be asked.
    pub(super) fn of_connection(base: &str, error: &ureq::Error) -> Self {
        let reason = reason(error);
        let is_secure = base.starts_with("https:");
        let hint = if reason.contains("CaUsedAsEndEntity") {
            "; the server has the certificate of an authority, expected one for a server \
             (openssl req -x509 -addext basicConstraints=critical,CA:FALSE)"
        } else if reason.contains("certificate") {
            "; --tls-ca FILE names the certificate that it is to have, or its authority's"
        } else if is_secure
            && (reason.contains("corrupt message") || reason.contains("InvalidContentType"))
        {
            "; is it an http:// address?"
        } else if !is_secure && matches!(error, ureq::Error::Protocol(_)) {
            "; is it an https:// address, or another program's?"
        } else if is_refused(error) {
            "; is `metal-candle serve` running there? --server names another address"
        } else {
            ""
        };
        Self::Unreachable(format!("{base} cannot be reached: {reason}{hint}"))
    }

    /// What an answer with such a status, kind and body says, if it is none to go on with.
    pub(super) fn of_answer(
        base: &str,
        (status, kind): (u16, &str),
        retry_after: Option<Duration>,
        body: &[u8],
        has_key: bool,
    ) -> Self {
        let value: Option<Value> = serde_json::from_slice(body).ok();
        let told = value.as_ref().and_then(|value| refusal(value.get("error")?));
        let Some(told) = told else {
            return match status {
                // What stands before a server answers so while that is away.
                502..=504 => Self::Unreachable(format!(
                    "{base} answers with status {status}: nothing is there behind what answers"
                )),
                _ => Self::strange(base, status, kind),
            };
        };
        let hint = match (status, has_key) {
            (401, false) => "; --api-key or METAL_CANDLE_API_KEY gives a key",
            _ => "",
        };
        let message = format!("{base} refused (status {status}): {told}{hint}");
        Self::Refused { status, message, retry_after }
    }

    /// That an answer is none of a server's.
    pub(super) fn strange(base: &str, status: u16, kind: &str) -> Self {
        let kind = if kind.is_empty() { "no content type" } else { kind };
        let kind = crate::settings::cut(kind);
        Self::Strange(format!(
            "{base} is no metal-candle server: it answered with status {status} and {kind}; --server names another address"
        ))
    }
}

/// What OpenAI's error object says: its message, and the field that it is about where the message doesn't name that.
pub fn refusal(error: &Value) -> Option<String> {
    let message = error.get("message").and_then(Value::as_str)?;
    let message = metal_candle::readable(message).trim().to_string();
    match error.get("param").and_then(Value::as_str) {
        Some(param) if !message.contains(param) => {
            Some(format!("{message} ({})", crate::settings::cut(param)))
        }
        _ => Some(message),
    }
}

/// What the HTTP client says, in words.
fn reason(error: &ureq::Error) -> String {
    match error {
        ureq::Error::Timeout(_) => "nothing came for too long".into(),
        ureq::Error::Io(error) => {
            let inner = error.get_ref().and_then(|inner| inner.source());
            inner.map_or_else(|| error.to_string(), ToString::to_string)
        }
        ureq::Error::Rustls(error) => error.to_string(),
        ureq::Error::HostNotFound => "there is no host of this name".into(),
        other => other.to_string(),
    }
}

fn is_refused(error: &ureq::Error) -> bool {
    match error {
        ureq::Error::Io(error) => error.kind() == std::io::ErrorKind::ConnectionRefused,
        ureq::Error::ConnectionFailed => true,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(status: u16, kind: &str, body: &str) -> String {
        Failure::of_answer("http://a", (status, kind), None, body.as_bytes(), false).to_string()
    }

    #[test]
    fn an_error_has_its_message_and_its_field() {
        let body = r#"{"error": {"message": "seed: is -1", "param": "seed", "type": "t"}}"#;
        assert_eq!(
            told(400, "application/json", body),
            "http://a refused (status 400): seed: is -1"
        );
        let body = r#"{"error": {"message": "No such thing", "param": "id"}}"#;
        assert_eq!(told(404, "", body), "http://a refused (status 404): No such thing (id)");
        let body = r#"{"error": {"message": "no API key"}}"#;
        assert!(told(401, "", body).ends_with("METAL_CANDLE_API_KEY gives a key"));
        for (body, kind) in [("<html>", "text/html"), ("{}", "application/json"), ("", "")] {
            let told = told(500, kind, body);
            assert!(told.starts_with("http://a is no metal-candle server"), "{told}");
        }
        let away = Failure::of_answer("http://a", (502, "text/html"), None, b"<html>", false);
        assert!(away.may_pass().is_some(), "{away}");
    }

    #[test]
    fn what_may_pass_is_tried_again() {
        let refused =
            |status| Failure::Refused { status, message: String::new(), retry_after: None };
        assert!(refused(429).may_pass().is_some() && refused(503).may_pass().is_some());
        assert!(refused(404).may_pass().is_none());
        assert!(Failure::Strange(String::new()).may_pass().is_none());
    }
}
