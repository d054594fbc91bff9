//! `POST /v1/completions`: texts and tokens are continued as they are, and told with their log-probabilities.

use crate::adapters::Chosen;
use crate::api::completion::{Completion, Used};
use crate::app::{App, Shared, new_id, now};
use crate::body::Body;
use crate::constraint::Constraint;
use crate::context;
use crate::conversation::Reason;
use crate::error::{ApiError, Result};
use crate::sampling::{Sampling, UsageIn, alternatives, request};
use crate::words::{Words, finite};
use crate::writing::{Gone, Out, Texts, Usage, Written, stream};
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use axum::{Json, Router};
use metal_candle::engine::{Finished, Request, Scored};
use metal_candle::generate::{FinishReason, Piece};
use metal_candle::text::Tokenizer;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// Prompts of a request, at most, and choices of all of them.
const MOST_PROMPTS: usize = 2048;
const MOST_CHOICES: usize = 4096;
/// Tokens of the prompts of all choices together, and entries of their `logit_bias`: each choice waits with a copy of both.
const MOST_PROMPT_TOKENS: usize = 4 << 20;
const MOST_BIASES: usize = 1 << 20;
/// Tokens that are written where a request doesn't say.
const USUAL_TOKENS: usize = 16;
/// What all parts of an answer are called.
const OBJECT: &str = "text_completion";

/// The routes.
pub fn routes() -> Router<Shared> {
    Router::new().route("/v1/completions", post(complete))
}

request! {
    /// A request to continue texts.
    CompletionRequest {
        prompt: Prompts,
        max_tokens: Option<usize>,
        logprobs: Option<usize>,
        echo: Option<bool>,
        best_of: Option<usize>,
        suffix: Option<String>,
    }
}

/// What is continued.
#[derive(Debug, Deserialize)]
#[serde(
    untagged,
    expecting = "expected a string, a list of strings, a list of token ids or a list of such lists"
)]
enum Prompts {
    Text(String),
    Tokens(Vec<u32>),
    Texts(Vec<String>),
    Lists(Vec<Vec<u32>>),
}

/// One of them.
#[derive(Debug)]
enum Prompt {
    Text(String),
    Tokens(Vec<u32>),
}

impl Prompts {
    fn each(self) -> Result<Vec<Prompt>> {
        let prompts: Vec<Prompt> = match self {
            Self::Text(text) => vec![Prompt::Text(text)],
            Self::Tokens(tokens) => vec![Prompt::Tokens(tokens)],
            Self::Texts(texts) => texts.into_iter().map(Prompt::Text).collect(),
            Self::Lists(lists) => lists.into_iter().map(Prompt::Tokens).collect(),
        };
        if prompts.len() > MOST_PROMPTS {
            let what = format!("has {} prompts, expected at most {MOST_PROMPTS}", prompts.len());
            return Err(ApiError::field("prompt", what));
        }
        Ok(prompts)
    }
}

async fn complete(
    State(app): State<Shared>,
    Body(request): Body<CompletionRequest>,
) -> Result<Response> {
    let streaming = request.streaming()?;
    let chosen = app.choose(&request.model).await?;
    let head = Head { id: new_id("cmpl-"), created: now(), model: chosen.name.clone() };
    let place = chosen.place.clone();
    let Prepared { requests, lines, choices } =
        app.blocking(move |app| request.prepare(app, &chosen)).await?;
    let texts = Texts::begin(&app, place, requests, streaming.is_some()).await?;
    match streaming {
        None => whole(texts, lines, choices, &head).await,
        Some(usage) => Ok(stream(&app, |out| tell(out, texts, lines, choices, head, usage))),
    }
}

/// What the engine is asked, and what its answers become.
struct Prepared {
    requests: Vec<Request>,
    lines: Vec<Line>,
    /// Of each prompt.
    choices: usize,
}

impl CompletionRequest {
    fn prepare(mut self, app: &App, chosen: &Chosen) -> Result<Prepared> {
        if self.suffix.as_ref().is_some_and(|suffix| !suffix.is_empty()) {
            return Err(ApiError::unsupported("suffix", "texts are continued at their end alone"));
        }
        let sampling: Sampling = self.sampling();
        let options = sampling.options(app)?;
        if let Some(best) = self.best_of.filter(|best| *best != options.len()) {
            let instead =
                format!("all choices are given: best_of is {best}, n is {}", options.len());
            return Err(ApiError::unsupported("best_of", instead));
        }
        let logprobs = self.logprobs.map(|count| alternatives("logprobs", count)).transpose()?;
        let constraint: Constraint = self.guided()?;
        let grammar = constraint.compile(app)?;
        let echo = self.echo.unwrap_or(false);
        if self.max_tokens == Some(0) && !echo {
            let what = "is 0, which is for prompts with \"echo\": true; expected at least 1";
            return Err(ApiError::field("max_tokens", what));
        }
        let prompts = self.prompt.each()?;
        let choices = prompts.len() * options.len();
        if !(1..=MOST_CHOICES).contains(&choices) {
            let what = format!(
                "has {} prompts with {} choices each, expected 1 to {MOST_CHOICES} choices together",
                prompts.len(),
                options.len()
            );
            return Err(ApiError::field("prompt", what));
        }
        let biases = options.first().map_or(0, |options| options.sampling.logit_bias.len());
        if biases * choices > MOST_BIASES {
            let what = format!(
                "has {biases} entries for each of {choices} choices, expected at most {MOST_BIASES} for all of them"
            );
            return Err(ApiError::field("logit_bias", what));
        }
        let (mut requests, mut lines) = (Vec::new(), Vec::new());
        let mut prompt_tokens = 0;
        for (index, prompt) in prompts.into_iter().enumerate() {
            let (tokens, text) = read(app, prompt, &chosen.tokenizer, echo)?;
            let most = most_tokens(app, tokens.len(), self.max_tokens)?;
            prompt_tokens += tokens.len() * options.len();
            if prompt_tokens > MOST_PROMPT_TOKENS {
                let what = format!(
                    "has {prompt_tokens} tokens in {} prompts, counted once for each of {} choices, expected at most \
                     {MOST_PROMPT_TOKENS}; ask in several requests",
                    index + 1,
                    options.len()
                );
                return Err(ApiError::field("prompt", what));
            }
            for mut options in sampling.of_prompt(&options, index) {
                options.continues_prompt = true;
                options.max_tokens = most;
                options.top_logprobs = logprobs.unwrap_or(0);
                lines.push(Line {
                    echo: text.clone(),
                    words: logprobs.map(|_| Words::of(app)),
                    writes: self.max_tokens != Some(0),
                    ends: app.ends(&options),
                    prompt: tokens.len(),
                    tokens: 0,
                    offset: 0,
                });
                requests.push(Request {
                    prompt: tokens.clone(),
                    options,
                    adapter: chosen.adapter.clone(),
                    grammar: grammar.clone(),
                    score_prompt: echo && logprobs.is_some(),
                    ..Request::default()
                });
            }
        }
        Ok(Prepared { requests, lines, choices: options.len() })
    }
}

/// A prompt's tokens, and its text where that is told.
fn read(
    app: &App,
    prompt: Prompt,
    tokenizer: &Tokenizer,
    echo: bool,
) -> Result<(Vec<u32>, Option<String>)> {
    let (tokens, text) = match prompt {
        Prompt::Text(text) => {
            let tokens = context::read(app, tokenizer, ("prompt", &text), true)?;
            (tokens, echo.then_some(text))
        }
        Prompt::Tokens(tokens) => {
            let text = echo.then(|| tokenizer.decode(&tokens, false)).transpose()?;
            (tokens, text)
        }
    };
    match tokens.is_empty() {
        true => Err(ApiError::field("prompt", "is empty, expected at least one token")),
        false => Ok((tokens, text)),
    }
}

/// Tokens that the engine writes after a prompt: one at least, also where none is wanted.
fn most_tokens(app: &App, prompt: usize, asked: Option<usize>) -> Result<usize> {
    match asked {
        Some(0) => context::check(app, "prompt", prompt).map(|()| 1),
        Some(most) => context::room(app, ("prompt", prompt), Some(("max_tokens", most))),
        None => Ok(context::room(app, ("prompt", prompt), None)?.min(USUAL_TOKENS)),
    }
}

/// A choice while it is written.
#[derive(Debug)]
struct Line {
    /// The prompt's text, until it is told, if it is.
    echo: Option<String>,
    /// What knows the tokens' texts, where log-probabilities are told.
    words: Option<Words>,
    /// Whether what is written is told.
    writes: bool,
    /// The tokens that end a text and belong to none.
    ends: Vec<u32>,
    /// Tokens of the prompt, and of what was written.
    prompt: usize,
    tokens: usize,
    /// Characters of the tokens that were told.
    offset: usize,
}

/// More of a choice.
#[derive(Debug, Default, PartialEq)]
struct More {
    text: String,
    logprobs: Option<Lists>,
    reason: Option<Reason>,
}

/// Log-probabilities as lists with an entry for each token.
#[derive(Debug, Default, PartialEq, Serialize)]
struct Lists {
    tokens: Vec<String>,
    /// Null for a text's first token, which follows from nothing.
    token_logprobs: Vec<Option<f64>>,
    /// The likeliest tokens by their texts, and the one that is there.
    top_logprobs: Vec<Option<Map<String, Value>>>,
    text_offset: Vec<usize>,
}

impl Lists {
    fn add(&mut self, more: Self) {
        self.tokens.extend(more.tokens);
        self.token_logprobs.extend(more.token_logprobs);
        self.top_logprobs.extend(more.top_logprobs);
        self.text_offset.extend(more.text_offset);
    }
}

impl Line {
    /// What an event adds to the choice.
    fn take(&mut self, written: Written) -> More {
        let mut more = More { text: self.echo.take().unwrap_or_default(), ..More::default() };
        match written {
            Written::Prompt(scored) => more.logprobs = self.scores(&scored, &more.text),
            Written::Piece(piece) if self.writes => {
                let belongs = piece.token.is_some_and(|token| !self.ends.contains(&token));
                self.tokens += usize::from(belongs);
                more.logprobs = self.logprob(&piece);
                more.text.push_str(&piece.text);
            }
            Written::Piece(_) => {}
            Written::Finished(finished) => {
                more.reason = Some(match finished.reason {
                    FinishReason::EndOfSequence | FinishReason::Stop if self.writes => Reason::Stop,
                    _ => Reason::Length,
                });
            }
        }
        more
    }

    /// Of the prompt's tokens, whose text is `told`.
    fn scores(&mut self, scored: &[Scored], told: &str) -> Option<Lists> {
        let words = self.words.clone()?;
        let mut lists = Lists::default();
        for Scored { token, logprob, likeliest } in scored {
            self.entry(&words, &mut lists, *token, *logprob, likeliest);
        }
        // What tokenizers add to a text, a BOS token and a space, stands at its beginning.
        let length = told.chars().count();
        let added = self.offset.saturating_sub(length);
        for offset in &mut lists.text_offset {
            *offset = offset.saturating_sub(added);
        }
        self.offset = length;
        Some(lists)
    }

    /// Of every token, also of the one that ends the text without being part of it: clients that score prompts take as
    /// many entries from the end as tokens were written.
    fn logprob(&mut self, piece: &Piece) -> Option<Lists> {
        let words = self.words.clone()?;
        let token = piece.token?;
        let mut lists = Lists::default();
        self.entry(&words, &mut lists, token, Some(piece.logprob), &piece.likeliest);
        Some(lists)
    }

    fn entry(
        &mut self,
        words: &Words,
        lists: &mut Lists,
        token: u32,
        logprob: Option<f64>,
        likeliest: &[(u32, f64)],
    ) {
        let word = words.word(token);
        lists.text_offset.push(self.offset);
        self.offset += word.characters();
        lists.token_logprobs.push(logprob.map(finite));
        lists.top_logprobs.push(logprob.map(|logprob| {
            let others = likeliest.iter().filter(|(other, _)| *other != token);
            let others = others.map(|(other, it)| (words.word(*other).text, *it));
            by_text(others.chain([(word.text.clone(), logprob)]))
        }));
        lists.tokens.push(word.text);
    }
}

/// Log-probabilities by the tokens' texts, the largest first; of two tokens with the same text the likelier counts.
fn by_text(tokens: impl Iterator<Item = (String, f64)>) -> Map<String, Value> {
    let mut tokens: Vec<(String, f64)> = tokens.collect();
    tokens.sort_by(|(_, one), (_, other)| other.total_cmp(one));
    let mut map = Map::new();
    for (text, logprob) in tokens {
        map.entry(text).or_insert_with(|| finite(logprob).into());
    }
    map
}

/// What all parts of an answer begin with.
#[derive(Debug, Serialize)]
struct Head {
    id: String,
    created: i64,
    model: String,
}

#[derive(Debug, Default, Serialize)]
struct Choice {
    index: usize,
    text: String,
    logprobs: Option<Lists>,
    finish_reason: Option<Reason>,
}

/// Counts a text that has ended.
fn count(usage: &mut Usage, finished: Finished, line: &Line, index: usize, choices: usize) {
    let tokens = if line.writes { finished.tokens } else { 0 };
    usage.add(&Finished { tokens, ..finished }, index.is_multiple_of(choices));
}

async fn whole(
    mut texts: Texts,
    mut lines: Vec<Line>,
    choices: usize,
    head: &Head,
) -> Result<Response> {
    let mut usage = Usage::default();
    let empty = |(index, line): (usize, &Line)| {
        let logprobs = line.words.as_ref().map(|_| Lists::default());
        Choice { index, logprobs, ..Choice::default() }
    };
    let mut answers: Vec<Choice> = lines.iter().enumerate().map(empty).collect();
    while let Some((index, written)) = texts.next().await? {
        let Some((line, choice)) = lines.get_mut(index).zip(answers.get_mut(index)) else {
            continue;
        };
        if let Written::Finished(finished) = &written {
            count(&mut usage, *finished, line, index, choices);
        }
        let More { text, logprobs, reason } = line.take(written);
        choice.text.push_str(&text);
        if let (Some(lists), Some(more)) = (&mut choice.logprobs, logprobs) {
            lists.add(more);
        }
        choice.finish_reason = reason.or(choice.finish_reason);
    }
    Ok(Json(Completion::whole(OBJECT, head, &answers, usage)).into_response())
}

async fn tell(
    out: Out,
    mut texts: Texts,
    mut lines: Vec<Line>,
    choices: usize,
    head: Head,
    usage_in: UsageIn,
) -> Result<(), Gone> {
    let mut usage = Usage::default();
    // Of tokens whose text is still held back.
    let mut waiting: Vec<Option<Lists>> = lines.iter().map(|_| None).collect();
    loop {
        let (index, written) = match texts.next().await {
            Ok(Some(next)) => next,
            Ok(None) => break,
            Err(error) => return out.end(Some(error)).await,
        };
        let Some((line, waiting)) = lines.get_mut(index).zip(waiting.get_mut(index)) else {
            continue;
        };
        if let Written::Finished(finished) = &written {
            count(&mut usage, *finished, line, index, choices);
        }
        let More { text, logprobs, reason } = line.take(written);
        if let Some(more) = logprobs {
            waiting.get_or_insert_default().add(more);
        }
        if text.is_empty() && reason.is_none() {
            continue;
        }
        let choice = Choice { index, text, logprobs: waiting.take(), finish_reason: reason };
        let usage = Used::so_far(usage_in, line.prompt, line.tokens);
        let choices = std::slice::from_ref(&choice);
        out.object(&Completion::chunk(OBJECT, &head, choices, usage)).await?;
    }
    if usage_in != UsageIn::None {
        let none: &[Choice] = &[];
        out.object(&Completion::whole(OBJECT, &head, none, usage)).await?;
    }
    out.end(None).await
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::body::parse;
    use serde_json::json;

    fn request(fields: &Value) -> Result<CompletionRequest> {
        parse(fields.to_string().as_bytes())
    }

    #[test]
    fn every_kind_of_prompt_is_read() {
        let count = |prompt: Value| {
            let read = request(&json!({"model": "m", "prompt": prompt})).unwrap();
            read.prompt.each().unwrap().len()
        };
        assert_eq!(count(json!("a")), 1);
        assert_eq!(count(json!(["a", "b"])), 2);
        assert_eq!(count(json!([1, 2, 3])), 1);
        assert_eq!(count(json!([[1, 2], [3]])), 2);
        for wrong in [json!([1, "a"]), json!([-1]), json!({}), json!([[1.5]])] {
            let error = request(&json!({"model": "m", "prompt": wrong})).unwrap_err();
            assert_eq!(error.param.as_deref(), Some("prompt"));
            assert!(error.message.contains("expected a string, a list"), "{}", error.message);
        }
        let many = request(&json!({"model": "m", "prompt": vec!["a"; 2049]})).unwrap();
        assert_eq!(many.prompt.each().unwrap_err().param.as_deref(), Some("prompt"));
    }

    #[test]
    fn of_tokens_with_one_text_the_likelier_counts() {
        let tokens = [("a", -2.0), ("b", -1.0), ("a", -0.5), ("c", f64::NEG_INFINITY)];
        let map = by_text(tokens.into_iter().map(|(text, it)| (text.to_string(), it)));
        assert_eq!(Value::Object(map), json!({"a": -0.5, "b": -1.0, "c": -9999.0}));
    }
}
