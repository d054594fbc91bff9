//! What a run minimises.
//!
//! Supervised fine-tuning minimises the cross entropy of target tokens, and distillation the divergence from what a
//! teacher says in their place. The others compare answers: their losses are functions of the log-probabilities of
//! whole answers, under the model that is trained (the policy) and most of them also under a frozen one (the reference).
//! Their names, defaults and formulas are those of TRL 1.16 (<https://huggingface.co/docs/trl>), the papers' are with
//! each. They are computed in f64, and a slope is the derivative with respect to a log-probability, from which the
//! gradients of an answer's tokens follow.

mod distill;
mod dpo;
mod kto;
mod orpo;
mod simpo;
#[cfg(test)]
mod tests;

pub use distill::DistillOptions;
pub use dpo::{DpoLoss, DpoOptions};
pub use kto::KtoOptions;
pub use orpo::OrpoOptions;
pub use simpo::SimPoOptions;

use crate::data::{Dataset, Role, SampleKind};
use crate::parallel::{self, Group};
use crate::{Error, Result, bounds};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// What the usual learning rate is divided by where answers are compared: TRL's default for DPO is a 20th of its default
/// for fine-tuning, as a loss of preferences is low long before the model is good, and larger steps unlearn what it knew.
pub const PREFERENCE_RATE_DIVISOR: f64 = 20.0;

/// What a run minimises.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(tag = "name", rename_all = "lowercase")]
pub enum Objective {
    /// The cross entropy of target tokens.
    #[default]
    Sft,
    /// The divergence from a teacher's likeliest tokens.
    Distill(DistillOptions),
    /// Direct preference optimisation.
    Dpo(DpoOptions),
    /// Simple preference optimisation, without a reference.
    SimPo(SimPoOptions),
    /// Odds-ratio preference optimisation: fine-tuning and preferences at once, without a reference.
    Orpo(OrpoOptions),
    /// Kahneman-Tversky optimisation, of answers that are labelled one by one.
    Kto(KtoOptions),
}

/// What is known of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Score {
    /// The sum of its tokens' log-probabilities under the policy, in nats.
    pub policy: f64,
    /// The same under the reference; 0 where there is none.
    pub reference: f64,
    /// How many tokens it has.
    pub tokens: usize,
    /// The sum over the other tokens of its sequence, where they are learned, and their number.
    pub prompt: f64,
    /// See `prompt`.
    pub prompt_tokens: usize,
}

impl Score {
    fn mean(&self) -> f64 {
        self.policy / self.tokens.max(1) as f64
    }

    fn log_ratio(&self) -> f64 {
        self.policy - self.reference
    }
}

/// The derivatives of a loss with respect to an answer's sums.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Slopes {
    /// By [`Score::policy`].
    pub answer: f64,
    /// By [`Score::prompt`].
    pub prompt: f64,
}

/// What all the batches of a step come to.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Totals {
    /// Pairs, or labelled answers.
    pub samples: usize,
    /// Tokens of sequences that are learned whole: those of chosen answers with their prompts, where a loss asks for
    /// them.
    pub learned_tokens: usize,
    /// The estimated KL divergence of the policy from the reference, at least 0.
    pub kl: f64,
}

/// Sums of what is reported, by the names that TRL has: how much, and of how many.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct MetricSums(BTreeMap<String, (f64, f64)>);

impl MetricSums {
    fn add(&mut self, name: &str, value: f64) {
        self.add_sum(name, value, 1.0);
    }

    /// Adds the sum of so many values.
    pub(super) fn add_sum(&mut self, name: &str, value: f64, of: f64) {
        let (sum, count) = self.0.entry(name.to_string()).or_default();
        *sum += value;
        *count += of;
    }

    /// Adds what another has.
    pub fn extend(&mut self, other: &Self) {
        for (name, (sum, count)) in &other.0 {
            let of_all = self.0.entry(name.clone()).or_default();
            of_all.0 += sum;
            of_all.1 += count;
        }
    }

    /// The sums of all ranks, added up in their order.
    pub(in crate::train) fn of_all(&self, group: Group<'_>, what: &'static str) -> Result<Self> {
        let mut all = Self::default();
        for (rank, bytes) in group.gather(what, &self.to_bytes())?.iter().enumerate() {
            all.extend(&Self::from_bytes(bytes).ok_or_else(|| parallel::elsewhere(rank, what))?);
        }
        Ok(all)
    }

    /// The sums as bytes, for another rank.
    fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        for (name, (sum, count)) in &self.0 {
            bytes.extend((name.len() as u64).to_le_bytes());
            bytes.extend(name.as_bytes());
            bytes.extend(sum.to_le_bytes());
            bytes.extend(count.to_le_bytes());
        }
        bytes
    }

    /// What [`Self::to_bytes`] gave; `None` for other bytes.
    fn from_bytes(mut bytes: &[u8]) -> Option<Self> {
        let mut sums = BTreeMap::new();
        while !bytes.is_empty() {
            let (length, rest) = bytes.split_first_chunk()?;
            let (name, rest) = rest.split_at_checked(u64::from_le_bytes(*length) as usize)?;
            let (sum, rest) = rest.split_first_chunk()?;
            let (count, rest) = rest.split_first_chunk()?;
            let of_name = (f64::from_le_bytes(*sum), f64::from_le_bytes(*count));
            sums.insert(String::from_utf8(name.to_vec()).ok()?, of_name);
            bytes = rest;
        }
        Some(Self(sums))
    }

    /// The means.
    pub fn means(&self) -> BTreeMap<String, f64> {
        let mean = |(name, (sum, count)): (&String, &(f64, f64))| (name.clone(), sum / count);
        self.0.iter().map(mean).collect()
    }
}

/// What a loss makes of answers.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Compared {
    /// The loss: what these answers add to that of the step.
    pub loss: f64,
    /// Its derivatives, one for each answer.
    pub slopes: Vec<Slopes>,
    /// What is reported of them.
    pub metrics: MetricSums,
}

impl Objective {
    /// The word for it.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Sft => "sft",
            Self::Distill(_) => "distill",
            Self::Dpo(_) => "dpo",
            Self::SimPo(_) => "simpo",
            Self::Orpo(_) => "orpo",
            Self::Kto(_) => "kto",
        }
    }

    /// Its name with the options that it has.
    pub fn describe(&self) -> String {
        let Ok(serde_json::Value::Object(options)) = serde_json::to_value(self) else {
            return self.name().into();
        };
        let told = options.iter().filter(|(key, _)| *key != "name").map(|(key, value)| {
            let value = value.as_str().map_or_else(|| value.to_string(), String::from);
            format!("{} {value}", key.replace('_', " "))
        });
        let told: Vec<String> = told.collect();
        format!("{} {}", self.name(), told.join(", ")).trim_end().into()
    }

    /// What examples it learns from.
    pub fn samples(&self) -> SampleKind {
        match self {
            Self::Sft | Self::Distill(_) => SampleKind::Plain,
            Self::Dpo(_) | Self::SimPo(_) | Self::Orpo(_) => SampleKind::Pair,
            Self::Kto(_) => SampleKind::Labelled,
        }
    }

    /// Whether it compares answers, rather than predicting one token after the other.
    pub fn compares_answers(&self) -> bool {
        self.samples() != SampleKind::Plain
    }

    /// How much of what is learned a teacher says, if there is one.
    pub fn teacher_share(&self) -> Option<f64> {
        match self {
            Self::Distill(options) => Some(options.kd_alpha),
            _ => None,
        }
    }

    /// Whether it compares with a reference.
    pub fn uses_reference(&self) -> bool {
        matches!(self, Self::Dpo(_) | Self::Kto(_))
    }

    /// Whether it learns the prompts of chosen answers.
    pub fn learns_prompts(&self) -> bool {
        matches!(self, Self::Orpo(_))
    }

    /// Whether it needs an estimate of the KL divergence from mismatched answers.
    pub fn estimates_kl(&self) -> bool {
        matches!(self, Self::Kto(_))
    }

    /// Checks every value.
    ///
    /// # Errors
    /// [`Error::Option`] about the first that cannot work.
    pub fn validate(&self) -> Result<()> {
        match self {
            Self::Sft => Ok(()),
            Self::Distill(options) => options.validate(),
            Self::Dpo(options) => options.validate(),
            Self::SimPo(options) => options.validate(),
            Self::Orpo(options) => options.validate(),
            Self::Kto(options) => options.validate(),
        }
    }

    /// That data are what it learns from, with a teacher where it learns from one.
    ///
    /// # Errors
    /// As [`Self::check_samples`].
    pub fn check(&self, data: &Dataset) -> Result<()> {
        self.check_samples(data.kind())?;
        if self.teacher_share().is_some() && !data.has_teacher() {
            return Err(Error::option(
                "objective",
                "is distill, which learns what a teacher says of the data, and there is no teacher",
            ));
        }
        Ok(())
    }

    /// That examples are what it learns from.
    ///
    /// # Errors
    /// [`Error::Option`] saying what they are and what learns from them.
    pub fn check_samples(&self, samples: SampleKind) -> Result<()> {
        let expected = self.samples();
        if samples == expected {
            return Ok(());
        }
        let (found, wanted) = (samples.name(), expected.name());
        let advice = match samples {
            SampleKind::Plain if expected == SampleKind::Labelled => {
                "sft and distill learn from these; for kto each has \"label\" beside its completion, true or false"
                    .to_string()
            }
            SampleKind::Plain => "sft and distill learn from these".to_string(),
            SampleKind::Pair => "dpo, simpo and orpo learn from these; to learn the chosen answers alone, name them as the \
                                 completions (completion_column: chosen), or as the messages (messages_column: chosen) \
                                 where they are whole conversations"
                .to_string(),
            SampleKind::Labelled => "kto learns from these".to_string(),
        };
        Err(Error::option(
            "objective",
            format!(
                "is {}, which learns from {wanted}, but the data are {found}: {advice}",
                self.name()
            ),
        ))
    }

    /// The loss of answers, which `totals` are about too, and its derivatives.
    ///
    /// # Errors
    /// [`Error::Option`] when the answers aren't pairs where pairs are compared.
    pub fn compare(&self, answers: &[(Role, Score)], totals: &Totals) -> Result<Compared> {
        let mut compared = Compared::default();
        match self.samples() {
            SampleKind::Plain => {
                return Err(Error::option(
                    "objective",
                    format!("is {}, which compares no answers", self.name()),
                ));
            }
            SampleKind::Pair => {
                for pair in answers.chunks(2) {
                    let [(Role::Chosen, chosen), (Role::Rejected, rejected)] = pair else {
                        return Err(Error::option("data", "have an answer without its pair"));
                    };
                    self.compare_pair(chosen, rejected, totals, &mut compared);
                }
            }
            SampleKind::Labelled => {
                for (role, score) in answers {
                    if let Self::Kto(options) = self {
                        options.compare(*role == Role::Desirable, score, totals, &mut compared);
                    }
                }
            }
        }
        Ok(compared)
    }

    fn compare_pair(&self, chosen: &Score, rejected: &Score, totals: &Totals, to: &mut Compared) {
        let rewards = match self {
            Self::Dpo(options) => options.compare(chosen, rejected, totals, to),
            Self::SimPo(options) => options.compare(chosen, rejected, totals, to),
            Self::Orpo(options) => options.compare(chosen, rejected, totals, to),
            Self::Sft | Self::Distill(_) | Self::Kto(_) => return,
        };
        let metrics = &mut to.metrics;
        metrics.add("rewards/chosen", rewards[0]);
        metrics.add("rewards/rejected", rewards[1]);
        metrics.add("rewards/margins", rewards[0] - rewards[1]);
        metrics.add("rewards/accuracies", f64::from(u8::from(rewards[0] > rewards[1])));
        let log_probability = |score: &Score| match self {
            Self::Dpo(_) => score.policy,
            _ => score.mean(),
        };
        metrics.add("logps/chosen", log_probability(chosen));
        metrics.add("logps/rejected", log_probability(rejected));
    }
}

/// `ln σ(x)`, which doesn't overflow.
fn log_sigmoid(x: f64) -> f64 {
    x.min(0.0) - (-x.abs()).exp().ln_1p()
}

fn sigmoid(x: f64) -> f64 {
    log_sigmoid(x).exp()
}

/// That a number may be what a loss is multiplied by.
fn check_beta(beta: f64) -> Result<()> {
    bounds::positive("beta", beta, bounds::BETA)
}

/// That a share of labels may be wrong and something is learned nevertheless.
fn check_smoothing(smoothing: f64) -> Result<()> {
    if (0.0..0.5).contains(&smoothing) {
        return Ok(());
    }
    Err(Error::option(
        "label_smoothing",
        format!(
            "is {smoothing}, expected at least 0 and below 0.5, from where on labels say nothing"
        ),
    ))
}
