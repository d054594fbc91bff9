//! Text of files, models and the hub on a terminal, which takes some characters as orders: to clear the screen, to
//! change its title, to type an answer, to show text in another order than it has.

use std::borrow::Cow;
use std::io::IsTerminal;
use std::sync::LazyLock;

static STDOUT: LazyLock<bool> = LazyLock::new(|| std::io::stdout().is_terminal());
static STDERR: LazyLock<bool> = LazyLock::new(|| std::io::stderr().is_terminal());

/// The text as stdout gets it: as it is in a pipe or a file, [`visible`] on a terminal.
pub fn for_stdout(text: &str) -> Cow<'_, str> {
    if *STDOUT { visible(text) } else { text.into() }
}

/// The text as stderr gets it: as it is in a pipe or a file, [`visible`] on a terminal.
pub fn for_stderr(text: &str) -> Cow<'_, str> {
    if *STDERR { visible(text) } else { text.into() }
}

/// The text with signs in place of the characters that order a terminal about. Line ends and tabs stay.
pub fn visible(text: &str) -> Cow<'_, str> {
    if text.chars().all(|character| sign(character).is_none()) {
        return text.into();
    }
    let mut shown = String::with_capacity(text.len());
    let mut characters = text.chars().peekable();
    while let Some(character) = characters.next() {
        // The line ends of Windows are line ends.
        if character == '\r' && characters.peek() == Some(&'\n') {
            continue;
        }
        shown.push(sign(character).unwrap_or(character));
    }
    shown.into()
}

/// What is shown instead of a character; `None` if it may be shown.
fn sign(character: char) -> Option<char> {
    match character {
        '\n' | '\t' => None,
        // Unicode has pictures of the first 32 and of DEL: ␛ for the escape character.
        '\0'..='\u{1f}' => char::from_u32(0x2400 + u32::from(character)),
        '\u{7f}' => Some('\u{2421}'),
        // The second set of control characters, and those that turn the direction of text round.
        '\u{80}'..='\u{9f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' => {
            Some(char::REPLACEMENT_CHARACTER)
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::visible;

    #[test]
    fn no_control_character_is_left_and_text_stays() {
        for (text, shown) in [
            ("a line\nand\ta tab\n", "a line\nand\ta tab\n"),
            ("naïve 日本語 👩‍👩‍👧 שלום", "naïve 日本語 👩‍👩‍👧 שלום"),
            ("\u{1b}[31mred", "␛[31mred"),
            ("\u{1b}]0;title\u{7}", "␛]0;title␇"),
            ("\u{9b}2J\u{85}\u{7f}", "\u{fffd}2J\u{fffd}␡"),
            ("one\r\ntwo\rthree", "one\ntwo␍three"),
            ("a\u{202e}b\u{2066}c\u{2069}", "a\u{fffd}b\u{fffd}c\u{fffd}"),
        ] {
            assert_eq!(visible(text), shown);
        }
        for character in ('\0'..='\u{ff}').filter(|c| c.is_control() && !"\n\t".contains(*c)) {
            let text = format!("a{character}b");
            assert!(!visible(&text).contains(character), "{character:?}");
        }
    }
}
