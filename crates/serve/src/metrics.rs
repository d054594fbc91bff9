//! What the server counts, for Prometheus, by vLLM's names where it has them.

use metal_candle::engine::{Finished, Statistics};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use std::sync::atomic::{AtomicU64, Ordering};
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

/// Bounds of the times that are told apart.
const SECONDS: [f64; 18] = [
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0,
    80.0, 160.0,
];

/// What the server counts. What is of a model has its name, as vLLM's has.
pub struct Metrics {
    registry: Registry,
    model: Model,
    requests: Family<Request, Counter>,
    open: Gauge,
    prompt_tokens: Family<Model, Counter>,
    cached_tokens: Family<Model, Counter>,
    written_tokens: Family<Model, Counter>,
    first_token: Family<Model, Histogram, Times>,
    whole: Family<Model, Histogram, Times>,
    running: Family<Model, Gauge>,
    waiting: Family<Model, Gauge>,
    cache: Family<Model, Ratio>,
    preemptions: Family<Model, Counter>,
    adapters: Gauge,
}

type Times = fn() -> Histogram;

fn times() -> Histogram {
    Histogram::new(SECONDS)
}

impl Metrics {
    /// Those of a server of this model.
    pub fn new(model_name: &str) -> Self {
        let mut registry = Registry::default();
        let requests = Family::default();
        let open = Gauge::default();
        registry.register("http_requests", "Requests answered", requests.clone());
        registry.register("http_requests_open", "Requests under way", open.clone());
        let mut of = |name: &str, help: &str| {
            let counter = Family::<Model, Counter>::default();
            registry.register(name, help, counter.clone());
            counter
        };
        let prompt_tokens = of("vllm:prompt_tokens", "Tokens of prompts");
        let cached_tokens = of("vllm:prefix_cache_hits", "Tokens of prompts found in the cache");
        let written_tokens = of("vllm:generation_tokens", "Tokens written");
        let preemptions = of("vllm:num_preemptions", "Texts put back for lack of blocks");
        let mut of = |name: &str, help: &str| {
            let histogram = Family::new_with_constructor(times as Times);
            registry.register(name, help, histogram.clone());
            histogram
        };
        let first_token = of("vllm:time_to_first_token_seconds", "Time to the first token");
        let whole = of("vllm:e2e_request_latency_seconds", "Time to the end of a text");
        let (running, waiting, cache) = (Family::default(), Family::default(), Family::default());
        registry.register("vllm:num_requests_running", "Texts under way", running.clone());
        registry.register("vllm:num_requests_waiting", "Requests that wait", waiting.clone());
        registry.register("vllm:kv_cache_usage_perc", "Share of the cache in use", cache.clone());
        let adapters = Gauge::default();
        registry.register("adapters_loaded", "Adapters in memory", adapters.clone());
        let model = Model { model_name: model_name.into() };
        // Counters of nothing are there, too.
        for counter in [&prompt_tokens, &cached_tokens, &written_tokens, &preemptions] {
            drop(counter.get_or_create(&model));
        }
        Self {
            registry,
            model,
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
        let model = &self.model;
        self.prompt_tokens.get_or_create(model).inc_by(finished.prompt_tokens as u64);
        self.cached_tokens.get_or_create(model).inc_by(finished.cached_tokens as u64);
        self.written_tokens.get_or_create(model).inc_by(finished.tokens as u64);
        self.first_token.get_or_create(model).observe(first_token.as_secs_f64());
        self.whole.get_or_create(model).observe(whole.as_secs_f64());
    }

    /// All of it, as Prometheus reads it.
    pub fn text(&self, statistics: &Statistics, adapters: usize) -> String {
        let model = &self.model;
        self.running.get_or_create(model).set(statistics.running as i64);
        self.waiting.get_or_create(model).set(statistics.waiting as i64);
        let used = statistics.blocks - statistics.available_blocks;
        self.cache.get_or_create(model).set(used as f64 / statistics.blocks.max(1) as f64);
        let preemptions = self.preemptions.get_or_create(model);
        preemptions.inner().store(statistics.preemptions, Ordering::Relaxed);
        drop(preemptions);
        self.adapters.set(adapters as i64);
        let mut text = String::new();
        // Writing to a string cannot fail.
        let _ = encode(&mut text, &self.registry);
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_of_a_model_has_its_name() {
        let metrics = Metrics::new("m");
        let statistics = Statistics { preemptions: 3, ..Statistics::default() };
        let text = metrics.text(&statistics, 0);
        for line in [
            "vllm:prompt_tokens_total{model_name=\"m\"} 0",
            "vllm:num_preemptions_total{model_name=\"m\"} 3",
        ] {
            assert!(text.lines().any(|it| it == line), "{text}");
        }
        let of_model = text.lines().filter(|line| line.starts_with("vllm:"));
        assert!(of_model.clone().count() > 0);
        assert!(of_model.clone().all(|line| line.contains("{model_name=\"m\"")), "{text}");
    }
}
