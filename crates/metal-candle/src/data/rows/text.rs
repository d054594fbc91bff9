//! Plain text, in pieces that end at a line end.

use super::{Place, Row, RowContent, Stream, read_line};
use crate::Result;
use std::io::BufRead;

/// A piece ends with the first line that makes it this long, in bytes.
const PIECE: usize = 1 << 20;

pub(super) struct Pieces {
    stream: Stream,
    place: Place,
    line: usize,
    done: bool,
}

impl Pieces {
    pub fn new(stream: Stream, place: Place) -> Self {
        Self { stream, place, line: 1, done: false }
    }

    pub fn next(&mut self) -> Option<Result<Row>> {
        if self.done {
            return None;
        }
        let piece = self.piece();
        if !matches!(piece, Some(Ok(_))) {
            self.done = true;
        }
        piece
    }

    fn piece(&mut self) -> Option<Result<Row>> {
        let (first, mut text, mut line) = (self.line, String::new(), Vec::new());
        while text.len() < PIECE {
            match read_line(&mut self.stream, &mut line) {
                Ok(true) => {}
                Ok(false) => {
                    self.done = true;
                    break;
                }
                Err(error) => return Some(Err(self.place.read(error))),
            }
            if line.len() as u64 > super::MAX_ROW_BYTES {
                return Some(Err(self.place.too_large(self.line)));
            }
            match std::str::from_utf8(&line) {
                Ok(line) => text.push_str(line),
                Err(_) => return Some(Err(self.place.at(self.line, "the text is not UTF-8"))),
            }
            self.line += 1;
        }
        if !self.done {
            match self.stream.fill_buf() {
                Ok(rest) => self.done = rest.is_empty(),
                Err(error) => return Some(Err(self.place.read(error))),
            }
        }
        if first == 1 && self.done && text.trim().is_empty() {
            return None;
        }
        Some(Ok(Row { line: first, content: RowContent::Text { text, last: self.done } }))
    }
}
