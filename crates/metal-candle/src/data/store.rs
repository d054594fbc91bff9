//! Where the tokens of all examples lie: in memory, or from some size on in a file that is mapped into it.
//!
//! A word is a token id, with its highest bit set when the token is trainable. The file has no name, so it ends with
//! the process.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::PathBuf;

use memmap2::Mmap;

use crate::{Error, Result};

/// The bit of a word that says that the token is trainable.
const TRAINABLE: u32 = 1 << 31;

/// The token id of a word.
pub(super) fn id(word: u32) -> u32 {
    word & !TRAINABLE
}

/// Whether the token of a word is trainable.
pub(super) fn is_trainable(word: u32) -> bool {
    word & TRAINABLE != 0
}

/// The word of a token; none for an id above 2³¹, which no vocabulary has.
pub(super) fn word(id: u32, trainable: bool) -> Option<u32> {
    (id < TRAINABLE).then_some(id | if trainable { TRAINABLE } else { 0 })
}

/// Words that don't change any more.
#[derive(Debug)]
pub(super) enum Store {
    Memory(Vec<u32>),
    File(Mmap),
}

impl Store {
    pub fn words(&self) -> &[u32] {
        match self {
            Self::Memory(words) => words,
            Self::File(map) => {
                let bytes: &[u8] = map;
                // SAFETY: a mapping starts at a page and so is aligned for u32, of which every pattern of bits is
                // one, and the length is rounded down to whole words.
                unsafe { std::slice::from_raw_parts(bytes.as_ptr().cast(), bytes.len() / 4) }
            }
        }
    }
}

/// Takes words until they are all there.
pub(super) struct Writer {
    words: Vec<u32>,
    file: Option<BufWriter<File>>,
    most: usize,
    folder: PathBuf,
}

impl Writer {
    /// A writer that keeps at most `bytes` in memory, and beyond that writes a file in `folder`.
    pub fn new(bytes: u64, folder: PathBuf) -> Self {
        let most = usize::try_from(bytes / 4).unwrap_or(usize::MAX);
        Self { words: Vec::new(), file: None, most, folder }
    }

    pub fn push(&mut self, words: &[u32]) -> Result<()> {
        if self.file.is_none() && self.words.len() + words.len() > self.most {
            let file = tempfile::tempfile_in(&self.folder).map_err(Error::io(&self.folder))?;
            let mut file = BufWriter::with_capacity(1 << 20, file);
            self.write(&mut file, &self.words)?;
            self.file = Some(file);
            self.words = Vec::new();
        }
        match self.file.take() {
            None => self.words.extend_from_slice(words),
            Some(mut file) => {
                self.write(&mut file, words)?;
                self.file = Some(file);
            }
        }
        Ok(())
    }

    fn write(&self, file: &mut BufWriter<File>, words: &[u32]) -> Result<()> {
        for word in words {
            file.write_all(&word.to_ne_bytes()).map_err(Error::io(&self.folder))?;
        }
        Ok(())
    }

    pub fn finish(self) -> Result<Store> {
        match self.file {
            None => Ok(Store::Memory(self.words)),
            Some(file) => {
                let file = file
                    .into_inner()
                    .map_err(|error| Error::io(&self.folder)(error.into_error()))?;
                // SAFETY: the file has no name, so no other process writes it, and this one has written it.
                let map = unsafe { Mmap::map(&file) }.map_err(Error::io(&self.folder))?;
                Ok(Store::File(map))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_the_same_in_memory_and_in_a_file() {
        let folder = tempfile::tempdir().unwrap();
        let words: Vec<u32> =
            (0..1000).map(|index| word(index * 7, index % 3 == 0).unwrap()).collect();
        for (bytes, in_file) in [(4000, false), (3999, true), (0, true)] {
            let mut writer = Writer::new(bytes, folder.path().to_path_buf());
            for part in words.chunks(37) {
                writer.push(part).unwrap();
            }
            let store = writer.finish().unwrap();
            assert_eq!(matches!(store, Store::File(_)), in_file);
            assert_eq!(store.words(), words);
        }
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
        assert!(is_trainable(words[0]) && !is_trainable(words[1]) && id(words[3]) == 21);
        assert_eq!(word(TRAINABLE, false), None);
    }
}
