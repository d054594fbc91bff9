//! The `metal-candle` command.

mod commands;
mod config;
mod errors;
mod interrupt;
mod logging;
mod models;
mod output;
mod progress;
mod prompts;
mod sampling;
mod settings;
mod training;

use clap::{Parser, Subcommand};
use output::Terminal;
use std::process::ExitCode;

/// Fine-tune language models with LoRA and run them.
#[derive(Debug, Parser)]
#[command(
    name = "metal-candle",
    version,
    propagate_version = true,
    max_term_width = 100,
    after_help = "Exit codes: 0 done, 1 failed, 2 wrong usage, 130 ended by Ctrl-C.\n\
                  METAL_CANDLE_LOG sets what is logged, such as metal_candle=debug."
)]
struct Cli {
    /// Say more on stderr; -vv says still more
    #[arg(short, long, global = true, action = clap::ArgAction::Count, help_heading = "Messages")]
    verbose: u8,
    /// Say only errors on stderr, and show no progress
    #[arg(short, long, global = true, help_heading = "Messages")]
    quiet: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Fine-tune a model on a file or folder of examples
    Train(Box<commands::train::Arguments>),
    /// Write a text
    Generate(commands::generate::Arguments),
    /// Talk with a model
    Chat(commands::chat::Arguments),
    /// Merge an adapter into its model
    Fuse(commands::fuse::Arguments),
    /// Measure loss and perplexity on data
    Evaluate(commands::evaluate::Arguments),
    /// Show what a model, an adapter or a checkpoint is
    Inspect(commands::inspect::Arguments),
    /// Time operations, training and generation on this machine
    Bench(commands::bench::Arguments),
    /// Fine-tune a small model that comes with this program
    Demo(commands::demo::Arguments),
    /// Write a shell's completions
    Completions(commands::completions::Arguments),
}

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            // Help into a closed pipe is nobody's mistake.
            let _ = error.print();
            return ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(errors::USAGE));
        }
    };
    match run(cli) {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            let code = errors::exit_code(&error);
            if code != errors::SUCCESS {
                output::say(format!("error: {}", errors::describe(&error)));
            }
            ExitCode::from(code)
        }
    }
}

fn run(cli: Cli) -> anyhow::Result<u8> {
    logging::start(cli.verbose, cli.quiet)?;
    let terminal = |json| Terminal { quiet: cli.quiet, json };
    match cli.command {
        Command::Train(arguments) => commands::train::run(*arguments, terminal),
        Command::Generate(arguments) => commands::generate::run(arguments, terminal),
        Command::Chat(arguments) => commands::chat::run(arguments, terminal(false)),
        Command::Fuse(arguments) => commands::fuse::run(arguments, terminal),
        Command::Evaluate(arguments) => commands::evaluate::run(arguments, terminal),
        Command::Inspect(arguments) => commands::inspect::run(arguments, terminal),
        Command::Bench(arguments) => commands::bench::run(arguments, terminal),
        Command::Demo(arguments) => commands::demo::run(arguments, terminal),
        Command::Completions(arguments) => {
            commands::completions::run(arguments, <Cli as clap::CommandFactory>::command())
        }
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn flags_are_consistent() {
        <super::Cli as clap::CommandFactory>::command().debug_assert();
    }
}
