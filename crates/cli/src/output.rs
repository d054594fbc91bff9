//! What goes to the terminal: results on stdout, everything said along the way on stderr. All of it passes through
//! here, so that what comes from a file or a model cannot order a terminal about.

use crate::processes;
use crate::visible::{for_stderr, for_stdout};
use crate::wrap::{stderr_columns, stdout_columns, wrap};
use indicatif::{HumanCount, MultiProgress};
use serde::Serialize;
use std::fmt;
use std::io::{IsTerminal, Write};
use std::path::Path;
use std::sync::LazyLock;

/// Every progress bar belongs to this, so that lines on stderr can step around them.
pub static BARS: LazyLock<MultiProgress> = LazyLock::new(MultiProgress::new);

/// How a command talks.
#[derive(Debug, Clone, Copy)]
pub struct Terminal {
    /// Say nothing along the way.
    pub quiet: bool,
    /// Results are one JSON object.
    pub json: bool,
}

impl Terminal {
    /// Whether progress bars can be drawn.
    pub fn draws_bars(self) -> bool {
        !self.quiet && std::io::stderr().is_terminal()
    }

    /// Says something on stderr, unless it is to be quiet.
    pub fn note(self, text: impl fmt::Display) {
        if !self.quiet {
            say(text);
        }
    }
}

/// A text on stderr, at the terminal's width, above the progress bars. There is nobody to tell when
/// stderr is closed.
pub fn say(text: impl fmt::Display) {
    let text = wrap(&format!("{}{text}", processes::prefix()), stderr_columns());
    BARS.suspend(|| {
        let _ = writeln!(std::io::stderr().lock(), "{}", for_stderr(&text));
    });
}

/// The reader of stdout is gone, as in `| head`; nothing is wrong.
#[derive(Debug)]
pub struct StdoutClosed;

impl fmt::Display for StdoutClosed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("nobody reads the output any more")
    }
}

impl std::error::Error for StdoutClosed {}

/// Writes to stdout at once; without control characters if that is a terminal.
pub fn write(text: &str) -> anyhow::Result<()> {
    write_as_it_is(&for_stdout(text))
}

/// Writes to stdout at once what may hold this program's own control characters, and no others.
pub fn write_as_it_is(text: &str) -> anyhow::Result<()> {
    BARS.suspend(|| {
        let mut stdout = std::io::stdout().lock();
        match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
            Ok(()) => Ok(()),
            Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => {
                Err(StdoutClosed.into())
            }
            Err(error) => Err(anyhow::Error::new(error).context("cannot write to stdout")),
        }
    })
}

/// Writes a text to stdout, at the terminal's width.
pub fn prose(text: &str) -> anyhow::Result<()> {
    write(&wrap(text, stdout_columns()))
}

/// Writes a line to stdout, at the terminal's width.
pub fn line(text: impl fmt::Display) -> anyhow::Result<()> {
    prose(&format!("{text}\n"))
}

/// Writes one JSON object to stdout, on a terminal too as it is: JSON escapes what orders one about, but for characters
/// beyond ASCII, of which it is to give all.
pub fn json(value: &impl Serialize) -> anyhow::Result<()> {
    write_as_it_is(&(serde_json::to_string_pretty(value)? + "\n"))
}

/// A path as it stands in a report: JSON is UTF-8, which the name of a file need not be.
pub fn path(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

/// Rows of a name and a value, the values in one column.
pub fn table(rows: &[(&str, String)]) -> String {
    let width = rows.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    let indent = format!("\n{:width$}  ", "");
    rows.iter()
        .map(|(name, value)| format!("{name:width$}  {}\n", value.replace('\n', &indent)))
        .collect()
}

/// A number with its digits in groups of three.
pub fn grouped(number: u64) -> String {
    HumanCount(number).to_string().replace(',', " ")
}

/// A size in bytes as a person reads it.
pub fn bytes(count: u64) -> String {
    let count = count as f64;
    for (unit, name) in [(1u64 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")] {
        if count >= unit as f64 {
            return format!("{:.1} {name}", count / unit as f64);
        }
    }
    format!("{count} bytes")
}

/// `count` of something, in the singular or the plural.
pub fn plural(count: u64, one: &str) -> String {
    let ending = match count {
        1 => "",
        _ if one.ends_with("ch") || one.ends_with('s') => "es",
        _ => "s",
    };
    format!("{} {one}{ending}", grouped(count))
}

/// [`plural`], and that they are: `1 record is`, `2 records are`.
pub fn are(count: u64, one: &str) -> String {
    format!("{} {}", plural(count, one), if count == 1 { "is" } else { "are" })
}

/// Something a person must read is written with a quote around it where a shell would need one.
pub fn shell_word(text: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=:,@+~".contains(c);
    if !text.is_empty() && text.chars().all(plain) {
        text.to_string()
    } else {
        format!("'{}'", text.replace('\'', r"'\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_read_easily() {
        assert_eq!(grouped(0), "0");
        assert_eq!(grouped(999), "999");
        assert_eq!(grouped(1_234_567), "1 234 567");
        assert_eq!(bytes(1536), "1.5 KiB");
        assert_eq!(bytes(12), "12 bytes");
        assert_eq!(plural(1, "step"), "1 step");
        assert_eq!(plural(2, "step"), "2 steps");
        assert_eq!(plural(2, "process"), "2 processes");
        assert_eq!(
            (plural(1, "batch"), plural(2, "batch")),
            ("1 batch".into(), "2 batches".into())
        );
    }

    #[test]
    fn words_are_quoted_for_the_shell_where_needed() {
        assert_eq!(shell_word("runs/a-1"), "runs/a-1");
        assert_eq!(shell_word("my run"), "'my run'");
        assert_eq!(shell_word("it's"), r"'it'\''s'");
    }
}
