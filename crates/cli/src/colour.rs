//! Text of which a part is marked: in colour where stdout shows it, by brackets elsewhere.

use crate::visible::for_stdout;
use crate::wrap::{Flow, stdout_columns};
use std::env;
use std::io::IsTerminal;

const MARKED: &str = "\u{1b}[32m";
const PLAIN: &str = "\u{1b}[0m";

/// What stands around marked text that has no colour.
pub const BRACKETS: [char; 2] = ['⟦', '⟧'];

/// Whether stdout gets colours, by the rules of clap's help: `NO_COLOR`, `CLICOLOR_FORCE` and `CLICOLOR`, and then
/// whether it is a terminal that shows them.
pub fn on_stdout() -> bool {
    decide(|name| env::var(name).ok(), std::io::stdout().is_terminal())
}

fn decide(variable: impl Fn(&str) -> Option<String>, is_terminal: bool) -> bool {
    let is_on = |name: &str| variable(name).map(|value| value != "0");
    if variable("NO_COLOR").is_some_and(|value| !value.is_empty()) {
        false
    } else if is_on("CLICOLOR_FORCE") == Some(true) {
        true
    } else if is_on("CLICOLOR") == Some(false) {
        false
    } else {
        is_terminal && variable("TERM").is_none_or(|term| term != "dumb")
    }
}

/// The pieces of a text, each marked or not, as one text at the terminal's width. Of the pieces no control character
/// reaches a terminal.
pub fn mark<'a>(pieces: impl Iterator<Item = (&'a str, bool)>, colours: bool) -> String {
    let pieces: Vec<(String, bool)> =
        pieces.map(|(text, marked)| (for_stdout(text).into_owned(), marked)).collect();
    let mut flow = Flow::new(stdout_columns());
    if colours {
        let mut text = String::new();
        pieces.iter().for_each(|(piece, _)| text.push_str(&flow.push(piece)));
        text.push_str(&flow.finish());
        return colour(&text, &pieces);
    }
    let [open, close] = BRACKETS;
    let mut text = String::new();
    for (piece, marked) in &pieces {
        match marked {
            true => text.push_str(&flow.push(&format!("{open}{piece}{close}"))),
            false => text.push_str(&flow.push(piece)),
        }
    }
    text + &flow.finish()
}

/// Colours a text that was made of the pieces by breaking lines, which changes white space alone.
fn colour(text: &str, pieces: &[(String, bool)]) -> String {
    let mut marks = pieces
        .iter()
        .flat_map(|(piece, marked)| piece.chars().filter(|c| !c.is_whitespace()).map(|_| *marked));
    let (mut coloured, mut is_on) = (String::with_capacity(text.len()), false);
    for character in text.chars() {
        if !character.is_whitespace() {
            let marked = marks.next().unwrap_or(false);
            if marked != is_on {
                coloured.push_str(if marked { MARKED } else { PLAIN });
                is_on = marked;
            }
        }
        coloured.push(character);
    }
    if is_on {
        coloured.push_str(PLAIN);
    }
    coloured
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn colours_go_by_the_usual_variables() {
        let on = |variables: &[(&str, &str)], is_terminal| {
            let find = |name: &str| variables.iter().find(|(known, _)| *known == name);
            decide(|name| find(name).map(|(_, value)| value.to_string()), is_terminal)
        };
        for (variables, in_a_pipe, on_a_terminal) in [
            (&[][..], false, true),
            (&[("NO_COLOR", "1")], false, false),
            (&[("NO_COLOR", "")], false, true),
            (&[("CLICOLOR_FORCE", "1")], true, true),
            (&[("CLICOLOR_FORCE", "0")], false, true),
            (&[("CLICOLOR_FORCE", "1"), ("NO_COLOR", "1")], false, false),
            (&[("CLICOLOR", "0")], false, false),
            (&[("TERM", "dumb")], false, false),
        ] {
            assert_eq!(on(variables, false), in_a_pipe, "{variables:?}");
            assert_eq!(on(variables, true), on_a_terminal, "{variables:?}");
        }
    }

    #[test]
    fn marks_stay_with_their_words_where_lines_are_broken() {
        let pieces = [
            ("user: a b ".to_string(), false),
            ("c d".to_string(), true),
            ("\ne".to_string(), false),
        ];
        assert_eq!(colour("user: a\nb c\nd\ne", &pieces), "user: a\nb \u{1b}[32mc\nd\n\u{1b}[0me");
        let plain = mark(pieces.iter().map(|(text, marked)| (text.as_str(), *marked)), false);
        assert_eq!(plain, "user: a b ⟦c d⟧\ne");
    }
}
