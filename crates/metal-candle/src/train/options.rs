//! What a training run is told.

use super::optimizer::Optimizer;
use super::schedule::LearningRate;
use crate::{Error, Result};
use serde::{Deserialize, Serialize};

/// The most optimiser steps of a run: years of them, and every number of batches that follows from
/// them can be counted.
pub const MAX_STEPS: u64 = 1_000_000_000;
/// The most batches of one step, and checkpoints that are kept.
const MAX_COUNT: u64 = 1_000_000;

/// How long a run is.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Duration {
    /// Optimiser steps.
    Steps(u64),
    /// Passes over the training data; a fraction is allowed.
    Epochs(f64),
}

/// What a training run is told, beside the model and the data.
#[derive(Debug, Clone, PartialEq)]
pub struct TrainOptions {
    /// Optimiser steps of the whole run; see [`total_steps`].
    pub steps: u64,
    /// Batches that are added up to one optimiser step. Every target token weighs the same,
    /// whichever batch it is in.
    pub accumulation: usize,
    /// The rate of each step.
    pub learning_rate: LearningRate,
    /// The optimiser and its options.
    pub optimizer: Optimizer,
    /// Gradients with a larger L2 norm are scaled down to it.
    pub clip_norm: Option<f64>,
    /// Steps in a row whose loss or gradient may be NaN or infinite before the run stops.
    pub skip_limit: u64,
    /// Recompute each layer in the backward pass instead of storing its activations, but for what its
    /// attention gives.
    pub gradient_checkpointing: bool,
    /// Where dropout and samples get their random numbers from.
    pub seed: u64,
    /// Steps between reports.
    pub report_every: u64,
    /// Steps between evaluations, if there is validation data; 0 for only at the end.
    pub evaluate_every: u64,
    /// Batches of the validation data that an evaluation reads; `None` for all.
    pub evaluate_batches: Option<usize>,
    /// Steps between checkpoints; 0 for only at the end.
    pub save_every: u64,
    /// Checkpoints that are kept, the newest, beside the best.
    pub keep: usize,
    /// End with the parameters of the best evaluation instead of the last.
    pub keep_best: bool,
    /// Evaluations in a row that may pass without a better loss before the run stops.
    pub patience: Option<u64>,
    /// Steps between samples; 0 for none.
    pub sample_every: u64,
}

impl TrainOptions {
    /// A run of `steps` optimiser steps at these rates, with the usual values for the rest.
    pub fn new(steps: u64, learning_rate: LearningRate) -> Self {
        Self {
            steps,
            accumulation: 1,
            learning_rate,
            optimizer: Optimizer::default(),
            clip_norm: Some(1.0),
            skip_limit: 5,
            gradient_checkpointing: false,
            seed: 0,
            report_every: 10,
            evaluate_every: 200,
            evaluate_batches: None,
            save_every: 100,
            keep: 3,
            keep_best: false,
            patience: None,
            sample_every: 0,
        }
    }

    /// Checks every value.
    pub fn validate(&self) -> Result<()> {
        for (name, value, least, most) in [
            ("steps", self.steps, 1, MAX_STEPS),
            ("report_every", self.report_every, 1, MAX_STEPS),
            ("skip_limit", self.skip_limit, 1, MAX_STEPS),
            ("keep", self.keep as u64, 1, MAX_COUNT),
            ("accumulation", self.accumulation as u64, 1, MAX_COUNT),
            ("patience", self.patience.unwrap_or(1), 1, MAX_STEPS),
            ("evaluate_batches", self.evaluate_batches.unwrap_or(1) as u64, 1, u64::MAX),
            ("evaluate_every", self.evaluate_every, 0, MAX_STEPS),
            ("save_every", self.save_every, 0, MAX_STEPS),
            ("sample_every", self.sample_every, 0, MAX_STEPS),
        ] {
            if value < least {
                return Err(Error::option(name, format!("is {value}, expected at least {least}")));
            }
            if value > most {
                return Err(Error::option(name, format!("is {value}, expected at most {most}")));
            }
        }
        self.optimizer.validate()?;
        if let Some(norm) = self.clip_norm
            && !(norm.is_finite() && norm > 0.0)
        {
            return Err(Error::option(
                "clip_norm",
                format!("is {norm}, expected a positive number"),
            ));
        }
        Ok(())
    }
}

/// Optimiser steps of a run over an epoch of `batches` batches. The batches of one step are all
/// of one epoch, so its last step may have fewer.
pub fn total_steps(duration: Duration, batches: usize, accumulation: usize) -> Result<u64> {
    let per_epoch = batches.div_ceil(accumulation.max(1)) as f64;
    match duration {
        Duration::Steps(steps) => Ok(steps),
        Duration::Epochs(epochs) if epochs.is_finite() && epochs > 0.0 => {
            let steps = ((epochs * per_epoch).round() as u64).max(1);
            if steps > MAX_STEPS {
                return Err(Error::option(
                    "epochs",
                    format!(
                        "{epochs} are {steps} steps of this data, expected at most {MAX_STEPS}"
                    ),
                ));
            }
            Ok(steps)
        }
        Duration::Epochs(epochs) => {
            Err(Error::option("epochs", format!("is {epochs}, expected a positive number")))
        }
    }
}
