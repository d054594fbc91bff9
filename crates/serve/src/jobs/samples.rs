//! What the model of a job writes while it is trained: to the same few prompts each time, so that one can watch it learn.
//!
//! The prompts are the first conversations of the validation file, or of the training file where there is none, each up
//! to its last answer. The likeliest tokens are written, so a run that goes on after a kill writes the same.

use metal_candle::adapter::Adapter;
use metal_candle::data::{Body, DataOptions, read_first_records};
use metal_candle::generate::{GenerateOptions, Generation, Session};
use metal_candle::model::Model;
use metal_candle::text::{Message, RenderOptions, Tokenizer};
use metal_candle::turns::Turns;
use metal_candle::{Error, Result};
use serde_json::Value;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Prompts of a job, at most, and records among which they are looked for.
const PROMPTS: usize = 3;
const LOOKED_AT: usize = 64;
/// Tokens of a prompt, at most: they are read in one turn.
const TOKENS_OF_A_PROMPT: usize = 1024;
/// Tokens of a text, at most.
const TOKENS: usize = 64;

/// What is continued.
#[derive(Debug, Clone, PartialEq)]
struct Prompt {
    /// The last message, as people are shown it.
    shown: String,
    ids: Vec<u32>,
}

/// Writes the samples of a job.
pub(super) struct Samples {
    prompts: Vec<Prompt>,
    tokenizer: Arc<Tokenizer>,
    turns: Arc<Turns>,
    stop: Arc<AtomicBool>,
}

impl Samples {
    /// Those of a file's conversations, for a model with this context. They are given up once `stop` is true.
    pub fn of_file(
        path: &Path,
        options: &DataOptions,
        tokenizer: &Arc<Tokenizer>,
        context: usize,
        turns: &Arc<Turns>,
        stop: &Arc<AtomicBool>,
    ) -> Result<Self> {
        let mut prompts = Vec::new();
        for record in read_first_records(path, LOOKED_AT)? {
            let prompt = match prompt_of(&record.body) {
                Some((messages, tools)) => read(messages, tools, tokenizer, options)?,
                None => None,
            };
            let fits = |prompt: &Prompt| {
                (1..=TOKENS_OF_A_PROMPT).contains(&prompt.ids.len()) && prompt.ids.len() < context
            };
            prompts.extend(prompt.filter(fits));
            if prompts.len() == PROMPTS {
                break;
            }
        }
        let (tokenizer, turns, stop) = (tokenizer.clone(), turns.clone(), stop.clone());
        Ok(Self { prompts, tokenizer, turns, stop })
    }

    /// The prompts and what the model writes to them, as far as it was not given up.
    pub fn write(
        &self,
        model: &Arc<Model>,
        adapter: &Arc<Adapter>,
    ) -> Result<Vec<(String, String)>> {
        let mut samples = Vec::new();
        for prompt in &self.prompts {
            match self.continued(model, adapter, &prompt.ids)? {
                Some(text) => samples.push((prompt.shown.clone(), text)),
                None => break,
            }
        }
        Ok(samples)
    }

    /// The text after a prompt; `None` when it was given up. Each token has a turn of its own.
    fn continued(
        &self,
        model: &Arc<Model>,
        adapter: &Arc<Adapter>,
        ids: &[u32],
    ) -> Result<Option<String>> {
        let (turns, device) = (Some(&self.turns), model.device());
        let left = model.config().context() - ids.len();
        let options =
            GenerateOptions { max_tokens: TOKENS.min(left), ..GenerateOptions::default() };
        let session = &mut Turns::train(turns, device, || Session::new(model, Some(adapter)))?;
        let begin = move || Generation::new(session, &self.tokenizer, ids, options);
        let mut generation = Turns::train(turns, device, begin)?;
        let mut text = String::new();
        while !self.stop.load(Ordering::Relaxed) {
            match Turns::train(turns, device, || generation.next().transpose())? {
                Some(piece) => text.push_str(&piece.text),
                None => return Ok(Some(text)),
            }
        }
        Ok(None)
    }
}

/// A conversation up to the model's last answer, with the tools it may call.
fn prompt_of(body: &Body) -> Option<(&[Message], Option<&[Value]>)> {
    match body {
        Body::Messages { messages, tools } => {
            let last = messages.iter().rposition(Message::is_from_model)?;
            Some((messages.get(..last)?, tools.as_deref()))
        }
        Body::ChatCompletion { prompt, tools, .. } => Some((prompt, tools.as_deref())),
        Body::Pair { chosen, .. } => prompt_of(chosen),
        _ => None,
    }
}

/// The prompt of a conversation; `None` where its last message has no text, or the template takes no conversation that
/// ends there.
fn read(
    messages: &[Message],
    tools: Option<&[Value]>,
    tokenizer: &Tokenizer,
    options: &DataOptions,
) -> Result<Option<Prompt>> {
    let Some(shown) = messages.last().and_then(Message::text) else { return Ok(None) };
    let options = RenderOptions {
        add_generation_prompt: true,
        tools,
        variables: Some(&options.variables),
        now: options.now,
    };
    let template = tokenizer.require_chat_template()?;
    let rendered = match template.render(&template.fitted(messages), &options) {
        Err(Error::Template(_)) => return Ok(None),
        rendered => rendered?,
    };
    Ok(Some(Prompt { shown, ids: tokenizer.encode(&rendered, false)? }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(roles: &[&str]) -> Vec<Message> {
        let message = |(index, role): (usize, &&str)| Message::new(*role, index.to_string());
        roles.iter().enumerate().map(message).collect()
    }

    #[test]
    fn a_prompt_is_a_conversation_up_to_the_last_answer() {
        let messages = |roles: &[&str]| Body::Messages { messages: said(roles), tools: None };
        let length = |body: &Body| prompt_of(body).map(|(messages, _)| messages.len());
        assert_eq!(length(&messages(&["system", "user", "assistant"])), Some(2));
        assert_eq!(length(&messages(&["user", "assistant", "user", "assistant", "user"])), Some(3));
        assert_eq!(length(&messages(&["user"])), None);
        let answered = |text: &str| {
            let completion = vec![Message::new("assistant", text)];
            Box::new(Body::ChatCompletion { prompt: said(&["user"]), completion, tools: None })
        };
        let pair = Body::Pair { chosen: answered("a"), rejected: answered("b") };
        assert_eq!(length(&pair), Some(1));
        assert_eq!(length(&Body::Text { text: "a".into() }), None);
    }
}
