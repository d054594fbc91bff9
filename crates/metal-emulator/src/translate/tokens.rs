//! Preprocessed text as tokens, each with its place in the file that it came from.

use std::fmt;
use std::rc::Rc;

/// A line of a file.
#[derive(Clone, Debug)]
pub struct Place {
    pub file: Rc<str>,
    pub line: usize,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.file, self.line)
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    Word,
    Number,
    /// A string or a character.
    Quoted,
    /// One character of punctuation.
    Mark,
    Space,
    /// A whole line that begins with `#`.
    Directive,
}

#[derive(Clone, Debug)]
pub struct Token {
    pub kind: Kind,
    pub text: String,
    pub place: Place,
}

/// Cuts preprocessed text into tokens; their texts together are the text.
pub fn tokens(source: &str) -> Vec<Token> {
    let mut result = Vec::new();
    let mut place = Place { file: "".into(), line: 1 };
    let mut rest = source;
    let mut line_begins = true;
    while let Some(first) = rest.chars().next() {
        let (kind, length) = next(rest, first, line_begins);
        let (text, behind) = rest.split_at(length);
        rest = behind;
        if let Some(new) = marker(text).filter(|_| kind == Kind::Directive) {
            place = new;
        }
        let breaks = text.matches('\n').count();
        result.push(Token { kind, text: text.into(), place: place.clone() });
        // A directive's own line break belongs to the space behind it, so a marker names that line.
        place.line += breaks;
        line_begins = breaks > 0 || (line_begins && kind == Kind::Space);
    }
    result
}

fn next(rest: &str, first: char, line_begins: bool) -> (Kind, usize) {
    let until = |stop: &dyn Fn(char) -> bool| rest.find(stop).unwrap_or(rest.len());
    if line_begins && first == '#' {
        (Kind::Directive, until(&|c| c == '\n'))
    } else if first.is_whitespace() {
        let end = until(&|c| !c.is_whitespace());
        (Kind::Space, rest.find('\n').map_or(end, |at| end.min(at + 1)))
    } else if is_word(first) && !first.is_ascii_digit() {
        (Kind::Word, until(&|c| !is_word(c)))
    } else if first.is_ascii_digit()
        || (first == '.' && rest.chars().nth(1).is_some_and(|c| c.is_ascii_digit()))
    {
        (Kind::Number, number_length(rest))
    } else if first == '"' || first == '\'' {
        (Kind::Quoted, quoted_length(rest, first))
    } else {
        (Kind::Mark, first.len_utf8())
    }
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

fn number_length(rest: &str) -> usize {
    let hexadecimal = rest.starts_with("0x") || rest.starts_with("0X");
    let mut before = ' ';
    for (at, c) in rest.char_indices() {
        let exponent = if hexadecimal { "pP" } else { "eEpP" };
        let sign = (c == '+' || c == '-') && exponent.contains(before);
        if !(is_word(c) || c == '.' || sign) {
            return at;
        }
        before = c;
    }
    rest.len()
}

fn quoted_length(rest: &str, quote: char) -> usize {
    let mut escaped = false;
    for (at, c) in rest.char_indices().skip(1) {
        if escaped {
            escaped = false;
        } else if c == '\\' {
            escaped = true;
        } else if c == quote {
            return at + 1;
        }
    }
    rest.len()
}

/// `# 12 "file" 1`: the place of the line after the next.
fn marker(directive: &str) -> Option<Place> {
    let rest = directive.strip_prefix('#')?.trim_start();
    let (number, rest) = rest.split_once(' ')?;
    let line: usize = number.parse().ok()?;
    let file = rest.strip_prefix('"')?.split('"').next()?;
    Some(Place { file: file.into(), line: line.saturating_sub(1) })
}
