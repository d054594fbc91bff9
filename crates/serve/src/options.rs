//! How a server is started.

use crate::hub::HubAdapters;
use crate::keys::Keys;
use crate::tls::Tls;
use metal_candle::engine::EngineOptions;
use metal_candle::model::Quantization;
use metal_candle::{Error, Result};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

/// How a server is started.
#[derive(Debug, Clone)]
pub struct Options {
    /// Where it listens; port 0 is any that is free.
    pub address: SocketAddr,
    /// The name of the base among the models; a request may also give [`Options::aliases`].
    pub model_name: String,
    /// Other names of the base.
    pub aliases: Vec<String>,
    /// Where it keeps files, jobs, events and keys.
    pub data: PathBuf,
    /// A folder whose folders are adapters, by their names.
    pub adapters: Option<PathBuf>,
    /// Adapters held in memory, at most; the least recently used goes first.
    pub max_adapters: usize,
    /// What the base was brought into while it was loaded, if it was: a job that another server has begun with something
    /// else waits.
    pub quantization: Option<Quantization>,
    /// How much the engine does at once.
    pub engine: EngineOptions,
    /// Keys that may do everything, beside those in the data folder. Without any key at all everybody may.
    pub api_keys: Vec<String>,
    /// Whether an address that others reach may be served without a key.
    pub allow_anyone: bool,
    /// Where adapters are brought from that a request names by their id on the Hugging Face hub; `None` for nowhere, as
    /// any client could make the server download then.
    pub hub_adapters: Option<HubAdapters>,
    /// Bytes of a request, at most, but for uploaded files.
    pub max_body: usize,
    /// Bytes of an uploaded file, at most.
    pub max_file: u64,
    /// Requests that are answered at once, at most; more get a 429.
    pub max_requests: usize,
    /// How long a request that is not streamed may take, how long a stream may stand still, and how long a client may take
    /// nothing of what is sent.
    pub timeout: Duration,
    /// A certificate and its key, for TLS.
    pub tls: Option<Tls>,
    /// Websites whose pages may ask this server; none by default.
    pub cors_origins: Vec<String>,
    /// Whether routes exist that load adapters from the server's folders by path.
    pub load_adapters_by_path: bool,
    /// The share of the device's time that fine-tuning gets while texts are written, above 0 and below 1.
    pub training_share: f64,
    /// How long texts under way may go on once the server is told to stop.
    pub grace: Duration,
}

impl Options {
    /// The usual ones.
    pub fn new(model_name: impl Into<String>, data: impl Into<PathBuf>) -> Self {
        Self {
            address: SocketAddr::from(([127, 0, 0, 1], 8080)),
            model_name: model_name.into(),
            aliases: Vec::new(),
            data: data.into(),
            adapters: None,
            max_adapters: 64,
            quantization: None,
            engine: EngineOptions { max_waiting: 1024, ..EngineOptions::default() },
            api_keys: Vec::new(),
            allow_anyone: false,
            hub_adapters: None,
            max_body: 16 << 20,
            max_file: 512 << 20,
            max_requests: 2048,
            timeout: Duration::from_secs(600),
            tls: None,
            cors_origins: Vec::new(),
            load_adapters_by_path: true,
            training_share: 0.5,
            grace: Duration::from_secs(30),
        }
    }
}

impl Options {
    /// That others can't ask without a key by mistake.
    ///
    /// # Errors
    /// [`Error::Option`] for an address that isn't this machine's alone where there is no key and nobody has said that anyone
    /// may ask; also when the data folder's keys cannot be read.
    pub fn check_reach(&self) -> Result<()> {
        let is_closed = self.address.ip().is_loopback() || self.allow_anyone;
        if is_closed || !self.api_keys.is_empty() || Keys::has_any(&self.data)? {
            return Ok(());
        }
        let what = format!(
            "{} can be reached by others, and there is no API key: make one, or say that anyone may ask",
            self.address
        );
        Err(Error::option("address", what))
    }

    /// Checks every value.
    ///
    /// # Errors
    /// [`Error::Option`] about the first that cannot work.
    pub fn validate(&self) -> Result<()> {
        self.engine.validate()?;
        let above_zero = [
            ("max_adapters", self.max_adapters as u64),
            ("max_body", self.max_body as u64),
            ("max_file", self.max_file),
            ("max_requests", self.max_requests as u64),
            ("timeout", self.timeout.as_secs()),
            ("hub_adapters.max_bytes", self.hub_adapters.as_ref().map_or(1, |it| it.max_bytes)),
        ];
        for (name, value) in above_zero {
            if value == 0 {
                return Err(Error::option(name, "is 0, expected more"));
            }
        }
        if !(0.01..=0.99).contains(&self.training_share) {
            let problem = format!("is {}, expected 0.01 to 0.99", self.training_share);
            return Err(Error::option("training_share", problem));
        }
        let is_named = |name: &String| !name.is_empty() && name.chars().count() <= 256;
        if !std::iter::once(&self.model_name).chain(&self.aliases).all(is_named) {
            return Err(Error::option("model_name", "is empty or longer than 256 characters"));
        }
        if let Some(origin) = self.cors_origins.iter().find(|origin| !is_origin(origin)) {
            let shown = metal_candle::readable(origin);
            let problem =
                format!("is {shown:?}, expected *, null, or one such as https://example.org");
            return Err(Error::option("cors_origin", problem));
        }
        if self.api_keys.iter().any(|key| key.len() < 16) {
            return Err(Error::option("api_key", "has fewer than 16 characters, which is too few"));
        }
        Ok(())
    }
}

/// Whether a text is what browsers, and programs that are pages, say of a page's site, so that it can be the same: a scheme,
/// a host and perhaps a port.
fn is_origin(text: &str) -> bool {
    let is_in = |more: &'static str| {
        move |it: char| it.is_ascii_digit() || it.is_ascii_lowercase() || more.contains(it)
    };
    let is_site = |(scheme, site): (&str, &str)| {
        let starts = scheme.starts_with(|it: char| it.is_ascii_lowercase()) && !site.is_empty();
        starts && scheme.chars().all(is_in("+-.")) && site.chars().all(is_in("-_.:[]"))
    };
    ["*", "null"].contains(&text) || text.split_once("://").is_some_and(is_site)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn origins_are_as_browsers_send_them() {
        for origin in [
            "*",
            "null",
            "https://example.org",
            "http://localhost:3000",
            "http://[::1]:80",
            "chrome-extension://abcdef",
            "tauri://localhost",
        ] {
            assert!(is_origin(origin), "{origin}");
        }
        for origin in ["", "foo", "example.org", "https://", "https://example.org/", "https://A.b"]
        {
            assert!(!is_origin(origin), "{origin}");
        }
    }
}
