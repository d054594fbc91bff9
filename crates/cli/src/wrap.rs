//! Text at the terminal's width: words are not broken, and what continues a line stands under it.

use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

/// Narrower terminals break words all the same.
const LEAST: usize = 20;

/// The columns of the terminal that is behind stdout; `None` for a pipe or a file, which get lines as
/// they are.
pub fn stdout_columns() -> Option<usize> {
    columns(terminal_size::terminal_size_of(std::io::stdout()))
}

/// Those of the terminal behind stderr.
pub fn stderr_columns() -> Option<usize> {
    columns(terminal_size::terminal_size_of(std::io::stderr()))
}

fn columns(size: Option<(terminal_size::Width, terminal_size::Height)>) -> Option<usize> {
    size.map(|(terminal_size::Width(columns), _)| usize::from(columns))
        .filter(|columns| *columns >= LEAST)
}

/// Wraps lines that are longer than `columns`. What continues a line is indented as the line is, in a row
/// of a table as its value is. Commands stay whole, so that they can be copied.
pub fn wrap(text: &str, columns: Option<usize>) -> String {
    let Some(columns) = columns else { return text.into() };
    let mut wrapped = String::with_capacity(text.len());
    for line in text.split_inclusive('\n') {
        let (line, end) = match line.strip_suffix('\n') {
            Some(line) => (line, "\n"),
            None => (line, ""),
        };
        if line.width() <= columns || line.contains("metal-candle ") {
            wrapped.push_str(line);
        } else {
            let indent = " ".repeat(hanging(line, columns));
            let options = textwrap::Options::new(columns)
                .subsequent_indent(&indent)
                .break_words(false)
                .word_separator(textwrap::WordSeparator::AsciiSpace)
                .word_splitter(textwrap::WordSplitter::NoHyphenation)
                .wrap_algorithm(textwrap::WrapAlgorithm::FirstFit);
            let whole = with_whole_numbers(line);
            wrapped.push_str(&textwrap::fill(&whole, options).replace(NO_BREAK, " "));
        }
        wrapped.push_str(end);
    }
    wrapped
}

/// A space that is none to break at. Texts that have it for themselves get spaces.
const NO_BREAK: char = '\u{a0}';

/// A line whose numbers, in groups of three digits, have no space to break at.
fn with_whole_numbers(line: &str) -> String {
    let characters: Vec<char> = line.chars().collect();
    let digit = |index: usize| characters.get(index).is_some_and(char::is_ascii_digit);
    let within = |index: usize| {
        index > 0 && digit(index - 1) && (index + 1..index + 4).all(digit) && !digit(index + 4)
    };
    let parts = characters.iter().enumerate();
    parts.map(|(index, c)| if *c == ' ' && within(index) { NO_BREAK } else { *c }).collect()
}

/// Where the second row of a line begins: where the line does, or the value of a table's row, which two
/// spaces part from its name.
fn hanging(line: &str, columns: usize) -> usize {
    let start = line.len() - line.trim_start_matches(' ').len();
    let rest = line.get(start..).unwrap_or_default();
    let value = rest.find("  ").map(|name| {
        let gap = rest.get(name..).unwrap_or_default();
        let spaces = gap.len() - gap.trim_start_matches(' ').len();
        start + rest.get(..name).unwrap_or_default().width() + spaces
    });
    value.filter(|value| *value <= columns / 2).unwrap_or_else(|| start.min(columns / 2))
}

/// Wraps a text that comes in pieces, whose words may be parted between them.
#[derive(Debug)]
pub struct Flow {
    columns: Option<usize>,
    column: usize,
    spaces: usize,
    word: String,
}

impl Flow {
    /// For a text whose first character stands in the first column.
    pub fn new(columns: Option<usize>) -> Self {
        Self { columns, column: 0, spaces: 0, word: String::new() }
    }

    /// Takes a piece of the text, and gives what can be written of it and of those before.
    pub fn push(&mut self, piece: &str) -> String {
        let Some(columns) = self.columns else { return piece.into() };
        let mut text = String::new();
        for c in piece.chars() {
            match c {
                '\n' => {
                    self.put_word(columns, &mut text);
                    text.push('\n');
                    (self.column, self.spaces) = (0, 0);
                }
                ' ' => {
                    self.put_word(columns, &mut text);
                    self.spaces += 1;
                }
                // Scripts whose characters are wide have no spaces, and may break anywhere.
                _ if c.width() == Some(2) => {
                    self.put_word(columns, &mut text);
                    self.word.push(c);
                    self.put_word(columns, &mut text);
                }
                _ => {
                    self.word.push(c);
                    // This will not fit in one row anyway.
                    if self.word.width() >= columns {
                        self.put_word(columns, &mut text);
                    }
                }
            }
        }
        text
    }

    /// What is left at the end.
    pub fn finish(&mut self) -> String {
        let mut text = String::new();
        if let Some(columns) = self.columns {
            self.put_word(columns, &mut text);
        }
        text
    }

    fn put_word(&mut self, columns: usize, text: &mut String) {
        if self.word.is_empty() {
            return;
        }
        let width = self.word.width();
        if self.column > 0 && self.column + self.spaces + width > columns {
            text.push('\n');
            self.column = 0;
        } else {
            text.extend(std::iter::repeat_n(' ', self.spaces));
            self.column += self.spaces;
        }
        text.push_str(&self.word);
        self.column += width;
        self.spaces = 0;
        self.word.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PROSE: &str = "This model has read plain statements of facts, never a question in a chat, \
                         and LoRA now teaches it to answer, with conversations about some of them.";

    #[test]
    fn words_stay_whole_at_every_width() {
        for columns in [20, 40, 60, 80] {
            let wrapped = wrap(PROSE, Some(columns));
            assert!(wrapped.lines().all(|line| line.width() <= columns), "{wrapped}");
            assert_eq!(wrapped.split_whitespace().collect::<Vec<_>>().join(" "), PROSE);
        }
        assert_eq!(wrap(PROSE, None), PROSE);
        let command =
            "Next: metal-candle chat --adapter some/very/long/path --model another/long/path";
        assert_eq!(wrap(command, Some(30)), command);
    }

    #[test]
    fn what_continues_a_line_stands_under_it() {
        let row =
            "LoRA        rank 8, on q_proj, k_proj, v_proj\n  - a list's item that is longer\n";
        assert_eq!(
            wrap(row, Some(28)),
            "LoRA        rank 8, on\n            q_proj, k_proj,\n            v_proj\n  \
             - a list's item that is\n  longer\n"
        );
    }

    #[test]
    fn numbers_stay_whole() {
        assert_eq!(wrap("about 12 345 678 weights", Some(20)), "about 12 345 678\nweights");
        assert_eq!(wrap("twenty columns 9 619 of", Some(20)), "twenty columns 9 619\nof");
        assert_eq!(wrap("eighteen columns 9 619 of", Some(20)), "eighteen columns\n9 619 of");
    }

    #[test]
    fn pieces_make_the_same_rows_wherever_they_are_cut() {
        let text = format!("{PROSE}\n\n    code  stays\n日本語の文章はどこでも折り返せる {PROSE}");
        let whole = |columns| {
            let mut flow = Flow::new(columns);
            flow.push(&text) + &flow.finish()
        };
        assert_eq!(whole(None), text);
        let rows = whole(Some(24));
        assert!(rows.lines().all(|line| line.width() <= 24), "{rows}");
        assert!(rows.contains("\n\n    code  stays\n"), "{rows}");
        let words = |text: &str| text.split_whitespace().collect::<String>();
        assert_eq!(words(&rows), words(&text));
        for size in [1, 2, 3, 7] {
            let mut flow = Flow::new(Some(24));
            let characters: Vec<char> = text.chars().collect();
            let mut found: String = characters
                .chunks(size)
                .map(|piece| flow.push(&piece.iter().collect::<String>()))
                .collect();
            found += &flow.finish();
            assert_eq!(found, rows, "{size}");
        }
        // A word that is longer than a row doesn't wait for its end.
        let mut flow = Flow::new(Some(20));
        assert!(!flow.push(&"x".repeat(30)).is_empty());
    }
}
