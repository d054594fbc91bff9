//! JSON: a record a line, or a list of records.

use std::io::BufRead;

use serde_json::Value;

use super::{MAX_ROW_BYTES, Place, Row, RowContent, Stream, read_line};
use crate::Result;

/// A record a line; blank lines are passed over.
pub(super) struct Lines {
    stream: Stream,
    place: Place,
    line: usize,
    bytes: Vec<u8>,
}

impl Lines {
    pub fn new(stream: Stream, place: Place) -> Self {
        Self { stream, place, line: 0, bytes: Vec::new() }
    }

    pub fn next(&mut self) -> Option<Result<Row>> {
        loop {
            match read_line(&mut self.stream, &mut self.bytes) {
                Ok(true) => self.line += 1,
                Ok(false) => return None,
                Err(error) => return Some(Err(self.place.read(error))),
            }
            if self.bytes.len() as u64 > MAX_ROW_BYTES {
                return Some(Err(self.place.too_large(self.line)));
            }
            let bytes = self.bytes.trim_ascii();
            if bytes.is_empty() {
                continue;
            }
            return Some(match serde_json::from_slice(bytes) {
                Ok(value) => Ok(Row { line: self.line, content: RowContent::Value(value) }),
                Err(error) => {
                    let words = words(&error);
                    // What comes from an editor goes over many lines.
                    let whole = if bytes == b"{" || bytes == b"[" {
                        "each line holds one whole record, or the file holds one list [...] of them"
                    } else {
                        "each line holds one whole record"
                    };
                    let column = error.column();
                    Err(self.place.at(
                        self.line,
                        format!("malformed JSON at column {column}: {words}; {whole}"),
                    ))
                }
            });
        }
    }
}

/// The records of one list.
pub(super) struct Items {
    stream: Stream,
    place: Place,
    line: usize,
    state: State,
    item: Vec<u8>,
}

#[derive(Clone, Copy, PartialEq)]
enum State {
    BeforeList,
    /// Behind the bracket or, when `comma`, behind a comma.
    BeforeItem {
        comma: bool,
    },
    InItem {
        from: usize,
        depth: usize,
        in_string: bool,
        escaped: bool,
    },
    /// Behind the list's last bracket.
    AfterList,
    Done,
}

impl Items {
    pub fn new(stream: Stream, place: Place) -> Self {
        Self { stream, place, line: 1, state: State::BeforeList, item: Vec::new() }
    }

    pub fn next(&mut self) -> Option<Result<Row>> {
        let next = self.scan();
        if !matches!(next, Some(Ok(_))) {
            self.state = State::Done;
        }
        next
    }

    fn scan(&mut self) -> Option<Result<Row>> {
        match self.state {
            State::Done => return None,
            State::AfterList => return self.end(),
            _ => self.item.clear(),
        }
        loop {
            let bytes = match self.stream.fill_buf() {
                Ok(bytes) => bytes,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(error) => return Some(Err(self.place.read(error))),
            };
            if bytes.is_empty() {
                let message = "malformed JSON array: the file ends inside of the list";
                return Some(Err(self.place.at(self.line, message)));
            }
            let mut used = 0;
            let mut ended = None;
            let mut wrong = None;
            for &byte in bytes {
                used += 1;
                let space = byte.is_ascii_whitespace();
                let start = match &mut self.state {
                    State::BeforeList => {
                        if byte == b'[' {
                            self.state = State::BeforeItem { comma: false };
                        }
                        false
                    }
                    State::BeforeItem { .. } if space => false,
                    State::BeforeItem { comma: false } if byte == b']' => {
                        self.state = State::AfterList;
                        ended = Some(None);
                        false
                    }
                    State::BeforeItem { .. } if byte == b']' || byte == b',' => {
                        wrong = Some("a value is missing");
                        false
                    }
                    State::BeforeItem { .. } => true,
                    State::InItem { from, depth, in_string, escaped } => {
                        let end = *depth == 0 && !*in_string && matches!(byte, b',' | b']');
                        if end {
                            ended = Some(Some(*from));
                            self.state = if byte == b',' {
                                State::BeforeItem { comma: true }
                            } else {
                                State::AfterList
                            };
                        } else {
                            self.item.push(byte);
                            if *in_string {
                                match byte {
                                    _ if *escaped => *escaped = false,
                                    b'\\' => *escaped = true,
                                    b'"' => *in_string = false,
                                    _ => {}
                                }
                            } else {
                                match byte {
                                    b'"' => *in_string = true,
                                    b'[' | b'{' => *depth += 1,
                                    b']' | b'}' => *depth = depth.saturating_sub(1),
                                    _ => {}
                                }
                            }
                        }
                        false
                    }
                    State::AfterList | State::Done => false,
                };
                if start {
                    self.item.push(byte);
                    let depth = usize::from(matches!(byte, b'[' | b'{'));
                    let in_string = byte == b'"';
                    self.state =
                        State::InItem { from: self.line, depth, in_string, escaped: false };
                }
                self.line += usize::from(byte == b'\n');
                if ended.is_some() || wrong.is_some() {
                    break;
                }
            }
            self.stream.consume(used);
            if let Some(wrong) = wrong {
                return Some(Err(self
                    .place
                    .at(self.line, format!("malformed JSON array: {wrong}"))));
            }
            if self.item.len() as u64 > MAX_ROW_BYTES {
                return Some(Err(self.place.too_large(self.line)));
            }
            match ended {
                None => {}
                Some(None) => return self.end(),
                Some(Some(line)) => return Some(self.value(line)),
            }
        }
    }

    /// That nothing stands behind the list.
    fn end(&mut self) -> Option<Result<Row>> {
        loop {
            let bytes = match self.stream.fill_buf() {
                Ok([]) => return None,
                Ok(bytes) => bytes,
                Err(error) => return Some(Err(self.place.read(error))),
            };
            let other = bytes.iter().position(|byte| !byte.is_ascii_whitespace());
            let space = bytes.iter().take(other.unwrap_or(bytes.len()));
            self.line += space.filter(|byte| **byte == b'\n').count();
            if other.is_some() {
                let message = "malformed JSON array: there is something behind the list";
                return Some(Err(self.place.at(self.line, message)));
            }
            let used = bytes.len();
            self.stream.consume(used);
        }
    }

    fn value(&self, line: usize) -> Result<Row> {
        match serde_json::from_slice::<Value>(&self.item) {
            Ok(value) => Ok(Row { line, content: RowContent::Value(value) }),
            Err(error) => Err(self.place.at(
                line + error.line().saturating_sub(1),
                format!("malformed JSON array: {} at column {}", words(&error), error.column()),
            )),
        }
    }
}

/// What is wrong, without the place in what was parsed.
fn words(error: &serde_json::Error) -> String {
    let whole = error.to_string();
    whole.split(" at line ").next().unwrap_or(&whole).to_string()
}
