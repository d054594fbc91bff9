//! From the logits of one position to one token.
//!
//! In this order, as transformers does it, with each part left out that the options leave off:
//!
//! ```text
//! logit bias            l[i] += bias[i]
//! repetition penalty    l[i] = l[i] / r if l[i] > 0, else l[i] · r     for i in the context
//! presence, frequency   l[i] -= presence · (n[i] > 0) + frequency · n[i]     n: counts generated
//! temperature           l = l / t;  t = 0 takes the largest l, of equals the lowest id
//! top-k                 keep l[i] >= the k-th largest
//! top-p                 keep the most likely until their probabilities reach p
//! min-p                 keep p[i] >= m · max p
//! draw                  from softmax(l) over what was kept
//! ```
//!
//! The repetition penalty is that of CTRL (Keskar et al., 2019), presence and frequency are those
//! of OpenAI's API, top-p is nucleus sampling (Holtzman et al., 2020) and min-p is that of Nguyen
//! et al., 2024. The choice is made where the logits are, by [`sampling::choose`].
//!
//! The draws are those of [`SplitMix64`], the same on every platform for a seed; the text is the
//! same as far as the logits are.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor};
use llguidance::toktrie::SimpleVob;
use metal_candle_kernels::host::Downloads;
use metal_candle_kernels::sampling::{self, Choice, Draw};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::penalties::Penalties;
use crate::random::SplitMix64;
use crate::{Error, Result};

/// How many of the likeliest tokens can be told of a place.
pub(crate) const MOST_LIKELIEST: usize = 20;

/// How the next token is chosen. The default is greedy: the most likely token, every time.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SamplingOptions {
    /// Divides the logits, 0 or more: below 1 favours the likely, 0 is greedy.
    pub temperature: f64,
    /// How many of the most likely tokens remain; those as likely as the last of them remain too.
    /// 0 is off.
    pub top_k: usize,
    /// The most likely tokens remain whose probabilities together reach this, above 0 and at
    /// most 1. 1 is off.
    pub top_p: f64,
    /// Tokens remain that are at least this share as likely as the likeliest, 0 to 1. 0 is off.
    pub min_p: f64,
    /// Divides the positive and multiplies the negative logits of tokens in the prompt and the
    /// text so far, 0.001 to 1000. 1 is off; above 1 discourages repetition.
    pub repetition_penalty: f64,
    /// How many of the last tokens the repetition penalty looks at; `None` is all of them.
    pub repetition_context: Option<usize>,
    /// Taken from the logit of every token generated before, -2 to 2. 0 is off.
    pub presence_penalty: f64,
    /// Taken from the logit of a token for each time it was generated, -2 to 2. 0 is off.
    pub frequency_penalty: f64,
    /// Added to the logits of these token ids.
    pub logit_bias: BTreeMap<u32, f32>,
    /// What the random draws follow from.
    pub seed: u64,
}

impl Default for SamplingOptions {
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            repetition_context: None,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: BTreeMap::new(),
            seed: 0,
        }
    }
}

impl SamplingOptions {
    /// Checks every option's range.
    ///
    /// # Errors
    /// [`Error::Option`] that names the first option out of its range, what was found and what was
    /// expected.
    pub fn validate(&self) -> Result<()> {
        let check = |option, value: f64, holds: bool, expected: &str| {
            if holds && value.is_finite() {
                return Ok(());
            }
            Err(Error::option(option, format!("expected {expected}, found {value}")))
        };
        let t = self.temperature;
        check("temperature", t, t >= 0.0, "0 (greedy) or more")?;
        let p = self.top_p;
        check("top_p", p, p > 0.0 && p <= 1.0, "a probability above 0 and at most 1 (1 is off)")?;
        let p = self.min_p;
        check("min_p", p, (0.0..=1.0).contains(&p), "a share from 0 (off) to 1")?;
        let r = self.repetition_penalty;
        // The bounds keep every adjusted logit finite.
        let holds = (1e-3..=1e3).contains(&r);
        check("repetition_penalty", r, holds, "a number from 0.001 to 1000 (1 is off)")?;
        for (option, value) in [
            ("presence_penalty", self.presence_penalty),
            ("frequency_penalty", self.frequency_penalty),
        ] {
            check(
                option,
                value,
                (-2.0..=2.0).contains(&value),
                "a number from -2 to 2 (0 is off)",
            )?;
        }
        if self.repetition_context == Some(0) {
            return Err(Error::option(
                "repetition_context",
                "expected 1 token or more, or none for the whole text; found 0",
            ));
        }
        for (id, bias) in &self.logit_bias {
            if !bias.is_finite() {
                return Err(Error::option(
                    "logit_bias",
                    format!("expected a finite number for token {id}, found {bias}"),
                ));
            }
        }
        Ok(())
    }
}

/// One chosen token.
#[derive(Debug, Clone, PartialEq)]
pub struct Sampled {
    /// The token's id.
    pub id: u32,
    /// Its natural log probability as the model gave it: before bias, penalties, temperature and
    /// truncation.
    pub logprob: f64,
    /// The likeliest tokens and their log probabilities, the first the likeliest, if they are asked for.
    pub likeliest: Vec<(u32, f64)>,
}

/// Chooses tokens by [`SamplingOptions`].
#[derive(Debug, Clone)]
pub struct Sampler {
    options: SamplingOptions,
    random: SplitMix64,
}

/// Whose token is chosen from a row of logits.
pub(crate) struct Row<'a> {
    pub sampler: &'a Sampler,
    pub penalties: &'a Penalties,
    /// Tokens that may be drawn before this one and after those that the sampler and the penalties know of.
    pub guesses: &'a [u32],
    /// The tokens that may be chosen; `None` is all.
    pub allowed: Option<&'a SimpleVob>,
    /// How many of the likeliest are told.
    pub top_logprobs: usize,
}

impl Row<'_> {
    /// Whether its token comes from a part of the vocabulary, which no kernel on a GPU knows of.
    fn is_chosen_on_the_host(&self) -> bool {
        self.allowed.is_some()
    }

    fn is_seen_on_the_host(&self) -> bool {
        self.is_chosen_on_the_host() || self.top_logprobs > 0
    }

    /// Chooses its token from `logits` `(vocabulary)`.
    pub fn sample(self, logits: &Tensor, meanwhile: Option<Meanwhile>) -> Result<Sampled> {
        if logits.rank() != 1 {
            let found = logits.dims();
            return Err(broken(format!("logits have shape {found:?}, expected (vocabulary)")));
        }
        let sampled = sample_rows(&logits.unsqueeze(0)?, &[self], meanwhile)?.pop();
        sampled.unwrap_or_else(|| Err(broken("a row gave no token".into())))
    }
}

impl Sampler {
    /// A sampler at the start of the random draws of `options.seed`.
    ///
    /// # Errors
    /// As [`SamplingOptions::validate`].
    pub fn new(options: SamplingOptions) -> Result<Self> {
        options.validate()?;
        let random = SplitMix64::new(options.seed);
        Ok(Self { options, random })
    }

    /// The options this sampler was made with.
    pub fn options(&self) -> &SamplingOptions {
        &self.options
    }

    /// Chooses the next token.
    ///
    /// `logits` holds one number a token of the vocabulary, where negative infinity forbids a
    /// token. `history` is the prompt followed by what was generated, `generated` only the latter.
    ///
    /// # Errors
    /// [`Error::Tensor`] when a logit is NaN or positive infinity, when there is none above
    /// negative infinity, or when `history` or `generated` holds an id outside the vocabulary;
    /// [`Error::Option`] when `logit_bias` does.
    pub fn sample(
        &mut self,
        logits: &[f32],
        history: &[u32],
        generated: &[u32],
    ) -> Result<Sampled> {
        let logits = Tensor::from_slice(logits, logits.len(), &Device::Cpu)?;
        self.sample_tensor(&logits, history, generated)
    }

    /// As [`Sampler::sample`], from `logits` `(vocabulary)` of any float type. On a GPU the choice is
    /// made there, and waits for it; the same seed may choose another token than on the CPU where
    /// the draw falls within a rounding of the border between two.
    ///
    /// # Errors
    /// As [`Sampler::sample`], and when `logits` has other than one dimension.
    pub fn sample_tensor(
        &mut self,
        logits: &Tensor,
        history: &[u32],
        generated: &[u32],
    ) -> Result<Sampled> {
        let penalties = &Penalties::new(&self.options, history, generated);
        let row = Row { sampler: self, penalties, guesses: &[], allowed: None, top_logprobs: 0 };
        let sampled = row.sample(logits, None)?;
        self.advance();
        Ok(sampled)
    }

    /// Goes on to the random numbers of the next token.
    pub(crate) fn advance(&mut self) {
        // The greedy choice takes no number from the generator.
        if self.options.temperature != 0.0 {
            self.random.uniform();
        }
    }

    /// How a token is drawn before which `ahead` others are: the options, and a number in `[0, 1)`.
    fn draw(&self, ahead: usize) -> (sampling::Options, f64) {
        let SamplingOptions { temperature, top_k, top_p, min_p, .. } = self.options;
        let options = sampling::Options { temperature, top_k, top_p, min_p };
        if temperature == 0.0 {
            return (options, 0.0);
        }
        let mut random = self.random.clone();
        for _ in 0..ahead {
            random.uniform();
        }
        (options, random.uniform())
    }
}

/// What is launched while a device chooses tokens.
pub(crate) struct Meanwhile<'a> {
    pub downloads: &'a Downloads,
    /// Is given the tokens `(rows)`, where the device will have them. It may overwrite the logits.
    pub launch: &'a mut dyn FnMut(&Tensor),
}

/// Chooses a token from each row of `logits` `(rows, vocabulary)`, of all rows at once. What a row gives
/// follows from the row alone, and a row without a distribution is an error of that row. Samplers are told of
/// the tokens that are taken by [`Sampler::advance`]. Nothing is launched meanwhile where the host has a part in a choice.
///
/// # Errors
/// When the device fails.
pub(crate) fn sample_rows(
    logits: &Tensor,
    rows: &[Row],
    meanwhile: Option<Meanwhile>,
) -> Result<Vec<Result<Sampled>>> {
    let vocabulary = logits.dim(1)?;
    let (mut draws, mut problems) = (Vec::with_capacity(rows.len()), Vec::new());
    for Row { sampler, penalties, guesses, .. } in rows {
        let (options, uniform) = sampler.draw(guesses.len());
        let (adjustments, problem) = match penalties.adjustments(vocabulary, guesses) {
            Ok(adjustments) => (adjustments, None),
            Err(error) => (Vec::new(), Some(error)),
        };
        draws.push(Draw { adjustments, options, uniform });
        problems.push(problem);
    }
    let wanted: Vec<usize> =
        (0..rows.len()).filter(|&row| rows[row].is_seen_on_the_host()).collect();
    let mut choices = if rows.iter().all(Row::is_chosen_on_the_host) {
        vec![Choice::Nothing; rows.len()]
    } else {
        let meanwhile = meanwhile.filter(|_| wanted.is_empty());
        let choices = sampling::begin(logits, &draws, meanwhile.as_ref().map(|it| it.downloads))?;
        if let Some(Meanwhile { launch, .. }) = meanwhile {
            launch(&choices.ids()?);
        }
        choices.wait()?
    };
    let mut likeliest = vec![Vec::new(); rows.len()];
    let seen = wanted.iter().map(|&row| host_row(logits, row)).collect::<Result<Vec<_>>>()?;
    let found: Vec<_> = wanted
        .par_iter()
        .zip(&seen)
        .map(|(&index, logits)| {
            let row = &rows[index];
            let choice = match row.is_chosen_on_the_host() {
                true => choose_allowed(logits, row, &draws[index])?,
                false => choices[index],
            };
            Ok((choice, likeliest_of(logits, row.top_logprobs)))
        })
        .collect::<Result<_>>()?;
    for (index, found) in wanted.into_iter().zip(found) {
        (choices[index], likeliest[index]) = found;
    }
    let results = choices.into_iter().zip(likeliest).zip(problems);
    let results = results.map(|((choice, likeliest), problem)| {
        // Broken logits are told of before ids that are outside the vocabulary.
        match (choice, problem) {
            (Choice::Broken { id, logit }, _) => Err(broken_logit(id, logit)),
            (Choice::Nothing, _) => Err(nothing(vocabulary)),
            (Choice::Token { .. }, Some(problem)) => Err(problem),
            (Choice::Token { id, logprob }, None) => Ok(Sampled { id, logprob, likeliest }),
        }
    });
    Ok(results.collect())
}

/// The logits of one row, in f32 on the host.
fn host_row(logits: &Tensor, row: usize) -> Result<Vec<f32>> {
    Ok(logits.get(row)?.to_device(&Device::Cpu)?.to_dtype(DType::F32)?.to_vec1()?)
}

/// Chooses among the allowed tokens; the log probability is that of the logits as they are.
fn choose_allowed(logits: &[f32], row: &Row, draw: &Draw) -> Result<Choice> {
    let Some(allowed) = row.allowed else { return Ok(Choice::Nothing) };
    let all = Tensor::from_slice(logits, (1, logits.len()), &Device::Cpu)?;
    let greedy = sampling::Options { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0 };
    let as_they_are = Draw { adjustments: Vec::new(), options: greedy, uniform: 0.0 };
    if let [broken @ (Choice::Broken { .. } | Choice::Nothing)] =
        sampling::choose(&all, &[as_they_are])?[..]
    {
        return Ok(broken);
    }
    let masked: Vec<f32> = (0..)
        .zip(logits)
        .map(|(id, logit)| {
            let may_come = (id as usize) < allowed.len() && allowed.is_allowed(id);
            if may_come { *logit } else { f32::NEG_INFINITY }
        })
        .collect();
    let masked = Tensor::from_vec(masked, (1, logits.len()), &Device::Cpu)?;
    let choice = sampling::choose(&masked, std::slice::from_ref(draw))?.pop();
    Ok(match choice {
        Some(Choice::Token { id, .. }) => {
            let logprob = f64::from(logits[id as usize]) - log_sum_exp(logits);
            Choice::Token { id, logprob }
        }
        other => other.unwrap_or(Choice::Nothing),
    })
}

/// `ln Σ e^l`, in f64.
pub(crate) fn log_sum_exp(logits: &[f32]) -> f64 {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|logit| f64::from(logit - largest).exp()).sum();
    f64::from(largest) + sum.ln()
}

/// The `count` likeliest tokens by the logits of one place, with their log probabilities; of equals the lowest id first.
pub(crate) fn likeliest_of(logits: &[f32], count: usize) -> Vec<(u32, f64)> {
    if count == 0 {
        return Vec::new();
    }
    let log_sum = log_sum_exp(logits);
    let mut ids: Vec<u32> = (0..).take(logits.len()).collect();
    let by_logit = |a: &u32, b: &u32| {
        logits[*b as usize].total_cmp(&logits[*a as usize]).then_with(|| a.cmp(b))
    };
    if count < ids.len() {
        ids.select_nth_unstable_by(count, by_logit);
        ids.truncate(count);
    }
    ids.sort_unstable_by(by_logit);
    ids.into_iter().map(|id| (id, f64::from(logits[id as usize]) - log_sum)).collect()
}

fn broken_logit(id: u32, logit: f32) -> Error {
    broken(format!("the logit of token {id} is {logit}"))
}

fn nothing(vocabulary: usize) -> Error {
    broken(format!("none of the {vocabulary} logits is above negative infinity"))
}

pub(super) fn broken(message: String) -> Error {
    Error::Tensor(candle_core::Error::Msg(format!("sampling: {message}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::DType;

    fn sampler(options: SamplingOptions) -> Sampler {
        Sampler::new(options).expect("valid")
    }

    fn warm() -> SamplingOptions {
        SamplingOptions { temperature: 1.0, ..Default::default() }
    }

    #[test]
    fn greedy_takes_the_largest_and_of_equals_the_lowest_id() {
        let mut greedy = sampler(SamplingOptions::default());
        let mut id = |logits: &[f32]| greedy.sample(logits, &[], &[]).expect("valid").id;
        assert_eq!(id(&[1.0, 3.0, 3.0, 2.0]), 1);
        assert_eq!(id(&[f32::NEG_INFINITY, -5.0]), 1);
        assert_eq!(id(&[-0.0, 0.0]), 0);
        assert_eq!(id(&[f32::MIN]), 0);
    }

    /// Probabilities after top-k, top-p and min-p, as the logits processors of transformers
    /// define them: each sets what it removes to negative infinity, on a full ascending sort.
    fn reference(logits: &[f32], options: &SamplingOptions) -> Vec<f64> {
        let mut scores: Vec<f64> =
            logits.iter().map(|&logit| f64::from(logit) / options.temperature).collect();
        let softmax = |scores: &[f64]| -> Vec<f64> {
            let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = scores.iter().map(|score| (score - largest).exp()).sum();
            scores.iter().map(|score| (score - largest).exp() / sum).collect()
        };
        if options.top_k > 0 {
            let mut sorted = scores.clone();
            sorted.sort_by(|a, b| b.total_cmp(a));
            let last = sorted[options.top_k.min(sorted.len()) - 1];
            scores.iter_mut().filter(|score| **score < last).for_each(|s| *s = f64::NEG_INFINITY);
        }
        if options.top_p < 1.0 {
            let probabilities = softmax(&scores);
            let mut ids: Vec<usize> = (0..scores.len()).collect();
            // Ascending; of equals the highest id goes first, so the lowest stays longest.
            ids.sort_by(|&a, &b| probabilities[a].total_cmp(&probabilities[b]).then(b.cmp(&a)));
            let mut cumulative = 0.0;
            for &id in &ids[..ids.len() - 1] {
                cumulative += probabilities[id];
                if cumulative <= 1.0 - options.top_p {
                    scores[id] = f64::NEG_INFINITY;
                }
            }
        }
        if options.min_p > 0.0 {
            let probabilities = softmax(&scores);
            let largest = probabilities.iter().copied().fold(0.0, f64::max);
            for (score, probability) in scores.iter_mut().zip(probabilities) {
                if probability < options.min_p * largest {
                    *score = f64::NEG_INFINITY;
                }
            }
        }
        softmax(&scores)
    }

    #[test]
    fn the_most_likely_token_always_remains() {
        let options = SamplingOptions { top_k: 1, top_p: 1e-300, min_p: 1.0, ..warm() };
        for temperature in [f64::MIN_POSITIVE, 1e-3, 1.0, 1e30] {
            let mut sampler = sampler(SamplingOptions { temperature, ..options.clone() });
            let logits = [f32::MIN, 1.0, 2.0, f32::NEG_INFINITY, f32::MAX, 0.0];
            assert_eq!(sampler.sample(&logits, &[], &[]).expect("valid").id, 4);
        }
    }

    #[test]
    fn frequencies_follow_the_probabilities() {
        let logits = [0.0, 1.0, 2.0, -1.0, 0.5, -3.0, f32::NEG_INFINITY, 2.0];
        for options in [
            warm(),
            SamplingOptions { temperature: 0.7, seed: 3, ..warm() },
            SamplingOptions { temperature: 2.0, top_k: 4, seed: 4, ..warm() },
            SamplingOptions { top_p: 0.8, seed: 5, ..warm() },
            SamplingOptions { min_p: 0.1, seed: 6, ..warm() },
        ] {
            let expected = reference(&logits, &options);
            let mut sampler = sampler(options.clone());
            let mut counts = [0.0; 8];
            const DRAWS: usize = 100_000;
            for _ in 0..DRAWS {
                counts[sampler.sample(&logits, &[], &[]).expect("valid").id as usize] += 1.0;
            }
            let mut chi_square = 0.0;
            for (count, probability) in counts.iter().zip(&expected) {
                let expected = probability * DRAWS as f64;
                if expected == 0.0 {
                    assert_eq!(*count, 0.0, "{options:?}");
                } else {
                    chi_square += (count - expected) * (count - expected) / expected;
                }
            }
            // The 99.9 % point for six degrees of freedom, the most there are here.
            assert!(chi_square < 22.46, "{options:?}: {chi_square}");
        }
    }

    #[test]
    fn the_same_seed_gives_the_same_tokens_and_another_seed_others() {
        let tokens = |seed| {
            let mut sampler = sampler(SamplingOptions { seed, ..warm() });
            let sample = |_| sampler.sample(&[0.0; 50], &[], &[]).expect("valid").id;
            (0..20).map(sample).collect::<Vec<_>>()
        };
        assert_eq!(tokens(1), tokens(1));
        assert_ne!(tokens(1), tokens(2));
        // A change here changes the text that every seed gives.
        assert_eq!(tokens(0)[..3], [44, 21, 1]);
    }

    #[test]
    fn the_log_probability_is_the_models_own() {
        let options = SamplingOptions {
            temperature: 0.5,
            top_k: 1,
            logit_bias: BTreeMap::from([(0, 9.0)]),
            ..Default::default()
        };
        let logits = [1.0f32, 2.0, 3.0];
        let sampled = sampler(options).sample(&logits, &[], &[]).expect("valid");
        let sum: f64 = logits.iter().map(|&logit| f64::from(logit).exp()).sum();
        assert_eq!(sampled.id, 0);
        assert!((sampled.logprob - (1.0 - sum.ln())).abs() < 1e-12);
    }

    #[test]
    fn logits_that_give_no_distribution_are_an_error() {
        let no = f32::NEG_INFINITY;
        for temperature in [0.0, 1.0] {
            let mut sampler = sampler(SamplingOptions { temperature, ..warm() });
            let mut error =
                |logits: &[f32]| sampler.sample(logits, &[], &[]).expect_err("bad").to_string();
            assert!(error(&[1.0, f32::NAN]).contains("token 1 is NaN"));
            assert!(error(&[f32::INFINITY, 0.0]).contains("token 0 is inf"));
            assert!(error(&[no, no, no]).contains("none of the 3 logits"));
            assert!(error(&[]).contains("none of the 0 logits"));
        }
    }

    #[test]
    fn an_id_outside_the_vocabulary_is_an_error() {
        let error = |options, history: &[u32]| {
            let mut sampler = sampler(options);
            sampler.sample(&[0.0, 1.0], history, history).expect_err("outside").to_string()
        };
        let bias = BTreeMap::from([(2, 1.0)]);
        let options = SamplingOptions { logit_bias: bias, ..Default::default() };
        assert!(error(options, &[]).starts_with("logit_bias: token 2 is outside"));
        let options = SamplingOptions { repetition_penalty: 1.1, ..Default::default() };
        assert!(error(options, &[1, 5]).contains("token 5 of the text"));
        let options = SamplingOptions { presence_penalty: 1.1, ..Default::default() };
        assert!(error(options, &[u32::MAX]).contains("token 4294967295 of the text"));
    }

    #[test]
    fn rows_give_the_tokens_and_the_errors_of_each_alone() {
        let options = SamplingOptions {
            temperature: 0.8,
            top_p: 0.9,
            repetition_penalty: 1.3,
            presence_penalty: 0.5,
            frequency_penalty: 0.25,
            logit_bias: BTreeMap::from([(1, 0.75), (4, -3.0)]),
            seed: 7,
            ..Default::default()
        };
        let good: Vec<f32> = (0..40).map(|id| (id * 7 % 11) as f32 * 0.5).collect();
        let (mut nan, mut infinite) = (good.clone(), good.clone());
        nan[3] = f32::NAN;
        infinite[7] = f32::INFINITY;
        let none = vec![f32::NEG_INFINITY; 40];
        let cases = [
            (&good[..], vec![1u32, 2, 5]),
            (&nan, vec![1]),
            (&good, vec![2, 2, 39]),
            (&infinite, vec![1, 99]),
            (&good, vec![1, 99]),
            (&none, vec![]),
            (&none, vec![99]),
            (&good, vec![]),
        ];
        let all: Vec<f32> = cases.iter().flat_map(|(logits, _)| logits.iter().copied()).collect();
        let all = Tensor::from_vec(all, (cases.len(), 40), &Device::Cpu).expect("made");
        let of_row = |row: usize| match row % 3 {
            0 => SamplingOptions::default(),
            _ => SamplingOptions { seed: row as u64, ..options.clone() },
        };
        let mut alone: Vec<Sampler> = (0..cases.len()).map(|row| sampler(of_row(row))).collect();
        let together = alone.clone();
        let of_texts = together.iter().zip(&cases).map(|(sampler, (_, text))| {
            Penalties::new(sampler.options(), text, &text[text.len() / 2..])
        });
        let of_texts: Vec<Penalties> = of_texts.collect();
        // After each number of guesses, as each has its random numbers and its penalties.
        for ahead in 0..5 {
            let guesses = &[5, 2, 5, 38][..ahead];
            let rows: Vec<Row> = together
                .iter()
                .zip(&of_texts)
                .map(|(sampler, penalties)| Row {
                    sampler,
                    penalties,
                    guesses,
                    allowed: None,
                    top_logprobs: 0,
                })
                .collect();
            let found = sample_rows(&all, &rows, None).expect("sampled");
            assert_eq!(found.len(), cases.len());
            for ((found, sampler), (logits, text)) in found.into_iter().zip(&mut alone).zip(&cases)
            {
                let history = [text.as_slice(), guesses].concat();
                let expected = sampler.sample(logits, &history, &history[text.len() / 2..]);
                let expected = expected.map_err(|error| error.to_string());
                assert_eq!(found.map_err(|error| error.to_string()), expected);
            }
        }
        let square = Tensor::zeros((2, 3), DType::F32, &Device::Cpu).expect("made");
        let error = sampler(warm()).sample_tensor(&square, &[], &[]).expect_err("square");
        assert!(error.to_string().contains("shape [2, 3]"), "{error}");
    }

    #[test]
    fn an_option_out_of_range_is_named() {
        let d = SamplingOptions::default;
        for (option, options) in [
            ("temperature", SamplingOptions { temperature: -0.1, ..d() }),
            ("temperature", SamplingOptions { temperature: f64::INFINITY, ..d() }),
            ("top_p", SamplingOptions { top_p: 0.0, ..d() }),
            ("top_p", SamplingOptions { top_p: f64::NAN, ..d() }),
            ("min_p", SamplingOptions { min_p: 1.5, ..d() }),
            ("repetition_penalty", SamplingOptions { repetition_penalty: 0.0, ..d() }),
            ("repetition_context", SamplingOptions { repetition_context: Some(0), ..d() }),
            ("presence_penalty", SamplingOptions { presence_penalty: 2.5, ..d() }),
            ("frequency_penalty", SamplingOptions { frequency_penalty: -3.0, ..d() }),
            ("logit_bias", SamplingOptions { logit_bias: [(1, f32::NAN)].into(), ..d() }),
        ] {
            let error = Sampler::new(options).expect_err(option).to_string();
            assert!(error.starts_with(option) && error.contains("found"), "{error}");
        }
    }

    #[test]
    fn options_are_read_from_json() {
        let options: SamplingOptions =
            serde_json::from_str(r#"{"temperature": 0.7, "logit_bias": {"12": -100}}"#)
                .expect("read");
        let logit_bias = BTreeMap::from([(12, -100.0)]);
        let expected = SamplingOptions { temperature: 0.7, logit_bias, ..Default::default() };
        assert_eq!(options, expected);
        assert!(serde_json::from_str::<SamplingOptions>(r#"{"topp": 0.7}"#).is_err());
    }
}
