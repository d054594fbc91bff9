//! A text of tokens that is looked at and changed in place. A token that goes away becomes empty, so
//! that positions and lines stay.

use super::tokens::{Kind, Place, Token, tokens};
use std::collections::BTreeMap;

/// What is wrong with a text, and where.
#[derive(Debug)]
pub struct Wrong {
    pub place: Option<Place>,
    pub message: String,
}

pub struct Text {
    pub tokens: Vec<Token>,
    /// What stood between `[[` and `]]`, by the position of the first bracket.
    pub attributes: BTreeMap<usize, String>,
}

impl Text {
    /// Takes the attributes out of a preprocessed text.
    pub fn new(source: &str) -> Result<Self, Wrong> {
        let mut text = Self { tokens: tokens(source), attributes: BTreeMap::new() };
        let mut at = 0;
        while at + 1 < text.len() {
            if text.is(at, "[") && text.is(at + 1, "[") {
                let end = text.closing(at)?;
                let inside = text.between(at + 2, end - 1);
                text.blank(at, end + 1);
                text.attributes.insert(at, inside);
                at = end;
            }
            at += 1;
        }
        Ok(text)
    }

    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    pub fn text(&self, at: usize) -> &str {
        self.tokens.get(at).map_or("", |token| &token.text)
    }

    pub fn is(&self, at: usize, text: &str) -> bool {
        self.text(at) == text
    }

    pub fn is_any(&self, at: usize, texts: &[&str]) -> bool {
        texts.contains(&self.text(at))
    }

    pub fn is_word(&self, at: usize) -> bool {
        self.counts(at) && self.tokens[at].kind == Kind::Word
    }

    pub fn wrong(&self, at: usize, message: impl Into<String>) -> Wrong {
        let place = self.tokens.get(at).map(|token| token.place.clone());
        Wrong { place, message: message.into() }
    }

    /// Whether there is a token that is neither space nor gone.
    pub fn counts(&self, at: usize) -> bool {
        self.tokens.get(at).is_some_and(|token| {
            !matches!(token.kind, Kind::Space | Kind::Directive) && !token.text.is_empty()
        })
    }

    /// The positions of the tokens that count.
    pub fn counting(&self, from: usize, to: usize) -> impl DoubleEndedIterator<Item = usize> + '_ {
        (from..to.min(self.len())).filter(|&at| self.counts(at))
    }

    pub fn after(&self, at: usize) -> Option<usize> {
        self.counting(at + 1, self.len()).next()
    }

    pub fn before(&self, at: usize) -> Option<usize> {
        self.counting(0, at).next_back()
    }

    pub fn after_is(&self, at: usize, text: &str) -> bool {
        self.after(at).is_some_and(|at| self.is(at, text))
    }

    pub fn before_is(&self, at: usize, text: &str) -> bool {
        self.before(at).is_some_and(|at| self.is(at, text))
    }

    pub fn between(&self, from: usize, to: usize) -> String {
        self.tokens[from..to].iter().map(|token| token.text.as_str()).collect()
    }

    /// The tokens that count, with a space between them: equal for equal code.
    pub fn normal(&self, from: usize, to: usize) -> String {
        self.counting(from, to).map(|at| self.text(at)).collect::<Vec<_>>().join(" ")
    }

    /// The tokens as they stand, on one line.
    pub fn inline(&self, from: usize, to: usize) -> String {
        let kept = self.tokens[from..to].iter().filter(|token| token.kind != Kind::Directive);
        let text: String = kept.map(|token| token.text.as_str()).collect();
        text.replace('\n', " ").trim().to_string()
    }

    /// Takes tokens away. Line breaks and directives stay.
    pub fn blank(&mut self, from: usize, to: usize) {
        for token in &mut self.tokens[from..to] {
            if !matches!(token.kind, Kind::Space | Kind::Directive) {
                token.text.clear();
            }
        }
    }

    pub fn set(&mut self, at: usize, text: impl Into<String>) {
        self.tokens[at].text = text.into();
    }

    /// The next of these texts at the same depth of brackets.
    pub fn find(&self, from: usize, texts: &[&str]) -> Option<usize> {
        let mut depth = 0_i32;
        for at in from..self.len() {
            if depth <= 0 && self.is_any(at, texts) {
                return Some(at);
            }
            depth += bracket(self.text(at));
        }
        None
    }

    /// The bracket that closes the one here.
    pub fn closing(&self, at: usize) -> Result<usize, Wrong> {
        let (open, close) = match self.text(at) {
            "(" => ("(", ")"),
            "[" => ("[", "]"),
            "{" => ("{", "}"),
            _ => ("<", ">"),
        };
        let mut depth = 0;
        for end in at..self.len() {
            if self.is(end, open) {
                depth += 1;
            } else if self.is(end, close) {
                depth -= 1;
                if depth == 0 {
                    return Ok(end);
                }
            }
        }
        Err(self.wrong(at, format!("`{open}` is never closed")))
    }

    /// The bracket that opens the one here.
    pub fn opening(&self, at: usize) -> Result<usize, Wrong> {
        let (open, close) = match self.text(at) {
            ")" => ("(", ")"),
            "]" => ("[", "]"),
            "}" => ("{", "}"),
            _ => ("<", ">"),
        };
        let mut depth = 0;
        for start in (0..=at).rev() {
            if self.is(start, close) {
                depth += 1;
            } else if self.is(start, open) {
                depth -= 1;
                if depth == 0 {
                    return Ok(start);
                }
            }
        }
        Err(self.wrong(at, format!("`{close}` was never opened")))
    }

    /// The pieces between commas that are in no bracket. `<` counts as a bracket.
    pub fn pieces(&self, from: usize, to: usize) -> Vec<(usize, usize)> {
        let (mut depth, mut start, mut result) = (0, from, Vec::new());
        for at in from..to {
            match self.text(at) {
                "," if depth == 0 => {
                    result.push((start, at));
                    start = at + 1;
                }
                "<" => depth += 1,
                ">" => depth -= 1,
                other => depth += bracket(other),
            }
        }
        if self.counting(start, to).next().is_some() {
            result.push((start, to));
        }
        result
    }

    /// Whether one of these texts is there in no bracket.
    pub fn outside(&self, from: usize, to: usize, texts: &[&str]) -> bool {
        let mut depth = 0;
        (from..to).any(|at| {
            match self.text(at) {
                "<" => depth += 1,
                ">" => depth -= 1,
                other => depth += bracket(other),
            }
            depth == 0 && self.is_any(at, texts)
        })
    }

    pub fn attributes_in(&self, from: usize, to: usize) -> String {
        let inside: Vec<&str> =
            self.attributes.range(from..to).map(|(_, text)| text.as_str()).collect();
        inside.join(",")
    }
}

fn bracket(text: &str) -> i32 {
    match text {
        "(" | "[" | "{" => 1,
        ")" | "]" | "}" => -1,
        _ => 0,
    }
}

/// The argument of an attribute, in a list of them.
pub fn argument_of(attributes: &str, name: &str) -> Option<String> {
    let text: String = attributes.chars().filter(|c| !c.is_whitespace()).collect();
    let start = text
        .match_indices(&format!("{name}("))
        .map(|(at, _)| at)
        .find(|&at| text[..at].chars().next_back().is_none_or(|c| c == ',' || c == ':'))?;
    let inside = &text[start + name.len() + 1..];
    Some(inside[..inside.find(')')?].to_string())
}

/// Whether a list of attributes has this one.
pub fn has(attributes: &str, name: &str) -> bool {
    attributes.split(|c: char| !(c.is_alphanumeric() || c == '_')).any(|word| word == name)
}
