//! The learning rate of every step: a warm-up, then a constant, linear or cosine course.
//!
//! With `r0` the rate that warm-up starts from, `r` the peak and `m` the minimum, and for `w`
//! warm-up steps of a run of `n` steps, the rate of step `s` (counted from 0) is
//!
//! ```text
//! s < w              r0 + (r - r0) · s / w
//! constant           r
//! linear             m + (r - m) · (1 - p)                p = (s - w) / (n - w), at most 1
//! cosine             m + (r - m) · (1 + cos(π p)) / 2
//! ```
//!
//! With `r0` and `m` at 0 these are `get_constant_schedule_with_warmup`,
//! `get_linear_schedule_with_warmup` and `get_cosine_schedule_with_warmup` of transformers, with
//! one difference after the last step of the run, where this cosine stays at its minimum and
//! theirs rises again.

use std::f64::consts::PI;

use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// How the learning rate moves after the warm-up.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Schedule {
    /// Stays at the peak.
    Constant,
    /// Falls in a straight line to the minimum at the end of the run.
    #[default]
    Linear,
    /// Falls along half a cosine to the minimum at the end of the run.
    Cosine,
}

/// How long the warm-up is.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Warmup {
    /// A number of optimiser steps.
    Steps(u64),
    /// A share of all steps, from 0 to 1, rounded up to whole steps.
    Ratio(f64),
}

impl Default for Warmup {
    fn default() -> Self {
        Self::Steps(0)
    }
}

/// A schedule as a person writes it, before the length of the run is known.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ScheduleOptions {
    /// The course after the warm-up.
    pub schedule: Schedule,
    /// The highest rate, reached at the end of the warm-up.
    pub learning_rate: f64,
    /// The rate at the end of the run; a constant schedule has no use for it.
    pub min_learning_rate: f64,
    /// The length of the warm-up.
    pub warmup: Warmup,
    /// The rate of the first warm-up step.
    pub warmup_init: f64,
}

impl Default for ScheduleOptions {
    fn default() -> Self {
        Self {
            schedule: Schedule::default(),
            learning_rate: 1e-4,
            min_learning_rate: 0.0,
            warmup: Warmup::default(),
            warmup_init: 0.0,
        }
    }
}

impl ScheduleOptions {
    /// The schedule of a run of `total_steps` optimiser steps.
    ///
    /// # Errors
    /// [`Error::Option`] when a rate is negative or not finite, the minimum or the warm-up's start
    /// is above the peak, the ratio is outside 0 to 1, or the warm-up is longer than the run.
    pub fn build(&self, total_steps: u64) -> Result<LearningRate> {
        check_rate("learning_rate", self.learning_rate)?;
        check_rate("min_learning_rate", self.min_learning_rate)?;
        check_rate("warmup_init", self.warmup_init)?;
        for (option, rate) in
            [("min_learning_rate", self.min_learning_rate), ("warmup_init", self.warmup_init)]
        {
            if rate > self.learning_rate {
                return Err(Error::option(
                    option,
                    format!("{rate} is above learning_rate, which is {}", self.learning_rate),
                ));
            }
        }
        let warmup_steps = match self.warmup {
            Warmup::Steps(steps) => steps,
            Warmup::Ratio(ratio) if (0.0..=1.0).contains(&ratio) => {
                (ratio * total_steps as f64).ceil() as u64
            }
            Warmup::Ratio(ratio) => {
                return Err(Error::option(
                    "warmup_ratio",
                    format!("expected a share of the run from 0 to 1, found {ratio}"),
                ));
            }
        };
        if warmup_steps > total_steps {
            return Err(Error::option(
                "warmup_steps",
                format!("{warmup_steps} is more than the {total_steps} steps of the run"),
            ));
        }
        Ok(LearningRate {
            schedule: self.schedule,
            peak: self.learning_rate,
            end: self.min_learning_rate,
            warmup_init: self.warmup_init,
            warmup_steps,
            decay_start: warmup_steps,
            decay_steps: total_steps - warmup_steps,
        })
    }
}

/// The learning rate as a function of the step and of nothing else, so that a resumed run needs
/// only its step to continue.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LearningRate {
    schedule: Schedule,
    peak: f64,
    end: f64,
    warmup_init: f64,
    warmup_steps: u64,
    // mlx-lm holds the peak for one step more between the two parts, so the start of the second
    // is not always the end of the first.
    decay_start: u64,
    decay_steps: u64,
}

impl LearningRate {
    /// The same rate at every step.
    ///
    /// # Errors
    /// [`Error::Option`] when the rate is negative or not finite.
    pub fn constant(learning_rate: f64) -> Result<Self> {
        ScheduleOptions { schedule: Schedule::Constant, learning_rate, ..Default::default() }
            .build(0)
    }

    /// The rate for `step`, the optimiser step about to be taken, counted from 0.
    pub fn at(&self, step: u64) -> f64 {
        if step < self.warmup_steps {
            let done = step as f64 / self.warmup_steps as f64;
            return self.warmup_init + (self.peak - self.warmup_init) * done;
        }
        let progress = match self.decay_steps {
            0 => 1.0,
            steps => (step.saturating_sub(self.decay_start) as f64 / steps as f64).min(1.0),
        };
        let remaining = match self.schedule {
            Schedule::Constant => return self.peak,
            Schedule::Linear => 1.0 - progress,
            Schedule::Cosine => 0.5 * (1.0 + (PI * progress).cos()),
        };
        self.end + (self.peak - self.end) * remaining
    }

    /// The rate that the warm-up leads to.
    pub fn peak(&self) -> f64 {
        self.peak
    }
}

/// The `lr_schedule` of an mlx-lm training file.
///
/// ```yaml
/// lr_schedule:
///   name: cosine_decay          # or linear_schedule
///   warmup: 100                 # steps, 0 for none
///   warmup_init: 1e-7           # the rate of the first of them
///   arguments: [1e-5, 1000, 1e-7]
/// ```
///
/// The arguments are those of MLX's function of that name: `cosine_decay(init, decay_steps, end =
/// 0)` and `linear_schedule(init, end, steps)`. As in mlx-lm, `init` takes the place of the file's
/// `learning_rate`, and the course begins one step after the warm-up has reached it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MlxSchedule {
    /// MLX's name of the schedule.
    pub name: String,
    /// How many steps the warm-up takes.
    #[serde(default)]
    pub warmup: u64,
    /// The rate that the warm-up starts from.
    #[serde(default)]
    pub warmup_init: f64,
    /// The arguments of the function `name`, in its order.
    pub arguments: Vec<f64>,
}

impl MlxSchedule {
    /// The schedule that mlx-lm would follow.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for MLX's other schedules, [`Error::Option`] for an unknown name, a
    /// wrong number of arguments, a rate that is negative or not finite, or a number of steps that
    /// is not a whole number above 0.
    pub fn build(&self) -> Result<LearningRate> {
        const ARGUMENTS: &str = "lr_schedule.arguments";
        let (schedule, peak, end, steps) = match (self.name.as_str(), self.arguments.as_slice()) {
            ("cosine_decay", &[init, steps]) => (Schedule::Cosine, init, 0.0, steps),
            ("cosine_decay", &[init, steps, end]) => (Schedule::Cosine, init, end, steps),
            ("cosine_decay", other) => {
                return Err(Error::option(
                    ARGUMENTS,
                    format!(
                        "cosine_decay takes [init, decay_steps] or [init, decay_steps, end], \
                         found {} numbers",
                        other.len()
                    ),
                ));
            }
            ("linear_schedule", &[init, end, steps]) => (Schedule::Linear, init, end, steps),
            ("linear_schedule", other) => {
                return Err(Error::option(
                    ARGUMENTS,
                    format!(
                        "linear_schedule takes [init, end, steps], found {} numbers",
                        other.len()
                    ),
                ));
            }
            (name @ ("exponential_decay" | "step_decay" | "join_schedules"), _) => {
                return Err(Error::Unsupported(format!(
                    "lr_schedule.name {name}; use cosine_decay or linear_schedule"
                )));
            }
            (name, _) => {
                return Err(Error::option(
                    "lr_schedule.name",
                    format!(
                        "unknown schedule {name:?}; expected cosine_decay or linear_schedule, or \
                         no lr_schedule for a constant rate"
                    ),
                ));
            }
        };
        check_rate(ARGUMENTS, peak)?;
        check_rate(ARGUMENTS, end)?;
        check_rate("lr_schedule.warmup_init", self.warmup_init)?;
        // Beyond 2^53 an f64 no longer tells one step from the next.
        if !(steps >= 1.0 && steps.fract() == 0.0 && steps <= 9_007_199_254_740_992.0) {
            return Err(Error::option(
                ARGUMENTS,
                format!("expected a whole number of steps above 0, found {steps}"),
            ));
        }
        Ok(LearningRate {
            schedule,
            peak,
            end,
            warmup_init: self.warmup_init,
            warmup_steps: self.warmup,
            decay_start: if self.warmup == 0 { 0 } else { self.warmup.saturating_add(1) },
            decay_steps: steps as u64,
        })
    }
}

fn check_rate(option: &str, rate: f64) -> Result<()> {
    if rate.is_finite() && rate >= 0.0 {
        return Ok(());
    }
    Err(Error::option(option, format!("expected a finite rate of 0 or more, found {rate}")))
}
