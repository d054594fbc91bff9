//! Odds-ratio preference optimisation (Hong et al., 2024, arXiv:2403.07691): the cross entropy of the chosen sequence, with
//! its prompt, and `-β·ln σ(ln odds(c) - ln odds(r))`, where `odds = p / (1 - p)` of the mean probability of an answer's
//! tokens.

use super::{Compared, Score, Slopes, Totals, check_beta, log_sigmoid, sigmoid};
use crate::Result;
use serde::{Deserialize, Serialize};

/// Mean log-probabilities above this are taken as it, where the odds have no end.
const CERTAIN: f64 = -1e-12;

/// What ORPO is told.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OrpoOptions {
    /// How much the odds ratio counts beside the cross entropy; λ in the paper.
    pub beta: f64,
}

impl Default for OrpoOptions {
    fn default() -> Self {
        Self { beta: 0.1 }
    }
}

impl OrpoOptions {
    pub(super) fn validate(&self) -> Result<()> {
        check_beta(self.beta)
    }

    /// Adds a pair, and gives the rewards of its answers.
    pub(super) fn compare(
        &self,
        chosen: &Score,
        rejected: &Score,
        totals: &Totals,
        to: &mut Compared,
    ) -> [f64; 2] {
        let samples = totals.samples as f64;
        let learned = totals.learned_tokens.max(1) as f64;
        let mean = |score: &Score| bounded(score.mean());
        let log_odds = [chosen, rejected].map(|score| mean(score) - log_of_rest(mean(score)));
        let ratio = log_odds[0] - log_odds[1];
        let cross_entropy = -(chosen.policy + chosen.prompt);
        to.loss += cross_entropy / learned - self.beta * log_sigmoid(ratio) / samples;
        // d ln odds / d ln p = 1 / (1 - p)
        let slope = |score: &Score| {
            let of_mean = -1.0 / mean(score).exp_m1();
            self.beta * sigmoid(-ratio) * of_mean / score.tokens.max(1) as f64 / samples
        };
        to.slopes.push(Slopes { answer: -slope(chosen) - 1.0 / learned, prompt: -1.0 / learned });
        to.slopes.push(Slopes { answer: slope(rejected), prompt: 0.0 });
        let tokens = (chosen.tokens + chosen.prompt_tokens) as f64;
        to.metrics.add_sum("nll_loss", cross_entropy, tokens);
        to.metrics.add("log_odds_ratio", log_sigmoid(ratio));
        to.metrics.add("log_odds_chosen", ratio);
        [chosen, rejected].map(|score| self.beta * score.mean())
    }
}

/// A mean log-probability, at most [`CERTAIN`]. What is no number stays so.
fn bounded(mean: f64) -> f64 {
    if mean > CERTAIN { CERTAIN } else { mean }
}

/// `ln(1 - e^x)` of a negative x (Mächler, 2012, "Accurately computing log(1 - exp(-|a|))").
fn log_of_rest(x: f64) -> f64 {
    if x > -std::f64::consts::LN_2 { (-x.exp_m1()).ln() } else { (-x.exp()).ln_1p() }
}
