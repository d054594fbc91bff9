//! The `metal-candle` command.

mod batch;
mod bounds;
mod check;
mod colour;
mod commands;
mod datasets;
mod engine;
mod errors;
mod interrupt;
mod logging;
mod measured;
mod models;
mod output;
mod plan;
mod plot;
mod processes;
mod progress;
mod prompts;
mod remote;
mod run_folder;
mod sampling;
mod settings;
mod template;
mod thoughts;
mod training;
mod visible;
mod wrap;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{CommandFactory, Parser, Subcommand};
use output::Terminal;
use std::ffi::{OsStr, OsString};
use std::io::Write;
use std::process::ExitCode;

/// Fine-tune language models with LoRA and run them.
#[derive(Debug, Parser)]
#[command(
    name = "metal-candle",
    version,
    propagate_version = true,
    max_term_width = 100,
    after_help = "Exit codes: 0 done, 1 failed (as it may by a flag that only the model or the data show to be wrong), \
                  2 wrong usage, 130 ended by Ctrl-C, SIGTERM or SIGHUP, after which `serve` exits with 0.\n\
                  METAL_CANDLE_LOG sets what is logged, such as metal_candle=debug."
)]
struct Cli {
    /// Say more on stderr; -vv says still more
    #[arg(short, long, global = true, action = clap::ArgAction::Count, help_heading = "Messages")]
    verbose: u8,
    /// Say only errors on stderr, and where a run isn't as its file says; show no progress
    #[arg(short, long, global = true, help_heading = "Messages")]
    quiet: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Fine-tune a model on a file or folder of examples
    #[command(alias = "lora", alias = "sft", alias = "finetune")]
    Train(Box<commands::train::Arguments>),
    /// Write a text
    Generate(commands::generate::Arguments),
    /// Talk with a model
    Chat(Box<commands::chat::Arguments>),
    /// Answer OpenAI's clients, fine-tune for them, and show a page to do both in a browser
    Serve(Box<commands::serve::Arguments>),
    /// Fine-tune on a server: start jobs there, follow, steer and fetch them
    Jobs(Box<commands::jobs::Arguments>),
    /// Make, show and remove the keys with which a server is asked
    Keys(commands::keys::Arguments),
    /// Merge an adapter into its model
    #[command(alias = "merge")]
    Fuse(commands::fuse::Arguments),
    /// Write an adapter's files as another program has them, or check an export against its source
    Convert(commands::convert::Arguments),
    /// Measure loss and perplexity on data
    #[command(alias = "eval")]
    Evaluate(commands::evaluate::Arguments),
    /// Write what a model finds likeliest in place of each token of data, to distil another from it
    Logprobs(commands::logprobs::Arguments),
    /// Show what data are: records, lengths, duplicates, and one record as it is learned
    #[command(alias = "dataset")]
    Data(commands::data::Arguments),
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
    interrupt::ignore_file_size();
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            match explain(&error) {
                Some(message) => output::say(format!("error: {message}")),
                None => {
                    let printed = error.print().and_then(|()| std::io::stdout().flush());
                    if let Err(failed) = printed
                        && !error.use_stderr()
                        // Help into a closed pipe is nobody's mistake.
                        && failed.kind() != std::io::ErrorKind::BrokenPipe
                    {
                        output::say(format!("error: cannot write to stdout: {failed}"));
                        return ExitCode::from(errors::FAILURE);
                    }
                }
            }
            return ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(errors::USAGE));
        }
    };
    match run(cli) {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            interrupt::wait_if_ending();
            let code = errors::exit_code(&error);
            if code != errors::SUCCESS {
                output::say(format!("error: {}", errors::describe(&error)));
            }
            ExitCode::from(code)
        }
    }
}

/// Flags of other programs, and what there is instead. Those that mean the same as a flag here are its
/// aliases.
const ELSEWHERE: &[(&str, &str)] = &[
    ("--do-sample", "tokens are drawn unless --temperature is 0"),
    ("--export-gguf", "--to gguf-f16 writes a GGUF file, --output model.gguf says where"),
    ("--load-in-4bit", "--quantize nf4 holds the weights in 4 bits"),
    ("--load-in-8bit", "--quantize int8 or q8_0 holds the weights in 8 bits"),
    ("--max-kv-size", "the cache grows with the text; leave it out"),
    ("--max-length", "--max-tokens counts the new tokens, --max-seq-length those of an example"),
    ("--num-beams", "beam search is not supported; --temperature 0 takes the likeliest token"),
    ("--trust-remote-code", "no code of a model is ever run; leave it out"),
    ("--upload-repo", "nothing is uploaded; leave it out"),
];

/// What is wrong with the arguments, where clap's message would be Rust's or it can't know the word.
fn explain(error: &clap::Error) -> Option<String> {
    let context = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.as_str()),
        _ => None,
    };
    if error.kind() == ErrorKind::InvalidUtf8 {
        let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
        let takes_value = |option: &str| takes_value(&arguments, option);
        return errors::no_text(arguments.iter().cloned(), takes_value);
    }
    let flag = context(ContextKind::InvalidArg)?;
    match error.kind() {
        ErrorKind::ValueValidation => {
            let value = context(ContextKind::InvalidValue)?;
            let kind = flag.split(['<', '>']).nth(1).unwrap_or_default();
            let name = flag.split([' ', '[', '=']).next().unwrap_or(flag);
            let own = std::error::Error::source(error).map(ToString::to_string);
            // Those of Rust's types are none of this program's.
            let expected = match own.filter(|own| own.contains('`') || own.contains(" is not in "))
            {
                Some(own) => format!("but {}", settings::cut(&own)),
                None => format!("expected {}", settings::of_kind(kind)),
            };
            Some(format!("{name}: is {}, {expected}", settings::cut(value)))
        }
        ErrorKind::UnknownArgument => {
            let name = flag.split('=').next().unwrap_or(flag).replace('_', "-");
            if let Some((_, instead)) = ELSEWHERE.iter().find(|(other, _)| *other == name) {
                return Some(format!("{flag}: {instead}"));
            }
            let key = name.trim_start_matches('-').replace('-', "_");
            if settings::has_no_flag(&key) {
                return Some(format!(
                    "{flag}: is no flag; `{key}` is a key of train's file, see --config"
                ));
            }
            // Not the name of another program's, which clap may find closer.
            let close = context(ContextKind::SuggestedArg)?.replace('_', "-");
            Some(format!(
                "unknown flag {}; did you mean {close}? --help lists all of them",
                settings::cut(flag)
            ))
        }
        _ => None,
    }
}

/// Whether `option`, as it is written, takes a value in the command that the arguments name.
fn takes_value(arguments: &[impl AsRef<OsStr>], option: &str) -> bool {
    let root = Cli::command();
    let (mut command, mut known) = (&root, Vec::new());
    known.extend(root.get_arguments());
    for word in arguments {
        if let Some(named) = command.find_subcommand(word.as_ref()) {
            known.extend(named.get_arguments());
            command = named;
        }
    }
    let is_meant = |argument: &clap::Arg| match option.strip_prefix("--") {
        Some(name) => {
            let aliases = argument.get_all_aliases().unwrap_or_default();
            argument.get_long().into_iter().chain(aliases).any(|long| long == name)
        }
        // The last of several in a word.
        None => option.starts_with('-') && option.chars().last() == argument.get_short(),
    };
    known.into_iter().any(|argument| argument.get_action().takes_values() && is_meant(argument))
}

fn run(cli: Cli) -> anyhow::Result<u8> {
    logging::start(cli.verbose, cli.quiet)?;
    let terminal = |json| Terminal { quiet: cli.quiet, json };
    match cli.command {
        Command::Train(arguments) => commands::train::run(*arguments, terminal),
        Command::Generate(arguments) => commands::generate::run(arguments, terminal),
        Command::Chat(arguments) => commands::chat::run(*arguments, terminal(false)),
        Command::Serve(arguments) => commands::serve::run(*arguments, terminal(false)),
        Command::Jobs(arguments) => commands::jobs::run(*arguments, terminal),
        Command::Keys(arguments) => commands::keys::run(arguments, terminal),
        Command::Fuse(arguments) => commands::fuse::run(arguments, terminal),
        Command::Convert(arguments) => commands::convert::run(arguments, terminal),
        Command::Evaluate(arguments) => commands::evaluate::run(arguments, terminal),
        Command::Logprobs(arguments) => commands::logprobs::run(arguments, terminal(false)),
        Command::Data(arguments) => commands::data::run(arguments, terminal),
        Command::Inspect(arguments) => commands::inspect::run(arguments, terminal),
        Command::Bench(arguments) => commands::bench::run(arguments, terminal),
        Command::Demo(arguments) => commands::demo::run(arguments, terminal),
        Command::Completions(arguments) => commands::completions::run(arguments, Cli::command()),
    }
}

#[cfg(test)]
#[path = "../tests/integration/common/documents.rs"]
mod documents;

#[cfg(test)]
mod tests {
    use super::*;

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
    fn mistakes_in_flags_are_told_in_words() {
        let told = |line: &str| {
            let words: Vec<&str> = std::iter::once("metal-candle").chain(line.split(' ')).collect();
            explain(&Cli::try_parse_from(words).unwrap_err())
        };
        for (line, expected) in [
            ("train --rank many", "--rank: is many, expected a whole number"),
            ("train --epochs x", "--epochs: is x, expected a number"),
            ("train --packing=3", "--packing: is 3, expected true or false"),
            ("train --rank-pattern q", "--rank-pattern: is q, but `q` is not NAME=VALUE"),
            ("train --layers 0,x", "--layers: is x, expected whole numbers in a list"),
            ("generate -p x -n -3", "--max-tokens: is -3, expected a whole number"),
            ("generate --logit-bias 3", "--logit-bias: is 3, but `3` is not ID=X"),
            ("fuse -m x -a y -o z --export_gguf", "--export_gguf: --to gguf-f16 writes a GGUF"),
            (
                "train --learning_rat 1",
                "unknown flag --learning_rat; did you mean --learning-rate?",
            ),
            ("generate --max-kv-size 4", "--max-kv-size: the cache grows"),
            (
                "train --decay-rate 0.5",
                "--decay-rate: is no flag; `decay_rate` is a key of train's",
            ),
            (
                "train --gpus some",
                "--gpus: is some, but `some` is neither a number from 1 on nor `all`",
            ),
            (
                "chat --chat-template-kwargs {x",
                "--chat-template-kwargs: is {x, expected a JSON object such as {\"enable_thinking\": false}",
            ),
        ] {
            let found = told(line).unwrap_or_else(|| panic!("{line}"));
            assert!(found.starts_with(expected), "{line}: {found}");
        }
        let long = format!("train --rank {}", "9x".repeat(10_000));
        assert!(told(&long).unwrap().chars().count() < 120);
    }

    #[test]
    fn options_with_values_are_known_from_switches() {
        for (words, option, expected) in [
            (&["inspect"][..], "--revision", true),
            (&["inspect"], "--json", false),
            (&["bench"], "--json", true),
            (&["train"], "--adapter-path", true),
            (&["train"], "-qm", true),
            (&["train"], "-q", false),
            (&["jobs", "create"], "--suffix", true),
            (&["jobs", "create"], "--server", true),
            (&["inspect"], "model", false),
        ] {
            assert_eq!(takes_value(words, option), expected, "{words:?} {option}");
        }
    }

    #[test]
    fn fingers_find_the_flags_of_other_programs() {
        for line in [
            "train --train --model x --data y --iters 4 --mask-prompt --num-layers 8 --adapter-path z",
            "train -m x -d y --lora-rank 4 --lora-alpha 8 --lora-r 4 --num-epochs 1 --lr 1e-4",
            "train -m x -d y --num-train-epochs 1 --per-device-train-batch-size 1",
            "train -m x -d y --max_steps 5 --num_train_epochs 3 --optim paged_lion_32bit",
            "train --model_name_or_path x -d y --gradient_accumulation_steps 2 --bf16 True --packing true",
            "train -m x -d y --gradient-accumulation-steps 4 --max-steps 3 --eval_strategy steps",
            "train -m x -d y --output-dir z --logging-steps 1 --lr-scheduler-type cosine --warmup_ratio 0.1",
            "generate -m x -p y --temp 0 --max-new-tokens 3 --system-prompt z --adapter-path a",
            "serve -m x --tensor-parallel-size 2",
            "chat -m x --system-prompt y --temp 1",
            "bench --only train --grad-checkpoint",
            "fuse -m x --adapter-path a --save-path b",
            "lora -c x.yaml",
            "train -m x --dataset_name owner/name --dataset-config en --dataset_text_field body",
            "train -m x -d y --prompt-feature q --completion_feature a",
        ] {
            let words = std::iter::once("metal-candle").chain(line.split(' '));
            let expected_twice = line.contains("--lora-r 4");
            match Cli::try_parse_from(words) {
                Ok(_) => assert!(!expected_twice),
                Err(error) => assert!(expected_twice, "{line}: {error}"),
            }
        }
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
