//! Direct preference optimisation (Rafailov et al., 2023, arXiv:2305.18290) and its relatives.

use super::{Compared, Score, Slopes, Totals, check_beta, check_smoothing, log_sigmoid, sigmoid};
use crate::{Error, Result};
use serde::{Deserialize, Serialize};

/// The function of the margin `δ = ln π(c)/ρ(c) - ln π(r)/ρ(r)` of the policy π over the reference ρ.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DpoLoss {
    /// `-ln σ(β·δ)`.
    #[default]
    Sigmoid,
    /// `max(0, 1 - β·δ)` (Zhao et al., 2023, arXiv:2305.10425).
    Hinge,
    /// `(δ - 1 / 2β)²`, of log-ratios that are means over the tokens (Azar et al., 2023, arXiv:2310.12036).
    Ipo,
    /// For labels of which the share ε is wrong: `(-(1 - ε)·ln σ(β·δ) + ε·ln σ(-β·δ)) / (1 - 2ε)` (Chowdhury et al., 2024,
    /// arXiv:2403.00409).
    Robust,
    /// `-ln σ(β·δ)`, of log-ratios that are means over the tokens (Meng et al., 2024, arXiv:2405.14734, with a
    /// reference).
    SigmoidNorm,
}

/// What DPO is told.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DpoOptions {
    /// How strongly the policy is held to the reference.
    pub beta: f64,
    /// The function of the margin.
    pub loss: DpoLoss,
    /// The share of labels that are wrong, of [`DpoLoss::Robust`].
    pub label_smoothing: f64,
}

impl Default for DpoOptions {
    fn default() -> Self {
        Self { beta: 0.1, loss: DpoLoss::Sigmoid, label_smoothing: 0.0 }
    }
}

impl DpoOptions {
    pub(super) fn validate(&self) -> Result<()> {
        check_beta(self.beta)?;
        check_smoothing(self.label_smoothing)?;
        if self.label_smoothing > 0.0 && self.loss != DpoLoss::Robust {
            return Err(Error::option(
                "label_smoothing",
                "is for the loss robust; the others take every label as right",
            ));
        }
        Ok(())
    }

    /// The loss and its derivative by the margin.
    fn of_margin(&self, margin: f64) -> (f64, f64) {
        let (beta, smoothing) = (self.beta, self.label_smoothing);
        let scaled = beta * margin;
        match self.loss {
            DpoLoss::Sigmoid | DpoLoss::SigmoidNorm => {
                (-log_sigmoid(scaled), -beta * sigmoid(-scaled))
            }
            DpoLoss::Hinge if scaled >= 1.0 => (0.0, 0.0),
            // What is no number stays so.
            DpoLoss::Hinge => (1.0 - scaled, -beta),
            DpoLoss::Ipo => {
                let distance = margin - 0.5 / beta;
                (distance * distance, 2.0 * distance)
            }
            DpoLoss::Robust => {
                let loss =
                    -(1.0 - smoothing) * log_sigmoid(scaled) + smoothing * log_sigmoid(-scaled);
                let slope = -(1.0 - smoothing) * sigmoid(-scaled) - smoothing * sigmoid(scaled);
                let share = 1.0 - 2.0 * smoothing;
                (loss / share, beta * slope / share)
            }
        }
    }

    /// Adds a pair, and gives the rewards of its answers.
    pub(super) fn compare(
        &self,
        chosen: &Score,
        rejected: &Score,
        totals: &Totals,
        to: &mut Compared,
    ) -> [f64; 2] {
        let is_mean = matches!(self.loss, DpoLoss::Ipo | DpoLoss::SigmoidNorm);
        let share = |score: &Score| if is_mean { 1.0 / score.tokens.max(1) as f64 } else { 1.0 };
        let shares = [share(chosen), share(rejected)];
        let margin = chosen.log_ratio() * shares[0] - rejected.log_ratio() * shares[1];
        let (loss, slope) = self.of_margin(margin);
        let samples = totals.samples as f64;
        to.loss += loss / samples;
        let slope = slope / samples;
        to.slopes.push(Slopes { answer: slope * shares[0], prompt: 0.0 });
        to.slopes.push(Slopes { answer: -slope * shares[1], prompt: 0.0 });
        [chosen, rejected].map(|score| self.beta * score.log_ratio())
    }
}
