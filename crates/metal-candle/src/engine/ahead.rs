//! Passes that are launched while the device still chooses the tokens that they read. Between two passes over texts that
//! are all written it would wait for the host otherwise, to learn what it has chosen itself. Where a text turns out to
//! have ended, what was read for it is left unread.

use super::scores::rows as rows_of;
use super::{Engine, Event, RequestId, Sequence};
use crate::adapter::AdapterVersion;
use candle_core::Tensor;

/// Texts of such a pass, at most. A request that comes meanwhile waits for it, too, and of more texts it takes so long that
/// what the host does between two passes is nothing beside it.
const MOST_ROWS: usize = 64;

/// A pass over the next token of each of some texts.
pub(super) struct Ahead {
    texts: Vec<(RequestId, Option<AdapterVersion>)>,
    /// `(texts, vocabulary)`.
    logits: Tensor,
}

impl Engine<'_> {
    /// Whether the pass after this one, over the texts of `group`, can be launched without knowing what comes of this: it
    /// reads one more token of each of these texts, and no other. Finds the blocks for them. `total` is the longest text's
    /// length.
    pub(super) fn may_read_ahead(&mut self, group: &[usize], total: usize) -> bool {
        let is_next = self.options.draft_tokens == 0
            && self.options.turns.as_ref().is_none_or(|turns| turns.engine_is_alone())
            && self.waiting.is_empty()
            && group.len() == self.running.len()
            && group.len() <= MOST_ROWS
            && !self.reader.ropes_change(total, total + 1);
        let mut running = self.running.iter();
        if !is_next
            || !running.all(|it| it.goes_on() && it.scores.is_none() && it.answer.left() > 1)
        {
            return false;
        }
        let Self { blocks, running, .. } = self;
        running.iter_mut().all(|it| blocks.extend(&mut it.tables, it.tokens.len() + 1))
    }

    /// Keeps what such a pass gives for the texts of `group`.
    pub(super) fn keep_ahead(&mut self, group: &[usize], logits: Tensor) {
        let text = |&index: &usize| {
            let Sequence { id, adapter, .. } = &self.running[index];
            (*id, adapter.as_ref().map(AdapterVersion::of))
        };
        self.ahead = Some(Ahead { texts: group.iter().map(text).collect(), logits });
        self.read_ahead += 1;
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
