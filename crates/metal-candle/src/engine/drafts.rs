//! Guesses of the tokens that come next, which are read together with a text's last one.

use super::{Engine, Event, RequestId, Sequence};
use crate::Result;
use crate::pass::Stretch;
use metal_candle_kernels::sampling;

/// Tokens that a step reads at most with guesses among them: a device reads as many hardly slower than one.
pub(super) const MOST_ROWS: usize = 64;
/// Tokens that have to have stood before for what followed to be a guess, and those that are looked for at most.
const LEAST_REPEATED: usize = 2;
const MOST_REPEATED: usize = 4;

/// What followed the last tokens of a text where as many of them as possible stood last before.
fn look_up(text: &[u32], count: usize) -> &[u32] {
    for repeated in (LEAST_REPEATED..=MOST_REPEATED).rev() {
        let Some(start) = text.len().checked_sub(repeated) else { continue };
        let (before, end) = (&text[..text.len() - 1], &text[start..]);
        if let Some(found) = before.windows(repeated).rposition(|window| window == end) {
            let next = &text[found + repeated..];
            return &next[..next.len().min(count)];
        }
    }
    &[]
}

impl Sequence<'_> {
    fn guess(&mut self, tokens: &[u32]) {
        self.tokens.extend(tokens);
        self.drafts += tokens.len();
        self.planned += tokens.len();
    }
}

impl Engine<'_> {
    /// Guesses what comes next in texts that are being written, where that is of use, for steps that could read so many
    /// tokens more. Texts that the draft model cannot read end.
    pub(super) fn draft(&mut self, budget: usize, events: &mut Vec<(RequestId, Event)>) {
        let planned: usize = self.running.iter().map(|sequence| sequence.planned).sum();
        let mut left = budget.min(MOST_ROWS.saturating_sub(planned));
        let mut wanted = Vec::new();
        for (index, sequence) in self.running.iter_mut().enumerate() {
            let length = sequence.tokens.len();
            let count = self.options.draft_tokens.min(left).min(sequence.answer.left() - 1);
            let stays = |reader: &dyn super::Reader| !reader.ropes_change(1, length + count);
            let is_free = sequence.scores.is_none() && !sequence.answer.is_constrained();
            let useful = count > 0 && sequence.planned == 1 && sequence.goes_on() && is_free;
            let can_be_read = stays(&*self.reader) && self.drafter.as_deref().is_none_or(stays);
            let end = sequence.cached + 1 + count;
            if !(useful && can_be_read && self.blocks.extend(&mut sequence.tables, end)) {
                continue;
            }
            match self.drafter {
                None => {
                    let guess = look_up(&sequence.tokens, count).to_vec();
                    sequence.guess(&guess);
                    left -= guess.len();
                }
                Some(_) => {
                    wanted.push((index, count));
                    left -= count;
                }
            }
        }
        let most = wanted.iter().map(|(_, count)| *count).max().unwrap_or(0);
        for round in 0..most {
            wanted.retain(|(index, count)| *count > round && !self.running[*index].ended);
            let group: Vec<usize> = wanted.iter().map(|(index, _)| *index).collect();
            self.guess_next(&group, events);
        }
    }

    /// One more guess of the draft model for each text of `group`.
    fn guess_next(&mut self, group: &[usize], events: &mut Vec<(RequestId, Event)>) {
        match self.read_drafts(group) {
            Ok(tokens) => {
                for (&index, token) in group.iter().zip(tokens) {
                    let sequence = &mut self.running[index];
                    sequence.drafter_cached = sequence.tokens.len();
                    sequence.guess(&[token]);
                }
            }
            Err(error) => match group {
                [index] => self.end(*index, Event::Failed(error), events),
                _ => {
                    for index in group {
                        self.guess_next(std::slice::from_ref(index), events);
                    }
                }
            },
        }
    }

    /// The draft model's most likely next tokens.
    fn read_drafts(&mut self, group: &[usize]) -> Result<Vec<u32>> {
        let Some(drafter) = &mut self.drafter else { return Ok(Vec::new()) };
        // Prompts in pieces, of which the last is left for the pass over all texts.
        let most = self.options.max_batch_tokens;
        for &index in group {
            let sequence = &mut self.running[index];
            while sequence.tokens.len() - sequence.drafter_cached > MOST_ROWS {
                let start = sequence.drafter_cached;
                let end = sequence.tokens.len().min(start + most + 1) - 1;
                drafter.read(&[stretch(sequence, start..end, 0)], sequence.tokens.len())?;
                sequence.drafter_cached = end;
            }
        }
        let sequences = group.iter().map(|&index| &self.running[index]);
        let total = sequences.clone().map(|it| it.tokens.len()).max().unwrap_or(0);
        let stretches: Vec<Stretch> =
            sequences.map(|it| stretch(it, it.drafter_cached..it.tokens.len(), 1)).collect();
        let logits = drafter.read(&stretches, total)?;
        Ok(sampling::greedy(&logits)?.to_vec1()?)
    }
}

/// Tokens of a text as the draft model reads them.
fn stretch<'a>(
    sequence: &'a Sequence,
    range: std::ops::Range<usize>,
    logits: usize,
) -> Stretch<'a> {
    Stretch {
        start: range.start,
        tokens: &sequence.tokens[range],
        tables: &sequence.tables,
        adapter: None,
        logits,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_followed_the_longest_repetition_last_is_the_guess() {
        assert_eq!(look_up(&[1, 2, 3, 4, 1, 2], 2), [3, 4]);
        assert_eq!(look_up(&[1, 2, 3, 4, 1, 2], 9), [3, 4, 1, 2]);
        // The last of two, and a longer one before that.
        assert_eq!(look_up(&[1, 2, 8, 1, 2, 9, 1, 2], 1), [9]);
        assert_eq!(look_up(&[0, 1, 2, 8, 5, 1, 2, 9, 0, 1, 2], 1), [8]);
        // A text that repeats itself.
        assert_eq!(look_up(&[7, 7, 7, 7], 3), [7]);
        for nothing in [&[][..], &[1], &[1, 1], &[1, 2], &[1, 2, 1], &[1, 2, 3, 2]] {
            assert!(look_up(nothing, 3).is_empty(), "{nothing:?}");
        }
    }
}
