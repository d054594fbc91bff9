//! A model of a server.

use super::{Answer, Partner};
use crate::output::{self, Terminal};
use crate::remote::{Client, Events, Failure, refusal};
use metal_candle::text::Message;
use metal_candle_serve::Said;
use serde_json::{Map, Value, json};
use std::io::Read;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::Duration;

const PATH: &str = "/v1/chat/completions";
/// What ends a stream.
const DONE: &str = "[DONE]";
/// How often it is looked whether to stop.
const GLANCE: Duration = Duration::from_millis(50);
/// Bytes that are read at once, and events that are read ahead.
const PIECE: usize = 16 << 10;
const AHEAD: usize = 64;

/// A server, and how it is asked.
pub struct Remote {
    client: Arc<Client>,
    model: String,
    /// What all requests say of drawing.
    request: Map<String, Value>,
    seed: u64,
}

impl Remote {
    /// Asks the server which models it has; `model` is one of them, or else the first is taken.
    pub fn new(
        client: Client,
        model: Option<String>,
        (request, seed): (Map<String, Value>, u64),
        terminal: Terminal,
    ) -> anyhow::Result<Self> {
        let models = client.models()?;
        if let Some(model) = &model {
            note_unknown(model, &models, terminal);
        }
        let model = model.unwrap_or_else(|| models[0].clone());
        Ok(Self { client: Arc::new(client), model, request, seed })
    }

    /// Sends a conversation; what the server tells comes from a thread, so that its silence doesn't keep anybody from
    /// stopping it.
    fn ask(&self, messages: &[Message], turn: u64) -> Receiver<Told> {
        let mut request = Value::Object(self.request.clone());
        request["model"] = self.model.clone().into();
        request["messages"] = json!(messages);
        request["stream"] = true.into();
        // Two turns with the same draws would tend to repeat each other.
        request["seed"] = self.seed.wrapping_add(turn).cast_signed().into();
        let client = self.client.clone();
        let (sender, receiver) = sync_channel(AHEAD);
        std::thread::spawn(move || {
            let told = client.stream(PATH, &request).map_err(anyhow::Error::from);
            if let Err(error) = told.and_then(|stream| forward(stream, &sender)) {
                // Who has left needs no error.
                let _ = sender.send(Err(error));
            }
        });
        receiver
    }
}

/// An event's data, or why no more come.
type Told = anyhow::Result<String>;

/// Says that a model isn't one that the server lists; it may know it all the same.
fn note_unknown(model: &str, models: &[String], terminal: Terminal) {
    if !models.iter().any(|name| name == model) {
        terminal.note(format!("The server lists no {model}, but {}", models.join(", ")));
    }
}

/// Passes a stream's events on until its end, or until nobody takes them: the connection is closed then, and the server
/// writes no further.
fn forward(mut stream: impl Read, sender: &SyncSender<Told>) -> anyhow::Result<()> {
    let mut events = Events::default();
    let mut piece = vec![0; PIECE];
    loop {
        let count = match stream.read(&mut piece) {
            Ok(0) => anyhow::bail!("the server broke off its answer"),
            Ok(count) => count,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
            Err(error) => {
                return Err(anyhow::Error::new(error).context("the server broke off its answer"));
            }
        };
        for event in events.push(&piece[..count]).map_err(Failure::Strange)? {
            let is_last = event == DONE;
            if sender.send(Ok(event)).is_err() || is_last {
                return Ok(());
            }
        }
    }
}

/// A piece of an answer.
#[derive(Debug, PartialEq)]
struct Delta {
    thought: String,
    text: String,
}

/// What an event of a stream says.
fn delta(event: &str) -> Result<Delta, Failure> {
    let strange = || {
        let shown = crate::settings::cut(event);
        Failure::Strange(format!("the server told {shown}, expected a piece of an answer"))
    };
    let value: Value = serde_json::from_str(event).map_err(|_| strange())?;
    if let Some(error) = value.get("error") {
        let message = refusal(error).ok_or_else(strange)?;
        return Err(Failure::Strange(format!("the server failed: {message}")));
    }
    let choices = value.get("choices").and_then(Value::as_array).ok_or_else(strange)?;
    let text = |key: &str| {
        let texts = choices.iter().filter_map(|choice| choice.get("delta")?.get(key)?.as_str());
        texts.collect::<String>()
    };
    Ok(Delta { thought: text("reasoning_content"), text: text("content") })
}

impl Partner for Remote {
    fn answer(
        &mut self,
        messages: &[Message],
        turn: u64,
        answer: &mut Answer,
    ) -> anyhow::Result<()> {
        let told = self.ask(messages, turn);
        while !answer.is_stopped() {
            let event = match told.recv_timeout(GLANCE) {
                Ok(event) => event?,
                Err(RecvTimeoutError::Timeout) => continue,
                Err(RecvTimeoutError::Disconnected) => break,
            };
            if event == DONE {
                break;
            }
            let Delta { thought, text } = delta(&event)?;
            answer.push(&Said::Thought(thought))?;
            answer.push(&Said::Answer(text))?;
        }
        Ok(())
    }

    fn orders(&self) -> &'static str {
        "/models  /model NAME  "
    }

    fn order(&mut self, word: &str, rest: &str, terminal: Terminal) -> anyhow::Result<bool> {
        match (word, rest) {
            ("/models", _) | ("/model", "") => {
                let models = self.client.models()?;
                output::say(format!("{} is asked, of {}", self.model, models.join(", ")));
            }
            ("/model", name) => {
                note_unknown(name, &self.client.models()?, terminal);
                self.model = name.to_string();
            }
            _ => return Ok(false),
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_read_with_their_thoughts_and_errors() {
        let piece =
            r#"{"choices": [{"delta": {"role": "assistant", "content": "a"}, "index": 0}]}"#;
        let found = delta(piece).unwrap();
        assert_eq!(found, Delta { thought: String::new(), text: "a".into() });
        let piece = r#"{"choices": [{"delta": {"reasoning_content": "hm", "content": null}}]}"#;
        assert_eq!(delta(piece).unwrap().thought, "hm");
        assert_eq!(delta(r#"{"choices": []}"#).unwrap().text, "");
        let failed = delta(r#"{"error": {"message": "no room", "param": null}}"#).unwrap_err();
        assert_eq!(failed.to_string(), "the server failed: no room");
        for wrong in ["", "x", "{}", "[1]", r#"{"choices": 1}"#, r#"{"error": 1}"#] {
            assert!(matches!(delta(wrong), Err(Failure::Strange(_))), "{wrong}");
        }
    }

    #[test]
    fn a_stream_that_breaks_off_is_an_error() {
        let told = |stream: &'static [u8]| {
            let (sender, receiver) = sync_channel(AHEAD);
            let error = forward(stream, &sender).err().map(|error| error.to_string());
            drop(sender);
            (receiver.iter().map(Result::unwrap).collect::<Vec<_>>(), error)
        };
        assert_eq!(told(b"data: a\n\ndata: [DONE]\n\n"), (vec!["a".into(), DONE.into()], None));
        let (events, error) = told(b"data: a\n\ndata: b\n");
        assert_eq!((events.len(), error.is_some()), (1, true));
    }
}
