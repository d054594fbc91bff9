//! The loss of a model on data it does not learn from.

use super::metrics::{number_or_null, numbers_or_nulls};
use super::objectives::{MetricSums, Objective};
use super::references::References;
use super::task::{self, Part, Task};
use crate::adapter::Adapter;
use crate::autograd::Tape;
use crate::data::{Batch, BatchPlan, Batcher};
use crate::model::Model;
use crate::parallel::Group;
use crate::turns::Turns;
use crate::{Error, Result};
use candle_core::DType;
use metal_candle_kernels::cross_entropy::Statistics;
use metal_candle_kernels::devices;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

/// The share of target tokens that the model finds likeliest, or for which nothing is likelier than the teacher's first,
/// as TRL calls it.
pub const TOKEN_ACCURACY: &str = "mean_token_accuracy";

/// What an evaluation found.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Evaluation {
    /// Mean cross entropy a target token, in nats; of another objective its mean over pairs or answers.
    #[serde(deserialize_with = "number_or_null")]
    pub loss: f64,
    /// `exp(loss)`, of a cross entropy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub perplexity: Option<f64>,
    /// What else is reported, by the names that TRL has: the mean entropy of the predictions in nats and
    /// [`TOKEN_ACCURACY`], or what an objective of answers reports.
    #[serde(
        default,
        skip_serializing_if = "BTreeMap::is_empty",
        deserialize_with = "numbers_or_nulls"
    )]
    pub metrics: BTreeMap<String, f64>,
    /// Target tokens it was measured on.
    pub tokens: u64,
    /// How long it took, in seconds.
    pub seconds: f64,
}

/// The mean loss over the target tokens of `batches`, or of the first `limit` of them; shuffled
/// batches make those a fair sample.
///
/// # Errors
/// [`Error::Option`] when the data are no sequences to learn.
pub fn evaluate(
    model: &Model,
    adapter: Option<&Arc<Adapter>>,
    batches: &Batcher,
    limit: Option<usize>,
) -> Result<Evaluation> {
    Task { model, adapter, objective: &Objective::Sft, reference: None, turns: None }
        .evaluate(batches, limit)
}

impl Task<'_> {
    /// What the objective comes to on `batches`, or on the first `limit` of them.
    ///
    /// # Errors
    /// [`Error::Option`] when the data aren't what the objective learns from.
    pub fn evaluate(&self, batches: &Batcher, limit: Option<usize>) -> Result<Evaluation> {
        self.evaluate_with(Group::default(), batches, limit)
    }

    /// [`Self::evaluate`] by a group, each rank of which reads its rows of every batch. All get the same.
    ///
    /// # Errors
    /// As [`Self::evaluate`], and when a rank is lost.
    pub fn evaluate_with(
        &self,
        group: Group<'_>,
        batches: &Batcher,
        limit: Option<usize>,
    ) -> Result<Evaluation> {
        match self.evaluate_until(&|| Ok(false), group, batches, limit, None)? {
            Some(evaluation) => Ok(evaluation),
            None => Err(Error::option("evaluation", "was given up")),
        }
    }

    /// [`Self::evaluate_with`], but `None` as soon as `stop` is true, which is asked before every batch, and the same for
    /// all ranks.
    pub(super) fn evaluate_until(
        &self,
        stop: &dyn Fn() -> Result<bool>,
        group: Group<'_>,
        batches: &Batcher,
        limit: Option<usize>,
        known: Option<&References>,
    ) -> Result<Option<Evaluation>> {
        self.objective.check(batches.dataset())?;
        self.check_shards(group)?;
        let mut sums = Sums::begin();
        for plan in batches.epoch(0).iter().take(limit.unwrap_or(usize::MAX)) {
            if stop()? {
                return Ok(None);
            }
            Turns::train(self.turns, self.model.device(), || {
                if self.objective.compares_answers() {
                    sums.compare(self, batches, plan, known, group)
                } else {
                    match self.part(batches, plan, group)? {
                        Some(Part { batch, counts: true }) => sums.add(self, &batch),
                        Some(Part { batch, counts: false }) => Sums::begin().add(self, &batch),
                        None => Ok(()),
                    }
                }
            })?;
        }
        sums.of_all(group)?.finish(*self.objective == Objective::Sft).map(Some)
    }
}

/// What an evaluation has added up so far.
struct Sums {
    started: Instant,
    loss: f64,
    /// What the loss is a mean over.
    count: u64,
    tokens: u64,
    metrics: MetricSums,
}

impl Sums {
    fn begin() -> Self {
        let metrics = MetricSums::default();
        Self { started: Instant::now(), loss: 0.0, count: 0, tokens: 0, metrics }
    }

    fn add(&mut self, task: &Task, batch: &Batch) -> Result<()> {
        let (of_batch, targets) = devices::step(task.model.device(), || -> Result<_> {
            let tape = Tape::inference();
            let loss = task.model.loss_with(&tape, batch, task.adapter, true)?;
            if let Some(Statistics { entropies, hits }) = &loss.statistics {
                for (name, of_rows) in [("entropy", entropies), (TOKEN_ACCURACY, hits)] {
                    let sum = of_rows.sum_all()?.to_dtype(DType::F32)?.to_scalar::<f32>()?;
                    self.metrics.add_sum(name, f64::from(sum), loss.tokens as f64);
                }
            }
            let of_batch = loss.sum.tensor().to_dtype(DType::F32)?.to_scalar::<f32>()?;
            Ok((of_batch, loss.tokens))
        })?;
        self.loss += f64::from(of_batch) + batch.loss_offset();
        self.tokens += targets as u64;
        self.count = self.tokens;
        Ok(())
    }

    fn compare(
        &mut self,
        task: &Task,
        batches: &Batcher,
        plan: &BatchPlan,
        known: Option<&References>,
        group: Group<'_>,
    ) -> Result<()> {
        let part = task.part(batches, plan, group)?;
        let kl = task.kl(batches, std::slice::from_ref(plan), group)?;
        let counted = part.iter().filter(|part| part.counts).map(|part| &part.batch);
        let totals = task.totals(counted, kl, group)?;
        let Some(Part { batch, counts }) = part else { return Ok(()) };
        let references = task.references(&batch, known)?;
        let (compared, _) = devices::step(task.model.device(), || {
            let losses =
                task.model.token_losses(&Tape::inference(), &batch, task.adapter, false)?.losses;
            task.compare(&batch, losses.tensor(), &references, &totals)
        })?;
        if !counts {
            return Ok(());
        }
        self.loss += compared.loss * totals.samples as f64;
        self.count += task::samples(&batch) as u64;
        self.tokens += batch.target_tokens as u64;
        self.metrics.extend(&compared.metrics);
        Ok(())
    }

    /// The sums of all ranks.
    fn of_all(mut self, group: Group<'_>) -> Result<Self> {
        if group.size() == 1 {
            return Ok(self);
        }
        const WHAT: &str = "an evaluation";
        let counts = [self.count as usize, self.tokens as usize];
        let [count, tokens] = group.count(WHAT, counts)?;
        (self.count, self.tokens) = (count as u64, tokens as u64);
        let mut loss = [self.loss];
        group.add_up(WHAT, &mut loss)?;
        self.loss = loss[0];
        self.metrics = self.metrics.of_all(group, WHAT)?;
        Ok(self)
    }

    fn finish(self, is_cross_entropy: bool) -> Result<Evaluation> {
        if self.count == 0 {
            return Err(Error::option("data", "has no token to evaluate on"));
        }
        let loss = self.loss / self.count as f64;
        Ok(Evaluation {
            loss,
            perplexity: is_cross_entropy.then(|| loss.exp()),
            metrics: self.metrics.means(),
            tokens: self.tokens,
            seconds: self.started.elapsed().as_secs_f64(),
        })
    }
}
