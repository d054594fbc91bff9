//! How errors are told, and which exit code they have.

use crate::output::StdoutClosed;
use std::fmt;

/// 0, as programs whose reader has left.
pub const SUCCESS: u8 = 0;
/// What was asked for failed.
pub const FAILURE: u8 = 1;
/// What was asked for makes no sense: an unknown flag or key, a value out of its range.
pub const USAGE: u8 = 2;
/// Ended by Ctrl-C.
pub const INTERRUPTED: u8 = 130;

/// A mistake in the flags or in the configuration file.
#[derive(Debug)]
pub struct Usage(pub String);

impl fmt::Display for Usage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Usage {}

/// A [`Usage`] error, for `?`.
pub fn usage(message: impl fmt::Display) -> anyhow::Error {
    Usage(message.to_string()).into()
}

/// The exit code of an error.
pub fn exit_code(error: &anyhow::Error) -> u8 {
    if error.is::<StdoutClosed>() {
        SUCCESS
    } else if error.is::<Usage>() {
        USAGE
    } else {
        FAILURE
    }
}

/// The error and its causes in one line. A cause that the text before has told already is left
/// out.
pub fn describe(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain() {
        let cause = cause.to_string();
        if text.is_empty() {
            text = cause;
        } else if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    if text.contains("is out of memory") || text.contains("CUDA_ERROR_OUT_OF_MEMORY") {
        text += "; a smaller --batch-size or --max-seq-length, --gradient-checkpointing, or \
                 --dtype bf16 take less";
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn causes_are_told_once() {
        let inner = std::io::Error::other("no space left");
        let error = metal_candle::Error::Io { path: "a/b".into(), source: inner };
        let error = anyhow::Error::new(error).context("cannot save");
        assert_eq!(describe(&error), "cannot save: a/b: no space left");
        assert_eq!(exit_code(&error), FAILURE);
        assert_eq!(exit_code(&usage("x")), USAGE);
    }
}
