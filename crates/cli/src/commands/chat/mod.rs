//! `chat`: a conversation, a line a message, with a model here or on a server.

mod local;
mod remote;

use crate::engine::Writing;
use crate::errors::{INTERRUPTED, SUCCESS, usage};
use crate::interrupt;
use crate::models::{Placed, Ranks, Runtime, Source, set_threads};
use crate::output::{self, Terminal, say};
use crate::remote::{Access, Client};
use crate::sampling::Sampling;
use crate::template::TemplateFlags;
use crate::thoughts::Tags;
use crate::wrap::{Flow, stdout_columns};
use clap::Args;
use metal_candle::text::Message;
use metal_candle_serve::Said;
use rustyline::error::ReadlineError;
use std::io::{BufRead, IsTerminal};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

const EXAMPLES: &str = "\
Examples:
  metal-candle chat --model model/
  metal-candle chat --adapter adapters --system 'Answer in one word.'
  printf 'Hello\\nAnd again\\n' | metal-candle chat -m model/
  metal-candle chat --server http://127.0.0.1:8080 --model ft:demo:mine

In the conversation: /reset forgets it, /system TEXT sets the system message and begins anew (without \
a text it removes it), /exit or Ctrl-D ends. Ctrl-C stops an answer. With --server, /models shows the server's, and \
/model NAME goes on with another one.";

/// What the command is told.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct Arguments {
    #[command(flatten)]
    source: Source,
    /// Talk with a model of this server, which --model names [default of --model: the first that it lists]; without an
    /// address, that of METAL_CANDLE_SERVER, or else http://127.0.0.1:8080
    #[arg(
        long,
        value_name = "URL",
        num_args = 0..=1,
        conflicts_with_all = [
            "revision", "adapter", "chat_template", "dtype", "quantize", "base_compute", "base_placement", "device", "matmul", "threads", "cache_dtype",
            "batch_invariant", "draft_tokens", "draft_model", "tensor_parallel",
        ],
        help_heading = "Server"
    )]
    server: Option<Option<String>>,
    #[command(flatten)]
    access: Access,
    /// A system message before the conversation
    #[arg(long, value_name = "TEXT", alias = "system-prompt", help_heading = "Prompt")]
    system: Option<String>,
    #[command(flatten)]
    template: TemplateFlags,
    #[command(flatten)]
    sampling: Sampling,
    #[command(flatten)]
    writing: Writing,
    #[command(flatten)]
    runtime: Runtime,
    #[command(flatten)]
    placed: Placed,
    #[command(flatten)]
    ranks: Ranks,
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

/// Who answers.
trait Partner {
    /// Writes the answer to a conversation, until it is whole or stopped. `turn` counts the answers.
    fn answer(
        &mut self,
        messages: &[Message],
        turn: u64,
        answer: &mut Answer,
    ) -> anyhow::Result<()>;

    /// What can be ordered beside what always can.
    fn orders(&self) -> &'static str {
        ""
    }

    /// Does what a word with a slash orders; false if it orders nothing.
    fn order(&mut self, _word: &str, _rest: &str, _terminal: Terminal) -> anyhow::Result<bool> {
        Ok(false)
    }
}

/// An answer on its way to stdout.
struct Answer {
    text: String,
    flow: Flow,
    tags: Tags,
    stop: Arc<AtomicBool>,
}

impl Answer {
    fn new() -> Self {
        let stop = interrupt::watch("");
        Self { text: String::new(), flow: Flow::new(stdout_columns()), tags: Tags::default(), stop }
    }

    /// Writes a piece of it, or of what is thought before it, of which the next turn isn't told.
    fn push(&mut self, said: &Said) -> anyhow::Result<()> {
        if let Said::Answer(text) = said {
            self.text.push_str(text);
        }
        let shown = self.tags.around(said);
        self.show(&shown)
    }

    /// Writes what is no part of it.
    fn show(&mut self, piece: &str) -> anyhow::Result<()> {
        output::write(&self.flow.push(piece))
    }

    /// Whether nobody wants the rest.
    fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::SeqCst)
    }

    fn finish(mut self) -> anyhow::Result<String> {
        output::write(&format!("{}\n", self.flow.finish()))?;
        Ok(self.text)
    }
}

/// Talks.
pub fn run(arguments: Arguments, terminal: Terminal) -> anyhow::Result<u8> {
    interrupt::install()?;
    let Arguments {
        source,
        server,
        access,
        system,
        template,
        sampling,
        writing,
        runtime,
        placed,
        ranks,
    } = arguments;
    let Some(server) = server else {
        if access.is_given() {
            return Err(usage("--api-key and --tls-ca are for a server, which --server names"));
        }
        set_threads(runtime.threads)?;
        let devices = ranks.devices(runtime.device, &writing)?;
        writing.check_draft(&source, terminal)?;
        let loaded = source.load_on(&devices, &runtime, &placed, &template, terminal)?;
        loaded.tokenizer.require_chat_template()?;
        let options = sampling.resolve(&loaded.folder)?;
        return talk(local::Local::new(&loaded, options, &writing, terminal)?, system, terminal);
    };
    let client = Client::new(server.as_deref(), &access)?;
    let request = sampling.request(template.chat_template_kwargs)?;
    let partner = remote::Remote::new(client, source.model, request, terminal)?;
    talk(partner, system, terminal)
}

/// Takes lines to their end.
fn talk(partner: impl Partner, system: Option<String>, terminal: Terminal) -> anyhow::Result<u8> {
    let mut input = Input::open()?;
    let help = format!("/reset  /system TEXT  {}/exit", partner.orders());
    if matches!(input, Input::Person(_)) {
        terminal.note(&help);
    }
    let mut conversation = Conversation::new(partner, system);
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
        let done = match word {
            "" => Ok(()),
            "/exit" | "/quit" => return Ok(SUCCESS),
            "/reset" => {
                conversation.reset();
                Ok(())
            }
            "/system" => {
                let rest = rest.trim();
                conversation.system = (!rest.is_empty()).then(|| rest.to_string());
                conversation.reset();
                Ok(())
            }
            "/help" => {
                terminal.note(&help);
                Ok(())
            }
            _ => match conversation.partner.order(word, rest.trim(), terminal) {
                Ok(true) => Ok(()),
                Ok(false) if word.starts_with('/') && matches!(input, Input::Person(_)) => {
                    say(format!("unknown command {word}; there are {help}"));
                    Ok(())
                }
                Ok(false) => conversation.answer(text),
                Err(error) => Err(error),
            },
        };
        if let Err(error) = done {
            // A person can go on; what reads a pipe's answers must not miss one.
            if matches!(input, Input::Pipe(_)) || error.is::<output::StdoutClosed>() {
                return Err(error);
            }
            say(format!("error: {}", crate::errors::describe(&error)));
        }
    }
}

struct Conversation<P> {
    partner: P,
    system: Option<String>,
    messages: Vec<Message>,
    turn: u64,
}

impl<P: Partner> Conversation<P> {
    fn new(partner: P, system: Option<String>) -> Self {
        let mut conversation = Self { partner, system, messages: Vec::new(), turn: 0 };
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
        let mut answer = Answer::new();
        let written = self.partner.answer(&self.messages, self.turn, &mut answer);
        let finished = written.and_then(|()| answer.finish());
        self.turn += 1;
        interrupt::unwatch();
        match finished {
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
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_what_was_said_without_what_was_thought() {
        let stop = Arc::default();
        let (flow, tags) = (Flow::new(None), Tags::default());
        let mut answer = Answer { text: String::new(), flow, tags, stop };
        for (thought, text) in [("h", ""), ("m", ""), ("", "Yes"), ("", "."), ("so", " No.")] {
            answer.push(&Said::Thought(thought.into())).unwrap();
            answer.push(&Said::Answer(text.into())).unwrap();
        }
        assert_eq!(answer.finish().unwrap(), "Yes. No.");
    }
}
