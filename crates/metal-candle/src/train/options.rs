//! What a training run is told.

use super::objectives::Objective;
use super::optimizer::{Optimizer, OptimizerPlacement};
use super::schedule::LearningRate;
use crate::data::SampleKind;
use crate::{Error, Result, bounds};
use serde::{Deserialize, Serialize};

/// The most optimiser steps of a run: years of them, and every number of batches that follows from
/// them can be counted.
pub const MAX_STEPS: u64 = 1_000_000_000;

/// How long a run is.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Duration {
    /// Optimiser steps.
    Steps(u64),
    /// Passes over the training data; a fraction is allowed.
    Epochs(f64),
}

/// Where activations that only the backward pass reads wait for it. It changes no bit of what comes out.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ActivationPlacement {
    /// On the device.
    #[default]
    Device,
    /// In the memory of the host (activation offloading), with CUDA in pinned memory, to which they are copied, and from which
    /// they come, beside the device's work: with gradient checkpointing all that is kept of a layer, otherwise the queries,
    /// keys and values of its attention and the gate of its MLP.
    Host,
}

/// What makes an evaluation better than another.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BestBy {
    /// A lower loss.
    #[default]
    Loss,
    /// The better answer has the higher reward more often.
    Accuracy,
    /// The reward of the better answers is higher by more.
    Margin,
}

impl BestBy {
    /// The metric, where it isn't the loss.
    pub(super) fn metric(self) -> Option<&'static str> {
        match self {
            Self::Loss => None,
            Self::Accuracy => Some("rewards/accuracies"),
            Self::Margin => Some("rewards/margins"),
        }
    }
}

impl Default for Duration {
    fn default() -> Self {
        Self::Epochs(1.0)
    }
}

impl Duration {
    /// Checks the number.
    ///
    /// # Errors
    /// [`Error::Option`] when no run can be so long.
    pub fn validate(self) -> Result<()> {
        match self {
            Self::Steps(steps) => bounds::check("steps", steps, &bounds::STEPS),
            Self::Epochs(epochs) => bounds::positive("epochs", epochs, bounds::EPOCHS),
        }
    }
}

/// What a training run is told, beside the model and the data.
#[derive(Debug, Clone, PartialEq)]
pub struct TrainOptions {
    /// What is minimised.
    pub objective: Objective,
    /// Compute the log-probabilities of all answers under the reference before the first step, and keep them in a file,
    /// instead of in every step.
    pub precompute_ref_log_probs: bool,
    /// Optimiser steps of the whole run; see [`total_steps`].
    pub steps: u64,
    /// Batches that are added up to one optimiser step. Every target token weighs the same,
    /// whichever batch it is in.
    pub grad_accumulation: usize,
    /// The rate of each step.
    pub learning_rate: LearningRate,
    /// The optimiser and its options.
    pub optimizer: Optimizer,
    /// Where what it keeps lies.
    pub optimizer_placement: OptimizerPlacement,
    /// What the learning rate of every B of a linear layer is multiplied by, and, as in PEFT, that of every vector, such
    /// as biases and DoRA's magnitudes: LoRA+ (Hayou et al., 2024, arXiv:2402.12354), whose authors take 16. For Adam
    /// and AdamW. Full fine-tuning has no B, so it takes 1, which is no other rate.
    pub loraplus_lr_ratio: f64,
    /// Gradients with a larger L2 norm are scaled down to it.
    pub clip_norm: Option<f64>,
    /// Steps in a row whose loss or gradient may be NaN or infinite before the run stops. In f16, gradients that a lower scale of the
    /// loss mends don't count.
    pub skip_limit: u64,
    /// Recompute each layer in the backward pass instead of storing its activations, but for what its
    /// attention gives.
    pub grad_checkpoint: bool,
    /// Where what only the backward pass reads waits for it.
    pub activation_placement: ActivationPlacement,
    /// Where dropout and samples get their random numbers from.
    pub seed: u64,
    /// Steps between reports.
    pub report_every: u64,
    /// Steps between evaluations, if there is validation data; 0 for only at the end.
    pub eval_every: u64,
    /// Batches of the validation data that an evaluation reads; `None` for all.
    pub eval_batches: Option<usize>,
    /// Steps between checkpoints; 0 for only at the end.
    pub save_every: u64,
    /// Evaluate, show samples and save at the end of each epoch, too, where there are validation data and something to
    /// sample.
    pub epoch_ends: bool,
    /// Checkpoints that are kept, the newest, beside the best.
    pub keep: usize,
    /// End with the parameters of the best evaluation instead of the last.
    pub keep_best: bool,
    /// Evaluations in a row that may pass without a better one before the run stops.
    pub patience: Option<u64>,
    /// Which evaluation is better.
    pub best_by: BestBy,
    /// Steps between samples; 0 for none.
    pub sample_every: u64,
}

impl TrainOptions {
    /// A run of `steps` optimiser steps at these rates, with the usual values for the rest.
    pub fn new(steps: u64, learning_rate: LearningRate) -> Self {
        Self {
            objective: Objective::default(),
            precompute_ref_log_probs: false,
            steps,
            grad_accumulation: 1,
            learning_rate,
            optimizer: Optimizer::default(),
            optimizer_placement: OptimizerPlacement::default(),
            loraplus_lr_ratio: 1.0,
            clip_norm: Some(1.0),
            skip_limit: 5,
            grad_checkpoint: false,
            activation_placement: ActivationPlacement::default(),
            seed: 0,
            report_every: 10,
            eval_every: 200,
            eval_batches: None,
            save_every: 100,
            epoch_ends: false,
            keep: 3,
            keep_best: false,
            patience: None,
            best_by: BestBy::default(),
            sample_every: 0,
        }
    }

    /// Checks every value.
    ///
    /// # Errors
    /// [`Error::Option`](crate::Error::Option) about the first that cannot work.
    pub fn validate(&self) -> Result<()> {
        for (name, value, allowed) in [
            ("steps", self.steps, bounds::STEPS),
            ("report_every", self.report_every, bounds::STEPS),
            ("skip_limit", self.skip_limit, bounds::STEPS),
            ("patience", self.patience.unwrap_or(1), bounds::STEPS),
            ("eval_every", self.eval_every, bounds::EVERY),
            ("save_every", self.save_every, bounds::EVERY),
            ("sample_every", self.sample_every, bounds::EVERY),
        ] {
            bounds::check(name, value, &allowed)?;
        }
        for (name, value, allowed) in [
            ("grad_accumulation", self.grad_accumulation, bounds::ACCUMULATION),
            ("keep", self.keep, bounds::KEPT),
            ("eval_batches", self.eval_batches.unwrap_or(1), bounds::BATCHES),
        ] {
            bounds::check(name, value, &allowed)?;
        }
        self.objective.validate()?;
        if self.precompute_ref_log_probs && !self.objective.uses_reference() {
            return Err(Error::option(
                "precompute_ref_log_probs",
                format!("is set, but {} has no reference", self.objective.name()),
            ));
        }
        if self.best_by != BestBy::Loss && self.objective.samples() != SampleKind::Pair {
            return Err(Error::option(
                "best_by",
                format!(
                    "is for pairs of answers; {} compares none, expected loss",
                    self.objective.name()
                ),
            ));
        }
        self.optimizer.validate()?;
        bounds::positive("loraplus_lr_ratio", self.loraplus_lr_ratio, bounds::RATIO)?;
        let is_adam = matches!(self.optimizer, Optimizer::Adam(_) | Optimizer::AdamW(_));
        if self.loraplus_lr_ratio != 1.0 && !is_adam {
            return Err(Error::option(
                "loraplus_lr_ratio",
                format!(
                    "is {}, but {} has no rate of its own for B; adamw and adam have",
                    self.loraplus_lr_ratio,
                    self.optimizer.name()
                ),
            ));
        }
        match self.clip_norm {
            Some(norm) => bounds::positive("clip_norm", norm, bounds::NORM),
            None => Ok(()),
        }
    }
}

/// Optimiser steps of a run over epochs of so many batches, by their numbers from 0: packed rows are not as many in each. The
/// batches of one step are all of one epoch, so its last step may have fewer.
///
/// # Errors
/// [`Error::Option`] for a duration that can't be one, and for epochs of too many steps.
pub fn total_steps(
    duration: Duration,
    batches: impl Fn(usize) -> usize,
    accumulation: usize,
) -> Result<u64> {
    duration.validate()?;
    let epochs = match duration {
        Duration::Steps(steps) => return Ok(steps),
        Duration::Epochs(epochs) => epochs,
    };
    let steps_of = |epoch| batches(epoch).div_ceil(accumulation.max(1)) as f64;
    let checked = |steps: f64| match steps.round() as u64 {
        steps if steps > MAX_STEPS => Err(Error::option(
            "epochs",
            format!("{epochs} are {steps} steps of this data, expected at most {MAX_STEPS}"),
        )),
        steps => Ok(steps.max(1)),
    };
    // So there are not too many epochs to look at each.
    checked(epochs * steps_of(0))?;
    let last = (epochs.ceil() as usize).saturating_sub(1);
    let of_last = steps_of(last);
    let others: f64 = (0..last).map(|epoch| steps_of(epoch) - of_last).sum();
    checked(epochs * of_last + others)
}

/// [`total_steps`] of a run that goes on, which had `before`. Runs used to have as many steps of each epoch as of the first;
/// one of the same epochs keeps that number, and with it its learning rates.
///
/// # Errors
/// As [`total_steps`].
pub fn total_steps_resumed(
    duration: Duration,
    batches: impl Fn(usize) -> usize,
    accumulation: usize,
    before: u64,
) -> Result<u64> {
    let first = batches(0);
    let alike = total_steps(duration, |_| first, accumulation)?;
    if alike == before { Ok(alike) } else { total_steps(duration, batches, accumulation) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_that_goes_on_keeps_the_steps_that_its_epochs_had() {
        // More in later epochs, and fewer.
        for later in [11, 9] {
            let batches = |epoch: usize| if epoch == 0 { 10 } else { later };
            let steps = |epochs, before| {
                total_steps_resumed(Duration::Epochs(epochs), batches, 1, before).unwrap()
            };
            let now = 10 + 3 * later as u64;
            assert_eq!(total_steps(Duration::Epochs(4.0), batches, 1).unwrap(), now);
            assert_eq!((steps(4.0, 40), steps(4.0, now)), (40, now));
            // It is made longer.
            assert_eq!(steps(4.0, 30), now);
        }
        let steps = |before| total_steps_resumed(Duration::Steps(7), |_| 10, 1, before).unwrap();
        assert_eq!((steps(7), steps(5)), (7, 7));
    }

    #[test]
    fn the_steps_of_epochs_are_those_of_each_epoch() {
        let batches = |epoch: usize| [454, 454, 456, 455][epoch % 4];
        let steps = |epochs, accumulation| {
            total_steps(Duration::Epochs(epochs), batches, accumulation).unwrap()
        };
        assert_eq!(steps(1.0, 1), 454);
        assert_eq!(steps(3.0, 1), 454 + 454 + 456);
        assert_eq!(steps(2.5, 1), 454 + 454 + 228);
        assert_eq!(steps(4.0, 10), 46 * 4);
        assert_eq!(steps(4.0, 4), 114 * 4);
        assert_eq!(steps(4.0, 5), 91 + 91 + 92 + 91);
        assert_eq!(steps(0.5, 1), 227);
        assert_eq!(steps(1e-9, 1), 1);
        assert_eq!(total_steps(Duration::Steps(7), |_| unreachable!(), 1).unwrap(), 7);
        let alike = |epochs| total_steps(Duration::Epochs(epochs), |_| 10, 1).unwrap();
        assert_eq!((alike(1.15), alike(2.3), alike(100.0)), (12, 23, 1000));
        let error = total_steps(Duration::Epochs(1e6), |_| 10_000, 1).unwrap_err().to_string();
        assert!(error.contains("10000000000 steps"), "{error}");
    }
}
