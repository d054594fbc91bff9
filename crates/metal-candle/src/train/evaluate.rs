//! The loss of a model on data it does not learn from.

use super::metrics::number_or_null;
use crate::adapter::Adapter;
use crate::autograd::Tape;
use crate::data::{BatchPlan, Batcher};
use crate::model::Model;
use crate::{Error, Result};
use candle_core::DType;
use metal_candle_kernels::devices;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// What an evaluation found.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Evaluation {
    /// Mean cross entropy a target token, in nats.
    #[serde(deserialize_with = "number_or_null")]
    pub loss: f64,
    /// `exp(loss)`.
    #[serde(deserialize_with = "number_or_null")]
    pub perplexity: f64,
    /// Target tokens it was measured on.
    pub tokens: u64,
    /// How long it took, in seconds.
    pub seconds: f64,
}

/// The mean loss over the target tokens of `batches`, or of the first `limit` of them; shuffled
/// batches make those a fair sample.
pub fn evaluate(
    model: &Model,
    adapter: Option<&Arc<Adapter>>,
    batches: &Batcher,
    limit: Option<usize>,
) -> Result<Evaluation> {
    let mut sums = Sums::begin();
    for plan in batches.epoch(0).iter().take(limit.unwrap_or(usize::MAX)) {
        sums.add(model, adapter, batches, plan)?;
    }
    sums.finish()
}

/// [`evaluate`], but `None` as soon as `stop` is true, which is looked at before every batch.
pub(super) fn evaluate_until(
    stop: &AtomicBool,
    model: &Model,
    adapter: Option<&Arc<Adapter>>,
    batches: &Batcher,
    limit: Option<usize>,
) -> Result<Option<Evaluation>> {
    let mut sums = Sums::begin();
    for plan in batches.epoch(0).iter().take(limit.unwrap_or(usize::MAX)) {
        if stop.load(Ordering::Relaxed) {
            return Ok(None);
        }
        sums.add(model, adapter, batches, plan)?;
    }
    sums.finish().map(Some)
}

/// What an evaluation has added up so far.
struct Sums {
    started: Instant,
    loss: f64,
    tokens: u64,
}

impl Sums {
    fn begin() -> Self {
        Self { started: Instant::now(), loss: 0.0, tokens: 0 }
    }

    fn add(
        &mut self,
        model: &Model,
        adapter: Option<&Arc<Adapter>>,
        batches: &Batcher,
        plan: &BatchPlan,
    ) -> Result<()> {
        let (of_batch, targets) = devices::step(model.device(), || -> Result<_> {
            let batch = batches.batch(plan)?;
            let loss = model.loss(&Tape::inference(), &batch, adapter)?;
            let of_batch = loss.sum.tensor().to_dtype(DType::F32)?.to_scalar::<f32>()?;
            Ok((of_batch, loss.tokens))
        })?;
        self.loss += f64::from(of_batch);
        self.tokens += targets as u64;
        Ok(())
    }

    fn finish(self) -> Result<Evaluation> {
        if self.tokens == 0 {
            return Err(Error::option("data", "has no token to evaluate on"));
        }
        let loss = self.loss / self.tokens as f64;
        Ok(Evaluation {
            loss,
            perplexity: loss.exp(),
            tokens: self.tokens,
            seconds: self.started.elapsed().as_secs_f64(),
        })
    }
}
