//! Simple preference optimisation (Meng et al., 2024, arXiv:2405.14734): `-ln σ(β·δ - γ)` of the margin δ between the
//! mean log-probabilities of the answers' tokens.

use super::{Compared, Score, Slopes, Totals, check_beta, check_smoothing, log_sigmoid, sigmoid};
use crate::{Result, bounds};
use serde::{Deserialize, Serialize};

/// What SimPO is told, with the defaults of TRL's CPO trainer; the paper takes a beta of 2 to 10.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SimPoOptions {
    /// What the margin is multiplied by.
    pub beta: f64,
    /// The margin that is aimed at, times beta.
    pub simpo_gamma: f64,
    /// The share of labels that are taken as the other way round.
    pub label_smoothing: f64,
}

impl Default for SimPoOptions {
    fn default() -> Self {
        Self { beta: 0.1, simpo_gamma: 0.5, label_smoothing: 0.0 }
    }
}

impl SimPoOptions {
    pub(super) fn validate(&self) -> Result<()> {
        check_beta(self.beta)?;
        bounds::not_negative("simpo_gamma", self.simpo_gamma, bounds::BETA)?;
        check_smoothing(self.label_smoothing)
    }

    /// Adds a pair, and gives the rewards of its answers.
    pub(super) fn compare(
        &self,
        chosen: &Score,
        rejected: &Score,
        totals: &Totals,
        to: &mut Compared,
    ) -> [f64; 2] {
        let margin = self.beta * (chosen.mean() - rejected.mean()) - self.simpo_gamma;
        let smoothing = self.label_smoothing;
        let samples = totals.samples as f64;
        let loss = (1.0 - smoothing) * log_sigmoid(margin) + smoothing * log_sigmoid(-margin);
        to.loss -= loss / samples;
        let slope = (smoothing * sigmoid(margin) - (1.0 - smoothing) * sigmoid(-margin))
            * self.beta
            / samples;
        let share = |score: &Score| 1.0 / score.tokens.max(1) as f64;
        to.slopes.push(Slopes { answer: slope * share(chosen), prompt: 0.0 });
        to.slopes.push(Slopes { answer: -slope * share(rejected), prompt: 0.0 });
        [chosen, rejected].map(|score| self.beta * score.mean())
    }
}
