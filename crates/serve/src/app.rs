//! What all requests share.

use crate::adapters::Adapters;
use crate::context::LargeTexts;
use crate::error::{ApiError, Result};
use crate::keys::Gate;
use crate::metrics::Metrics;
use crate::options::Options;
use crate::replicas::Replicas;
use crate::store::Store;
use chrono::Utc;
use metal_candle::generate::{GenerateOptions, Grammars};
use metal_candle::model::Model;
use metal_candle::text::Tokenizer;
use metal_candle::turns::Turns;
use serde_json::{Map, Value};
use std::path::PathBuf;
use std::sync::Arc;
use tokio::sync::Semaphore;

/// Threads on which requests wait for the disk, the database or the device, and more of them for what is short: keys would
/// wait behind all of that otherwise, and nobody be let in.
pub const WAITING: usize = 384;
pub const QUICK: usize = 128;

/// What all requests share.
pub struct App {
    /// The frozen base, as the first replica has it: what isn't written as a text is computed there.
    pub model: Arc<Model>,
    /// Whose turn it is there: what computes outside of the engine holds one.
    pub turns: Arc<Turns>,
    /// The base on each device, and what writes texts there.
    pub replicas: Replicas,
    /// Where its files are.
    pub folder: PathBuf,
    /// When the server was started, in seconds since 1970.
    pub started: i64,
    /// Its tokenizer, with the chat template that is used.
    pub tokenizer: Arc<Tokenizer>,
    /// The most bytes that a token of it has.
    pub longest_token: usize,
    /// Large texts whose tokens are found.
    pub large_texts: LargeTexts,
    /// What the chat template is told beside the conversation.
    pub variables: Map<String, Value>,
    /// How texts are drawn where a request doesn't say.
    pub defaults: GenerateOptions,
    /// What may be written where a request has a schema; `None` where the tokenizer doesn't allow for it.
    pub grammars: Option<Arc<Grammars>>,
    /// Adapters by name.
    pub adapters: Adapters,
    /// Files, jobs, events and keys.
    pub store: Store,
    /// Requests that have a thread on which they may wait.
    pub waiting: Arc<Semaphore>,
    /// Texts whose embeddings are computed.
    pub embedding: Arc<Semaphore>,
    /// Who may download a merged model.
    pub merging: Arc<Semaphore>,
    /// Whether keys are asked for, and what was asked with those that have limits.
    pub gate: Gate,
    /// Counts for `/metrics`.
    pub metrics: Metrics,
    /// How the server was started.
    pub options: Options,
}

/// What handlers get.
pub type Shared = Arc<App>;

impl App {
    /// An error unless the model is whole on a device, which what is called so needs.
    ///
    /// # Errors
    /// A 400 where it is in parts on several.
    pub fn require_whole(&self, what: &str) -> Result<()> {
        match self.model.is_tensor_parallel() {
            false => Ok(()),
            true => Err(ApiError::invalid(format!(
                "{what} needs the model on one device, and this server has it in parts on several (--tensor-parallel)"
            ))),
        }
    }

    /// The tokens that end a text and belong to none.
    pub fn ends(&self, options: &GenerateOptions) -> Vec<u32> {
        if options.ignore_eos { Vec::new() } else { self.tokenizer.eos_ids().to_vec() }
    }

    /// Runs what waits for the disk, the database or the device on a thread where waiting holds nothing up, once there is one
    /// of [`WAITING`].
    ///
    /// # Errors
    /// What `work` gives, and a 500 when it panics.
    pub async fn blocking<T: Send + 'static>(
        self: &Arc<Self>,
        work: impl FnOnce(&App) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let thread = self.waiting.clone().acquire_owned().await.map_err(ApiError::internal)?;
        let work = move |app: &App| {
            // Until the work is done, also where nobody waits for it any more.
            let _thread = thread;
            work(app)
        };
        self.quick(work).await
    }

    /// As [`Self::blocking`], but whatever else waits; for what is short.
    ///
    /// # Errors
    /// What `work` gives, and a 500 when it panics.
    pub async fn quick<T: Send + 'static>(
        self: &Arc<Self>,
        work: impl FnOnce(&App) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let (app, span) = (self.clone(), tracing::Span::current());
        match tokio::task::spawn_blocking(move || span.in_scope(|| work(&app))).await {
            Ok(result) => result,
            Err(error) => Err(ApiError::internal(error)),
        }
    }
}

/// Seconds since 1970, as all of OpenAI's objects have them.
pub fn now() -> i64 {
    Utc::now().timestamp()
}

/// A new identifier: `prefix` and 24 letters and digits, which nobody can guess.
pub fn new_id(prefix: &str) -> String {
    const LETTERS: &[u8; 32] = b"abcdefghijkmnpqrstuvwxyz23456789";
    let mut bytes = [0_u8; 24];
    // The system's source of random numbers fails on no system that this runs on.
    getrandom::fill(&mut bytes).expect("random numbers");
    let letters = bytes.iter().map(|byte| LETTERS[usize::from(byte % 32)] as char);
    prefix.chars().chain(letters).collect()
}
