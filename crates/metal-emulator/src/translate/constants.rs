//! The function constants that a kernel depends on: those that it, or anything that it names, reads. Metal
//! makes no pipeline of it unless all of them are set.

use super::text::{Text, Wrong, argument_of};
use std::collections::HashSet;

/// What stands outside of all functions: what it declares, and every word of it.
struct Item {
    /// `None` where it can't be told, which counts as being used everywhere.
    name: Option<String>,
    words: HashSet<String>,
}

/// What of a text depends on which function constants.
pub struct Constants {
    /// Names and indices.
    indices: Vec<(String, String)>,
    items: Vec<Item>,
}

impl Constants {
    /// Looks through a text of which attributes and instantiations have been taken out.
    pub fn of(text: &Text) -> Result<Self, Wrong> {
        let mut found = Self { indices: Vec::new(), items: Vec::new() };
        let (mut at, mut start) = (0, 0);
        while at < text.len() {
            let mut ends = text.is(at, ";");
            if text.is_any(at, &["(", "["]) {
                at = text.closing(at)?;
            } else if text.is(at, "{") {
                let words = ["namespace", "extern"];
                if text.counting(start, at).any(|at| text.is_any(at, &words)) {
                    start = at + 1;
                } else {
                    at = text.closing(at)?;
                    ends = !text.after_is(at, ";");
                }
            } else if text.is(at, "}") {
                start = at + 1;
            }
            if ends {
                found.add(text, start, at + 1)?;
                start = at + 1;
            }
            at += 1;
        }
        Ok(found)
    }

    fn add(&mut self, text: &Text, start: usize, end: usize) -> Result<(), Wrong> {
        let item = item(text, start, end);
        let index = argument_of(&text.attributes_in(start, end), "function_constant");
        let is_variable = !text.counting(start, end).any(|at| text.is_any(at, &["(", "{"]));
        if let (Some(index), Some(name), true) = (index, &item.name, is_variable) {
            if let Some((other, _)) = self.indices.iter().find(|(_, taken)| *taken == index) {
                let message =
                    format!("`{other}` and `{name}` are both the function constant {index}");
                return Err(text.wrong(end - 1, message));
            }
            self.indices.push((name.clone(), index));
        }
        self.items.push(item);
        Ok(())
    }

    /// The indices of the constants that a function depends on, with a space before and after each.
    pub fn used_by(&self, function: &str) -> String {
        let (mut names, mut known) = (vec![function], HashSet::from([function]));
        let mut waiting: Vec<&Item> =
            self.items.iter().filter(|item| item.name.is_none()).collect();
        loop {
            if let Some(name) = names.pop() {
                waiting.extend(self.items.iter().filter(|item| item.name.as_deref() == Some(name)));
            } else if let Some(item) = waiting.pop() {
                let words = item.words.iter().map(String::as_str);
                names.extend(words.filter(|word| known.insert(word)));
            } else {
                break;
            }
        }
        let used = self.indices.iter().filter(|(name, _)| known.contains(name.as_str()));
        used.map(|(_, index)| format!(" {index} ")).collect()
    }
}

fn item(text: &Text, start: usize, end: usize) -> Item {
    let places: Vec<usize> = text.counting(start, end).collect();
    let mut words: HashSet<String> =
        places.iter().filter(|&&at| text.is_word(at)).map(|&at| text.text(at).into()).collect();
    // An argument that a constant may leave out names it in an attribute.
    for attributes in text.attributes.range(start..end).map(|(_, attributes)| attributes) {
        words.extend(argument_of(attributes, "function_constant"));
    }
    Item { name: name(text, &places), words }
}

/// The function, the variable or the type that is declared.
fn name(text: &Text, places: &[usize]) -> Option<String> {
    let mut rest = places;
    while rest.first().is_some_and(|&at| text.is(at, "template")) {
        let open = rest.get(1).copied().filter(|&at| text.is(at, "<"));
        let close = open.map_or(rest[0], |open| text.closing(open).unwrap_or(open));
        rest = &rest[rest.iter().position(|&at| at > close)?..];
    }
    let is_type = rest.first().is_some_and(|&at| text.is_any(at, &["struct", "class", "enum"]));
    let end = if is_type {
        rest.iter().position(|&at| text.is_any(at, &["{", ":", ";", "<"]))?
    } else {
        rest.iter().position(|&at| text.is_any(at, &["(", "=", "[", ";", "{"]))?
    };
    let name = *rest.get(end.checked_sub(1)?)?;
    text.is_word(name).then(|| text.text(name).into())
}
