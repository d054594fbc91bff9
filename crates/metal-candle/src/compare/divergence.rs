//! How far the probabilities of two models are apart.

use candle_core::{DType, Tensor};
use metal_candle_kernels::devices;
use rayon::prelude::*;
use serde::Serialize;

use super::{Side, nothing};
use crate::Result;
use crate::autograd::Tape;
use crate::pass::Input;

/// Logits of each model that are there at a time.
const LOGITS: usize = 1 << 22;

/// How far the probabilities that two models give to the same tokens are apart.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Divergence {
    /// Tokens that were predicted.
    pub tokens: usize,
    /// Of the source.
    pub source_perplexity: f64,
    /// Of the export.
    pub exported_perplexity: f64,
    /// The mean of KL(source ‖ export), in nats.
    pub mean_kl: f64,
    /// Its largest value.
    pub max_kl: f64,
    /// The part of tokens where both find the same one the likeliest.
    pub top1_agreement: f64,
}

/// What is found of one predicted token.
#[derive(Clone, Copy)]
struct Found {
    source_loss: f64,
    exported_loss: f64,
    kl: f64,
    agrees: bool,
}

/// Reads every sequence, of at least two tokens, with both models.
pub(super) fn measure(source: Side, exported: Side, sequences: &[Vec<u32>]) -> Result<Divergence> {
    measure_by(LOGITS, source, exported, sequences)
}

fn measure_by(
    logits: usize,
    source: Side,
    exported: Side,
    sequences: &[Vec<u32>],
) -> Result<Divergence> {
    let mut found = Vec::new();
    for ids in sequences {
        // Converters add rows to a vocabulary, and take off those that no token has.
        let vocabulary = [source, exported].map(|side| side.model.config().vocab_size);
        let vocabulary = vocabulary.into_iter().fold(usize::MAX, usize::min);
        let end = ids.iter().position(|id| *id as usize >= vocabulary).unwrap_or(ids.len());
        let Some(ids) = ids.get(..end).filter(|ids| ids.len() > 1) else { continue };
        let sides = [Read::new(source, ids)?, Read::new(exported, ids)?];
        let rows = (logits / vocabulary.max(1)).max(1);
        for first in (0..ids.len() - 1).step_by(rows) {
            let count = rows.min(ids.len() - 1 - first);
            let [ours, theirs] =
                [&sides[0], &sides[1]].map(|it| it.logits(first, count, vocabulary));
            let (ours, theirs) = (ours?, theirs?);
            let rows = ours.par_chunks(vocabulary).zip(theirs.par_chunks(vocabulary));
            let targets = ids[first + 1..].par_iter();
            found.par_extend(rows.zip(targets).map(|((p, q), target)| of_token(p, q, *target)));
        }
    }
    summary(&found)
}

/// The hidden states of a text.
struct Read<'a> {
    side: Side<'a>,
    input: Input,
    /// `(1, seq, hidden)`
    hidden: Tensor,
}

impl<'a> Read<'a> {
    fn new(side: Side<'a>, ids: &[u32]) -> Result<Self> {
        let device = side.model.device();
        let input = Input::sequence(ids, device)?.with_adapter(side.adapter);
        let hidden = devices::step(device, || -> Result<Tensor> {
            Ok(side.model.forward(&Tape::inference(), &input)?.into_tensor())
        })?;
        Ok(Self { side, input, hidden })
    }

    /// The first `vocabulary` logits of each of `count` tokens from `first` on, one row after the other.
    fn logits(&self, first: usize, count: usize, vocabulary: usize) -> Result<Vec<f32>> {
        let hidden = self.hidden.narrow(1, first, count)?.contiguous()?;
        let logits = self.side.model.logits(&hidden, &self.input)?;
        let logits = logits.narrow(2, 0, vocabulary)?.to_dtype(DType::F32)?;
        Ok(logits.flatten_all()?.to_vec1()?)
    }
}

fn of_token(source: &[f32], exported: &[f32], target: u32) -> Found {
    let (ours, theirs) = (log_sum_exp(source), log_sum_exp(exported));
    let loss = |logits: &[f32], sum: f64| match logits.get(target as usize) {
        Some(logit) => sum - f64::from(*logit),
        None => f64::NAN,
    };
    let kl = source.iter().zip(exported).map(|(p, q)| {
        let (p, q) = (f64::from(*p) - ours, f64::from(*q) - theirs);
        // The limit for p = 0, where a logit is -inf.
        if p == f64::NEG_INFINITY { 0.0 } else { p.exp() * (p - q) }
    });
    Found {
        source_loss: loss(source, ours),
        exported_loss: loss(exported, theirs),
        kl: kl.sum(),
        agrees: largest(source) == largest(exported),
    }
}

fn log_sum_exp(logits: &[f32]) -> f64 {
    let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|logit| f64::from(logit - most).exp()).sum();
    f64::from(most) + sum.ln()
}

/// The place of the largest, the first of several.
fn largest(logits: &[f32]) -> usize {
    let mut most = 0;
    for (index, logit) in logits.iter().enumerate() {
        if *logit > logits[most] {
            most = index;
        }
    }
    most
}

fn summary(found: &[Found]) -> Result<Divergence> {
    if found.is_empty() {
        return Err(nothing());
    }
    let count = found.len() as f64;
    let mean = |of: fn(&Found) -> f64| found.iter().map(of).sum::<f64>() / count;
    let kl = mean(|it| it.kl);
    Ok(Divergence {
        tokens: found.len(),
        source_perplexity: mean(|it| it.source_loss).exp(),
        exported_perplexity: mean(|it| it.exported_loss).exp(),
        // Of the same numbers it is 0 but for rounding.
        mean_kl: if kl < 0.0 { 0.0 } else { kl },
        max_kl: found
            .iter()
            .fold(0.0, |most, it| if it.kl > most || it.kl.is_nan() { it.kl } else { most }),
        top1_agreement: mean(|it| f64::from(u8::from(it.agrees))),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Config, Model};
    use crate::text::Tokenizer;
    use candle_core::Device;
    use std::path::Path;

    #[test]
    fn every_token_after_the_first_counts_once_however_many_rows_are_read_at_a_time() {
        let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures");
        let tokenizer = Tokenizer::load(&fixtures.join("tokenizer")).unwrap();
        let config = Config::load(fixtures.join("models/llama")).unwrap();
        let vocabulary = config.vocab_size;
        let [ours, theirs] = [1, 2]
            .map(|seed| Model::random(config.clone(), DType::F32, &Device::Cpu, seed).unwrap());
        let side = |model| Side { model, adapter: None, tokenizer: &tokenizer };
        // The last text has a token that the models don't have.
        let sequences = [vec![5, 17, 80, 33, 9, 41, 2], vec![7, 8, 9], vec![3, 4, 1 << 20, 5]];
        let found =
            |rows| measure_by(rows * vocabulary, side(&ours), side(&theirs), &sequences).unwrap();
        let whole = found(100);
        assert_eq!(whole.tokens, 6 + 2 + 1);
        assert!(whole.mean_kl > 1e-6 && whole.max_kl > whole.mean_kl, "{whole:?}");
        for rows in [1, 2, 4] {
            let part = found(rows);
            assert_eq!((part.tokens, part.top1_agreement), (whole.tokens, whole.top1_agreement));
            for (part, whole) in [
                (part.mean_kl, whole.mean_kl),
                (part.max_kl, whole.max_kl),
                (part.source_perplexity, whole.source_perplexity),
                (part.exported_perplexity, whole.exported_perplexity),
            ] {
                assert!((part - whole).abs() < 1e-4 * whole, "{part}, expected {whole}");
            }
        }
        // The perplexities by what each model gives to each token.
        for (model, found) in
            [(&ours, whole.source_perplexity), (&theirs, whole.exported_perplexity)]
        {
            let mut loss = 0.0;
            for ids in [&sequences[0][..], &sequences[1], &sequences[2][..2]] {
                let input = Input::sequence(ids, &Device::Cpu).unwrap();
                let hidden = model.forward(&Tape::inference(), &input).unwrap();
                let logits = model.logits(hidden.tensor(), &input).unwrap();
                let logits = logits.squeeze(0).unwrap().to_vec2::<f32>().unwrap();
                for (row, next) in logits.iter().zip(&ids[1..]) {
                    let sum: f64 = row.iter().map(|logit| f64::from(*logit).exp()).sum();
                    loss += sum.ln() - f64::from(row[*next as usize]);
                }
            }
            let expected = (loss / 9.0).exp();
            assert!((found - expected).abs() < 1e-5 * expected, "{found}, expected {expected}");
        }
    }

    #[test]
    fn the_divergence_of_two_distributions_is_that_of_its_formula() {
        // p = (1/2, 1/4, 1/4) and q = (1/4, 1/4, 1/2), whatever is added to the logits.
        let logits = |p: [f32; 3], plus: f32| p.map(|p| p.ln() + plus);
        let (p, q) = (logits([0.5, 0.25, 0.25], 3.0), logits([0.25, 0.25, 0.5], -80.0));
        let found = of_token(&p, &q, 2);
        let expected = 0.5 * 2f64.ln() - 0.25 * 2f64.ln();
        assert!((found.kl - expected).abs() < 1e-6, "{}", found.kl);
        assert!((found.source_loss - 4f64.ln()).abs() < 1e-6);
        assert!((found.exported_loss - 2f64.ln()).abs() < 1e-5);
        assert!(!found.agrees);
        let same = of_token(&p, &logits([0.5, 0.25, 0.25], 1.0), 0);
        assert!(same.kl.abs() < 1e-6 && same.agrees);
        let sum = summary(&[found, same]).unwrap();
        assert!((sum.mean_kl - expected / 2.0).abs() < 1e-6 && sum.tokens == 2);
        assert!((sum.max_kl - expected).abs() < 1e-6);
        assert_eq!(sum.top1_agreement, 0.5);
        assert!((sum.source_perplexity - 8f64.sqrt()).abs() < 1e-6);
        // What is no number is not passed over.
        let broken = of_token(&p, &[f32::NAN; 3], 0);
        let sum = summary(&[same, broken, same]).unwrap();
        assert!(sum.mean_kl.is_nan() && sum.max_kl.is_nan() && sum.exported_perplexity.is_nan());
        assert!(summary(&[]).unwrap_err().to_string().contains("texts: have no two tokens"));
    }
}
