//! `chat`: a conversation, a line a message.

use crate::errors::{INTERRUPTED, SUCCESS, usage};
use crate::models::{Loaded, Runtime, Source, set_threads};
use crate::output::{self, Terminal, say};
use crate::sampling::Sampling;
use crate::template::TemplateFlags;
use crate::wrap::{Flow, stdout_columns};
use crate::{interrupt, prompts};
use clap::Args;
use metal_candle::generate::{GenerateOptions, Generation, Session};
use metal_candle::text::Message;
use rustyline::error::ReadlineError;
use std::io::{BufRead, IsTerminal};
use std::sync::atomic::Ordering;

const EXAMPLES: &str = "\
Examples:
  metal-candle chat --model model/
  metal-candle chat --adapter adapters --system 'Answer in one word.'
  printf 'Hello\\nAnd again\\n' | metal-candle chat -m model/

In the conversation: /reset forgets it, /system TEXT sets the system message and begins anew (without \
a text it removes it), /exit or Ctrl-D ends. Ctrl-C stops an answer.";

const HELP: &str = "/reset  /system TEXT  /exit";

/// What the command is told.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct Arguments {
    #[command(flatten)]
    source: Source,
    /// A system message before the conversation
    #[arg(long, value_name = "TEXT", alias = "system-prompt", help_heading = "Prompt")]
    system: Option<String>,
    #[command(flatten)]
    template: TemplateFlags,
    #[command(flatten)]
    sampling: Sampling,
    #[command(flatten)]
    runtime: Runtime,
}

/// Where lines come from.
enum Input {
    Person(Box<rustyline::DefaultEditor>),
    Pipe(std::io::Lines<std::io::StdinLock<'static>>),
}

/// What came.
enum Line {
    Text(String),
    Interrupted,
    End,
}

impl Input {
    fn open() -> anyhow::Result<Self> {
        Ok(if std::io::stdin().is_terminal() {
            // It reads Ctrl-C as a key, and its handler would keep ours from stopping an answer.
            Self::Person(Box::new(interrupt::keep_handler(rustyline::DefaultEditor::new)?))
        } else {
            Self::Pipe(std::io::stdin().lock().lines())
        })
    }

    fn next(&mut self) -> anyhow::Result<Line> {
        match self {
            Self::Person(editor) => match editor.readline("> ") {
                Ok(text) => {
                    editor.add_history_entry(&text)?;
                    Ok(Line::Text(text))
                }
                Err(ReadlineError::Interrupted) => Ok(Line::Interrupted),
                Err(ReadlineError::Eof) => Ok(Line::End),
                Err(error) => Err(error.into()),
            },
            Self::Pipe(lines) => Ok(lines.next().transpose()?.map_or(Line::End, Line::Text)),
        }
    }
}

/// Talks.
pub fn run(arguments: Arguments, terminal: Terminal) -> anyhow::Result<u8> {
    set_threads(arguments.runtime.threads)?;
    interrupt::install()?;
    let loaded = arguments.source.load(&arguments.runtime, &arguments.template, terminal)?;
    loaded.tokenizer.require_chat_template()?;
    let options = arguments.sampling.resolve(&loaded.folder)?;
    let mut input = Input::open()?;
    if matches!(input, Input::Person(_)) {
        terminal.note(HELP);
    }
    let mut conversation = Conversation::new(&loaded, options, arguments.system);
    let mut interrupted = false;
    loop {
        let text = match input.next()? {
            Line::Text(text) => text,
            // Once may be a slip of the hand.
            Line::Interrupted if !interrupted => {
                terminal.note("Ctrl-C again, Ctrl-D or /exit ends");
                interrupted = true;
                continue;
            }
            Line::Interrupted => return Ok(INTERRUPTED),
            Line::End => return Ok(SUCCESS),
        };
        interrupted = false;
        let text = text.trim();
        let (word, rest) = text.split_once(char::is_whitespace).unwrap_or((text, ""));
        match word {
            "" => {}
            "/exit" | "/quit" => return Ok(SUCCESS),
            "/reset" => conversation.reset(),
            "/system" => {
                let rest = rest.trim();
                conversation.system = (!rest.is_empty()).then(|| rest.to_string());
                conversation.reset();
            }
            "/help" => terminal.note(HELP),
            _ if word.starts_with('/') && matches!(input, Input::Person(_)) => {
                say(format!("unknown command {word}; there are {HELP}"));
            }
            _ => {
                if let Err(error) = conversation.answer(text) {
                    // A person can go on; what reads a pipe's answers must not miss one.
                    if matches!(input, Input::Pipe(_)) || error.is::<output::StdoutClosed>() {
                        return Err(error);
                    }
                    say(format!("error: {}", crate::errors::describe(&error)));
                }
            }
        }
    }
}

struct Conversation<'a> {
    loaded: &'a Loaded,
    options: GenerateOptions,
    session: Session,
    system: Option<String>,
    messages: Vec<Message>,
    turn: u64,
}

impl<'a> Conversation<'a> {
    fn new(loaded: &'a Loaded, options: GenerateOptions, system: Option<String>) -> Self {
        let session = Session::new(&loaded.model, loaded.adapter.as_ref());
        let mut conversation =
            Self { loaded, options, session, system, messages: Vec::new(), turn: 0 };
        conversation.reset();
        conversation
    }

    fn reset(&mut self) {
        self.messages = self.system.iter().map(|text| Message::new("system", text)).collect();
    }

    /// Writes the answer to a message, and remembers both. A message whose answer failed is
    /// forgotten.
    fn answer(&mut self, text: &str) -> anyhow::Result<()> {
        self.messages.push(Message::new("user", text));
        let answer = self.write_answer();
        interrupt::unwatch();
        match answer {
            Ok(answer) => {
                self.messages.push(Message::new("assistant", answer));
                Ok(())
            }
            Err(error) => {
                self.messages.pop();
                Err(error)
            }
        }
    }

    fn write_answer(&mut self) -> anyhow::Result<String> {
        let Loaded { tokenizer, variables, .. } = self.loaded;
        let ids = prompts::encode_chat(tokenizer, &self.messages, variables)?;
        let limit = self.loaded.model.config().max_position_embeddings;
        if ids.len() >= limit {
            return Err(usage(format!(
                "the conversation has {} tokens, and this model was made for {limit}; /reset begins anew",
                ids.len()
            )));
        }
        let mut options = self.options.clone();
        // Two turns with the same draws would tend to repeat each other.
        options.sampling.seed = options.sampling.seed.wrapping_add(self.turn);
        self.turn += 1;
        let stop = interrupt::watch("");
        let mut answer = String::new();
        let mut flow = Flow::new(stdout_columns());
        let generation = Generation::new(&mut self.session, &self.loaded.tokenizer, &ids, options)?;
        for piece in generation {
            let piece = piece?.text;
            output::write(&flow.push(&piece))?;
            answer.push_str(&piece);
            if stop.load(Ordering::SeqCst) {
                break;
            }
        }
        output::write(&format!("{}\n", flow.finish()))?;
        Ok(answer)
    }
}
