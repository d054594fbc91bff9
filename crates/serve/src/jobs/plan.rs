//! What a job's data have decided. With the files it makes a run that is the same, bit for bit, whenever it goes on.

use super::hyperparameters::Chosen;
use chrono::NaiveDateTime;
use metal_candle::data::{BatchOptions, DataOptions, SampleKind};
use metal_candle::train::objectives::{DpoOptions, Objective, PREFERENCE_RATE_DIVISOR};
use metal_candle::train::{Duration, LearningRate, ScheduleOptions, TrainOptions, total_steps};
use metal_candle::{Error, Result};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::path::Path;

/// Tokens of a pass at most, where an example alone doesn't have more: a pass holds up the texts that are written.
const TOKENS_OF_A_PASS: usize = 4096;
/// Tokens of an example at most, where the model's context isn't shorter. A pass of more tokens than the usual ones
/// computes the layers' activations again for its backward pass, so with four times as many it still takes no more memory;
/// but the texts that are written wait four times as long for it.
const TOKENS_OF_AN_EXAMPLE: usize = 4 * TOKENS_OF_A_PASS;
/// Reports and checkpoints of a run, about.
const REPORTS: u64 = 2000;
const CHECKPOINTS: u64 = 10;
/// Checkpoints that are kept, beside what others need to be told of.
const KEPT: usize = 100;
const TIME: &str = "%Y-%m-%dT%H:%M:%S";

/// How a model is trained.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Method {
    /// On what the assistant is to say.
    Supervised,
    /// On which of two answers is better.
    Dpo,
}

impl Method {
    pub fn name(self) -> &'static str {
        match self {
            Self::Supervised => "supervised",
            Self::Dpo => "dpo",
        }
    }

    /// The method of this name.
    pub fn named(name: &str) -> Option<Self> {
        [Self::Supervised, Self::Dpo].into_iter().find(|method| method.name() == name)
    }

    fn objective(self, beta: f64) -> Objective {
        match self {
            Self::Supervised => Objective::Sft,
            Self::Dpo => Objective::Dpo(DpoOptions { beta, ..DpoOptions::default() }),
        }
    }

    /// What it learns from.
    pub fn samples(self) -> SampleKind {
        self.objective(DpoOptions::default().beta).samples()
    }
}

/// What a job's data have decided, and what must stay over a restart.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Plan {
    pub method: Method,
    pub n_epochs: u32,
    /// Rows of a pass.
    pub rows: usize,
    /// Passes of a step.
    pub passes: usize,
    pub learning_rate: f64,
    pub beta: f64,
    pub max_seq_length: usize,
    /// Whether the longest pass has so many tokens that activations are computed again instead of kept.
    #[serde(default)]
    pub recompute: bool,
    /// The time that the chat template is told.
    template_time: String,
    /// What else it is told.
    pub variables: Map<String, Value>,
    pub seed: u64,
}

impl Plan {
    /// The plan of a job whose longest example has `longest` tokens, at `now`.
    pub fn new(
        method: Method,
        chosen: Chosen,
        (longest, max_seq_length): (usize, usize),
        variables: &Map<String, Value>,
        seed: u64,
        now: NaiveDateTime,
    ) -> Self {
        let base = ScheduleOptions::default().learning_rate;
        let base = match method {
            Method::Supervised => base,
            Method::Dpo => base / PREFERENCE_RATE_DIVISOR,
        };
        let sequences = match method {
            Method::Supervised => 1,
            Method::Dpo => 2,
        };
        let batch = chosen.batch_size as usize;
        let of_a_row = sequences * longest.min(max_seq_length);
        let rows = rows_of_a_pass(batch, of_a_row);
        Self {
            method,
            n_epochs: chosen.n_epochs,
            rows,
            passes: batch / rows,
            learning_rate: base * chosen.learning_rate_multiplier,
            beta: chosen.beta,
            max_seq_length,
            recompute: rows * of_a_row > TOKENS_OF_A_PASS,
            template_time: now.format(TIME).to_string(),
            variables: variables.clone(),
            seed,
        }
    }

    /// How records become examples. What doesn't fit into memory goes to a file in `folder`.
    pub fn data_options(&self, folder: &Path) -> Result<DataOptions> {
        let now = NaiveDateTime::parse_from_str(&self.template_time, TIME).map_err(|error| {
            Error::option("template_time", format!("is {:?}: {error}", self.template_time))
        })?;
        Ok(DataOptions {
            max_seq_length: self.max_seq_length,
            variables: self.variables.clone(),
            now: Some(now),
            folder: folder.to_path_buf(),
            samples: self.method.samples(),
            ..DataOptions::default()
        })
    }

    /// How examples become batches.
    pub fn batch_options(&self) -> BatchOptions {
        BatchOptions {
            batch_size: self.rows,
            max_seq_length: self.max_seq_length,
            seed: self.seed,
            ..BatchOptions::default()
        }
    }

    /// Steps of an epoch of so many batches.
    pub fn steps_of_epoch(&self, batches: usize) -> u64 {
        batches.div_ceil(self.passes) as u64
    }

    /// What the trainer is told, for epochs of so many batches, which all have as no rows are packed.
    pub fn train_options(&self, batches: usize) -> Result<TrainOptions> {
        let epochs = Duration::Epochs(f64::from(self.n_epochs));
        let steps = total_steps(epochs, |_| batches, self.passes)?;
        let save_every = steps_between_checkpoints(steps, self.steps_of_epoch(batches));
        let options = TrainOptions {
            objective: self.method.objective(self.beta),
            grad_accumulation: self.passes,
            grad_checkpoint: self.recompute,
            seed: self.seed,
            report_every: steps.div_ceil(REPORTS),
            eval_every: save_every,
            sample_every: save_every,
            save_every,
            epoch_ends: true,
            keep: KEPT,
            ..TrainOptions::new(steps, self.rate(steps)?)
        };
        options.validate()?;
        Ok(options)
    }

    fn rate(&self, steps: u64) -> Result<LearningRate> {
        ScheduleOptions { learning_rate: self.learning_rate, ..ScheduleOptions::default() }
            .build(steps)
    }
}

/// Tokens that an example has at most, of a model with this context: as many as that, up to
/// [`TOKENS_OF_AN_EXAMPLE`].
pub(super) fn most_tokens(context: usize) -> usize {
    context.clamp(2, TOKENS_OF_AN_EXAMPLE)
}

/// The most rows of a pass that divide a batch and have no more tokens than a pass may have.
fn rows_of_a_pass(batch: usize, longest: usize) -> usize {
    let fits = |rows: &usize| batch.is_multiple_of(*rows) && rows * longest <= TOKENS_OF_A_PASS;
    (1..=batch.max(1)).rev().find(fits).unwrap_or(1)
}

/// Steps between the checkpoints beside those that each epoch ends with: about a tenth of the run, and a part of an epoch
/// where its steps can be divided so; 0 where the epochs are as short as that.
fn steps_between_checkpoints(steps: u64, of_epoch: u64) -> u64 {
    let wanted = steps.div_ceil(CHECKPOINTS).max(1);
    if wanted >= of_epoch {
        return 0;
    }
    let near = wanted.div_ceil(3)..=2 * wanted;
    let pieces = of_epoch.div_ceil(2 * wanted)..=of_epoch / near.start();
    let divides = |pieces: &u64| of_epoch.is_multiple_of(*pieces);
    let distance = |pieces: &u64| wanted.abs_diff(of_epoch / pieces);
    pieces.filter(divides).min_by_key(distance).map_or(wanted, |pieces| of_epoch / pieces)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(method: Method, batch_size: u32, longest: usize) -> Plan {
        let chosen = Chosen { n_epochs: 3, batch_size, learning_rate_multiplier: 2.0, beta: 0.3 };
        let now = NaiveDateTime::parse_from_str("2025-01-31T12:00:00", TIME).unwrap();
        Plan::new(method, chosen, (longest, 2048), &Map::new(), 7, now)
    }

    #[test]
    fn a_large_batch_is_made_in_passes_that_hold_nobody_up() {
        let shape = |method, batch, longest| {
            let plan = plan(method, batch, longest);
            assert_eq!(plan.rows * plan.passes, batch as usize);
            (plan.rows, plan.passes)
        };
        assert_eq!(shape(Method::Supervised, 4, 40), (4, 1));
        assert_eq!(shape(Method::Supervised, 256, 100), (32, 8));
        assert_eq!(shape(Method::Dpo, 256, 100), (16, 16));
        assert_eq!(shape(Method::Supervised, 7, 2048), (1, 7));
        assert_eq!(shape(Method::Supervised, 8, 1_000_000), (2, 4));
        assert!(!plan(Method::Supervised, 256, 100).recompute);
        assert!(!plan(Method::Dpo, 1, 2048).recompute);
        let rate = |method| plan(method, 4, 40).learning_rate;
        assert_eq!((rate(Method::Supervised), rate(Method::Dpo)), (4e-4, 2e-5));
    }

    #[test]
    fn an_example_has_as_many_tokens_as_the_model_reads_or_as_fit() {
        for (context, most) in [(0, 2), (256, 256), (8192, 8192), (131_072, 16_384)] {
            assert_eq!(most_tokens(context), most);
        }
        let chosen =
            Chosen { n_epochs: 1, batch_size: 4, learning_rate_multiplier: 1.0, beta: 0.1 };
        let now = NaiveDateTime::parse_from_str("2025-01-31T12:00:00", TIME).unwrap();
        let of =
            |longest| Plan::new(Method::Supervised, chosen, (longest, 16_384), &Map::new(), 7, now);
        assert_eq!((of(1024).rows, of(1024).recompute), (4, false));
        assert_eq!((of(5000).rows, of(5000).recompute), (1, true));
        assert!(of(5000).train_options(10).unwrap().grad_checkpoint);
    }

    #[test]
    fn checkpoints_stand_at_the_ends_of_epochs_and_are_about_ten() {
        for (steps, of_epoch, expected) in [
            (1, 1, 0),
            (10, 1, 0),
            (25, 1, 0),
            (315, 105, 35),
            (1000, 1000, 100),
            (3000, 1000, 250),
            (50, 5, 0),
            (309, 103, 31),
            (10_007, 10_007, 1001),
            (12, 4, 2),
            (3, 3, 1),
        ] {
            let every = steps_between_checkpoints(steps, of_epoch);
            assert_eq!(every, expected, "{steps} of {of_epoch}");
            let between = steps.checked_div(every).unwrap_or(0);
            assert!(between <= 3 * CHECKPOINTS + 1, "{steps} of {of_epoch}");
        }
        let options = plan(Method::Dpo, 4, 40).train_options(105).unwrap();
        assert_eq!((options.steps, options.save_every, options.report_every), (315, 35, 1));
        assert!(options.epoch_ends);
        assert!(matches!(options.objective, Objective::Dpo(DpoOptions { beta: 0.3, .. })));
    }

    #[test]
    fn a_plan_is_the_same_when_it_is_read_again() {
        let made = plan(Method::Supervised, 4, 40);
        let text = serde_json::to_string(&made).unwrap();
        assert_eq!(serde_json::from_str::<Plan>(&text).unwrap(), made);
        let options = made.data_options(Path::new("run")).unwrap();
        assert_eq!(options.now.unwrap().to_string(), "2025-01-31 12:00:00");
    }
}
