//! Log lines on stderr, which step around progress bars.

use crate::output::BARS;
use crate::processes;
use crate::visible::for_stderr;
use std::io::{self, Write};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::MakeWriter;

/// The variable that says what is logged, such as `metal_candle=debug`; it wins over `-v` and `-q`.
const VARIABLE: &str = "METAL_CANDLE_LOG";

struct AboveBars;

impl<'a> MakeWriter<'a> for AboveBars {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        Self
    }
}

impl Write for AboveBars {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        // A line comes whole.
        let shown = format!("{}{}", processes::prefix(), String::from_utf8_lossy(text));
        BARS.suspend(|| io::stderr().lock().write_all(for_stderr(&shown).as_bytes()))?;
        Ok(text.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().lock().flush()
    }
}

/// Starts logging: warnings by default, only errors when `quiet`, more with each `-v`.
pub fn start(verbose: u8, quiet: bool) -> anyhow::Result<()> {
    let default = match (quiet, verbose) {
        (true, _) => "error",
        (_, 0) => "warn",
        (_, 1) => "warn,metal_candle=info,metal_candle_kernels=info",
        (_, 2) => "info,metal_candle=debug,metal_candle_kernels=debug",
        _ => "trace",
    };
    let filter = match std::env::var(VARIABLE) {
        Ok(text) if !text.trim().is_empty() => EnvFilter::try_new(&text).map_err(|error| {
            crate::errors::usage(format!(
                "{VARIABLE} is {text:?}, which is no filter ({error}); an example is metal_candle=debug"
            ))
        })?,
        _ => EnvFilter::new(default),
    };
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(AboveBars)
        .with_ansi(false)
        .without_time()
        .with_target(false)
        .init();
    Ok(())
}
