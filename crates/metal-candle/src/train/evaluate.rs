//! The loss of a model on data it does not learn from.

use crate::autograd::Tape;
use crate::data::Batcher;
use crate::model::{Model, PassOptions};
use crate::{Error, Result};
use candle_core::DType;
use metal_candle_kernels::devices;
use serde::Serialize;
use std::time::Instant;

/// What an evaluation found.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Evaluation {
    /// Mean cross entropy a target token, in nats.
    pub loss: f64,
    /// `exp(loss)`.
    pub perplexity: f64,
    /// Target tokens it was measured on.
    pub tokens: u64,
    /// How long it took, in seconds.
    pub seconds: f64,
}

/// The mean loss over the target tokens of `batches`, or of the first `limit` of them; shuffled
/// batches make those a fair sample.
pub fn evaluate(model: &Model, batches: &Batcher, limit: Option<usize>) -> Result<Evaluation> {
    let started = Instant::now();
    let (mut sum, mut tokens) = (0.0, 0);
    for plan in batches.epoch(0).iter().take(limit.unwrap_or(usize::MAX)) {
        let (of_batch, targets) = devices::step(model.device(), || -> Result<_> {
            let batch = batches.batch(plan);
            let loss = model.loss(&Tape::inference(), &batch, PassOptions::default())?;
            let of_batch = loss.sum.tensor().to_dtype(DType::F32)?.to_scalar::<f32>()?;
            Ok((of_batch, loss.tokens))
        })?;
        sum += f64::from(of_batch);
        tokens += targets as u64;
    }
    if tokens == 0 {
        return Err(Error::option("data", "has no token to evaluate on"));
    }
    let loss = sum / tokens as f64;
    Ok(Evaluation {
        loss,
        perplexity: loss.exp(),
        tokens,
        seconds: started.elapsed().as_secs_f64(),
    })
}
