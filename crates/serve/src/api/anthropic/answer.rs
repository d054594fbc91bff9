//! Answers of `/v1/messages`, whole and as events.

use super::Failure;
use crate::conversation::{Reason, Reply};
use crate::error::{ApiError, Result};
use crate::tools::{Call, Part};
use crate::writing::{Gone, Out, Texts, Written};
use axum::Json;
use axum::response::{IntoResponse, Response};
use metal_candle::engine::Finished;
use metal_candle::generate::FinishReason;
use serde_json::{Value, json};

/// What an answer begins with.
pub struct Head {
    /// `msg_...`
    pub id: String,
    /// The model's name.
    pub model: String,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// The stop strings of the request.
    pub stop: Vec<String>,
}

impl Head {
    fn message(&self, content: Vec<Value>) -> Value {
        json!({
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": null,
            "stop_sequence": null,
            "stop_details": null,
            "container": null,
            "usage": self.usage(0, 0),
        })
    }

    fn usage(&self, cached: usize, written: usize) -> Value {
        json!({
            "input_tokens": self.prompt_tokens.saturating_sub(cached),
            "cache_creation": null,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": written,
            "output_tokens_details": null,
            "server_tool_use": null,
            "service_tier": null,
            "inference_geo": null,
        })
    }

    /// Why the text ended, and the stop string that ended it.
    fn stop(&self, reply: &Reply, finished: &Finished) -> (&'static str, Option<&str>) {
        match (reply.reason(finished), finished.reason) {
            (Reason::ToolCalls, _) => ("tool_use", None),
            (Reason::Length, _) => ("max_tokens", None),
            (Reason::Stop, FinishReason::Stop) => {
                let found = finished.stop.and_then(|stop| self.stop.get(stop));
                ("stop_sequence", found.map(String::as_str))
            }
            (Reason::Stop, _) => ("end_turn", None),
        }
    }
}

fn call_block(call: &Call) -> Value {
    // The arguments are an object: what isn't is no call.
    let input: Value = serde_json::from_str(&call.arguments).unwrap_or_else(|_| json!({}));
    let caller = json!({"type": "direct"});
    json!({"type": "tool_use", "id": call.id, "name": call.name, "input": input, "caller": caller})
}

/// Waits for the text and answers with it.
///
/// # Errors
/// When it cannot be written to its end.
pub async fn whole(mut texts: Texts, mut reply: Reply, head: Head) -> Result<Response> {
    let mut parts = Vec::new();
    let mut message = head.message(Vec::new());
    while let Some((_, written)) = texts.next().await? {
        match written {
            Written::Prompt(_) => {}
            Written::Piece(piece) => join(&mut parts, reply.take(piece)?.0),
            Written::Finished(finished) => {
                join(&mut parts, reply.finish());
                let (reason, sequence) = head.stop(&reply, &finished);
                message["stop_reason"] = reason.into();
                message["stop_sequence"] = sequence.into();
                message["usage"] = head.usage(finished.cached_tokens, finished.tokens);
            }
        }
    }
    let is_answer = |part: &Part| !matches!(part, Part::Reasoning(_));
    if !parts.iter().any(is_answer) {
        parts.push(Part::Text(String::new()));
    }
    let content: Vec<Value> = parts
        .iter()
        .map(|part| match part {
            Part::Reasoning(text) => json!({"type": "thinking", "thinking": text, "signature": ""}),
            Part::Text(text) => json!({"type": "text", "text": text}),
            Part::Call(call) => call_block(call),
        })
        .collect();
    message["content"] = content.into();
    Ok(Json(message).into_response())
}

/// Adds parts in their order; those of one kind that follow each other are one.
fn join(parts: &mut Vec<Part>, more: Vec<Part>) {
    for part in more {
        match (parts.last_mut(), part) {
            (Some(Part::Text(text)), Part::Text(more))
            | (Some(Part::Reasoning(text)), Part::Reasoning(more)) => text.push_str(&more),
            (_, Part::Text(text) | Part::Reasoning(text)) if text.is_empty() => {}
            (_, part) => parts.push(part),
        }
    }
}

/// The block of a stream that is open.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Open {
    None,
    Text,
    Thinking,
}

/// Where events go, and what was told of the blocks.
struct Blocks {
    out: Out,
    open: Open,
    /// Blocks that were begun.
    count: usize,
}

impl Blocks {
    async fn event(&self, name: &str, mut fields: Value) -> Result<(), Gone> {
        fields["type"] = name.into();
        self.out.named(name, &fields).await
    }

    async fn begin(&mut self, open: Open, block: Value) -> Result<(), Gone> {
        self.end().await?;
        self.open = open;
        let fields = json!({"index": self.count, "content_block": block});
        self.count += 1;
        self.event("content_block_start", fields).await
    }

    async fn delta(&self, delta: Value) -> Result<(), Gone> {
        let fields = json!({"index": self.count.saturating_sub(1), "delta": delta});
        self.event("content_block_delta", fields).await
    }

    async fn stop(&self) -> Result<(), Gone> {
        let fields = json!({"index": self.count.saturating_sub(1)});
        self.event("content_block_stop", fields).await
    }

    async fn end(&mut self) -> Result<(), Gone> {
        if self.open == Open::Thinking {
            self.delta(json!({"type": "signature_delta", "signature": ""})).await?;
        }
        if self.open != Open::None {
            self.open = Open::None;
            self.stop().await?;
        }
        Ok(())
    }

    async fn part(&mut self, part: Part) -> Result<(), Gone> {
        match part {
            Part::Text(text) => {
                if self.open != Open::Text {
                    self.begin(Open::Text, json!({"type": "text", "text": ""})).await?;
                }
                self.delta(json!({"type": "text_delta", "text": text})).await
            }
            Part::Reasoning(text) => {
                if self.open != Open::Thinking {
                    let block = json!({"type": "thinking", "thinking": "", "signature": ""});
                    self.begin(Open::Thinking, block).await?;
                }
                self.delta(json!({"type": "thinking_delta", "thinking": text})).await
            }
            Part::Call(call) => {
                let mut block = call_block(&call);
                block["input"] = json!({});
                self.begin(Open::None, block).await?;
                let arguments = call.arguments;
                self.delta(json!({"type": "input_json_delta", "partial_json": arguments})).await?;
                self.stop().await
            }
        }
    }

    async fn fail(&self, error: &ApiError) -> Result<(), Gone> {
        self.out.named("error", &Failure::body(error)).await
    }
}

/// Tells the text as it is written.
///
/// # Errors
/// When nobody listens any more.
pub async fn tell(out: Out, mut texts: Texts, mut reply: Reply, head: Head) -> Result<(), Gone> {
    let mut blocks = Blocks { out, open: Open::None, count: 0 };
    blocks.event("message_start", json!({"message": head.message(Vec::new())})).await?;
    loop {
        let written = match texts.next().await {
            Ok(Some((_, written))) => written,
            Ok(None) => break,
            Err(error) => return blocks.fail(&error).await,
        };
        match written {
            Written::Prompt(_) => {}
            Written::Piece(piece) => match reply.take(piece) {
                Ok((parts, _)) => {
                    for part in parts {
                        blocks.part(part).await?;
                    }
                }
                Err(error) => return blocks.fail(&error).await,
            },
            Written::Finished(finished) => {
                for part in reply.finish() {
                    blocks.part(part).await?;
                }
                if blocks.count == 0 {
                    blocks.part(Part::Text(String::new())).await?;
                }
                blocks.end().await?;
                let (reason, sequence) = head.stop(&reply, &finished);
                let delta = json!({"stop_reason": reason, "stop_sequence": sequence,
                    "stop_details": null, "container": null});
                let usage = head.usage(finished.cached_tokens, finished.tokens);
                blocks.event("message_delta", json!({"delta": delta, "usage": usage})).await?;
            }
        }
    }
    blocks.event("message_stop", json!({})).await
}
