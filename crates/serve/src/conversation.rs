//! A conversation to be continued, whichever API it came by: what it asks of the engine, and what the texts that come back
//! are.

use crate::adapters::Chosen;
use crate::app::{App, Shared};
use crate::constraint::{Constraint, about, grammars};
use crate::context;
use crate::error::{ApiError, Result};
use crate::replicas::Place;
use crate::sampling::Sampling;
use crate::tools::{
    self, Choice, Forced, Format, Markers, Parser, Part, Thinking, Tool, find_markers,
};
use crate::words::{Word, Words, finite};
use metal_candle::engine::{Finished, Request};
use metal_candle::generate::{FinishReason, Grammar, Piece};
use metal_candle::text::{ChatTemplate, Message, RenderOptions, Tokenizer};
use serde::Serialize;
use serde_json::{Map, Value};
use std::sync::Arc;

/// Messages of a conversation, at most.
pub const MOST_MESSAGES: usize = 4096;
/// What a template is told anyway, and no request may say otherwise.
const RESERVED: [&str; 3] = ["messages", "tools", "add_generation_prompt"];

/// The field of most requests that has the conversation.
pub const MESSAGES: &str = "messages";

/// A conversation to be continued.
#[derive(Debug)]
pub struct Conversation {
    /// What was said.
    pub messages: Vec<Message>,
    /// The field of the request that says it.
    pub field: &'static str,
    /// What the model may call.
    pub tools: Vec<Tool>,
    /// Which of these it calls.
    pub choice: Choice,
    /// Whether it may call several at once.
    pub parallel: bool,
    /// What the chat template is told beside the server's own variables.
    pub variables: Map<String, Value>,
    /// What the answer has to be.
    pub answer: Constraint,
    /// How texts are drawn.
    pub sampling: Sampling,
    /// Tokens of a text at most, and the field that says so.
    pub max_tokens: Option<(&'static str, usize)>,
    /// How many of the likeliest tokens are told beside each token, if log-probabilities are told at all.
    pub logprobs: Option<usize>,
}

/// What the engine is asked, and how its answers are read.
#[derive(Debug)]
pub struct Prepared {
    /// Where they are written.
    pub place: Arc<Place>,
    /// A request for each choice.
    pub requests: Vec<Request>,
    /// What reads each choice.
    pub replies: Vec<Reply>,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
}

/// The chat template of a model, for the conversation that a field has.
///
/// # Errors
/// A 400 that names the field, when there is none.
pub fn template<'a>(tokenizer: &'a Tokenizer, field: &str) -> Result<&'a ChatTemplate> {
    tokenizer.chat_template().ok_or_else(|| {
        let what = "this model has no chat template; /v1/completions continues texts";
        ApiError::field(field, what)
    })
}

/// That the template makes use of what a request tells it.
///
/// # Errors
/// A 400 that names the variable that it makes no use of.
pub fn check_variables(
    field: &str,
    variables: &Map<String, Value>,
    template: &ChatTemplate,
) -> Result<()> {
    for name in variables.keys() {
        let field = || format!("{field}.{}", metal_candle::readable(name));
        if RESERVED.contains(&name.as_str()) {
            return Err(ApiError::field(field(), "is what the request has fields of its own for"));
        }
        if !template.mentions(name) {
            return Err(ApiError::field(
                field(),
                "this model's chat template has no such variable",
            ));
        }
    }
    Ok(())
}

impl Conversation {
    /// The prompt: the conversation as the model's template writes it, up to where the model goes on, if it is to.
    ///
    /// # Errors
    /// A 400 when the template refuses it.
    pub fn render(&self, app: &App, tokenizer: &Tokenizer, goes_on: bool) -> Result<String> {
        let template = template(tokenizer, self.field)?;
        let tools = match self.choice {
            Choice::None => &[],
            _ => self.tools.as_slice(),
        };
        let mut variables = app.variables.clone();
        variables.extend(self.variables.clone());
        let messages = (self.field, self.messages.as_slice());
        tools::rendered(messages, tools, template, |messages, tools| {
            let options = RenderOptions {
                add_generation_prompt: goes_on,
                tools,
                variables: Some(&variables),
                now: None,
            };
            let rendered = template.render(messages, &options);
            rendered.map_err(|error| ApiError::from(error).about(self.field))
        })
    }

    /// What the engine is asked about the conversation that `read` makes of a request, with the model of this name.
    ///
    /// # Errors
    /// A 404 when there is no such model, and a 400 that names what can't be done.
    pub async fn prepared(
        app: &Shared,
        model: &str,
        read: impl FnOnce(&Tokenizer) -> Result<Self> + Send + 'static,
    ) -> Result<Prepared> {
        let chosen = app.choose(model).await?;
        app.blocking(move |app| read(&chosen.tokenizer)?.prepare(app, &chosen)).await
    }

    /// How many tokens the conversation has that `read` makes of a request, for the model of this name.
    ///
    /// # Errors
    /// As [`Self::prepared`], but for what is too long.
    pub async fn counted(
        app: &Shared,
        model: &str,
        read: impl FnOnce(&Tokenizer) -> Result<Self> + Send + 'static,
    ) -> Result<usize> {
        let chosen = app.choose(model).await?;
        app.blocking(move |app| {
            let tokenizer = &chosen.tokenizer;
            let rendered = read(tokenizer)?.render(app, tokenizer, true)?;
            Ok(context::encode(app, tokenizer, &rendered, false)?.len())
        })
        .await
    }

    /// What the engine is asked. Takes as long as tokenizing and compiling a grammar take.
    ///
    /// # Errors
    /// A 400 that names what can't be done.
    pub fn prepare(&self, app: &App, chosen: &Chosen) -> Result<Prepared> {
        let tokenizer = &chosen.tokenizer;
        let options = self.sampling.options(app)?;
        let rendered = self.render(app, tokenizer, true)?;
        let prompt = context::read(app, tokenizer, (self.field, &rendered), false)?;
        let most = context::room(app, (self.field, prompt.len()), self.max_tokens)?;
        let template = template(tokenizer, self.field)?;
        let format = (self.choice != Choice::None).then(|| Format::of(template));
        let thinking = Thinking::of(template).map(|it| (it, it.is_open(&rendered)));
        let may_think = thinking.filter(|(it, _)| !it.is_over(&rendered));
        let grammar = self.grammar(app, tokenizer, Format::of(template), may_think)?;

        let marked = format.into_iter().flat_map(Format::markers);
        let marked = marked.chain(thinking.into_iter().flat_map(|(it, _)| it.markers()));
        let markers = find_markers(tokenizer, marked)?;
        let tools = self.tools.as_slice().into();
        let reasoning = thinking.is_some_and(|(_, is_open)| is_open);
        let thinking = thinking.map(|(thinking, _)| thinking);
        let parser = Parser::new(format, thinking, reasoning, tools, self.parallel);

        let prompt_tokens = prompt.len();
        let (mut requests, mut replies) = (Vec::new(), Vec::new());
        for mut options in options {
            options.max_tokens = most;
            options.top_logprobs = self.logprobs.unwrap_or(0);
            let holds_back = !options.stop.is_empty();
            replies.push(Reply {
                parser: parser.clone(),
                markers: Markers::new(tokenizer.clone(), markers.clone(), holds_back),
                ends: app.ends(&options),
                words: self.logprobs.map(|_| Words::of(app)),
                tokens: 0,
                reasoning_tokens: 0,
                calls: false,
            });
            requests.push(Request {
                prompt: prompt.clone(),
                options,
                adapter: chosen.adapter.clone(),
                grammar: grammar.clone(),
                ..Request::default()
            });
        }
        Ok(Prepared { place: chosen.place.clone(), requests, replies, prompt_tokens })
    }

    fn grammar(
        &self,
        app: &App,
        tokenizer: &Tokenizer,
        format: &'static Format,
        thinking: Option<(&'static Thinking, bool)>,
    ) -> Result<Option<Grammar>> {
        let forced = Forced {
            format,
            tools: &self.tools,
            choice: &self.choice,
            parallel: self.parallel,
            answer: &self.answer,
            thinking,
        };
        match tools::constrain(tokenizer, &forced)? {
            None => self.answer.compile(app),
            Some(source) => {
                let field = match self.answer {
                    Constraint::None => "tools",
                    _ => self.answer.field(),
                };
                let grammar =
                    grammars(app, field)?.lark(&source).map_err(|error| about(error, field))?;
                Ok(Some(grammar))
            }
        }
    }
}

/// A choice while it is written.
#[derive(Debug)]
pub struct Reply {
    parser: Parser,
    markers: Markers<Arc<Tokenizer>>,
    /// The tokens that end a text and belong to none.
    ends: Vec<u32>,
    /// What knows the tokens' texts, where log-probabilities are told.
    words: Option<Words>,
    tokens: usize,
    reasoning_tokens: usize,
    calls: bool,
}

impl Reply {
    /// What a piece adds: the parts that are certain now, and the token with its log-probability if that is told.
    ///
    /// # Errors
    /// When the tokenizer fails.
    pub fn take(&mut self, piece: Piece) -> Result<(Vec<Part>, Option<TokenLogprob>)> {
        let written = piece.token.filter(|token| !self.ends.contains(token));
        let logprob = match (&self.words, written) {
            (Some(words), Some(token)) => Some(TokenLogprob::new(words, token, &piece)),
            _ => None,
        };
        let text = self.markers.restore(piece)?;
        let parts = self.parser.push(&text);
        if written.is_some() {
            self.tokens += 1;
            self.reasoning_tokens += usize::from(self.parser.is_reasoning());
        }
        self.note(&parts);
        Ok((parts, logprob))
    }

    /// What was held back, at the end of the text.
    pub fn finish(&mut self) -> Vec<Part> {
        let parts = self.parser.finish();
        self.note(&parts);
        parts
    }

    fn note(&mut self, parts: &[Part]) {
        self.calls |= parts.iter().any(|part| matches!(part, Part::Call(_)));
    }

    /// Whether log-probabilities are told.
    pub fn tells_logprobs(&self) -> bool {
        self.words.is_some()
    }

    /// Tokens so far.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Tokens that the model thought with.
    pub fn reasoning_tokens(&self) -> usize {
        self.reasoning_tokens
    }

    /// Why the text ended.
    pub fn reason(&self, finished: &Finished) -> Reason {
        match finished.reason {
            FinishReason::Length => Reason::Length,
            FinishReason::EndOfSequence | FinishReason::Stop if self.calls => Reason::ToolCalls,
            FinishReason::EndOfSequence | FinishReason::Stop => Reason::Stop,
        }
    }
}

/// Why a text ended, in OpenAI's words.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// The model ended it, or it came to a stop string.
    Stop,
    /// It has as many tokens as it may have.
    Length,
    /// The model calls tools.
    ToolCalls,
}

/// All of a choice's text.
#[derive(Debug, Default)]
pub struct Whole {
    /// The answer.
    pub text: String,
    /// What the model thought before it.
    pub reasoning: String,
    /// The calls.
    pub calls: Vec<tools::Call>,
}

impl Whole {
    /// Adds parts.
    pub fn add(&mut self, parts: Vec<Part>) {
        for part in parts {
            match part {
                Part::Text(text) => self.text.push_str(&text),
                Part::Reasoning(text) => self.reasoning.push_str(&text),
                Part::Call(call) => self.calls.push(call),
            }
        }
    }
}

/// A token with its log-probability and those of the likeliest at its place.
#[derive(Debug, Clone, Serialize)]
pub struct TokenLogprob {
    token: String,
    logprob: f64,
    bytes: Option<Vec<u8>>,
    top_logprobs: Vec<Alternative>,
}

#[derive(Debug, Clone, Serialize)]
struct Alternative {
    token: String,
    logprob: f64,
    bytes: Option<Vec<u8>>,
}

impl TokenLogprob {
    fn new(words: &Words, token: u32, piece: &Piece) -> Self {
        let alternative = |(other, logprob): &(u32, f64)| {
            let Word { text, bytes } = words.word(*other);
            // What was drawn is told with the same digits in both places.
            let logprob = if *other == token { piece.logprob } else { *logprob };
            Alternative { token: text, logprob: finite(logprob), bytes }
        };
        let Word { text, bytes } = words.word(token);
        let top_logprobs = piece.likeliest.iter().map(alternative).collect();
        Self { token: text, logprob: finite(piece.logprob), bytes, top_logprobs }
    }
}
