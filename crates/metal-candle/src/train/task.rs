//! What a model is trained or measured by: an objective, with the passes that it asks for.

use super::objectives::{Compared, Objective, Score, Slopes, Totals};
use super::references::References;
use crate::adapter::Adapter;
use crate::autograd::Tape;
use crate::data::{Answer, Asked, Batch, BatchPlan, Batcher, Role};
use crate::model::Model;
use crate::parallel::Group;
use crate::turns::Turns;
use crate::{Error, Result};
use candle_core::{DType, Device, Tensor};
use metal_candle_kernels::devices;
use std::sync::Arc;

/// A model with an adapter, and what it is asked to do.
#[derive(Debug, Clone, Copy)]
pub struct Task<'a> {
    /// The frozen model.
    pub model: &'a Model,
    /// What is trained or measured, the policy.
    pub adapter: Option<&'a Arc<Adapter>>,
    /// What it is trained or measured by.
    pub objective: &'a Objective,
    /// The adapter of the reference; without one the reference is the frozen model.
    pub reference: Option<&'a Arc<Adapter>>,
    /// With whom the device is shared; `None` is nobody.
    pub turns: Option<&'a Arc<Turns>>,
}

/// A batch that a rank reads.
pub(super) struct Part {
    pub batch: Batch,
    /// Whether its rows are the rank's own; else it only makes the passes that the others make.
    pub counts: bool,
}

impl Task<'_> {
    /// How many processes have parts of the base, or of what is trained in its place, and have to make the same passes.
    pub(super) fn shards(&self) -> Option<usize> {
        let adapters = [self.adapter, self.reference].into_iter().flatten();
        let of_model = self.model.shards().map(|shards| shards.size());
        of_model.or_else(|| adapters.filter_map(|adapter| adapter.shards()).next())
    }

    /// That the ranks which have parts of the weights are those of the group, and make the same passes.
    pub(super) fn check_shards(&self, group: Group<'_>) -> Result<()> {
        let Some(count) = self.shards() else { return Ok(()) };
        if count != group.size() {
            return Err(Error::Unsupported(format!(
                "weights in parts with {count} processes, in a group of {}",
                group.size()
            )));
        }
        if self.objective.estimates_kl() {
            return Err(Error::Unsupported(
                "kto with sharded weights, as its ranks make different numbers of passes; keep the base on each device, or in \
                 fewer bits"
                    .into(),
            ));
        }
        Ok(())
    }

    /// This rank's part of a batch, where it has one or has to make the same passes.
    pub(super) fn part(
        &self,
        batches: &Batcher,
        plan: &BatchPlan,
        group: Group<'_>,
    ) -> Result<Option<Part>> {
        let Some(rows) = group.rows(plan, self.shards().is_some()) else { return Ok(None) };
        Ok(Some(Part { batch: self.batch(batches, &rows.plan)?, counts: rows.counts }))
    }

    /// The arrays of a batch, with the targets that the objective asks for.
    pub(super) fn batch(&self, batches: &Batcher, plan: &BatchPlan) -> Result<Batch> {
        let objective = self.objective;
        let asked =
            Asked { prompts: objective.learns_prompts(), teacher: objective.teacher_share() };
        batches.batch_with(plan, asked)
    }

    /// The sums of the log-probabilities of a batch's answers under the reference; zeros where none is asked for.
    pub(super) fn references(&self, batch: &Batch, known: Option<&References>) -> Result<Vec<f64>> {
        if !self.objective.uses_reference() {
            return Ok(vec![0.0; batch.answers.len()]);
        }
        if let Some(known) = known {
            return batch.answers.iter().map(|answer| known.of(answer)).collect();
        }
        self.log_probabilities(batch, self.reference)
    }

    /// The sums of the log-probabilities of a batch's answers.
    pub(super) fn log_probabilities(
        &self,
        batch: &Batch,
        adapter: Option<&Arc<Adapter>>,
    ) -> Result<Vec<f64>> {
        let losses = devices::step(self.model.device(), || {
            let found = self.model.token_losses(&Tape::inference(), batch, adapter, false)?;
            host(found.losses.tensor())
        })?;
        batch.answers.iter().map(|answer| sum(&losses, &answer.places)).collect()
    }

    /// How far the policy is from the reference, estimated by answers that belong to other prompts of the step; 0 where
    /// the estimate is negative, where there is one prompt only, or where nobody asks.
    pub(super) fn kl(
        &self,
        batches: &Batcher,
        plans: &[BatchPlan],
        group: Group<'_>,
    ) -> Result<f64> {
        if !self.objective.estimates_kl() {
            return Ok(0.0);
        }
        let examples: Vec<usize> = plans.iter().flat_map(|plan| plan.rows.concat()).collect();
        let (count, mismatched) = batches.mismatched(&examples, group)?;
        if count == 0 {
            return Ok(0.0);
        }
        let mut total = [0.0];
        for batch in mismatched {
            let policy = self.log_probabilities(&batch, self.adapter)?;
            let reference = self.log_probabilities(&batch, self.reference)?;
            total[0] += policy.iter().zip(reference).map(|(policy, it)| policy - it).sum::<f64>();
        }
        group.add_up("the divergence from the reference", &mut total)?;
        Ok(not_negative(total[0] / count as f64))
    }

    /// What the batches of a step come to, of which `batches` are this rank's part.
    pub(super) fn totals<'b>(
        &self,
        batches: impl Iterator<Item = &'b Batch> + Clone,
        kl: f64,
        group: Group<'_>,
    ) -> Result<Totals> {
        let learned_tokens = |answer: &Answer| answer.places.len() + answer.prompt.len();
        let chosen = |answer: &&Answer| answer.role == Role::Chosen;
        let answers = batches.clone().flat_map(|batch| &batch.answers);
        let learned = answers.filter(chosen).map(learned_tokens).sum();
        let counts = [batches.map(samples).sum(), learned];
        let [samples, learned_tokens] = group.count("the answers of a step", counts)?;
        Ok(Totals { samples, learned_tokens, kl })
    }

    /// The objective of a batch whose places have these losses, with the gradient by them.
    pub(super) fn compare(
        &self,
        batch: &Batch,
        losses: &Tensor,
        references: &[f64],
        totals: &Totals,
    ) -> Result<(Compared, Vec<f32>)> {
        let losses = host(losses)?;
        let mut scores = Vec::with_capacity(batch.answers.len());
        for (answer, &reference) in batch.answers.iter().zip(references) {
            scores.push((
                answer.role,
                Score {
                    policy: sum(&losses, &answer.places)?,
                    reference,
                    tokens: answer.places.len(),
                    prompt: sum(&losses, &answer.prompt)?,
                    prompt_tokens: answer.prompt.len(),
                },
            ));
        }
        let compared = self.objective.compare(&scores, totals)?;
        // A loss is the negative of a log-probability.
        let mut gradient = vec![0.0; losses.len()];
        for (answer, Slopes { answer: slope, prompt }) in batch.answers.iter().zip(&compared.slopes)
        {
            for (places, slope) in [(&answer.places, slope), (&answer.prompt, prompt)] {
                for place in places {
                    gradient[*place as usize] -= *slope as f32;
                }
            }
        }
        Ok((compared, gradient))
    }
}

/// `estimate`, or 0 where that is negative. What is no number stays so, for the step to be skipped.
fn not_negative(estimate: f64) -> f64 {
    if estimate < 0.0 { 0.0 } else { estimate }
}

/// How many answers or pairs a batch has.
pub(super) fn samples(batch: &Batch) -> usize {
    batch.answers.iter().filter(|answer| answer.role != Role::Rejected).count()
}

fn host(losses: &Tensor) -> Result<Vec<f32>> {
    Ok(losses.to_dtype(DType::F32)?.to_device(&Device::Cpu)?.to_vec1()?)
}

/// The sum of the log-probabilities at these places.
fn sum(losses: &[f32], places: &[u32]) -> Result<f64> {
    let mut sum = 0.0;
    for place in places {
        match losses.get(*place as usize) {
            Some(loss) => sum -= f64::from(*loss),
            None => {
                let count = losses.len();
                return Err(Error::option("data", format!("have place {place} of {count}")));
            }
        }
    }
    Ok(sum)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_divergence_that_is_no_number_is_none() {
        for (estimate, expected) in [(-0.5, 0.0), (0.0, 0.0), (0.5, 0.5)] {
            assert_eq!(not_negative(estimate), expected);
        }
        assert!(not_negative(f64::NAN).is_nan());
    }
}
