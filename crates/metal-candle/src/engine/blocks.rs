//! Who has which blocks of the paged KV cache.
//!
//! A full block whose tokens are known stays findable after its last user, until its memory is needed: the least
//! recently used goes first. It is found by its tokens and by the block before it, never by a hash alone, so two texts
//! share a block only if they are the same up to its end, read with the same adapter. Only full blocks are shared, and
//! those are never written again.

use std::collections::{BTreeMap, HashMap};

/// What a block holds, told by all that comes before it: no number is given twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Content(u64);

type Key = (Content, Box<[u32]>);

#[derive(Debug, Default)]
struct Block {
    users: usize,
    /// What it is found by, and what it holds, where it can be found.
    known: Option<(Key, Content)>,
    /// When its last user gave it back.
    idle_since: u64,
}

/// The blocks of a pool.
#[derive(Debug)]
pub(super) struct Blocks {
    size: usize,
    all: Vec<Block>,
    /// Those that hold nothing of use.
    free: Vec<u32>,
    /// Those without users that can be found, by when they were last used.
    idle: BTreeMap<u64, u32>,
    known: HashMap<Key, u32>,
    clock: u64,
    contents: u64,
}

impl Blocks {
    /// `count` blocks of `size` tokens.
    pub fn new(count: u32, size: usize) -> Self {
        Self {
            size,
            all: (0..count).map(|_| Block::default()).collect(),
            free: (0..count).rev().collect(),
            idle: BTreeMap::new(),
            known: HashMap::new(),
            clock: 0,
            contents: 0,
        }
    }

    /// Tokens of a block.
    pub fn size(&self) -> usize {
        self.size
    }

    /// All blocks.
    pub fn count(&self) -> usize {
        self.all.len()
    }

    /// Blocks that can be had.
    pub fn available(&self) -> usize {
        self.free.len() + self.idle.len()
    }

    /// What no block holds yet.
    pub fn new_content(&mut self) -> Content {
        self.contents += 1;
        Content(self.contents)
    }

    /// A block to write to, if there is one.
    pub fn take(&mut self) -> Option<u32> {
        let block = match self.free.pop() {
            Some(block) => block,
            None => {
                let (_, block) = self.idle.pop_first()?;
                let state = self.all.get_mut(block as usize)?;
                if let Some((key, _)) = state.known.take() {
                    self.known.remove(&key);
                }
                block
            }
        };
        self.all.get_mut(block as usize)?.users = 1;
        Some(block)
    }

    /// The block that has `tokens` after `before`, which has a user more then.
    pub fn find(&mut self, before: Content, tokens: &[u32]) -> Option<(u32, Content)> {
        let block = *self.known.get(&(before, tokens.into()))?;
        let state = self.all.get_mut(block as usize)?;
        let (_, content) = state.known.as_ref()?;
        if state.users == 0 {
            self.idle.remove(&state.idle_since);
        }
        state.users += 1;
        Some((block, *content))
    }

    /// Makes `block`, which is full, findable by `tokens` and what comes before them. Where another has the same,
    /// that one stays the one to be found. Returns what it holds.
    pub fn remember(&mut self, block: u32, before: Content, tokens: &[u32]) -> Content {
        let key = (before, tokens.into());
        let same = self.known.get(&key).and_then(|same| self.all.get(*same as usize));
        if let Some((_, content)) = same.and_then(|same| same.known.as_ref()) {
            return *content;
        }
        let content = self.new_content();
        if let Some(state) = self.all.get_mut(block as usize) {
            state.known = Some((key.clone(), content));
            self.known.insert(key, block);
        }
        content
    }

    /// Gives a block back for one of its users.
    pub fn release(&mut self, block: u32) {
        let Some(state) = self.all.get_mut(block as usize) else { return };
        state.users = state.users.saturating_sub(1);
        if state.users > 0 {
            return;
        }
        if state.known.is_some() {
            self.clock += 1;
            state.idle_since = self.clock;
            self.idle.insert(self.clock, block);
        } else {
            self.free.push(block);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_found_by_all_that_comes_before() {
        let mut blocks = Blocks::new(3, 2);
        let (one, other) = (blocks.new_content(), blocks.new_content());
        let first = blocks.take().unwrap();
        let after = blocks.remember(first, one, &[1, 2]);
        let second = blocks.take().unwrap();
        blocks.remember(second, after, &[3, 4]);
        assert_eq!(blocks.find(other, &[1, 2]), None);
        assert_eq!(blocks.find(one, &[3, 4]), None);
        assert_eq!(blocks.find(one, &[1, 2]), Some((first, after)));
        assert_eq!(blocks.find(after, &[3, 4]).map(|(block, _)| block), Some(second));
        assert_eq!(blocks.available(), 1);
    }

    #[test]
    fn the_least_recently_used_is_forgotten_first_and_only_when_it_has_to_be() {
        let mut blocks = Blocks::new(3, 1);
        let root = blocks.new_content();
        let taken: Vec<u32> = (0..3).map(|_| blocks.take().unwrap()).collect();
        assert_eq!(blocks.take(), None);
        for (block, token) in taken.iter().zip([7, 8]) {
            blocks.remember(*block, root, &[token]);
        }
        // One that nobody can find goes first.
        for block in [1, 0, 2] {
            blocks.release(taken[block]);
        }
        assert_eq!(blocks.available(), 3);
        assert_eq!(blocks.take(), Some(taken[2]));
        assert!(blocks.find(root, &[8]).is_some());
        blocks.release(taken[1]);
        // 8 was used after 7.
        assert_eq!(blocks.take(), Some(taken[0]));
        assert_eq!(blocks.find(root, &[7]), None);
        assert!(blocks.find(root, &[8]).is_some());
        assert_eq!(blocks.take(), None);
    }

    #[test]
    fn a_block_is_given_back_when_its_last_user_goes() {
        let mut blocks = Blocks::new(1, 1);
        let root = blocks.new_content();
        let block = blocks.take().unwrap();
        blocks.remember(block, root, &[1]);
        blocks.find(root, &[1]).unwrap();
        blocks.release(block);
        assert_eq!(blocks.available(), 0);
        blocks.release(block);
        assert_eq!(blocks.available(), 1);
    }

    #[test]
    fn the_first_of_two_that_hold_the_same_is_found() {
        let mut blocks = Blocks::new(2, 1);
        let root = blocks.new_content();
        let (first, second) = (blocks.take().unwrap(), blocks.take().unwrap());
        let content = blocks.remember(first, root, &[1]);
        assert_eq!(blocks.remember(second, root, &[1]), content);
        blocks.release(second);
        blocks.release(first);
        assert_eq!(blocks.find(root, &[1]), Some((first, content)));
        assert_eq!(blocks.take(), Some(second));
    }
}
