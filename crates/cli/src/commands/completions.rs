//! `completions`: a shell's completions on stdout.

use crate::output;
use clap::Args;
use clap_complete::Shell;

/// What the command is told.
#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  metal-candle completions bash > ~/.local/share/bash-completion/completions/metal-candle"
)]
pub struct Arguments {
    /// The shell
    shell: Shell,
}

/// Writes the completions.
pub fn run(arguments: Arguments, mut command: clap::Command) -> anyhow::Result<u8> {
    let mut text = Vec::new();
    clap_complete::generate(arguments.shell, &mut command, "metal-candle", &mut text);
    output::write(&String::from_utf8(text)?)?;
    Ok(crate::errors::SUCCESS)
}
