//! How likely the tokens of a prompt are, for those who ask: by the logits of every token of it but the last.

use super::{Engine, Sequence};
use crate::generate::{likeliest_of, log_sum_exp};
use crate::{Error, Result};
use candle_core::{DType, Device, Tensor};
use rayon::prelude::*;

/// Tokens of prompts whose logits a step gives, at most, as those of a token are a vocabulary's worth of numbers.
pub(super) const MOST_ROWS: usize = 256;

/// How likely a token of a prompt is after those before it.
#[derive(Debug, Clone, PartialEq)]
pub struct Scored {
    /// The token.
    pub token: u32,
    /// Its log-probability, in nats; nothing comes before the first.
    pub logprob: Option<f64>,
    /// The likeliest tokens of its place with their log-probabilities, as many as the request's `top_logprobs`.
    pub likeliest: Vec<(u32, f64)>,
}

/// A row of logits and the token that it is about.
struct Target {
    row: usize,
    text: usize,
    /// Where it stands in the prompt.
    place: usize,
    token: u32,
    likeliest: usize,
}

impl Engine<'_> {
    /// Takes the rows of `logits` that are about tokens of prompts, of the texts of `group`; gives those that are about
    /// what follows.
    pub(super) fn score(&mut self, group: &[usize], logits: Tensor) -> Result<Tensor> {
        if group.iter().all(|&index| self.running[index].scores.is_none()) {
            return Ok(logits);
        }
        for &text in group {
            let Sequence { scores, tokens, .. } = &mut self.running[text];
            if let (Some(scores), Some(&first)) = (scores, tokens.first())
                && scores.is_empty()
            {
                scores.push(Scored { token: first, logprob: None, likeliest: Vec::new() });
            }
        }
        let (mut targets, mut others) = (Vec::new(), Vec::new());
        let mut row = 0;
        for &text in group {
            let sequence = &self.running[text];
            let rows = row..row + sequence.logits();
            row = rows.end;
            if sequence.scores.is_none() {
                others.extend(rows);
                continue;
            }
            for (row, place) in rows.zip(sequence.cached + 1..) {
                match sequence.tokens[..sequence.prompt].get(place) {
                    Some(&token) => {
                        let likeliest = sequence.answer.top_logprobs();
                        targets.push(Target { row, text, place, token, likeliest });
                    }
                    // After the last token of a text that is read again up to there.
                    None if place == sequence.tokens.len() => others.push(row),
                    None => {}
                }
            }
        }
        let places: Vec<usize> = targets.iter().map(|target| target.row).collect();
        let on_host = rows(&logits, &places)?.to_device(&Device::Cpu)?.to_dtype(DType::F32)?;
        let on_host = on_host.to_vec2::<f32>()?;
        let scored: Vec<Scored> = targets
            .par_iter()
            .zip(&on_host)
            .map(|(target, logits)| score(target.token, logits, target.likeliest))
            .collect::<Result<_>>()?;
        for (target, scored) in targets.iter().zip(scored) {
            if let Some(scores) = &mut self.running[target.text].scores {
                // What a pass that failed afterwards has left.
                scores.truncate(target.place);
                scores.push(scored);
            }
        }
        rows(&logits, &others)
    }
}

/// These rows of `logits`, or of one number each.
pub(super) fn rows(logits: &Tensor, rows: &[usize]) -> Result<Tensor> {
    let rows: Vec<u32> = rows.iter().map(|row| *row as u32).collect();
    let count = rows.len();
    if count == 0 {
        return Ok(logits.narrow(0, 0, 0)?);
    }
    let rows = Tensor::from_vec(rows, count, logits.device())?;
    Ok(logits.contiguous()?.index_select(&rows, 0)?)
}

fn score(token: u32, logits: &[f32], likeliest: usize) -> Result<Scored> {
    let log_sum = log_sum_exp(logits);
    if !log_sum.is_finite() {
        let message = "the logits of a prompt's token have NaN or infinity among them";
        return Err(Error::Tensor(candle_core::Error::Msg(message.into())));
    }
    let logprob = Some(f64::from(logits[token as usize]) - log_sum);
    Ok(Scored { token, logprob, likeliest: likeliest_of(logits, likeliest) })
}
