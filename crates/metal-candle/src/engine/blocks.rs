//! Who has which blocks of the paged KV cache.
//!
//! Layers whose queries see as many keys have a pool of blocks together, and a text has a table of its blocks in each.
//! Where a window hides the keys of a block from all queries to come, its entry becomes a [`HOLE`], and the block is
//! given back.
//!
//! A full block whose tokens are known stays findable after its last user, until its memory is needed: the least
//! recently used goes first. It is found by its tokens and by the block before it, never by a hash alone, so two texts
//! share a block only if they are the same up to its end, read with the same adapter. Only full blocks are shared, and
//! those are never written again.

use crate::pass::Layers;
use metal_candle_kernels::attention::HOLE;
use std::collections::{BTreeMap, HashMap};

/// What a block holds, told by all that comes before it: no number is given twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Content(u64);

/// The tokens of a block, and what comes before them.
type Key = (Content, Box<[u32]>);

/// The blocks of a text in each pool, from its beginning on.
pub(super) type Tables = Vec<Vec<u32>>;

#[derive(Debug, Default)]
struct Block {
    users: usize,
    /// What it holds, if it is the one to be found by that.
    content: Option<Content>,
    /// When its last user gave it back.
    idle_since: u64,
}

#[derive(Debug)]
struct Pool {
    window: Option<usize>,
    all: Vec<Block>,
    /// Those that hold nothing of use.
    free: Vec<u32>,
    /// Those without users that can be found, by when they were last used.
    idle: BTreeMap<u64, u32>,
    found_by: HashMap<Content, u32>,
}

/// A content that can be found.
#[derive(Debug)]
struct Known {
    key: Key,
    /// How many blocks hold it, and how many that can be found come after it.
    uses: usize,
}

/// The blocks of all pools.
#[derive(Debug)]
pub(super) struct Blocks {
    size: usize,
    pools: Vec<Pool>,
    contents: HashMap<Key, Content>,
    known: HashMap<Content, Known>,
    clock: u64,
    given: u64,
}

/// The beginning of a text that is in the cache.
#[derive(Debug)]
pub(super) struct Found {
    pub tables: Tables,
    /// How many blocks it is long, and what the last of them holds.
    pub blocks: usize,
    pub content: Content,
}

impl Pool {
    fn new(Layers { window, blocks }: &Layers) -> Self {
        Self {
            window: *window,
            all: (0..*blocks).map(|_| Block::default()).collect(),
            free: (0..*blocks).rev().collect(),
            idle: BTreeMap::new(),
            found_by: HashMap::new(),
        }
    }

    fn available(&self) -> usize {
        self.free.len() + self.idle.len()
    }

    /// The first of the blocks that the token at `position` sees, and those after it.
    fn first_seen(&self, position: usize, size: usize) -> usize {
        self.window.map_or(0, |window| (position + 1).saturating_sub(window) / size)
    }

    /// A block to write to, if there is one, and what it held that could be found.
    fn take(&mut self) -> Option<(u32, Option<Content>)> {
        let block = match self.free.pop() {
            Some(block) => block,
            None => self.idle.pop_first()?.1,
        };
        let state = self.all.get_mut(block as usize)?;
        state.users = 1;
        let content = state.content.take();
        if let Some(content) = &content {
            self.found_by.remove(content);
        }
        Some((block, content))
    }

    /// Gives a block one user more.
    fn join(&mut self, block: u32) {
        let Some(state) = self.all.get_mut(block as usize) else { return };
        if state.users == 0 {
            self.idle.remove(&state.idle_since);
        }
        state.users += 1;
    }

    /// Gives a block back for one of its users.
    fn release(&mut self, block: u32, clock: &mut u64) {
        let Some(state) = self.all.get_mut(block as usize) else { return };
        state.users = state.users.saturating_sub(1);
        if state.users > 0 {
            return;
        }
        if state.content.is_some() {
            *clock += 1;
            state.idle_since = *clock;
            self.idle.insert(*clock, block);
        } else {
            self.free.push(block);
        }
    }
}

impl Blocks {
    /// Blocks of `size` tokens, in a pool for each kind of layers.
    pub fn new(layers: &[Layers], size: usize) -> Self {
        Self {
            size,
            pools: layers.iter().map(Pool::new).collect(),
            contents: HashMap::new(),
            known: HashMap::new(),
            clock: 0,
            given: 0,
        }
    }

    /// Tokens of a block.
    pub fn size(&self) -> usize {
        self.size
    }

    /// All blocks of the first pool, which is the largest.
    pub fn count(&self) -> usize {
        self.pools.first().map_or(0, |pool| pool.all.len())
    }

    /// Blocks of the first pool that can be had.
    pub fn available(&self) -> usize {
        self.pools.first().map_or(0, Pool::available)
    }

    /// Whether no text has a block.
    #[cfg(test)]
    pub fn is_whole(&self) -> bool {
        self.pools.iter().all(|pool| pool.available() == pool.all.len())
    }

    /// What no block holds yet.
    pub fn new_content(&mut self) -> Content {
        self.given += 1;
        Content(self.given)
    }

    /// The tables of a text without blocks.
    pub fn new_tables(&self) -> Tables {
        vec![Vec::new(); self.pools.len()]
    }

    /// Whether there are blocks for all of a text of `length` tokens that has these already.
    pub fn has_room(&self, tables: &Tables, length: usize) -> bool {
        let needed = length.div_ceil(self.size);
        // The other pools have room for the windows of all texts, or as many blocks as this one.
        tables.first().is_none_or(|table| needed.saturating_sub(table.len()) <= self.available())
    }

    /// Finds blocks for a text up to `length` tokens: all, or none.
    pub fn extend(&mut self, tables: &mut Tables, length: usize) -> bool {
        let needed = length.div_ceil(self.size);
        let missing = |table: &Vec<u32>| needed.saturating_sub(table.len());
        if self.pools.iter().zip(&*tables).any(|(pool, table)| missing(table) > pool.available()) {
            return false;
        }
        let mut forgotten = Vec::new();
        for (pool, table) in self.pools.iter_mut().zip(tables) {
            for _ in 0..missing(table) {
                let Some((block, content)) = pool.take() else { break };
                table.push(block);
                forgotten.extend(content);
            }
        }
        forgotten.into_iter().for_each(|content| self.forget(content));
        true
    }

    /// Gives the blocks back that no token from `position` on sees.
    pub fn trim(&mut self, tables: &mut Tables, position: usize) {
        let size = self.size;
        for (pool, table) in self.pools.iter_mut().zip(tables) {
            let first = pool.first_seen(position, size).min(table.len());
            // Those before the last hole are holes.
            for entry in table[..first].iter_mut().rev().take_while(|entry| **entry != HOLE) {
                pool.release(std::mem::replace(entry, HOLE), &mut self.clock);
            }
        }
    }

    /// Gives all blocks of a text back, the last one first, which is the least useful to others.
    pub fn release(&mut self, tables: &mut Tables) {
        for (pool, table) in self.pools.iter_mut().zip(tables) {
            while let Some(block) = table.pop() {
                if block != HOLE {
                    pool.release(block, &mut self.clock);
                }
            }
        }
    }

    /// The longest beginning of a text of these tokens after `root` whose blocks are there, as far as what follows
    /// sees them. They have a user more then.
    pub fn find(&mut self, root: Content, tokens: &[u32]) -> Found {
        let size = self.size;
        let mut chain = Vec::new();
        let mut content = root;
        for tokens in tokens.chunks_exact(size) {
            let Some(next) = self.contents.get(&(content, tokens.into())) else { break };
            content = *next;
            chain.push(content);
        }
        let has = |pool: &Pool, from: usize, to: usize| {
            chain[from..to].iter().all(|content| pool.found_by.contains_key(content))
        };
        let whole = self.pools.iter().filter(|pool| pool.window.is_none());
        let most = whole
            .map(|pool| chain.iter().take_while(|it| pool.found_by.contains_key(it)).count())
            .min()
            .unwrap_or(chain.len());
        let windows = || self.pools.iter().filter(|pool| pool.window.is_some());
        let blocks = (1..=most)
            .rev()
            .find(|&end| windows().all(|pool| has(pool, pool.first_seen(end * size, size), end)))
            .unwrap_or(0);
        let mut tables = self.new_tables();
        for (pool, table) in self.pools.iter_mut().zip(&mut tables) {
            let first = pool.first_seen(blocks * size, size).min(blocks);
            table.resize(first, HOLE);
            for content in &chain[first..blocks] {
                if let Some(&block) = pool.found_by.get(content) {
                    pool.join(block);
                    table.push(block);
                }
            }
        }
        let last = blocks.checked_sub(1).and_then(|last| chain.get(last));
        Found { tables, blocks, content: last.copied().unwrap_or(root) }
    }

    /// Makes the blocks at `index` of a text, which are full, findable by their `tokens` and what comes before them.
    /// Where another has the same, that one stays the one to be found. Returns what they hold.
    pub fn remember(
        &mut self,
        tables: &Tables,
        index: usize,
        before: Content,
        tokens: &[u32],
    ) -> Content {
        let key = (before, tokens.into());
        let content = match self.contents.get(&key) {
            Some(content) => *content,
            None => {
                let content = self.new_content();
                if let Some(before) = self.known.get_mut(&before) {
                    before.uses += 1;
                }
                self.contents.insert(key.clone(), content);
                self.known.insert(content, Known { key, uses: 0 });
                content
            }
        };
        // One more until all pools were asked, so that it isn't forgotten.
        let mut uses = 1;
        for (pool, table) in self.pools.iter_mut().zip(tables) {
            let Some(state) = table.get(index).and_then(|block| pool.all.get_mut(*block as usize))
            else {
                continue;
            };
            if state.content.is_none() && !pool.found_by.contains_key(&content) {
                state.content = Some(content);
                pool.found_by.insert(content, table[index]);
                uses += 1;
            }
        }
        if let Some(known) = self.known.get_mut(&content) {
            known.uses += uses;
        }
        self.forget(content);
        content
    }

    /// Counts one use of a content less. What is of no use any more cannot be found.
    fn forget(&mut self, content: Content) {
        let mut next = Some(content);
        while let Some(content) = next.take()
            && let Some(known) = self.known.get_mut(&content)
        {
            known.uses -= 1;
            if known.uses == 0
                && let Some(Known { key, .. }) = self.known.remove(&content)
            {
                self.contents.remove(&key);
                next = Some(key.0);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As many blocks of so many tokens in one pool, or in one for each of several windows.
    fn blocks(count: u32, size: usize, windows: &[Option<usize>]) -> Blocks {
        let layers: Vec<_> =
            windows.iter().map(|&window| Layers { window, blocks: count }).collect();
        Blocks::new(&layers, size)
    }

    /// A text of whole blocks that can be found.
    fn text(blocks: &mut Blocks, root: Content, tokens: &[u32]) -> Tables {
        let mut tables = blocks.new_tables();
        let size = blocks.size();
        let mut content = root;
        for (index, of_block) in tokens.chunks_exact(size).enumerate() {
            assert!(blocks.extend(&mut tables, (index + 1) * size));
            content = blocks.remember(&tables, index, content, of_block);
            blocks.trim(&mut tables, (index + 1) * size);
        }
        tables
    }

    #[test]
    fn blocks_are_found_by_all_that_comes_before() {
        let mut blocks = blocks(3, 2, &[None]);
        let (one, other) = (blocks.new_content(), blocks.new_content());
        let tables = text(&mut blocks, one, &[1, 2, 3, 4]);
        assert_eq!(blocks.find(other, &[1, 2]).blocks, 0);
        assert_eq!(blocks.find(one, &[3, 4]).blocks, 0);
        assert_eq!(blocks.find(one, &[1, 2]).tables[0], tables[0][..1]);
        let found = blocks.find(one, &[1, 2, 3, 4, 5]);
        assert_eq!((found.blocks, found.tables), (2, tables));
        assert_eq!(blocks.available(), 1);
    }

    #[test]
    fn the_least_recently_used_is_forgotten_first_and_only_when_it_has_to_be() {
        let mut blocks = blocks(3, 1, &[None]);
        let root = blocks.new_content();
        let mut of_7 = text(&mut blocks, root, &[7]);
        let mut of_8 = text(&mut blocks, root, &[8]);
        let mut unknown = blocks.new_tables();
        assert!(blocks.extend(&mut unknown, 1));
        assert!(!blocks.extend(&mut unknown, 2));
        // One that nobody can find goes first.
        let first = unknown.clone();
        for tables in [&mut of_7, &mut of_8, &mut unknown] {
            blocks.release(tables);
        }
        assert_eq!(blocks.available(), 3);
        let mut taken = blocks.new_tables();
        assert!(blocks.extend(&mut taken, 1));
        assert_eq!(taken, first);
        assert_eq!(blocks.find(root, &[7]).blocks, 1);
        let mut again = blocks.find(root, &[7]).tables;
        blocks.release(&mut again);
        blocks.release(&mut again.clone());
        assert!(blocks.extend(&mut taken, 2));
        // 8 had not been used as lately as 7.
        assert_eq!(blocks.find(root, &[8]).blocks, 0);
        assert_eq!(blocks.find(root, &[7]).blocks, 1);
        assert!(!blocks.extend(&mut taken, 3));
    }

    #[test]
    fn a_block_is_given_back_when_its_last_user_goes() {
        let mut blocks = blocks(1, 1, &[None]);
        let root = blocks.new_content();
        let mut tables = text(&mut blocks, root, &[1]);
        let mut found = blocks.find(root, &[1]).tables;
        blocks.release(&mut tables);
        assert_eq!(blocks.available(), 0);
        blocks.release(&mut found);
        assert_eq!(blocks.available(), 1);
    }

    #[test]
    fn the_first_of_two_that_hold_the_same_is_found() {
        let mut blocks = blocks(2, 1, &[None]);
        let root = blocks.new_content();
        let (mut first, mut second) =
            (text(&mut blocks, root, &[1]), text(&mut blocks, root, &[1]));
        assert_ne!(first, second);
        let of_second = second.clone();
        let expected = first.clone();
        blocks.release(&mut second);
        blocks.release(&mut first);
        assert_eq!(blocks.find(root, &[1]).tables, expected);
        let mut taken = blocks.new_tables();
        assert!(blocks.extend(&mut taken, 1));
        assert_eq!(taken, of_second);
    }

    #[test]
    fn what_no_token_sees_any_more_is_given_back() {
        let mut blocks = blocks(9, 2, &[None, Some(3)]);
        let root = blocks.new_content();
        let mut tables = blocks.new_tables();
        // The token at 4 sees those from 2 on, that at 5 those from 3 on, that at 6 those from 4 on.
        for (length, holes) in [(1, 0), (4, 0), (5, 1), (6, 1), (7, 2), (8, 2), (16, 6)] {
            assert!(blocks.extend(&mut tables, length));
            blocks.trim(&mut tables, length - 1);
            assert_eq!(tables[0].iter().filter(|entry| **entry == HOLE).count(), 0);
            let found = tables[1].iter().take_while(|entry| **entry == HOLE).count();
            assert_eq!(found, holes, "{length}");
            assert_eq!(blocks.pools[1].available(), 9 - (tables[1].len() - holes));
        }
        blocks.release(&mut tables);
        assert!(blocks.is_whole());
        assert_eq!(blocks.find(root, &[]).blocks, 0);
    }

    #[test]
    fn a_beginning_is_found_as_far_as_what_follows_sees_it() {
        let all: Vec<u32> = (0..12).collect();
        // What others take pushes out what was given back first: the windows' first blocks, and of the whole text's the
        // last ones.
        for (windows, after_8, after_12) in
            [(&[None, Some(3)][..], 4, 0), (&[Some(3)], 6, 6), (&[None], 4, 2)]
        {
            let mut blocks = blocks(8, 2, windows);
            let root = blocks.new_content();
            let mut tables = text(&mut blocks, root, &all);
            blocks.release(&mut tables);
            let mut found = blocks.find(root, &all);
            assert_eq!(found.blocks, 6);
            for (table, window) in found.tables.iter().zip(windows) {
                // The token at 12 sees those from 10 on.
                let holes = if window.is_some() { 5 } else { 0 };
                assert_eq!(table.iter().filter(|entry| **entry == HOLE).count(), holes);
                assert!(table[holes..].iter().all(|entry| *entry != HOLE));
            }
            blocks.release(&mut found.tables);
            let mut others = blocks.new_tables();
            for (length, expected) in [(8, after_8), (12, after_12)] {
                assert!(blocks.extend(&mut others, length));
                let mut found = blocks.find(root, &all);
                assert_eq!(found.blocks, expected, "{windows:?} after {length}");
                blocks.release(&mut found.tables);
            }
            blocks.release(&mut others);
            assert!(blocks.is_whole());
        }
    }

    #[test]
    fn what_cannot_be_found_any_more_is_not_remembered() {
        let mut blocks = blocks(3, 1, &[None, Some(2)]);
        let root = blocks.new_content();
        for round in 0..50 {
            let mut tables = text(&mut blocks, root, &[round, round + 100, round + 200]);
            blocks.release(&mut tables);
            assert!(blocks.known.len() <= 6 && blocks.contents.len() == blocks.known.len());
        }
    }
}
