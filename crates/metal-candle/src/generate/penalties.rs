//! What bias and penalties change of the next logits of a text: how often each of its tokens stands in it. That is counted
//! while the text is written, as counting a long one anew for each of its tokens would take longer than to choose it.

use super::sampler::{SamplingOptions, broken};
use crate::{Error, Result};
use metal_candle_kernels::sampling::Adjustment;
use std::borrow::Cow;
use std::collections::VecDeque;

/// A token of a text, or one with a bias.
#[derive(Debug, Clone, Copy)]
struct Entry {
    id: u32,
    bias: Option<f32>,
    /// How often it stands where the repetition penalty looks, and how often it was generated; 0 where no penalty asks.
    repeated: u32,
    generated: u32,
}

impl Entry {
    fn of(id: u32) -> Self {
        Self { id, bias: None, repeated: 0, generated: 0 }
    }

    fn is_of_text(&self) -> bool {
        self.repeated > 0 || self.generated > 0
    }
}

/// The bias and the penalties of a text that grows.
#[derive(Debug, Clone)]
pub(crate) struct Penalties {
    repetition: f64,
    context: Option<usize>,
    presence: f64,
    frequency: f64,
    /// By ascending ids.
    entries: Vec<Entry>,
    /// The tokens that the repetition penalty looks at, where those are only the last ones.
    window: VecDeque<u32>,
}

impl Penalties {
    /// Of a text so far: `history` is the prompt followed by what was generated, `generated` only the latter.
    pub fn new(options: &SamplingOptions, history: &[u32], generated: &[u32]) -> Self {
        let mut penalties = Self {
            repetition: options.repetition_penalty,
            context: options.repetition_context,
            presence: options.presence_penalty,
            frequency: options.frequency_penalty,
            entries: Vec::new(),
            window: VecDeque::new(),
        };
        let length = match penalties.repetition_is_on() {
            true => options.repetition_context.unwrap_or(usize::MAX).min(history.len()),
            false => 0,
        };
        let repeated = &history[history.len() - length..];
        let generated = if penalties.generated_count() { generated } else { &[] };
        if penalties.context.is_some() {
            penalties.window = repeated.iter().copied().collect();
        }
        let biases = options.logit_bias.iter();
        let biases = biases.map(|(&id, &bias)| Entry { bias: Some(bias), ..Entry::of(id) });
        let repeated = repeated.iter().map(|&id| Entry { repeated: 1, ..Entry::of(id) });
        let generated = generated.iter().map(|&id| Entry { generated: 1, ..Entry::of(id) });
        let mut entries: Vec<Entry> = biases.chain(repeated).chain(generated).collect();
        entries.sort_unstable_by_key(|entry| entry.id);
        entries.dedup_by(|next, kept| {
            let is_same = next.id == kept.id;
            if is_same {
                kept.bias = kept.bias.or(next.bias);
                kept.repeated += next.repeated;
                kept.generated += next.generated;
            }
            is_same
        });
        entries.shrink_to_fit();
        Self { entries, ..penalties }
    }

    fn repetition_is_on(&self) -> bool {
        self.repetition != 1.0
    }

    /// Whether it matters how often tokens were generated.
    fn generated_count(&self) -> bool {
        self.presence != 0.0 || self.frequency != 0.0
    }

    /// Goes on after a token that was generated.
    pub fn push(&mut self, id: u32) {
        let (repetition_is_on, generated_count) = (self.repetition_is_on(), self.generated_count());
        if !repetition_is_on && !generated_count {
            return;
        }
        let entry = self.entry(id);
        entry.repeated += u32::from(repetition_is_on);
        entry.generated += u32::from(generated_count);
        if let Some(context) = self.context.filter(|_| repetition_is_on) {
            self.window.push_back(id);
            if self.window.len() > context
                && let Some(left) = self.window.pop_front()
            {
                self.entry(left).repeated -= 1;
            }
        }
    }

    fn entry(&mut self, id: u32) -> &mut Entry {
        let place = match self.entries.binary_search_by_key(&id, |entry| entry.id) {
            Ok(place) => place,
            Err(place) => {
                self.entries.insert(place, Entry::of(id));
                place
            }
        };
        &mut self.entries[place]
    }

    /// What changes the logits of the token that follows the text and `guesses`, tokens that may be generated next; by
    /// ascending ids.
    ///
    /// # Errors
    /// [`Error::Option`] when a bias is for an id outside the vocabulary, [`Error::Tensor`] when the text has such an id.
    pub fn adjustments(&self, vocabulary: usize, guesses: &[u32]) -> Result<Vec<Adjustment>> {
        let mut text = Cow::Borrowed(self);
        for &id in guesses {
            text.to_mut().push(id);
        }
        let inside = text.entries.partition_point(|entry| (entry.id as usize) < vocabulary);
        let (entries, outside) = text.entries.split_at(inside);
        if let Some(Entry { id, .. }) = outside.iter().find(|entry| entry.bias.is_some()) {
            let problem = format!("token {id} is outside the vocabulary of {vocabulary}");
            return Err(Error::option("logit_bias", problem));
        }
        if let Some(Entry { id, .. }) = outside.iter().find(|entry| entry.is_of_text()) {
            let problem =
                format!("token {id} of the text is outside the vocabulary of {vocabulary}");
            return Err(broken(problem));
        }
        let changing = entries.iter().filter(|entry| entry.bias.is_some() || entry.is_of_text());
        Ok(changing.map(|entry| self.adjustment(entry)).collect())
    }

    fn adjustment(&self, entry: &Entry) -> Adjustment {
        let mut adjustment = Adjustment::of(entry.id);
        if let Some(bias) = entry.bias {
            adjustment.bias = f64::from(bias);
        }
        if entry.repeated > 0 {
            adjustment.penalty = self.repetition;
        }
        if entry.generated > 0 {
            adjustment.subtracted = self.presence + self.frequency * f64::from(entry.generated);
        }
        adjustment
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::SplitMix64;
    use std::collections::BTreeMap;

    #[test]
    fn penalties_and_bias_follow_their_definitions() {
        let options = SamplingOptions {
            repetition_penalty: 2.0,
            presence_penalty: 0.5,
            frequency_penalty: 0.25,
            logit_bias: BTreeMap::from([(0, 1.0), (4, -100.0)]),
            ..Default::default()
        };
        // Prompt 0, 1; generated 2, 2, 3.
        let history = [0, 1, 2, 2, 3];
        let adjusted = |options: &SamplingOptions| {
            let mut logits = [3.0, -1.0, 4.0, -4.0, 1.0, 7.0];
            let penalties = Penalties::new(options, &history, &history[2..]);
            for adjustment in penalties.adjustments(6, &[]).expect("valid") {
                let logit = &mut logits[adjustment.id as usize];
                *logit = adjustment.apply(*logit);
            }
            logits
        };
        // Bias, then half or double, then 0.5 and 0.25 for each time it was generated.
        assert_eq!(adjusted(&options), [2.0, -2.0, 1.0, -8.75, -99.0, 7.0]);
        let last_two = SamplingOptions { repetition_context: Some(2), ..options.clone() };
        assert_eq!(adjusted(&last_two), [4.0, -1.0, 1.0, -8.75, -99.0, 7.0]);
        let more_than_all = SamplingOptions { repetition_context: Some(99), ..options.clone() };
        assert_eq!(adjusted(&more_than_all), adjusted(&options));
        let praise = SamplingOptions { presence_penalty: -2.0, ..Default::default() };
        assert_eq!(adjusted(&praise), [3.0, -1.0, 6.0, -2.0, 1.0, 7.0]);
    }

    #[test]
    fn a_text_that_grows_and_guesses_have_the_penalties_of_one_that_is_counted_anew() {
        let mut random = SplitMix64::new(5);
        let text: Vec<u32> = (0..200).map(|_| random.below(30) as u32).collect();
        let (prompt, guessed) = (50, 3);
        for repetition_context in [None, Some(1), Some(7), Some(500)] {
            for (repetition_penalty, presence_penalty, frequency_penalty) in [
                (1.3, 0.5, 0.25),
                (1.3, 0.0, 0.0),
                (1.0, 0.5, 0.0),
                (1.0, 0.0, -0.3),
                (1.0, 0.0, 0.0),
            ] {
                let options = SamplingOptions {
                    repetition_penalty,
                    repetition_context,
                    presence_penalty,
                    frequency_penalty,
                    logit_bias: BTreeMap::from([(3, 0.5), (29, 0.0), (40, -2.0)]),
                    ..Default::default()
                };
                let anew = |length: usize| {
                    let penalties =
                        Penalties::new(&options, &text[..length], &text[prompt..length]);
                    penalties.adjustments(50, &[]).expect("valid")
                };
                let mut grown = Penalties::new(&options, &text[..prompt], &[]);
                for length in prompt..text.len() - guessed {
                    for ahead in 0..=guessed {
                        let guesses = &text[length..length + ahead];
                        let found = grown.adjustments(50, guesses).expect("valid");
                        assert_eq!(found, anew(length + ahead), "{options:?} {length} {ahead}");
                    }
                    // A guess that was wrong leaves nothing behind.
                    grown.adjustments(50, &[49, 49]).expect("valid");
                    grown.push(text[length]);
                }
            }
        }
    }
}
