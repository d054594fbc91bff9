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
#[path = "../tests/common/documents.rs"]
mod documents;

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn flags_are_consistent() {
        Cli::command().debug_assert();
    }

    fn parse(arguments: &[String]) -> Result<(), clap::Error> {
        let program = String::from("metal-candle");
        match Cli::try_parse_from(std::iter::once(&program).chain(arguments)) {
            Err(error) if error.use_stderr() => Err(error),
            _ => Ok(()),
        }
    }

    #[test]
    fn what_documents_and_workflows_call_is_there() {
        let found = documents::all();
        for command in &found {
            if let Err(error) = parse(&command.arguments) {
                panic!("{}: {}\n{error}", command.place, command.arguments.join(" "));
            }
        }
        for place in ["README.md", "docs/metal.md", "BENCHMARKS.md", ".github/workflows/ci.yml"] {
            assert!(found.iter().any(|command| command.place == place), "{place}: nothing found");
        }
        assert!(found.len() >= 20, "{} commands found", found.len());
    }

    #[test]
    fn the_examples_in_help_texts_are_commands() {
        let mut count = 0;
        for command in Cli::command().get_subcommands() {
            let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            for example in documents::commands(command.get_name(), &help, false) {
                if let Err(error) = parse(&example.arguments) {
                    panic!("help of {}: {:?}\n{error}", command.get_name(), example.arguments);
                }
                count += 1;
            }
        }
        assert!(count >= 10, "{count} examples found");
    }

    #[test]
    fn commands_are_found_where_a_reader_sees_them() {
        let markdown = "`metal-candle bench --only\nops` times; metal-candle 1.x did not.\n\n\
                        ```sh\nA=b target/release/metal-candle demo --a \\\n  --b | tee x\n```\n\
                        metal-candle is a program.\n\n    cargo run --release -- train -c 'a b'\n    \
                        cargo run --example x -- no\n";
        let found: Vec<String> = documents::commands("x", markdown, true)
            .iter()
            .map(|command| command.arguments.join(" "))
            .collect();
        assert_eq!(found, ["demo --a --b", "train -c a b", "bench --only ops"]);
        let workflow = "      - run: target/release/metal-candle demo --device metal && true\n";
        let [found] = &documents::commands("x", workflow, false)[..] else { panic!() };
        assert_eq!(found.arguments, ["demo", "--device", "metal"]);
    }
}
