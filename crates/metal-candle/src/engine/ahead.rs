//! Passes that are launched while the device still chooses the tokens that they read. Between two passes over texts that
//! are all written it would wait for the host otherwise, to learn what it has chosen itself. Where a text turns out to
//! have ended, what was read for it is left unread.

use super::scores::rows as rows_of;
use super::{Engine, Event, RequestId, Sequence};
use crate::adapter::AdapterVersion;
use candle_core::Tensor;
use std::collections::VecDeque;

/// A pass over the next token of each of some texts.
pub(super) struct Ahead {
    texts: Vec<(RequestId, Option<AdapterVersion>)>,
    /// `(texts, vocabulary)`.
    logits: Tensor,
}

impl Ahead {
    /// Of those of the running texts that have these places.
    pub(super) fn new(running: &VecDeque<Sequence>, places: &[usize], logits: Tensor) -> Self {
        let text = |&place: &usize| {
            let Sequence { id, adapter, .. } = &running[place];
            (*id, adapter.as_ref().map(AdapterVersion::of))
        };
        Self { texts: places.iter().map(text).collect(), logits }
    }
}

impl Engine<'_> {
    /// The texts of `group` that the pass after this one is over, if it can be launched without knowing what comes of this:
    /// it reads one more token of each text that has more than one to come, and no other. Finds the blocks for them.
    /// `total` is the longest text's length.
    pub(super) fn texts_ahead(&mut self, group: &[usize], total: usize) -> Option<Vec<usize>> {
        let is_next = self.options.draft_tokens == 0
            && self.options.turns.as_ref().is_none_or(|turns| turns.engine_is_alone())
            && group.len() == self.running.len()
            && !self.reader.ropes_change(total, total + 1)
            && self.running.iter().all(|it| it.goes_on() && it.scores.is_none())
            && !self.has_place();
        if !is_next {
            return None;
        }
        let Self { blocks, running, .. } = self;
        let mut texts = Vec::with_capacity(group.len());
        for (index, text) in running.iter_mut().enumerate() {
            if text.answer.left() <= 1 {
                continue;
            }
            if !blocks.extend(&mut text.tables, text.tokens.len() + 1) {
                return None;
            }
            texts.push(index);
        }
        (!texts.is_empty()).then_some(texts)
    }

    /// Goes on with those texts whose next token was read ahead; whether there are any. No other has begun since.
    pub(super) fn take_up(&mut self, events: &mut Vec<(RequestId, Event)>) -> bool {
        let Some(Ahead { texts, logits }) = self.ahead.take() else { return false };
        // Adapters may have changed since, and the tokens can be read again.
        let mut adapters = texts.iter().filter_map(|(_, adapter)| adapter.as_ref());
        if !adapters.all(AdapterVersion::is_current) {
            return false;
        }
        let (mut group, mut rows, mut total) = (Vec::new(), Vec::new(), 0);
        for (row, (id, _)) in texts.iter().enumerate() {
            let Some(text) = self.running.get_mut(group.len()).filter(|text| text.id == *id) else {
                continue;
            };
            text.planned = 1;
            text.cached_for = text.tokens.len();
            total = text.tokens.len().max(total);
            group.push(group.len());
            rows.push(row);
        }
        if group.is_empty() {
            return false;
        }
        let logits = match rows.len() == texts.len() {
            true => Ok(logits),
            false => rows_of(&logits, &rows),
        };
        self.go_on(&group, total, logits, events);
        true
    }
}
