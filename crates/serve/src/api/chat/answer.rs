//! Answers of `/v1/chat/completions`, whole and in chunks.

use crate::api::completion::{Completion, Used};
use crate::conversation::{Reason, Reply, TokenLogprob, Whole};
use crate::error::Result;
use crate::sampling::UsageIn;
use crate::tools::{Call, Part};
use crate::writing::{Gone, Out, Texts, Usage, Written};
use axum::Json;
use axum::response::{IntoResponse, Response};
use serde::Serialize;

/// What all parts of an answer begin with.
#[derive(Debug, Serialize)]
pub struct Head {
    /// `chatcmpl-...`
    pub id: String,
    /// When it began.
    pub created: i64,
    /// The model's name.
    pub model: String,
    /// Told where the request says one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub service_tier: Option<&'static str>,
}

#[derive(Serialize)]
struct Choice {
    index: usize,
    message: Message,
    logprobs: Option<Logprobs>,
    finish_reason: Option<Reason>,
}

#[derive(Serialize)]
struct Message {
    role: &'static str,
    content: Option<String>,
    refusal: Option<()>,
    #[serde(skip_serializing_if = "String::is_empty")]
    reasoning_content: String,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<ToolCall>,
}

#[derive(Serialize)]
struct Logprobs {
    content: Vec<TokenLogprob>,
    refusal: Option<()>,
}

impl Logprobs {
    fn of(content: Vec<TokenLogprob>) -> Self {
        Self { content, refusal: None }
    }
}

#[derive(Serialize)]
struct ToolCall {
    #[serde(skip_serializing_if = "Option::is_none")]
    index: Option<usize>,
    id: String,
    #[serde(rename = "type")]
    kind: &'static str,
    function: Function,
}

#[derive(Serialize)]
struct Function {
    name: String,
    arguments: String,
}

impl ToolCall {
    /// In a chunk a call has its number.
    fn new(call: Call, index: Option<usize>) -> Self {
        let Call { id, name, arguments } = call;
        Self { index, id, kind: "function", function: Function { name, arguments } }
    }
}

impl From<Whole> for Message {
    fn from(whole: Whole) -> Self {
        let Whole { text, reasoning, calls } = whole;
        Self {
            role: "assistant",
            content: Some(text).filter(|text| calls.is_empty() || !text.is_empty()),
            refusal: None,
            reasoning_content: reasoning,
            tool_calls: calls.into_iter().map(|call| ToolCall::new(call, None)).collect(),
        }
    }
}

/// Waits for all choices and answers with them.
///
/// # Errors
/// When one cannot be written to its end.
pub async fn whole(mut texts: Texts, mut replies: Vec<Reply>, head: Head) -> Result<Response> {
    let mut usage = Usage::default();
    let begin = |_: &Reply| (Whole::default(), Vec::new(), None);
    let mut wholes: Vec<(Whole, Vec<TokenLogprob>, Option<Reason>)> =
        replies.iter().map(begin).collect();
    while let Some((index, written)) = texts.next().await? {
        let Some((reply, (whole, logprobs, reason))) =
            replies.get_mut(index).zip(wholes.get_mut(index))
        else {
            continue;
        };
        match written {
            Written::Prompt(_) => {}
            Written::Piece(piece) => {
                let (parts, logprob) = reply.take(piece)?;
                whole.add(parts);
                logprobs.extend(logprob);
            }
            Written::Finished(finished) => {
                whole.add(reply.finish());
                *reason = Some(reply.reason(&finished));
                usage.add(&finished, index == 0);
                usage.completion_tokens_details.reasoning_tokens += reply.reasoning_tokens();
            }
        }
    }
    let with_logprobs = replies.iter().map(Reply::tells_logprobs);
    let choices = wholes.into_iter().zip(with_logprobs).enumerate();
    let choice = |(index, ((whole, logprobs, finish_reason), told)): (usize, (_, bool))| Choice {
        index,
        message: Message::from(whole),
        logprobs: told.then(|| Logprobs::of(logprobs)),
        finish_reason,
    };
    let choices: Vec<Choice> = choices.map(choice).collect();
    Ok(Json(Completion::whole("chat.completion", &head, &choices, usage)).into_response())
}

#[derive(Serialize)]
struct ChunkChoice {
    index: usize,
    delta: Delta,
    logprobs: Option<Logprobs>,
    finish_reason: Option<Reason>,
}

#[derive(Default, Serialize)]
struct Delta {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tool_calls: Option<[ToolCall; 1]>,
}

/// A choice as it was told so far.
#[derive(Default)]
struct Told {
    begun: bool,
    calls: usize,
    /// Of tokens whose text is still held back.
    logprobs: Vec<TokenLogprob>,
}

/// Tells the choices as they are written, of a prompt of so many tokens.
///
/// # Errors
/// When nobody listens any more.
pub async fn tell(
    out: Out,
    mut texts: Texts,
    mut replies: Vec<Reply>,
    head: Head,
    prompt_tokens: usize,
    usage_in: UsageIn,
) -> Result<(), Gone> {
    let chunks = Chunks { out, head, prompt_tokens, usage_in };
    let mut usage = Usage::default();
    let mut told: Vec<Told> = replies.iter().map(|_| Told::default()).collect();
    loop {
        let (index, written) = match texts.next().await {
            Ok(Some(next)) => next,
            Ok(None) => break,
            Err(error) => return chunks.out.end(Some(error)).await,
        };
        let Some((reply, told)) = replies.get_mut(index).zip(told.get_mut(index)) else { continue };
        if !told.begun {
            told.begun = true;
            let content = Some(String::new());
            let delta = Delta { role: Some("assistant"), content, ..Delta::default() };
            let choice = ChunkChoice { index, delta, logprobs: None, finish_reason: None };
            chunks.choice(choice, 0).await?;
        }
        let (parts, reason) = match written {
            Written::Prompt(_) => continue,
            Written::Piece(piece) => match reply.take(piece) {
                Ok((parts, logprob)) => {
                    told.logprobs.extend(logprob);
                    (parts, None)
                }
                Err(error) => return chunks.out.end(Some(error)).await,
            },
            Written::Finished(finished) => {
                usage.add(&finished, index == 0);
                let parts = reply.finish();
                usage.completion_tokens_details.reasoning_tokens += reply.reasoning_tokens();
                (parts, Some(reply.reason(&finished)))
            }
        };
        let deltas = parts.into_iter().map(|part| told.delta(part)).collect::<Vec<_>>();
        for delta in deltas {
            let logprobs = told.take_logprobs();
            let choice = ChunkChoice { index, delta, logprobs, finish_reason: None };
            chunks.choice(choice, reply.tokens()).await?;
        }
        if reason.is_some() {
            let (delta, logprobs) = (Delta::default(), told.take_logprobs());
            let choice = ChunkChoice { index, delta, logprobs, finish_reason: reason };
            chunks.choice(choice, reply.tokens()).await?;
        }
    }
    if usage_in != UsageIn::None {
        chunks.send(&[], Some(Used::All(usage))).await?;
    }
    chunks.out.end(None).await
}

impl Told {
    fn delta(&mut self, part: Part) -> Delta {
        match part {
            Part::Text(text) => Delta { content: Some(text), ..Delta::default() },
            Part::Reasoning(text) => Delta { reasoning_content: Some(text), ..Delta::default() },
            Part::Call(call) => {
                let call = ToolCall::new(call, Some(self.calls));
                self.calls += 1;
                Delta { tool_calls: Some([call]), ..Delta::default() }
            }
        }
    }

    fn take_logprobs(&mut self) -> Option<Logprobs> {
        let logprobs = std::mem::take(&mut self.logprobs);
        (!logprobs.is_empty()).then(|| Logprobs::of(logprobs))
    }
}

/// Where chunks go.
struct Chunks {
    out: Out,
    head: Head,
    prompt_tokens: usize,
    usage_in: UsageIn,
}

impl Chunks {
    /// More of a choice, which has so many tokens by now.
    async fn choice(&self, choice: ChunkChoice, tokens: usize) -> Result<(), Gone> {
        self.send(&[choice], Used::so_far(self.usage_in, self.prompt_tokens, tokens)).await
    }

    async fn send(&self, choices: &[ChunkChoice], usage: Option<Used>) -> Result<(), Gone> {
        let chunk = Completion::chunk("chat.completion.chunk", &self.head, choices, usage);
        self.out.object(&chunk).await
    }
}
