//! Many texts from one model at once (continuous batching, Yu et al. 2022): requests come and go at any time, each with
//! an adapter and sampling options of its own.
//!
//! A step of the [`Engine`] is one forward pass over the next tokens of many texts: one of each text that is being
//! written, and pieces of the prompts that are still read, up to a number of tokens. Keys and values lie in blocks of a
//! pool that is made once. Texts that begin with the same full blocks, read with the same adapter, share them, also
//! with texts that have ended, until their memory is needed. A text that finds no block is put back among the waiting:
//! what it has written stays, and is read again when there is room.
//!
//! Where few texts are written, the device has time for more: tokens that may come next are guessed, from the text
//! itself or by a small model, and read together with the last one (speculative decoding, Leviathan et al. 2023,
//! <https://arxiv.org/abs/2211.17192>). A token is drawn after each of them as ever, with the random numbers that it
//! would have been drawn with, and as long as what is drawn is what was guessed, the next one is there already. So a
//! text is what it would be without, but for roundings where a device multiplies several rows in another order than one.
//!
//! [`Handle`] runs an engine on a thread of its own, for callers on many.

mod ahead;
mod blocks;
mod drafts;
mod handle;
mod ranks;
mod reader;
mod scores;
#[cfg(test)]
mod tests;

pub use crate::pass::CacheDtype;
pub use handle::{Answers, Handle, Ticket};
pub use scores::Scored;

use crate::adapter::{Adapter, AdapterVersion};
use crate::generate::{
    Answer, FinishReason, GenerateOptions, Grammar, Meanwhile, Piece, Sampled, sample_rows,
};
use crate::memory::available_bytes;
use crate::model::Model;
use crate::pass::{Layers, ModelReader, PagedCache, Stretch, check_prompt};
use crate::text::Tokenizer;
use crate::turns::Turns;
use crate::{Error, Result, bounds};
use ahead::Ahead;
use blocks::{Blocks, Content, Tables};
use candle_core::{Device, Tensor};
use metal_candle_kernels::devices;
use ranks::RankReader;
use rayon::prelude::*;
use reader::Reader;
use std::cmp::Reverse;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

/// Which of the waiting requests of one priority is begun first, and when.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Order {
    /// The one that came first, as soon as there is room.
    #[default]
    Arrival,
    /// The one that may write the most, where nobody waits for one of them but for all: those that are written alone at the
    /// end take as long as many would. No more are written at once than needed for all to end together with the longest.
    Longest,
}

/// How much an engine does at once.
#[derive(Debug, Clone)]
pub struct EngineOptions {
    /// Texts that are read and written at once, at most.
    pub max_sequences: usize,
    /// Tokens of a step, at most; no fewer than texts.
    pub max_batch_tokens: usize,
    /// Requests that wait, at most, but for those that follow others ([`Request::follows`]).
    pub max_waiting: usize,
    /// In what order they are begun.
    pub order: Order,
    /// Tokens whose keys and values are kept; `None` is as many as fit into most of the GPU's free memory, half of what
    /// a Mac's may take, or a quarter of the machine's, but no more than all texts at once can have. Where layers
    /// differ in their windows, those that see less keep what they see of the texts at once; with a draft model, all
    /// keep everything.
    pub cache_tokens: Option<usize>,
    /// How those keys and values are kept.
    pub cache_dtype: CacheDtype,
    /// Tokens of a block.
    pub block_size: usize,
    /// Whether texts with the same beginning share its blocks.
    pub prefix_cache: bool,
    /// Tokens that are guessed after the last of a text, at most, as long as few texts are written; 0 is none.
    pub draft_tokens: usize,
    /// What guesses them, a smaller model of the same vocabulary. Without one, what followed the text's last tokens
    /// where they stood before is the guess (prompt lookup).
    pub draft_model: Option<Arc<Model>>,
    /// Whether a text's logits have the same bits whatever other texts there are and in whatever pieces it is read, so
    /// also when it is read again to be scored ("batch invariance"; see
    /// [`batch_invariance`](metal_candle_kernels::batch_invariance)). They are the bits that a pass for training has
    /// within it, for texts of more than 4 tokens that begin with their rows, over a cache in the model's dtype; on CUDA for
    /// heads of up to 256 elements, in blocks of a multiple of 16 tokens. It costs some 5 % of the time in bf16 on Hopper, and
    /// more for one text; other GPUs, and f32, multiply 256 rows at least then (64 on Metal), so few texts take as long as many.
    pub batch_invariant: bool,
    /// With whom a [`Handle`]'s engine shares the device; `None` is nobody.
    pub turns: Option<Arc<Turns>>,
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self {
            max_sequences: 256,
            max_batch_tokens: 2048,
            max_waiting: 100_000,
            order: Order::Arrival,
            cache_tokens: None,
            cache_dtype: CacheDtype::Model,
            block_size: 16,
            prefix_cache: true,
            draft_tokens: 0,
            draft_model: None,
            batch_invariant: false,
            turns: None,
        }
    }
}

impl EngineOptions {
    /// Checks every value.
    ///
    /// # Errors
    /// [`Error::Option`] about the first that cannot work.
    pub fn validate(&self) -> Result<()> {
        bounds::check("max_sequences", self.max_sequences, &bounds::BATCH_SIZE)?;
        bounds::check(
            "max_batch_tokens",
            self.max_batch_tokens,
            &(self.max_sequences..=*bounds::TOKENS.end()),
        )?;
        bounds::check("max_waiting", self.max_waiting, &(1..=usize::MAX))?;
        bounds::check("block_size", self.block_size, &(1..=4096))?;
        bounds::check("draft_tokens", self.draft_tokens, &(0..=drafts::MOST_ROWS - 1))?;
        if self.draft_model.is_some() && self.draft_tokens == 0 {
            let problem = "is given, but draft_tokens is 0; expected at least 1";
            return Err(Error::option("draft_model", problem));
        }
        match self.cache_tokens {
            Some(tokens) => bounds::check("cache_tokens", tokens, &(self.block_size..=usize::MAX)),
            None => Ok(()),
        }
    }
}

/// A text to be continued.
#[derive(Debug, Clone, Default)]
pub struct Request {
    /// The tokens to continue.
    pub prompt: Vec<u32>,
    /// When and how.
    pub options: GenerateOptions,
    /// The adapter that it is read with.
    pub adapter: Option<Arc<Adapter>>,
    /// Those with more go first, those with the same in the engine's [`Order`].
    pub priority: i32,
    /// What may be written; `None` is anything.
    pub grammar: Option<Grammar>,
    /// Whether to tell how likely the prompt's tokens are. Then all of it is read, also what is in the cache.
    pub score_prompt: bool,
    /// Whether it belongs to an answer of several texts, of which another was taken before: it is taken however many wait
    /// ([`EngineOptions::max_waiting`]), as what is written of the others would be lost. Those that are asked for at once
    /// go to [`Handle::submit_together`]. Who asks bounds how many these are.
    pub follows: bool,
}

/// A request's number, which an engine gives once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(u64);

/// What becomes of a request.
#[derive(Debug)]
pub enum Event {
    /// How likely the prompt's tokens are, if that was asked for; the first event of a request.
    Prompt(Vec<Scored>),
    /// A token was written.
    Piece(Piece),
    /// The text ended; the last event of a request.
    Finished(Finished),
    /// It cannot be written; the last event of a request.
    Failed(Error),
}

/// How a text ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Finished {
    /// Why.
    pub reason: FinishReason,
    /// Which of the request's stop strings ended it, by its place among them.
    pub stop: Option<usize>,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens of the prompt whose keys and values were in the cache when the request began.
    pub cached_tokens: usize,
    /// Tokens written, without the end-of-sequence token.
    pub tokens: usize,
}

/// What an engine is busy with.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Requests that wait.
    pub waiting: usize,
    /// Texts that are read or written.
    pub running: usize,
    /// Blocks of the cache, of the layers that see the most.
    pub blocks: usize,
    /// Blocks that no text is using.
    pub available_blocks: usize,
    /// The memory of all layers' blocks, in bytes.
    pub cache_bytes: usize,
    /// Times that a text was put back for lack of blocks.
    pub preemptions: u64,
    /// Tokens that were guessed.
    pub drafted: u64,
    /// Those of them that were drawn then.
    pub accepted: u64,
    /// Passes that a GPU repeated from a recording: see [`Recording`](metal_candle_kernels::recording::Recording).
    pub recorded: u64,
    /// Passes that were launched while the tokens that they read were still being chosen.
    pub read_ahead: u64,
}

/// A text under way.
struct Sequence<'t> {
    id: RequestId,
    priority: i32,
    /// What goes before the order in which texts came: how much it may write, where the longest go first.
    length: usize,
    adapter: Option<Arc<Adapter>>,
    answer: Answer<'t>,
    /// The prompt and what was written.
    tokens: Vec<u32>,
    prompt: usize,
    /// How many tokens' keys and values are in the blocks, and for what length of the text its ropes rotated them.
    cached: usize,
    cached_for: usize,
    tables: Tables,
    /// How many of its blocks can be found by others, and what the last of them holds.
    remembered: usize,
    content: Content,
    /// What comes before its first block.
    root: Content,
    /// How likely the tokens of the prompt are, as far as it was read, until that is told.
    scores: Option<Vec<Scored>>,
    /// How much was found when it began.
    found: Option<usize>,
    /// Tokens that this step reads.
    planned: usize,
    /// How many tokens at the end of the text are guesses, in a step.
    drafts: usize,
    /// How many tokens' keys and values of the draft model are in the blocks.
    drafter_cached: usize,
    ended: bool,
}

impl Sequence<'_> {
    fn order(&self) -> (Reverse<(i32, usize)>, RequestId) {
        (Reverse((self.priority, self.length)), self.id)
    }

    /// How many blocks it has in each table, with those that were given back.
    fn blocks(&self) -> usize {
        self.tables.first().map_or(0, Vec::len)
    }

    fn left(&self) -> usize {
        self.tokens.len() - self.cached
    }

    /// Whether its next token follows from what this step reads.
    fn goes_on(&self) -> bool {
        self.planned == self.left()
    }

    /// Of how many of the tokens that this step reads there are to be logits.
    fn logits(&self) -> usize {
        match self.scores {
            Some(_) => self.planned,
            None if self.goes_on() => 1 + self.drafts,
            None => 0,
        }
    }
}

/// What a step may still read.
struct Budget {
    tokens: usize,
    /// Tokens of prompts that are scored.
    scored: usize,
    /// Ranges of keys of all tokens together.
    ranges: usize,
}

impl Budget {
    /// Keys of a range, of which attention with batch invariance keeps on Metal what it gives each token.
    const RANGE: usize = 256;
    /// 1 GiB for a model with 32 heads of 128.
    const MOST_RANGES: usize = 1 << 16;

    fn new(options: &EngineOptions, keeps_ranges: bool) -> Self {
        let ranges = if keeps_ranges { Self::MOST_RANGES } else { usize::MAX };
        Self { tokens: options.max_batch_tokens, scored: scores::MOST_ROWS, ranges }
    }

    /// How many of a text's next tokens it allows.
    fn count_for(&self, sequence: &Sequence) -> usize {
        let left = match sequence.left() {
            // Texts that are written go on in every step.
            one @ 0..=1 => one,
            left => {
                let ranges_of_token =
                    (sequence.cached + left.min(self.tokens)).div_ceil(Self::RANGE);
                left.min(self.ranges / ranges_of_token)
            }
        };
        let scored = if sequence.scores.is_some() { self.scored } else { usize::MAX };
        left.min(self.tokens).min(scored)
    }

    /// Takes off what was planned of a text.
    fn spend(&mut self, sequence: &Sequence) {
        let count = sequence.planned;
        self.tokens -= count;
        self.scored -= if sequence.scores.is_some() { count } else { 0 };
        let ranges = count.saturating_mul((sequence.cached + count).div_ceil(Self::RANGE));
        self.ranges = self.ranges.saturating_sub(ranges);
    }
}

/// Writes many texts at once; see the [module](self).
pub struct Engine<'t> {
    reader: Box<dyn Reader>,
    tokenizer: Option<&'t Tokenizer>,
    options: EngineOptions,
    keeps_ranges: bool,
    blocks: Blocks,
    cache_bytes: usize,
    /// What comes before every text, by adapter.
    root: Content,
    roots: Vec<(AdapterVersion, Content)>,
    /// Both in their order.
    waiting: VecDeque<Sequence<'t>>,
    running: VecDeque<Sequence<'t>>,
    ids: u64,
    preemptions: u64,
    drafter: Option<Box<dyn Reader>>,
    drafted: u64,
    accepted: u64,
    /// What the next step reads, if that is under way, and how often that was so.
    ahead: Option<Ahead>,
    read_ahead: u64,
}

impl<'t> Engine<'t> {
    /// An engine without requests, which takes the memory of its cache now. Without a tokenizer it gives tokens and no
    /// text, and ends no text before its last token.
    ///
    /// # Errors
    /// When an option cannot work, or there is no memory for the cache.
    pub fn new(
        model: &Arc<Model>,
        tokenizer: Option<&'t Tokenizer>,
        options: EngineOptions,
    ) -> Result<Self> {
        let readers = Readers::new(model, &options)?;
        Ok(Self::over(readers, tokenizer, options))
    }

    fn over(readers: Readers, tokenizer: Option<&'t Tokenizer>, options: EngineOptions) -> Self {
        let Readers { reader, drafter, layers, bytes, keeps_ranges } = readers;
        let mut blocks = Blocks::new(&layers, options.block_size);
        let root = blocks.new_content();
        let (waiting, running) = (VecDeque::new(), VecDeque::new());
        Self {
            reader,
            tokenizer,
            options,
            keeps_ranges,
            blocks,
            cache_bytes: bytes,
            root,
            roots: Vec::new(),
            waiting,
            running,
            ids: 0,
            preemptions: 0,
            drafter,
            drafted: 0,
            accepted: 0,
            ahead: None,
            read_ahead: 0,
        }
    }

    /// Takes a request, whose events the following [`Engine::step`]s tell.
    ///
    /// # Errors
    /// [`Error::Option`] when the request cannot be written by this engine, or too many wait.
    pub fn submit(&mut self, request: Request) -> Result<RequestId> {
        let Request { prompt, options, adapter, priority, grammar, score_prompt, follows } =
            request;
        if !follows && self.waiting.len() >= self.options.max_waiting {
            let most = self.options.max_waiting;
            return Err(Error::option("max_waiting", format!("{most} requests wait already")));
        }
        check_prompt(&prompt, self.reader.vocabulary())?;
        if let Some(adapter) = &adapter {
            self.reader.check(adapter)?;
        }
        let most = prompt.len().saturating_add(options.max_tokens);
        let room = self.blocks.count() * self.blocks.size();
        if most > room {
            return Err(Error::option(
                "max_tokens",
                format!(
                    "is {} after a prompt of {}, and the cache has room for {room} tokens; ask for fewer or make \
                     cache_tokens larger",
                    options.max_tokens,
                    prompt.len()
                ),
            ));
        }
        let length = match self.options.order {
            Order::Arrival => 0,
            Order::Longest => options.max_tokens,
        };
        let mut answer = Answer::new(self.tokenizer, options, &prompt)?;
        if let Some(grammar) = &grammar {
            answer = answer.with_grammar(grammar)?;
        }
        let root = self.root_of(adapter.as_ref());
        self.ids += 1;
        let id = RequestId(self.ids);
        let sequence = Sequence {
            id,
            priority,
            length,
            adapter,
            answer,
            prompt: prompt.len(),
            tokens: prompt,
            cached: 0,
            cached_for: 0,
            tables: self.blocks.new_tables(),
            remembered: 0,
            content: root,
            root,
            scores: score_prompt.then(Vec::new),
            found: None,
            planned: 0,
            drafts: 0,
            drafter_cached: 0,
            ended: false,
        };
        insert(&mut self.waiting, sequence);
        Ok(id)
    }

    /// Forgets a request, of which no event is told any more; says whether there was one.
    pub fn cancel(&mut self, id: RequestId) -> bool {
        for sequences in [&mut self.waiting, &mut self.running] {
            if let Some(place) = sequences.iter().position(|sequence| sequence.id == id) {
                if let Some(mut sequence) = sequences.remove(place) {
                    restart(&mut self.blocks, &mut sequence);
                }
                return true;
            }
        }
        false
    }

    /// Whether there is nothing to do.
    pub fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.running.is_empty()
    }

    /// What it is busy with.
    pub fn statistics(&self) -> Statistics {
        Statistics {
            waiting: self.waiting.len(),
            running: self.running.len(),
            blocks: self.blocks.count(),
            available_blocks: self.blocks.available(),
            cache_bytes: self.cache_bytes,
            preemptions: self.preemptions,
            drafted: self.drafted,
            accepted: self.accepted,
            recorded: self.reader.recorded(),
            read_ahead: self.read_ahead,
        }
    }

    /// Reads the next tokens of the texts under way and writes a token of each that was read to its end. A pass that
    /// fails is tried again for each text alone, so that only those end for which it fails.
    pub fn step(&mut self) -> Vec<(RequestId, Event)> {
        let mut events = Vec::new();
        if !self.take_up(&mut events) {
            self.read_next(&mut events);
        }
        self.running.retain(|sequence| !sequence.ended);
        events
    }

    fn read_next(&mut self, events: &mut Vec<(RequestId, Event)>) {
        let budget = self.plan();
        self.draft(budget, events);
        // Texts whose lengths mean other ropes cannot be read in one pass.
        let mut groups: Vec<(usize, Vec<usize>)> = Vec::new();
        for (index, sequence) in self.running.iter().enumerate() {
            if sequence.planned == 0 {
                continue;
            }
            let length = sequence.tokens.len();
            let alike = groups.iter_mut().find(|(of, _)| !self.reader.ropes_change(*of, length));
            match alike {
                Some((of, group)) => {
                    *of = length.max(*of);
                    group.push(index);
                }
                None => groups.push((length, vec![index])),
            }
        }
        for (total, group) in groups {
            self.read(&group, total, events);
        }
    }

    /// Says how many tokens of which texts are read next, and finds the blocks for them; how many more could be read.
    fn plan(&mut self) -> usize {
        let mut budget = Budget::new(&self.options, self.keeps_ranges);
        for sequence in &mut self.running {
            sequence.planned = 0;
            if self.reader.ropes_change(sequence.cached_for, sequence.tokens.len()) {
                restart(&mut self.blocks, sequence);
            }
            sequence.cached_for = sequence.tokens.len();
        }
        let preemptions = self.preemptions;
        // Texts that are being written first, so that they don't wait for prompts.
        for writing in [true, false] {
            let mut index = 0;
            while budget.tokens > 0
                && let Some(sequence) = self.running.get(index)
            {
                let count = budget.count_for(sequence);
                if sequence.planned == 0
                    && count > 0
                    && (sequence.left() == 1) == writing
                    && self.make_room(index, count)
                    && let Some(sequence) = self.running.get_mut(index)
                {
                    sequence.planned = count;
                    budget.spend(sequence);
                }
                index += 1;
            }
        }
        while self.preemptions == preemptions
            && budget.tokens > 0
            && self.has_place()
            && self.admit(&mut budget)
        {}
        budget.tokens
    }

    /// Finds blocks for `count` more tokens of a running text, if need be those of texts that come after it and aren't
    /// read in this step. Without success the text waits for a step: the first in the order can always have the blocks
    /// of all that aren't read, and those that are read end some time.
    fn make_room(&mut self, index: usize, count: usize) -> bool {
        loop {
            let Some(sequence) = self.running.get_mut(index) else { return false };
            if self.blocks.extend(&mut sequence.tables, sequence.cached + count) {
                return true;
            }
            let after = index + 1..self.running.len();
            let Some(victim) = after.rev().find(|&other| self.running[other].planned == 0) else {
                return false;
            };
            let Some(mut sequence) = self.running.remove(victim) else { return false };
            restart(&mut self.blocks, &mut sequence);
            insert(&mut self.waiting, sequence);
            self.preemptions += 1;
        }
    }

    /// Whether the first of the waiting, if there is one, may begin as far as the number of texts goes.
    fn has_place(&self) -> bool {
        let Some(next) = self.waiting.front() else { return false };
        if self.running.len() >= self.options.max_sequences {
            return false;
        }
        if self.options.order == Order::Arrival {
            return true;
        }
        let left = |sequence: &Sequence| sequence.answer.left();
        let longest = self.running.iter().map(left).max().unwrap_or(0);
        // One that may be the last to end must not wait.
        if left(next) >= longest {
            return true;
        }
        // What can be written in the places of those that end before the longest does.
        let mut room: usize = self.running.iter().map(|sequence| longest - left(sequence)).sum();
        !self.waiting.iter().all(|sequence| {
            let fits = left(sequence) <= room;
            room = room.saturating_sub(left(sequence));
            fits
        })
    }

    /// Begins the first of the waiting, if there are blocks for all of it; whether it has begun.
    fn admit(&mut self, budget: &mut Budget) -> bool {
        let Some(sequence) = self.waiting.front_mut() else { return false };
        let size = self.blocks.size();
        let length = sequence.tokens.len();
        if sequence.scores.is_none() && shares_blocks(&self.options, &*self.reader, length) {
            // Something has to be read for the logits to follow from.
            let found = self.blocks.find(sequence.content, &sequence.tokens[..length - 1]);
            (sequence.tables, sequence.content) = (found.tables, found.content);
            sequence.remembered = found.blocks;
            let shares = |other: &&Sequence| {
                let length = other.tokens.len();
                other.root == sequence.root && shares_blocks(&self.options, &*self.reader, length)
            };
            if self.running.iter().filter(shares).any(|other| fills_for(other, sequence, size)) {
                restart(&mut self.blocks, sequence);
                return false;
            }
        }
        sequence.cached = sequence.blocks() * size;
        sequence.cached_for = length;
        let count = budget.count_for(sequence);
        if count == 0
            || !self.blocks.has_room(&sequence.tables, length)
            || !self.blocks.extend(&mut sequence.tables, sequence.cached + count)
        {
            restart(&mut self.blocks, sequence);
            return false;
        }
        sequence.planned = count;
        budget.spend(sequence);
        sequence.found.get_or_insert(sequence.cached.min(sequence.prompt));
        if let Some(sequence) = self.waiting.pop_front() {
            insert(&mut self.running, sequence);
        }
        true
    }

    /// Reads what was planned for the running texts of `group`.
    fn read(&mut self, group: &[usize], total: usize, events: &mut Vec<(RequestId, Event)>) {
        let stretches: Vec<Stretch> = group
            .iter()
            .map(|&index| {
                let sequence = &self.running[index];
                let end = sequence.cached + sequence.planned;
                Stretch {
                    tokens: &sequence.tokens[sequence.cached..end],
                    start: sequence.cached,
                    tables: &sequence.tables,
                    adapter: sequence.adapter.as_ref(),
                    logits: sequence.logits(),
                }
            })
            .collect();
        let read = self.reader.read(&stretches, total);
        self.go_on(group, total, read, events);
    }

    /// Goes on with the texts of `group` by the logits that were read.
    fn go_on(
        &mut self,
        group: &[usize],
        total: usize,
        read: Result<Tensor>,
        events: &mut Vec<(RequestId, Event)>,
    ) {
        let chosen = read.and_then(|logits| self.score(group, logits));
        let sampled = chosen.and_then(|logits| self.sample(group, total, &logits));
        match sampled.and_then(|sampled| self.reader.confirm().map(|()| sampled)) {
            Ok((sampled, ahead)) => {
                if let Some(ahead) = ahead {
                    self.ahead = Some(ahead);
                    self.read_ahead += 1;
                }
                let mut sampled = sampled.into_iter();
                for &index in group {
                    let sequence = &self.running[index];
                    let count = if sequence.goes_on() { 1 + sequence.drafts } else { 0 };
                    self.advance(index, sampled.by_ref().take(count).collect(), events);
                }
            }
            Err(error) => match group {
                [index] => self.end(*index, Event::Failed(error), events),
                _ => {
                    for index in group {
                        self.read(std::slice::from_ref(index), total, events);
                    }
                }
            },
        }
    }

    /// What follows the tokens of `group`'s texts (ascending) of which there are logits, and the pass over what follows
    /// that, if it was launched ahead.
    fn sample(
        &mut self,
        group: &[usize],
        total: usize,
        logits: &Tensor,
    ) -> Result<(Vec<Result<Sampled>>, Option<Ahead>)> {
        let mut problems = self.find_allowed(group);
        let downloads = self.reader.downloads();
        let ahead = downloads.and_then(|it| Some((self.texts_ahead(group, total)?, it)));
        let next = ahead.as_ref().map_or(&[][..], |(texts, _)| texts);
        let Self { reader, running, .. } = self;
        let texts = || group.iter().filter_map(|&index| running.get(index));
        let mut rows = Vec::new();
        for sequence in texts() {
            if !sequence.goes_on() {
                continue;
            }
            let text = sequence.tokens.len() - sequence.drafts;
            for ahead in 0..=sequence.drafts {
                rows.push(sequence.answer.row(&sequence.tokens[text..text + ahead]));
            }
        }
        if rows.is_empty() {
            return Ok((Vec::new(), None));
        }
        let mut launched = None;
        let mut launch = |tokens: &Tensor| {
            let stretches: Vec<Stretch> = next
                .iter()
                .filter_map(|&index| running.get(index))
                .map(|it| Stretch::ahead(it.tokens.len(), &it.tables, it.adapter.as_ref()))
                .collect();
            // Those that end now have tokens that nobody reads.
            let tokens = match next.len() == rows.len() {
                true => Ok(tokens.clone()),
                false => scores::rows(tokens, next),
            };
            let read = |tokens| reader.read_ahead(&stretches, total + 1, &tokens);
            launched = tokens.ok().and_then(read);
        };
        let meanwhile =
            ahead.as_ref().map(|(_, downloads)| Meanwhile { downloads, launch: &mut launch });
        let mut sampled = sample_rows(logits, &rows, meanwhile)?;
        // A text with a problem has one row, as no guesses are made for texts that follow a grammar.
        let writing = group.iter().filter(|&&index| running[index].goes_on());
        let mut row = 0;
        for index in writing {
            if let Some(problem) = problems.remove(index) {
                sampled[row] = Err(problem);
            }
            row += 1 + running[*index].drafts;
        }
        Ok((sampled, launched.map(|logits| Ahead::new(running, next, logits))))
    }

    /// Finds what may come next in those of `group` that follow a grammar, while the device is busy; gives the problems
    /// of those for which that fails.
    fn find_allowed(&mut self, group: &[usize]) -> HashMap<usize, Error> {
        let texts = self.running.iter_mut().enumerate();
        let constrained: Vec<_> = texts
            .filter(|(index, text)| {
                text.answer.is_constrained() && text.goes_on() && group.binary_search(index).is_ok()
            })
            .collect();
        constrained
            .into_par_iter()
            .filter_map(|(index, text)| Some((index, text.answer.find_allowed().err()?)))
            .collect()
    }

    /// Counts what was read of a text, and goes on with the tokens that follow: the one after its last, and as long as
    /// they were guessed, those after the guesses.
    fn advance(
        &mut self,
        index: usize,
        next: Vec<Result<Sampled>>,
        events: &mut Vec<(RequestId, Event)>,
    ) {
        let sequence = &mut self.running[index];
        let drafts = std::mem::take(&mut sequence.drafts);
        let guessed = sequence.tokens.split_off(sequence.tokens.len() - drafts);
        sequence.cached += sequence.planned - drafts;
        self.drafted += drafts as u64;
        if sequence.cached >= sequence.prompt
            && let Some(scores) = sequence.scores.take()
        {
            events.push((sequence.id, Event::Prompt(scores)));
        }
        let mut last = None;
        for (place, next) in next.into_iter().enumerate() {
            let piece = match next.and_then(|sampled| sequence.answer.take(sampled)) {
                Ok(piece) => piece,
                Err(error) => {
                    last = Some(Event::Failed(error));
                    break;
                }
            };
            let token = piece.token;
            sequence.tokens.extend(token);
            events.push((sequence.id, Event::Piece(piece)));
            if let Some(reason) = sequence.answer.finish_reason() {
                last = Some(Event::Finished(Finished {
                    reason,
                    stop: sequence.answer.stop_found(),
                    prompt_tokens: sequence.prompt,
                    cached_tokens: sequence.found.unwrap_or(0),
                    tokens: sequence.answer.tokens().len(),
                }));
                break;
            }
            if token.is_none() || guessed.get(place).copied() != token {
                break;
            }
            sequence.cached += 1;
            self.accepted += 1;
        }
        sequence.drafter_cached = sequence.drafter_cached.min(sequence.cached);
        let size = self.blocks.size();
        if shares_blocks(&self.options, &*self.reader, sequence.tokens.len()) {
            let full = sequence.tokens.chunks_exact(size).take(sequence.cached / size);
            for (index, tokens) in full.enumerate().skip(sequence.remembered) {
                let before = sequence.content;
                sequence.content = self.blocks.remember(&sequence.tables, index, before, tokens);
                sequence.remembered += 1;
            }
        }
        self.blocks.trim(&mut sequence.tables, sequence.cached);
        if let Some(event) = last {
            self.end(index, event, events);
        }
    }

    /// The last of a request.
    fn end(&mut self, index: usize, event: Event, events: &mut Vec<(RequestId, Event)>) {
        let sequence = &mut self.running[index];
        restart(&mut self.blocks, sequence);
        sequence.ended = true;
        events.push((sequence.id, event));
    }

    /// What comes before the first block of texts that are read with `adapter`.
    fn root_of(&mut self, adapter: Option<&Arc<Adapter>>) -> Content {
        let Some(adapter) = adapter else { return self.root };
        // One that is gone leaves its place in memory, but not its number, to others.
        self.roots.retain(|(version, _)| version.is_current());
        let version = AdapterVersion::of(adapter);
        match self.roots.iter().find(|(other, _)| *other == version) {
            Some((_, root)) => *root,
            None => {
                let root = self.blocks.new_content();
                self.roots.push((version, root));
                root
            }
        }
    }
}

/// Whether a text of so many tokens shares blocks with others: its keys are those of any beginning of it.
fn shares_blocks(options: &EngineOptions, reader: &dyn Reader, length: usize) -> bool {
    options.prefix_cache && !reader.ropes_change(1, length)
}

/// Puts a text at its place in the order.
fn insert<'t>(sequences: &mut VecDeque<Sequence<'t>>, sequence: Sequence<'t>) {
    let place = sequences.partition_point(|other| other.order() < sequence.order());
    sequences.insert(place, sequence);
}

/// Whether a text is about to fill blocks that another, which waits, will find then: as where many samples of one
/// prompt are asked for at once.
fn fills_for(running: &Sequence, waiting: &Sequence, size: usize) -> bool {
    // Something of it has to be read in any case.
    let usable = waiting.tokens.len().saturating_sub(1);
    let both = running.tokens.iter().zip(waiting.tokens.iter().take(usable));
    let shared = both.take_while(|(a, b)| a == b).count() / size;
    running.planned > 0 && shared > waiting.blocks().max(running.remembered)
}

/// Gives a text's blocks back.
fn restart(blocks: &mut Blocks, sequence: &mut Sequence) {
    blocks.release(&mut sequence.tables);
    (sequence.cached, sequence.remembered, sequence.planned) = (0, 0, 0);
    if let Some(scores) = &mut sequence.scores {
        scores.clear();
    }
    sequence.drafter_cached = 0;
    sequence.content = sequence.root;
}

/// What reads, with its cache, what guesses, with one of as many blocks, and how many those are for each kind of layers.
struct Readers {
    reader: Box<dyn Reader>,
    drafter: Option<Box<dyn Reader>>,
    layers: Vec<Layers>,
    /// What all blocks take.
    bytes: usize,
    /// Whether attention keeps what ranges of keys give every token of a prompt.
    keeps_ranges: bool,
}

impl Readers {
    fn new(model: &Arc<Model>, options: &EngineOptions) -> Result<Self> {
        options.validate()?;
        check_ranks(model, options)?;
        let draft = options.draft_model.as_ref();
        if let Some(draft) = draft {
            let (found, expected) = (draft.config().vocab_size, model.config().vocab_size);
            if found != expected {
                let problem =
                    format!("has a vocabulary of {found} tokens, and the model one of {expected}");
                return Err(Error::option("draft_model", problem));
            }
            if !draft.device().same_device(model.device()) {
                return Err(Error::option("draft_model", "is on another device than the model"));
            }
        }
        // A draft model reads later what has been read, so then all layers keep everything.
        let windows = match draft {
            None => PagedCache::windows(model),
            Some(_) => vec![None],
        };
        let blocks = match options.cache_tokens {
            Some(tokens) => tokens / options.block_size,
            None => usual_blocks(model, &windows, options)?,
        };
        let layers: Vec<_> = kinds(&windows, blocks, options).collect::<Result<_>>()?;
        let EngineOptions { block_size, cache_dtype, .. } = *options;
        let bytes = models(model, options)
            .map(|model| PagedCache::bytes(model, &layers, block_size, cache_dtype))
            .sum();
        check_memory(model, options, bytes)?;
        let batch_invariant = options.batch_invariant;
        let of_kinds = layers.clone();
        let cache = move |model: &Model| {
            let mut cache = PagedCache::new(model, &of_kinds, block_size, cache_dtype)?;
            cache.batch_invariant = batch_invariant;
            Ok(cache)
        };
        let reader = |model: &Arc<Model>| -> Result<Box<dyn Reader>> {
            Ok(match model.is_tensor_parallel() {
                true => Box::new(RankReader::new(model, cache.clone())?),
                false => Box::new(ModelReader::new(model, cache(model)?)?),
            })
        };
        let (reader, drafter) = (reader(model)?, draft.map(reader).transpose()?);
        let keeps_ranges = batch_invariant && model.device().is_metal();
        Ok(Self { reader, drafter, layers, bytes, keeps_ranges })
    }
}

/// That the machine has the memory that is asked for, as it would end the process otherwise; a GPU refuses it.
fn check_memory(model: &Model, options: &EngineOptions, bytes: usize) -> Result<()> {
    let free = available_bytes().filter(|_| models(model, options).any(|it| it.device().is_cpu()));
    match (options.cache_tokens, free) {
        (Some(tokens), Some(free)) if bytes as u64 > free => {
            let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
            let problem = format!(
                "is {tokens}, for which {:.1} GiB are needed, and {:.1} GiB of memory are free; expected fewer",
                gib(bytes as u64),
                gib(free)
            );
            Err(Error::option("cache_tokens", problem))
        }
        _ => Ok(()),
    }
}

/// That an option isn't for models that lie on one device alone, where this one doesn't.
fn check_ranks(model: &Model, options: &EngineOptions) -> Result<()> {
    let problem =
        "is for a model on one device, and this one is in parts on several (tensor_parallel)";
    let alone = [
        ("draft_model", options.draft_model.is_some()),
        ("batch_invariant", options.batch_invariant),
    ];
    match alone.iter().find(|(_, is_on)| *is_on && model.is_tensor_parallel()) {
        Some((option, _)) => Err(Error::option(*option, problem)),
        None => Ok(()),
    }
}

/// The model, or its parts, and the one that guesses, if there is one.
fn models<'a>(model: &'a Model, options: &'a EngineOptions) -> impl Iterator<Item = &'a Model> {
    let whole = (!model.is_tensor_parallel()).then_some(model);
    let parts = model.ranks().iter().map(|part| &**part);
    parts.chain(whole).chain(options.draft_model.as_deref())
}

/// The kinds of layers with these windows, the first of which has `blocks`. The others have as many as texts at once
/// can have of use, if those are fewer.
fn kinds(
    windows: &[Option<usize>],
    blocks: usize,
    options: &EngineOptions,
) -> impl Iterator<Item = Result<Layers>> {
    let EngineOptions { block_size: size, max_sequences, max_batch_tokens, draft_tokens, .. } =
        *options;
    // A slot's number has 32 bits.
    let blocks = blocks.min(u32::MAX as usize / size);
    windows.iter().enumerate().map(move |(kind, &window)| {
        let useful = match window {
            // Each has its window and guesses that were wrong, which may begin and end within a block, and what a
            // step reads of it.
            Some(window) if kind > 0 => {
                let of_text = window.saturating_add(draft_tokens).div_ceil(size).saturating_add(3);
                max_sequences
                    .saturating_mul(of_text)
                    .saturating_add(max_batch_tokens.div_ceil(size))
            }
            _ => blocks,
        };
        let blocks = u32::try_from(blocks.min(useful)).map_err(candle_core::Error::wrap)?;
        Ok(Layers { window, blocks })
    })
}

/// How many blocks fit, where nobody says.
fn usual_blocks(
    model: &Model,
    windows: &[Option<usize>],
    options: &EngineOptions,
) -> Result<usize> {
    /// What is known to fit nearly everywhere, where the system says nothing.
    const UNKNOWN: u64 = 1 << 30;
    /// Of what is free on a GPU the rest is for activations, and on a Mac for all other programs, too.
    const OF_GPU: f64 = 0.85;
    const OF_MAC: f64 = 0.5;
    const OF_MACHINE: f64 = 0.25;
    // What there is for all of them: the parts of a model have the room of the device that has the least each.
    let mut bytes = f64::INFINITY;
    for part in models(model, options) {
        bytes = bytes.min(match part.device() {
            Device::Cpu => available_bytes().unwrap_or(UNKNOWN) as f64 * OF_MACHINE,
            device => {
                let devices = model.ranks().len().max(1) as f64;
                let part = if device.is_metal() { OF_MAC } else { OF_GPU };
                devices::free_memory(device)?.unwrap_or(UNKNOWN) as f64 * part * devices
            }
        });
    }
    let size = options.block_size;
    let fits = |blocks: usize| -> Result<bool> {
        let layers: Vec<_> = kinds(windows, blocks, options).collect::<Result<_>>()?;
        let needed = |model| PagedCache::bytes(model, &layers, size, options.cache_dtype) as f64;
        Ok(models(model, options).map(needed).sum::<f64>() <= bytes)
    };
    let context = model.config().context();
    let useful = context.div_ceil(size).saturating_mul(options.max_sequences);
    // The most that fit, between `least` and `most`.
    let (mut least, mut most) = (0, useful);
    while least < most {
        let middle = least + (most - least).div_ceil(2);
        if fits(middle)? { least = middle } else { most = middle - 1 }
    }
    if least == 0 {
        return Err(Error::option(
            "cache_tokens",
            format!(
                "no block of {size} tokens fits into the memory that is free, expected at least one"
            ),
        ));
    }
    Ok(least)
}
