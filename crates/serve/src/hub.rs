//! Adapters by the names that they have on the Hugging Face hub, where the server is started so. One is downloaded once, by
//! the first who asks for it; others who ask for it wait without a thread, and nobody else waits for it.

use crate::adapters::locked;
use crate::app::{App, Shared};
use crate::error::{ApiError, Result};
use axum::http::StatusCode;
use metal_candle::adapter::read_config;
use metal_candle::hub::{HubOptions, parse_adapter, resolve_adapter_with};
use metal_candle::{Error, HubFault};
use tokio::sync::watch;

/// Adapters that are downloaded at once.
const AT_ONCE: usize = 8;

/// Where adapters come from that are named by their id on the hub.
#[derive(Debug, Clone)]
pub struct HubAdapters {
    /// The hub, and where its files are kept.
    pub hub: HubOptions,
    /// Bytes of an adapter, at most.
    pub max_bytes: u64,
}

impl HubAdapters {
    /// Those of a hub with at most 2 GiB. It is asked once what an adapter has, as somebody waits for the answer.
    pub fn new(hub: HubOptions) -> Self {
        Self { hub: HubOptions { list_attempts: 1, ..hub }, max_bytes: 2 << 30 }
    }
}

/// What a download comes to, once it has.
pub type Download = watch::Receiver<Option<Result<()>>>;

impl App {
    /// Brings the adapter that has this name on the hub here, unless it is on its way already.
    ///
    /// # Errors
    /// A 404 for a name that is none there, a 400 for what is no adapter of this base or too large, and a 503 when the
    /// hub can't be reached.
    pub(crate) async fn fetch_from_hub(self: &Shared, name: &str) -> Result<()> {
        let Some(options) = &self.options.hub_adapters else {
            return Err(ApiError::no_model(name));
        };
        if parse_adapter(name).is_none() {
            return Err(ApiError::no_model(name));
        }
        let mut download = self.download(name, options)?;
        let ended = download.wait_for(Option::is_some).await.map_err(ApiError::internal)?;
        ended.clone().unwrap_or(Ok(()))
    }

    /// The download under way of this adapter, which is begun if there is none.
    fn download(self: &Shared, name: &str, options: &HubAdapters) -> Result<Download> {
        let mut downloads = locked(&self.adapters.downloads);
        if let Some(download) = downloads.get(name) {
            return Ok(download.clone());
        }
        if downloads.len() >= AT_ONCE {
            let message = format!("{AT_ONCE} adapters are being downloaded already");
            return Err(ApiError::busy(message).about("model"));
        }
        let (sender, download) = watch::channel(None);
        downloads.insert(name.into(), download.clone());
        let (app, name, options) = (self.clone(), name.to_string(), options.clone());
        // It goes on when whoever asked for it has left.
        tokio::spawn(async move {
            let wanted = name.clone();
            let result = app.blocking(move |app| bring(app, &wanted, &options)).await;
            locked(&app.adapters.downloads).remove(&name);
            sender.send_replace(Some(result));
        });
        Ok(download)
    }
}

/// Downloads an adapter, reads it and gives it its name.
fn bring(app: &App, name: &str, options: &HubAdapters) -> Result<()> {
    let (id, revision) = parse_adapter(name).ok_or_else(|| ApiError::no_model(name))?;
    let found = resolve_adapter_with(id, revision, options.max_bytes, &options.hub, &mut |_| {});
    let folder = found.map_err(|error| refusal(app, &error))?;
    let (config, _) = read_config(&folder).map_err(|error| refusal(app, &error))?;
    if config.start.takes_from_weight() {
        // Whoever may chat could keep the CPU busy for hours with it.
        let message = format!(
            "{name} started from the base's weights (PiSSA, OLoRA), and its file lacks this start, which takes long to find \
             again; `metal-candle convert --to mlx` makes a plain LoRA adapter of it, which can be published or put into the \
             server's folder of adapters"
        );
        return Err(ApiError::invalid(message).about("model"));
    }
    app.read_adapter(&folder).map_err(|error| refusal(app, &error))?;
    app.keep_name(name, &folder)
}

/// What is said of an adapter that can't be had or used.
fn refusal(app: &App, error: &Error) -> ApiError {
    let message = app.store.without_paths(&error.to_string());
    let told = match error {
        Error::Hub { fault: HubFault::NotFound, .. } => {
            ApiError::not_found(message).coded("model_not_found")
        }
        Error::Hub { fault: HubFault::Unreachable, .. } => {
            ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "server_error", message)
        }
        Error::Hub { .. } | Error::File { .. } | Error::Option { .. } | Error::Unsupported(_) => {
            ApiError::invalid(message)
        }
        _ => ApiError::internal(message),
    };
    told.about("model")
}
