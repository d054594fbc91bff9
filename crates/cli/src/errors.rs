//! How errors are told, and which exit code they have.

use crate::output::StdoutClosed;
use crate::settings::cut;
use std::ffi::OsString;
use std::fmt;
use std::path::Path;

/// 0, as programs whose reader has left.
pub const SUCCESS: u8 = 0;
/// What was asked for failed, as it may by a flag that only the model or the data show to be wrong.
pub const FAILURE: u8 = 1;
/// What was asked for makes no sense: an unknown flag or key, a value out of its range.
pub const USAGE: u8 = 2;
/// Ended by Ctrl-C, SIGTERM or SIGHUP.
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

/// That a path is a text, where a file of settings has to name it.
pub fn check_name(key: &str, path: &Path) -> anyhow::Result<()> {
    match path.to_str() {
        Some(_) => Ok(()),
        None => Err(usage(format!(
            "{key}: is {}, which is no UTF-8, so the settings that a run keeps can't name it; choose another",
            cut(&path.to_string_lossy())
        ))),
    }
}

/// What is wrong with an argument that is no UTF-8, as a path may be where it isn't the name of something on the hub too.
/// It belongs to the option before it if that takes a value.
pub fn no_text(
    arguments: impl Iterator<Item = OsString>,
    takes_value: impl Fn(&str) -> bool,
) -> Option<String> {
    let mut before = None;
    for argument in arguments {
        match argument.to_str() {
            Some(text) => before = Some(text.to_string()),
            None => {
                let shown = argument.to_string_lossy();
                // As one word, `--data=...`, it has its option's name in it.
                let named = shown.split_once('=').filter(|_| shown.starts_with('-'));
                let (subject, value) = match (named, &before) {
                    (Some((option, value)), _) => (option, value),
                    (None, Some(option)) if takes_value(option) => (option.as_str(), &*shown),
                    _ => ("argument", &*shown),
                };
                return Some(format!(
                    "{subject}: is {}, which is no UTF-8; expected a text, or a file whose name is one",
                    cut(value)
                ));
            }
        }
    }
    None
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
        let cause = match cause.downcast_ref::<candle_core::Error>() {
            Some(error) => metal_candle::tensor_message(error),
            None => cause.to_string(),
        };
        let cause = metal_candle::readable(&cause);
        if text.is_empty() {
            text = cause.into_owned();
        } else if !text.contains(&*cause) {
            text = format!("{text}: {cause}");
        }
    }
    // As this project, CUDA, Candle's allocation on Metal, and Metal for work under way put it.
    const OUT_OF_MEMORY: [&str; 4] = [
        "is out of memory",
        "CUDA_ERROR_OUT_OF_MEMORY",
        "Failed to create metal resource: Buffer",
        "kIOGPUCommandBufferCallbackErrorOutOfMemory",
    ];
    if OUT_OF_MEMORY.iter().any(|message| text.contains(message)) {
        text += "; a smaller --batch-size or --max-seq-length, --gradient-checkpointing, or \
                 --dtype bf16 take less";
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(unix)]
    #[test]
    fn an_argument_that_is_no_text_is_told_with_its_option() {
        use std::os::unix::ffi::OsStringExt;
        let told = |words: &[&[u8]]| {
            let words = words.iter().map(|word| OsString::from_vec(word.to_vec()));
            no_text(words, |option| option == "--data").unwrap()
        };
        let found = told(&[b"train", b"-m", b"base", b"--data", b"bad\xff.jsonl"]);
        assert!(found.starts_with("--data: is bad\u{fffd}.jsonl, which is no UTF-8"), "{found}");
        assert!(told(&[b"train", b"--data=\xff"]).starts_with("--data: is \u{fffd}, which"));
        assert!(told(&[b"\xff"]).starts_with("argument: is \u{fffd}, which"));
        assert!(told(&[b"inspect", b"--json", b"\xff"]).starts_with("argument: is \u{fffd}"));
        assert!(told(&[b"data", b"--data", b"a", b"\xff"]).starts_with("argument: is \u{fffd}"));
        assert_eq!(no_text(["train", "-m"].map(OsString::from).into_iter(), |_| true), None);
    }

    #[test]
    fn causes_are_told_once() {
        let inner = std::io::Error::other("no space left");
        let error = metal_candle::Error::Io { path: "a/b".into(), source: inner };
        let error = anyhow::Error::new(error).context("cannot save");
        assert_eq!(describe(&error), "cannot save: a/b: no space left");
        assert_eq!(exit_code(&error), FAILURE);
        assert_eq!(exit_code(&usage("x")), USAGE);
    }

    #[test]
    fn an_error_of_candle_is_told_without_its_backtrace() {
        let error = || candle_core::Error::WithBacktrace {
            inner: Box::new(candle_core::Error::Msg("CUDA device 0 is out of memory".into())),
            backtrace: Box::new(std::backtrace::Backtrace::force_capture()),
        };
        for error in
            [anyhow::Error::new(error()), anyhow::Error::new(metal_candle::Error::from(error()))]
        {
            let told = describe(&error.context("step 3"));
            assert!(
                told.starts_with("step 3: CUDA device 0 is out of memory; a smaller"),
                "{told}"
            );
            assert_eq!(told.lines().count(), 1, "{told}");
        }
    }

    #[test]
    fn want_of_memory_comes_with_advice() {
        for message in [
            "metal-candle-kernels: CUDA device 0 is out of memory: 5 MiB were asked for",
            "metal-candle-kernels: the Metal device is out of memory: 5 MiB were asked for",
            "Failed to create metal resource: Buffer",
            "Command buffer had following error: Insufficient Memory \
             (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)",
        ] {
            let described = describe(&anyhow::anyhow!(message));
            assert!(described.starts_with(message));
            assert!(described.contains("a smaller --batch-size"), "{described}");
        }
        assert_eq!(describe(&anyhow::anyhow!("no space left")), "no space left");
    }
}
