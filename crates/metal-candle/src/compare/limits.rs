//! How far an export may be from its source, by the bits that it has.

use std::path::Path;

use serde::Serialize;

use super::{Aspect, Divergence, Problem};
use crate::Result;
use crate::model::stored_bytes;

/// How often as large the perplexity of an export may be.
const MOST_PERPLEXITY: f64 = 2.0;
/// The part of tokens on which both have to agree ...
const LEAST_AGREEMENT: f64 = 0.5;
/// ... unless their probabilities are this near: then there is no likeliest token to speak of.
const INDIFFERENT_KL: f64 = 0.1;

/// Whether a number is at most another; what is no number isn't.
pub(super) fn is_within(number: f64, most: f64) -> bool {
    number <= most
}

/// What happened to the numbers of a source in its export, by the types that both files have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Rounding {
    /// Nothing but that sums may have another order.
    None,
    /// They were rounded to f16.
    F16,
    /// They were rounded to bf16.
    Bf16,
    /// Matrices were brought into fewer bits; everything else into what the f16 or bf16 beside them can hold.
    FewerBits,
}

impl Rounding {
    /// Of an export of the model in `source`, in which weights have other values if `is_merged`.
    ///
    /// # Errors
    /// When the files are missing or malformed.
    pub fn of(source: &Path, is_merged: bool, exported: &Path) -> Result<Self> {
        let kinds = |path: &Path| -> Result<Vec<String>> {
            Ok(stored_bytes(path)?.into_keys().map(|kind| kind.to_lowercase()).collect())
        };
        let (ours, theirs) = (kinds(source)?, kinds(exported)?);
        Ok(Self::between(&ours, is_merged, &theirs))
    }

    fn between(source: &[String], is_merged: bool, exported: &[String]) -> Self {
        let has = |kind: &str| exported.iter().any(|other| other == kind);
        let rounded = match (has("bf16"), has("f16")) {
            (true, _) => Self::Bf16,
            (false, true) => Self::F16,
            (false, false) => Self::None,
        };
        let kept = |kind: &str| source.iter().all(|other| other == kind);
        if exported.iter().any(|kind| !["f32", "f16", "bf16"].contains(&kind.as_str())) {
            return Self::FewerBits;
        }
        let is_same = match rounded {
            Self::Bf16 => kept("bf16"),
            Self::F16 => kept("f16"),
            _ => true,
        };
        if is_same && !(is_merged && rounded != Self::None) { Self::None } else { rounded }
    }

    /// How far a row of a dense weight can be off. In f16 and bf16 an element is off by 2⁻¹¹ and 2⁻⁹ of itself; twice
    /// that leaves room for sums that were rounded before.
    pub(super) fn of_rows(self) -> f64 {
        match self {
            Self::None => 1e-5,
            Self::F16 => 0.5f64.powi(10),
            Self::Bf16 | Self::FewerBits => 0.5f64.powi(8),
        }
    }
}

/// How far probabilities may be apart.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Limits {
    /// The mean of KL(source ‖ export), in nats.
    pub mean_kl: Option<f64>,
    /// The perplexity of the export over that of the source.
    pub perplexity_ratio: f64,
    /// The part of tokens where both find the same one the likeliest.
    pub top1_agreement: f64,
}

impl Limits {
    /// Those that rounding explains. KL grows with the square of what logits are off, which is the rounding of weights
    /// times what the layers make of it: f32's sums give a KL below 1e-10, and the demo's model has 2e-7 in f16 and 1e-5
    /// in bf16 (`metal-candle fuse --to f16 --check`). A limit some hundred times as large leaves room for models that
    /// are more sensitive. What fewer bits cost depends on the model (llama.cpp's own tables have 0.001 for Q8_0, 0.03
    /// for Q4_K_M and 0.4 for Q2_K of one of 8 billion weights, and small models lose more), so there only a break is one.
    pub fn of(rounding: Rounding) -> Self {
        let mean_kl = match rounding {
            Rounding::None => Some(1e-6),
            Rounding::F16 => Some(1e-4),
            Rounding::Bf16 => Some(1e-2),
            Rounding::FewerBits => None,
        };
        Self { mean_kl, perplexity_ratio: MOST_PERPLEXITY, top1_agreement: LEAST_AGREEMENT }
    }

    /// What of a divergence is beyond them.
    pub fn problems(&self, found: &Divergence) -> Vec<Problem> {
        let mut problems = Vec::new();
        let mut tell =
            |message: String| problems.push(Problem::new(Aspect::Probabilities, message));
        let kl = found.mean_kl;
        if let Some(most) = self.mean_kl.filter(|most| !is_within(kl, *most)) {
            tell(format!("the mean KL is {kl:.3e}, at most {most:.1e} was expected"));
        }
        let (ours, theirs) = (found.source_perplexity, found.exported_perplexity);
        if !is_within(theirs, self.perplexity_ratio * ours) {
            tell(format!("the perplexity is {theirs:.4}, in the source {ours:.4}"));
        }
        let agreement = found.top1_agreement;
        if agreement < self.top1_agreement && !is_within(kl, INDIFFERENT_KL) {
            let share = 100.0 * agreement;
            tell(format!("the likeliest token is the same one at {share:.1} % of the places only"));
        }
        problems
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_rounded_follows_from_the_types_of_both_files() {
        let between = |source: &[&str], is_merged, exported: &[&str]| {
            let kinds = |kinds: &[&str]| kinds.iter().map(ToString::to_string).collect::<Vec<_>>();
            Rounding::between(&kinds(source), is_merged, &kinds(exported))
        };
        assert_eq!(between(&["f32"], false, &["f32"]), Rounding::None);
        assert_eq!(between(&["bf16"], true, &["f32"]), Rounding::None);
        assert_eq!(between(&["bf16"], false, &["bf16"]), Rounding::None);
        assert_eq!(between(&["bf16"], true, &["bf16"]), Rounding::Bf16);
        assert_eq!(between(&["bf16"], false, &["bf16", "f32"]), Rounding::None);
        assert_eq!(between(&["bf16", "f32"], false, &["bf16"]), Rounding::Bf16);
        assert_eq!(between(&["bf16"], false, &["f16", "f32"]), Rounding::F16);
        assert_eq!(between(&["q4_k", "f32"], false, &["f16"]), Rounding::F16);
        assert_eq!(between(&["f32"], false, &["f32", "q4_k", "q6_k"]), Rounding::FewerBits);
        assert_eq!(between(&["bf16"], false, &["bf16", "u8"]), Rounding::FewerBits);
    }

    #[test]
    fn what_is_no_number_is_beyond_every_limit() {
        let good = Divergence {
            tokens: 9,
            source_perplexity: 10.0,
            exported_perplexity: 10.0,
            mean_kl: 1e-9,
            max_kl: 1e-8,
            top1_agreement: 1.0,
        };
        let limits = Limits::of(Rounding::None);
        assert!(limits.problems(&good).is_empty());
        let nan = f64::NAN;
        let broken = Divergence { mean_kl: nan, exported_perplexity: nan, ..good };
        assert_eq!(limits.problems(&broken).len(), 2);
        let limits = Limits::of(Rounding::FewerBits);
        assert_eq!(limits.problems(&Divergence { exported_perplexity: 21.0, ..good }).len(), 1);
        let apart = Divergence { mean_kl: 0.4, top1_agreement: 0.49, ..good };
        assert_eq!(limits.problems(&apart).len(), 1);
        assert!(limits.problems(&Divergence { mean_kl: 0.01, ..apart }).is_empty());
        assert!(limits.problems(&Divergence { mean_kl: 0.4, ..good }).is_empty());
        let own = Limits { mean_kl: Some(0.1), ..limits };
        assert_eq!(own.problems(&Divergence { mean_kl: 0.4, ..good }).len(), 1);
    }
}
