//! Distillation (Hinton et al. 2015, <https://arxiv.org/abs/1503.02531>) from the likeliest tokens of a teacher.

use crate::{Error, Result};
use serde::{Deserialize, Serialize};

/// For each target token the divergence `Σ p·(ln p - ln q)` of the model's probabilities `q` from the teacher's `p`, which
/// are those of its likeliest tokens, brought to a sum of 1; and the cross entropy of the token itself.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DistillOptions {
    /// The share of the divergence; that of the cross entropy is the rest. Above 0, and at most 1.
    pub kd_alpha: f64,
}

impl Default for DistillOptions {
    fn default() -> Self {
        Self { kd_alpha: 1.0 }
    }
}

impl DistillOptions {
    /// Checks every value.
    ///
    /// # Errors
    /// [`Error::Option`] about the first that cannot work.
    pub fn validate(&self) -> Result<()> {
        if self.kd_alpha > 0.0 && self.kd_alpha <= 1.0 {
            return Ok(());
        }
        Err(Error::option(
            "kd_alpha",
            format!(
                "is {}, expected above 0 and at most 1; without a teacher's share it is sft",
                self.kd_alpha
            ),
        ))
    }
}
