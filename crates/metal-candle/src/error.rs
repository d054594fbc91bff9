//! What can go wrong, as a type a caller can match on.

use crate::files::cut_middle;
use std::borrow::Cow;
use std::path::{Path, PathBuf};

/// The result of anything in this crate that can fail.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Every error names the file, the key or the option, what was found and what was expected.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The operating system refused to read or write a path.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A file's content is not what its format or the model asks for.
    #[error("{}: {}", path.display(), readable(message))]
    File {
        /// The file.
        path: PathBuf,
        /// The key, what was found, and what was expected.
        message: String,
    },
    /// A line of a data file cannot be used.
    #[error("{}:{line}: {}", path.display(), readable(message))]
    Record {
        /// The data file.
        path: PathBuf,
        /// The line, counted from 1.
        line: usize,
        /// What is wrong with it.
        message: String,
    },
    /// An option has a value that cannot work.
    #[error("{}: {}", readable(option), readable(message))]
    Option {
        /// The option's name as the user writes it.
        option: String,
        /// What was found and what was expected.
        message: String,
    },
    /// Something valid that this library does not do; the message says what it does instead.
    #[error("not supported: {}", readable(.0))]
    Unsupported(String),
    /// A chat template failed to parse or to render.
    #[error("chat template: {}", readable(.0))]
    Template(String),
    /// The tokenizer failed on a text.
    #[error("tokenizer: {}", readable(.0))]
    Tokenizer(String),
    /// A model could not be had from the Hugging Face hub.
    #[error("{repository}: {}", readable(message))]
    Hub {
        /// The repository asked for.
        repository: String,
        /// What was missing and where it was looked for.
        message: String,
        /// What it comes down to.
        fault: HubFault,
    },
    /// Training stopped because losses or gradients kept being NaN or infinite.
    #[error("training diverged: {}", readable(.0))]
    Diverged(String),
    /// One of several processes that train together is lost, late, or does something else.
    #[error("rank {rank}: {}", readable(message))]
    Rank {
        /// Its number, from 0.
        rank: usize,
        /// What is wrong with it.
        message: String,
    },
    /// A tensor operation failed.
    #[error("{}", tensor_message(.0))]
    Tensor(#[from] candle_core::Error),
}

/// Why something could not be had from the Hugging Face hub.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum HubFault {
    /// There is no such repository, revision or file, or no access to it.
    NotFound,
    /// The hub cannot be reached, and what was downloaded before isn't it.
    Unreachable,
    /// What is there cannot be used, or not be kept here.
    Unusable,
}

/// A message at a length that can be read, its middle left out: files may hold names and values of any length.
pub fn readable(message: &str) -> Cow<'_, str> {
    const MOST: usize = 1500;
    cut_middle(message, MOST)
}

/// What a tensor operation's error says, in one line and without the backtrace that Candle's message
/// has in its middle where `RUST_BACKTRACE` is set.
pub fn tensor_message(error: &candle_core::Error) -> String {
    use candle_core::Error as Tensor;
    match error {
        Tensor::WithBacktrace { inner, .. } => tensor_message(inner),
        Tensor::Context { inner, context } => format!("{context}: {}", tensor_message(inner)),
        Tensor::WithPath { inner, path } => {
            format!("{}: {}", path.display(), tensor_message(inner))
        }
        Tensor::WrappedContext { wrapped, context } => {
            let wrapped = match wrapped.downcast_ref::<Tensor>() {
                Some(inner) => tensor_message(inner),
                None => wrapped.to_string(),
            };
            format!("{context}: {wrapped}")
        }
        // What wraps an error's text has its backtrace as text.
        other => without_backtrace(&other.to_string()),
    }
}

/// A text without the lines of a backtrace, each `<number>: <function>` or `at <file>`.
fn without_backtrace(text: &str) -> String {
    let numbered = |line: &str| {
        line.starts_with(' ')
            && line.trim_start().split_once(": ").is_some_and(|(number, _)| {
                !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())
            })
    };
    let place = |line: &str| line.starts_with("   ") && line.trim_start().starts_with("at ");
    let kept: Vec<&str> =
        text.lines().filter(|line| !numbered(line) && !place(line)).map(str::trim_end).collect();
    kept.join("\n").trim_end().to_string()
}

impl Error {
    /// An [`Error::Io`] about `path`, for `map_err`.
    pub fn io(path: impl AsRef<Path>) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.as_ref().to_path_buf();
        move |source| Self::Io { path, source }
    }

    /// An [`Error::File`] about `path`.
    pub fn file(path: impl AsRef<Path>, message: impl Into<String>) -> Self {
        Self::File { path: path.as_ref().to_path_buf(), message: message.into() }
    }

    /// An [`Error::Option`] about an option named `option`.
    pub fn option(option: impl Into<String>, message: impl Into<String>) -> Self {
        Self::Option { option: option.into(), message: message.into() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Error as Tensor;
    use std::backtrace::Backtrace;

    #[test]
    fn a_message_of_any_length_can_be_read() {
        let names = "ä".repeat(100_000);
        let told = Error::file("a", format!("has the key {names}; expected a number")).to_string();
        assert!(told.chars().count() < 1510, "{told}");
        assert!(told.starts_with("a: has the key ää"), "{told}");
        assert!(told.ends_with("ä; expected a number"), "{told}");
        assert!(Error::Unsupported(names.clone()).to_string().len() < 3100);
        assert!(Error::option(names, "short").to_string().ends_with("ä: short"));
    }

    #[test]
    fn a_tensor_error_is_told_without_its_backtrace() {
        let traced = |inner: Tensor| Tensor::WithBacktrace {
            inner: Box::new(inner),
            backtrace: Box::new(Backtrace::force_capture()),
        };
        let out_of_memory = || traced(Tensor::Msg("CUDA device 0 is out of memory".into()));
        assert!(out_of_memory().to_string().lines().count() > 3, "Candle tells the backtrace");
        let told = |error: Tensor| Error::from(error).to_string();
        assert_eq!(told(out_of_memory()), "CUDA device 0 is out of memory");
        assert_eq!(
            told(traced(out_of_memory().context("layer 3"))),
            "layer 3: CUDA device 0 is out of memory"
        );
        assert_eq!(told(Tensor::wrap(out_of_memory())), "CUDA device 0 is out of memory");
        assert_eq!(told(Tensor::Msg("shapes [2, 3]: at odds".into())), "shapes [2, 3]: at odds");
    }
}
