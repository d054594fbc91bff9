//! `keys`: who may ask a server.

use crate::errors::{FAILURE, SUCCESS, usage};
use crate::output::{self, Terminal, shell_word};
use chrono::{DateTime, Local};
use clap::{Args, Subcommand, ValueEnum};
use metal_candle::Error;
use metal_candle_serve::keys::{Key, Keys, Limits, Scope};
use std::path::{Path, PathBuf};

const EXAMPLES: &str = "\
Examples:
  metal-candle keys add laptop --scope chat --scope fine-tune
  metal-candle keys add guest --max-requests 2 --requests-per-minute 30 --data /srv/metal-candle
  metal-candle keys list
  metal-candle keys remove guest

A server that uses the folder meanwhile obeys with its next request. As soon as there is a key, it answers nobody without \
one. What is printed by add is the key, which is shown once; only its hash is kept.";

/// What the command is told.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct Arguments {
    #[command(subcommand)]
    command: Command,
    /// Where the server keeps files, jobs and keys
    #[arg(long, global = true, value_name = "DIR", default_value = "metal-candle-data")]
    data: PathBuf,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Make a key, and print it
    Add(Add),
    /// Show the keys' names, what they are for, and their limits
    List {
        /// Report as one JSON object on stdout
        #[arg(long)]
        json: bool,
    },
    /// Remove a key: who has it is refused from now on
    Remove {
        /// The key's name
        name: String,
    },
}

#[derive(Debug, Args)]
struct Add {
    /// What the key is called, in lists and in messages
    name: String,
    /// What it is for; may be given several times
    #[arg(long, value_enum, default_value = "chat")]
    scope: Vec<Allowed>,
    /// Requests under way at once, at most [default: as many as the server takes]
    #[arg(long, value_name = "N")]
    max_requests: Option<u32>,
    /// Requests within any minute, at most [default: as many as come]
    #[arg(long, value_name = "N")]
    requests_per_minute: Option<u32>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Allowed {
    /// Texts, models and tokens
    Chat,
    /// Files and fine-tuning jobs
    FineTune,
    /// Everything, also loading adapters by path, deleting models, and the figures
    Admin,
}

impl Allowed {
    fn scope(self) -> Scope {
        match self {
            Self::Chat => Scope::Chat,
            Self::FineTune => Scope::FineTune,
            Self::Admin => Scope::Admin,
        }
    }
}

/// Adds, lists or removes keys.
pub fn run(arguments: Arguments, terminal: impl Fn(bool) -> Terminal) -> anyhow::Result<u8> {
    let folder = &arguments.data;
    match arguments.command {
        Command::Add(add) => self::add(folder, add, terminal(false)),
        Command::List { json } => {
            let keys = Keys::open(folder)?.list()?;
            match json {
                true => output::json(&serde_json::json!({ "keys": keys }))?,
                false => list(&keys, terminal(false))?,
            }
            Ok(SUCCESS)
        }
        Command::Remove { name } => remove(folder, &name, terminal(false)),
    }
}

fn add(folder: &Path, add: Add, terminal: Terminal) -> anyhow::Result<u8> {
    let mut scopes: Vec<Scope> = Vec::new();
    for scope in add.scope.iter().map(|allowed| allowed.scope()) {
        if !scopes.contains(&scope) {
            scopes.push(scope);
        }
    }
    let limits = Limits { at_once: add.max_requests, per_minute: add.requests_per_minute };
    let keys = Keys::open_or_make(folder)?;
    let is_first = keys.list()?.is_empty();
    let key = keys.add(&add.name, &scopes, limits).map_err(|error| match error {
        Error::Option { option, message } => usage(format!("{}: {message}", flag(&option))),
        other => other.into(),
    })?;
    terminal.note(format!(
        "The key {} is for {}. It is shown once, and only its hash is kept:",
        add.name,
        named(&scopes)
    ));
    output::line(key)?;
    if is_first {
        terminal.note(format!(
            "It is the first one: from now on a server of {} answers nobody without a key.",
            folder.display()
        ));
    }
    Ok(SUCCESS)
}

/// What a flag is called that the library knows by another name.
fn flag(option: &str) -> &str {
    match option {
        "at_once" => "max_requests",
        "per_minute" => "requests_per_minute",
        other => other,
    }
}

fn named(scopes: &[Scope]) -> String {
    scopes.iter().map(|scope| scope.name()).collect::<Vec<_>>().join(", ")
}

fn list(keys: &[Key], terminal: Terminal) -> anyhow::Result<()> {
    if keys.is_empty() {
        terminal.note("there are no keys; `metal-candle keys add NAME` makes one");
    }
    let rows: Vec<(&str, String)> =
        keys.iter().map(|key| (key.name.as_str(), described(key))).collect();
    output::prose(&output::table(&rows))
}

fn described(key: &Key) -> String {
    let Limits { at_once, per_minute } = key.limits;
    let limits = [
        at_once.map(|most| format!("{most} at once")),
        per_minute.map(|most| format!("{most} a minute")),
    ];
    let limits: Vec<String> = limits.into_iter().flatten().collect();
    let limits = if limits.is_empty() { "no limits".into() } else { limits.join(", ") };
    let made = DateTime::from_timestamp(key.created, 0)
        .map(|time| time.with_timezone(&Local).format("made %Y-%m-%d").to_string());
    format!("{}; {limits}; {}", named(&key.scopes), made.unwrap_or_default())
}

fn remove(folder: &Path, name: &str, terminal: Terminal) -> anyhow::Result<u8> {
    let keys = Keys::open(folder)?;
    if !keys.remove(name)? {
        output::say(format!(
            "error: there is no key {name}; `metal-candle keys list --data {}` shows those there are",
            shell_word(&folder.display().to_string())
        ));
        return Ok(FAILURE);
    }
    terminal.note(format!("The key {name} is removed; who has it is refused from now on."));
    if keys.list()?.is_empty() {
        terminal.note(
            "There is no key left. A server that runs goes on asking for one; one that is started anew without a key lets \
             everybody on its machine ask.",
        );
    }
    Ok(SUCCESS)
}
