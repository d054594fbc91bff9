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

use super::optimizer::Optimizer;
use crate::{Error, Result, bounds};

/// How the learning rate moves after the warm-up.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Schedule {
    /// Stays at the peak.
    Constant,
    /// Falls in a straight line to the minimum at the end of the run.
    Linear,
    /// Falls along half a cosine to the minimum at the end of the run.
    #[default]
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
        Self::Ratio(0.03)
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
            learning_rate: Optimizer::default().default_learning_rate(false),
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
            Warmup::Steps(steps) => {
                bounds::check("warmup_steps", steps, &bounds::EVERY)?;
                steps
            }
            Warmup::Ratio(ratio) if (0.0..=1.0).contains(&ratio) => {
                // At least the last step is not part of the warm-up, whose first rate may be 0.
                ((ratio * total_steps as f64).ceil() as u64).min(total_steps.saturating_sub(1))
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

impl Default for LearningRate {
    /// That of [`ScheduleOptions`], the same at every step.
    fn default() -> Self {
        Self {
            schedule: Schedule::Constant,
            peak: ScheduleOptions::default().learning_rate,
            end: 0.0,
            warmup_init: 0.0,
            warmup_steps: 0,
            decay_start: 0,
            decay_steps: 0,
        }
    }
}

impl LearningRate {
    /// The same rate at every step.
    ///
    /// # Errors
    /// [`Error::Option`] when the rate is negative or not finite.
    pub fn constant(learning_rate: f64) -> Result<Self> {
        let warmup = Warmup::Steps(0);
        ScheduleOptions {
            schedule: Schedule::Constant,
            learning_rate,
            warmup,
            ..Default::default()
        }
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

    /// The same course over the steps of `other`.
    pub(super) fn with_lengths_of(&self, other: &Self) -> Self {
        let Self { warmup_steps, decay_start, decay_steps, .. } = *other;
        Self { warmup_steps, decay_start, decay_steps, ..self.clone() }
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
    bounds::not_negative(option, rate, bounds::RATE)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(schedule: Schedule, warmup: u64) -> ScheduleOptions {
        let warmup = Warmup::Steps(warmup);
        ScheduleOptions { schedule, learning_rate: 1.0, warmup, ..Default::default() }
    }

    fn assert_close(found: f64, expected: f64, tolerance: f64, what: &str) {
        assert!((found - expected).abs() <= tolerance, "{what}: {found} is not {expected}");
    }

    /// The factors that `transformers.optimization` 5.23.0 gives for steps 0 to 10 of 10 with 3
    /// steps of warm-up, and 0 to 7 of 7 with none.
    #[test]
    fn a_short_run_with_a_warm_up_ratio_still_learns() {
        for steps in [1, 2, 3] {
            let options = ScheduleOptions { warmup: Warmup::Ratio(0.03), ..Default::default() };
            let rate = options.build(steps).unwrap();
            assert!((0..steps).any(|step| rate.at(step) > 0.0), "{steps} steps");
        }
    }

    #[test]
    fn rates_are_those_of_transformers() {
        const UP: [f64; 3] = [0.0, 0.3333333333333333, 0.6666666666666666];
        const LINEAR: [f64; 8] = [
            1.0,
            0.8571428571428571,
            0.7142857142857143,
            0.5714285714285714,
            0.42857142857142855,
            0.2857142857142857,
            0.14285714285714285,
            0.0,
        ];
        const COSINE: [f64; 8] = [
            1.0,
            0.9504844339512095,
            0.8117449009293668,
            0.6112604669781572,
            0.38873953302184283,
            0.18825509907063326,
            0.04951556604879048,
            0.0,
        ];
        for (schedule, course) in
            [(Schedule::Constant, [1.0; 8]), (Schedule::Linear, LINEAR), (Schedule::Cosine, COSINE)]
        {
            let warm = options(schedule, 3).build(10).expect("valid");
            let expected = UP.iter().chain(&course);
            for (step, &expected) in (0..).zip(expected) {
                assert_close(warm.at(step), expected, 1e-15, &format!("{schedule:?} {step}"));
            }
            let cold = options(schedule, 0).build(7).expect("valid");
            for (step, &expected) in (0..).zip(&course) {
                assert_close(cold.at(step), expected, 1e-15, &format!("{schedule:?} {step}"));
            }
        }
    }

    /// What mlx-lm's `build_schedule` gives with MLX 0.32.4, which counts in f32.
    #[test]
    fn rates_are_those_of_mlx_lm() {
        let cosine_warm = "{name: cosine_decay, warmup: 3, warmup_init: 1e-7, \
                           arguments: [1e-5, 6, 1e-7]}";
        let cosine = "{name: cosine_decay, arguments: [2e-4, 5]}";
        let linear = "{name: linear_schedule, warmup: 2, arguments: [1e-4, 1e-5, 4]}";
        let cases: [(&str, &[f64]); 3] = [
            (
                cosine_warm,
                &[
                    1e-7,
                    3.4e-6,
                    6.7e-6,
                    1e-5,
                    1e-5,
                    9.336825314676389e-6,
                    7.525e-6,
                    5.05e-6,
                    2.575e-6,
                    7.631746257175109e-7,
                    1e-7,
                    1e-7,
                ],
            ),
            (
                cosine,
                &[
                    2e-4,
                    1.8090168305207044e-4,
                    1.309016952291131e-4,
                    6.909829244250432e-5,
                    1.909829916257877e-5,
                    0.0,
                    0.0,
                ],
            ),
            (linear, &[0.0, 5e-5, 1e-4, 1e-4, 7.75e-5, 5.5e-5, 3.25e-5, 1e-5, 1e-5]),
        ];
        for (yaml, expected) in cases {
            let schedule: MlxSchedule = serde_yaml_ng::from_str(yaml).expect("parses");
            let rate = schedule.build().expect("valid");
            for (step, &expected) in (0..).zip(expected) {
                let tolerance = 1e-6 * expected + 1e-11;
                assert_close(rate.at(step), expected, tolerance, &format!("{yaml} {step}"));
            }
        }
    }

    #[test]
    fn the_course_goes_from_the_start_over_the_peak_to_the_minimum_and_stays() {
        for schedule in [Schedule::Linear, Schedule::Cosine] {
            let options = ScheduleOptions {
                schedule,
                learning_rate: 3e-4,
                min_learning_rate: 3e-5,
                warmup: Warmup::Ratio(0.101),
                warmup_init: 1e-6,
            };
            let rate = options.build(100).expect("valid");
            assert_eq!(rate.at(0), 1e-6);
            assert_close(rate.at(11), 3e-4, 1e-18, "the share is rounded up to 11 steps");
            assert!(rate.at(10) < 3e-4 && rate.at(12) < 3e-4);
            assert!((0..11).all(|step| rate.at(step) < rate.at(step + 1)));
            assert!((11..100).all(|step| rate.at(step) > rate.at(step + 1)));
            for step in [100, 101, 150, 10_000, u64::MAX] {
                assert_close(rate.at(step), 3e-5, 1e-18, "the minimum");
            }
        }
    }

    #[test]
    fn runs_without_a_course_or_without_steps_have_finite_rates() {
        for schedule in [Schedule::Constant, Schedule::Linear, Schedule::Cosine] {
            for (warmup, total) in [(0, 0), (0, 1), (1, 1), (5, 5)] {
                let rate = options(schedule, warmup).build(total).expect("valid");
                assert!((0..=total + 1).all(|step| (0.0..=1.0).contains(&rate.at(step))));
            }
        }
        assert_eq!(LearningRate::constant(0.5).expect("valid").at(u64::MAX), 0.5);
    }

    #[test]
    fn a_schedule_survives_serde() {
        let rate = options(Schedule::Cosine, 3).build(10).expect("valid");
        let text = serde_json::to_string(&rate).expect("written");
        assert_eq!(serde_json::from_str::<LearningRate>(&text).expect("read"), rate);
        let written: ScheduleOptions =
            serde_yaml_ng::from_str("schedule: cosine\nwarmup: !ratio 0.1\nlearning_rate: 1e-5")
                .expect("read");
        assert_eq!(written.warmup, Warmup::Ratio(0.1));
        assert!(serde_yaml_ng::from_str::<ScheduleOptions>("peak: 1").is_err());
    }

    #[test]
    fn an_option_out_of_range_is_named() {
        let valid = options(Schedule::Linear, 0);
        let cases = [
            ("learning_rate", ScheduleOptions { learning_rate: f64::NAN, ..valid.clone() }),
            ("learning_rate", ScheduleOptions { learning_rate: -1.0, ..valid.clone() }),
            ("min_learning_rate", ScheduleOptions { min_learning_rate: 2.0, ..valid.clone() }),
            ("warmup_init", ScheduleOptions { warmup_init: 1.5, ..valid.clone() }),
            ("warmup_ratio", ScheduleOptions { warmup: Warmup::Ratio(1.01), ..valid.clone() }),
            ("warmup_ratio", ScheduleOptions { warmup: Warmup::Ratio(f64::NAN), ..valid.clone() }),
            ("warmup_steps", ScheduleOptions { warmup: Warmup::Steps(11), ..valid.clone() }),
        ];
        for (option, options) in cases {
            let error = options.build(10).expect_err(option).to_string();
            assert!(error.starts_with(option), "{error}");
        }
    }

    #[test]
    fn an_mlx_schedule_that_cannot_be_followed_says_what_can() {
        for (yaml, expected) in [
            ("{name: step_decay, arguments: [1e-1, 0.9, 10]}", "use cosine_decay or"),
            ("{name: exponential_decay, arguments: [1e-1, 0.9]}", "not supported"),
            ("{name: cosine, arguments: [1e-1, 10]}", "unknown schedule \"cosine\""),
            ("{name: cosine_decay, arguments: [1e-1]}", "found 1 numbers"),
            ("{name: linear_schedule, arguments: [1e-1, 10]}", "[init, end, steps]"),
            ("{name: cosine_decay, arguments: [1e-1, 10.5]}", "found 10.5"),
            ("{name: cosine_decay, arguments: [1e-1, 0]}", "found 0"),
            ("{name: cosine_decay, arguments: [-1e-1, 10]}", "is -0.1"),
            ("{name: linear_schedule, arguments: [1, .nan, 10]}", "is NaN"),
        ] {
            let schedule: MlxSchedule = serde_yaml_ng::from_str(yaml).expect(yaml);
            let error = schedule.build().expect_err(yaml).to_string();
            assert!(error.contains(expected), "{yaml}: {error}");
        }
    }
}
