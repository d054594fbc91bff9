//! What the server counts, for Prometheus, by vLLM's names where it has them.

use metal_candle::engine::{Finished, Statistics};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Request {
    route: String,
    status: u16,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Model {
    model_name: String,
}

type Ratio = Gauge<f64, AtomicU64>;

/// What the server counts.
pub struct Metrics {
    registry: Registry,
    requests: Family<Request, Counter>,
    open: Gauge,
    prompt_tokens: Counter,
    cached_tokens: Counter,
    written_tokens: Counter,
    first_token: Histogram,
    whole: Histogram,
    running: Family<Model, Gauge>,
    waiting: Family<Model, Gauge>,
    cache: Family<Model, Ratio>,
    preemptions: Gauge,
    adapters: Gauge,
}

impl Default for Metrics {
    fn default() -> Self {
        let seconds = [
            0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0,
            40.0, 80.0, 160.0,
        ];
        let mut registry = Registry::default();
        let requests = Family::default();
        let open = Gauge::default();
        registry.register("http_requests", "Requests answered", requests.clone());
        registry.register("http_requests_open", "Requests under way", open.clone());
        let mut of = |name: &str, help: &str| {
            let counter = Counter::default();
            registry.register(name, help, counter.clone());
            counter
        };
        let prompt_tokens = of("vllm:prompt_tokens", "Tokens of prompts");
        let cached_tokens = of("vllm:prefix_cache_hits", "Tokens of prompts found in the cache");
        let written_tokens = of("vllm:generation_tokens", "Tokens written");
        let mut of = |name: &str, help: &str| {
            let histogram = Histogram::new(seconds);
            registry.register(name, help, histogram.clone());
            histogram
        };
        let first_token = of("vllm:time_to_first_token_seconds", "Time to the first token");
        let whole = of("vllm:e2e_request_latency_seconds", "Time to the end of a text");
        let (running, waiting, cache) = (Family::default(), Family::default(), Family::default());
        registry.register("vllm:num_requests_running", "Texts under way", running.clone());
        registry.register("vllm:num_requests_waiting", "Requests that wait", waiting.clone());
        registry.register("vllm:kv_cache_usage_perc", "Share of the cache in use", cache.clone());
        let (preemptions, adapters) = (Gauge::default(), Gauge::default());
        registry.register(
            "vllm:num_preemptions",
            "Texts put back for lack of blocks",
            preemptions.clone(),
        );
        registry.register("adapters_loaded", "Adapters in memory", adapters.clone());
        Self {
            registry,
            requests,
            open,
            prompt_tokens,
            cached_tokens,
            written_tokens,
            first_token,
            whole,
            running,
            waiting,
            cache,
            preemptions,
            adapters,
        }
    }
}

impl Metrics {
    /// A request has come.
    pub fn began(&self) {
        self.open.inc();
    }

    /// A request is over, its answer sent or given up.
    pub fn ended(&self) {
        self.open.dec();
    }

    /// What a request was answered with.
    pub fn answered(&self, route: &str, status: u16) {
        self.requests.get_or_create(&Request { route: route.into(), status }).inc();
    }

    /// A text has ended.
    pub fn finished(&self, finished: &Finished, first_token: Duration, whole: Duration) {
        self.prompt_tokens.inc_by(finished.prompt_tokens as u64);
        self.cached_tokens.inc_by(finished.cached_tokens as u64);
        self.written_tokens.inc_by(finished.tokens as u64);
        self.first_token.observe(first_token.as_secs_f64());
        self.whole.observe(whole.as_secs_f64());
    }

    /// All of it, as Prometheus reads it.
    pub fn text(&self, statistics: &Statistics, model: &str, adapters: usize) -> String {
        let model = Model { model_name: model.into() };
        self.running.get_or_create(&model).set(statistics.running as i64);
        self.waiting.get_or_create(&model).set(statistics.waiting as i64);
        let used = statistics.blocks - statistics.available_blocks;
        self.cache.get_or_create(&model).set(used as f64 / statistics.blocks.max(1) as f64);
        self.preemptions.set(statistics.preemptions as i64);
        self.adapters.set(adapters as i64);
        let mut text = String::new();
        // Writing to a string cannot fail.
        let _ = encode(&mut text, &self.registry);
        text
    }
}
