//! A running `metal-candle serve`, which this program asks over HTTP.

mod client;
mod failure;
mod sse;
mod upload;

pub use client::Client;
pub use failure::{Failure, refusal};
pub use sse::Events;

use crate::errors::usage;
use clap::Args;
use metal_candle::files;
use std::env::VarError;
use std::path::{Path, PathBuf};
use ureq::http::{HeaderValue, Uri};
use ureq::tls::{Certificate, PemItem, parse_pem};

/// The variable that names the server.
const SERVER: &str = "METAL_CANDLE_SERVER";
/// The variable that has the key; the server reads it, too, and may have several there.
pub const API_KEY: &str = "METAL_CANDLE_API_KEY";
/// The largest file of certificates, in bytes.
const MOST_CERTIFICATES: u64 = 4 << 20;

/// How one is let in.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Server")]
pub struct Access {
    /// The key that the server asks for, better given as METAL_CANDLE_API_KEY, as others may see a command's flags
    #[arg(long, global = true, value_name = "KEY")]
    pub api_key: Option<String>,
    /// Certificates in PEM, of which an https server's must be one or be signed by one [default: Mozilla's list of authorities]
    #[arg(long, global = true, value_name = "FILE")]
    pub tls_ca: Option<PathBuf>,
}

impl Access {
    /// Whether anything is given.
    pub fn is_given(&self) -> bool {
        self.api_key.is_some() || self.tls_ca.is_some()
    }

    fn authorization(&self) -> anyhow::Result<Option<HeaderValue>> {
        let given = match &self.api_key {
            Some(key) => Some(key.clone()),
            None => variable(API_KEY)?,
        };
        let Some(keys) = given else { return Ok(None) };
        let key = keys_of(&keys).next().unwrap_or_default();
        let is_plain = !key.is_empty() && key.bytes().all(|byte| byte.is_ascii_graphic());
        let value =
            is_plain.then(|| HeaderValue::from_str(&format!("Bearer {key}")).ok()).flatten();
        let mut value = value.ok_or_else(|| {
            usage(format!(
                "api_key: expected ASCII characters without spaces (--api-key or {API_KEY})"
            ))
        })?;
        value.set_sensitive(true);
        Ok(Some(value))
    }

    fn authorities(&self) -> anyhow::Result<Option<Vec<Certificate<'static>>>> {
        let Some(path) = &self.tls_ca else { return Ok(None) };
        let wrong = |what: String| usage(format!("tls_ca: {}: {what}", path.display()));
        let bytes = files::read_limited(path, MOST_CERTIFICATES)
            .map_err(|error| usage(format!("tls_ca: {error}")))?;
        let mut found = Vec::new();
        for item in parse_pem(&bytes) {
            if let PemItem::Certificate(certificate) =
                item.map_err(|error| wrong(error.to_string()))?
            {
                found.push(certificate);
            }
        }
        match found.is_empty() {
            true => Err(wrong("has no certificate in PEM".into())),
            false => Ok(Some(found)),
        }
    }
}

/// The keys of a list with commas between.
pub fn keys_of(list: &str) -> impl Iterator<Item = &str> {
    list.split(',').map(str::trim).filter(|key| !key.is_empty())
}

/// What an environment variable says, if it says something.
///
/// # Errors
/// When it isn't text.
pub fn variable(name: &str) -> anyhow::Result<Option<String>> {
    said(name, std::env::var(name))
}

fn said(name: &str, value: Result<String, VarError>) -> anyhow::Result<Option<String>> {
    match value {
        Ok(value) => Ok(Some(value).filter(|value| !value.trim().is_empty())),
        Err(VarError::NotPresent) => Ok(None),
        Err(VarError::NotUnicode(_)) => Err(usage(format!("{name}: is no text in UTF-8"))),
    }
}

/// Where a server is.
#[derive(Debug, Clone, PartialEq)]
struct Address {
    /// What paths are put behind.
    base: String,
    /// Whether it is this machine, which no proxy knows.
    is_local: bool,
}

impl Address {
    /// The one that is given, or that of the environment, or where `serve` listens by default.
    fn find(given: Option<&str>) -> anyhow::Result<Self> {
        let text = match given {
            Some(given) => Some(given.to_string()),
            None => variable(SERVER)?,
        };
        match text {
            Some(text) => Self::parse(&text),
            None => {
                let usual = metal_candle_serve::Options::new("", "").address;
                Ok(Self { base: format!("http://{usual}"), is_local: true })
            }
        }
    }

    fn parse(text: &str) -> anyhow::Result<Self> {
        let wrong = |what: &str| {
            let shown = crate::settings::cut(text);
            usage(format!(
                "server: {shown} {what}, expected an address such as http://127.0.0.1:8080"
            ))
        };
        let uri: Uri = text.trim().parse().map_err(|_| wrong("is no address"))?;
        if !matches!(uri.scheme_str(), Some("http" | "https")) {
            return Err(wrong("begins neither with http:// nor with https://"));
        }
        let (Some(authority), Some(host)) = (uri.authority(), uri.host()) else {
            return Err(wrong("names no host"));
        };
        if authority.as_str().contains('@') {
            // Not shown, as it may be secret.
            return Err(usage(
                "server: has a name or a password in its address; a key is given by --api-key",
            ));
        }
        if uri.query().is_some() {
            return Err(wrong("has a ?"));
        }
        let path = uri.path().trim_end_matches('/');
        // The address that other clients are given.
        let path = path.strip_suffix("/v1").unwrap_or(path);
        let scheme = uri.scheme_str().unwrap_or_default();
        let bare = host.trim_start_matches('[').trim_end_matches(']');
        let is_local = bare.eq_ignore_ascii_case("localhost")
            || bare.parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback());
        Ok(Self { base: format!("{scheme}://{authority}{path}"), is_local })
    }
}

/// The file's name as it is sent.
fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_those_that_clients_are_given() {
        for (text, base, is_local) in [
            ("http://127.0.0.1:8080", "http://127.0.0.1:8080", true),
            (" http://localhost:1/v1/ ", "http://localhost:1", true),
            ("https://[::1]:8443/v1", "https://[::1]:8443", true),
            ("https://example.org/models/v1", "https://example.org/models", false),
            ("https://example.org/", "https://example.org", false),
        ] {
            let expected = Address { base: base.into(), is_local };
            assert_eq!(Address::parse(text).unwrap(), expected, "{text}");
        }
        for text in ["", "x", "localhost:8080", "ftp://a", "http://", "http://a?b=1", "http://a b"]
        {
            let error = Address::parse(text).unwrap_err().to_string();
            assert!(error.starts_with("server: ") && error.contains("http://127"), "{error}");
        }
        let error = Address::parse("http://me:secret@host").unwrap_err().to_string();
        assert!(!error.contains("secret"), "{error}");
    }

    #[test]
    fn a_variable_that_is_no_text_is_not_taken_for_none() {
        assert_eq!(said("X", Err(VarError::NotPresent)).unwrap(), None);
        assert_eq!(said("X", Ok(" ".into())).unwrap(), None);
        assert_eq!(said("X", Ok("a".into())).unwrap(), Some("a".into()));
        let error = said("X", Err(VarError::NotUnicode("?".into()))).unwrap_err();
        assert_eq!(error.to_string(), "X: is no text in UTF-8");
    }

    #[test]
    fn a_key_fits_into_a_header() {
        let access = |key: &str| Access { api_key: Some(key.into()), tls_ca: None };
        let sent = access("sk-a, sk-b").authorization().unwrap().unwrap();
        assert_eq!(sent.to_str().unwrap(), "Bearer sk-a");
        let sent = access(" , sk-b").authorization().unwrap().unwrap();
        assert_eq!(sent.to_str().unwrap(), "Bearer sk-b");
        for wrong in ["", ",", "a b", "a\nb", "ä"] {
            let error = access(wrong).authorization().unwrap_err().to_string();
            assert!(error.starts_with("api_key: "), "{error}");
        }
    }
}
