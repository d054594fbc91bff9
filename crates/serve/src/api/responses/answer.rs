//! Answers of `/v1/responses`: the items of an output and the events that tell of them.

use crate::app::new_id;
use crate::conversation::{Reason, Reply};
use crate::error::Result;
use crate::tools::{Call, Part};
use crate::writing::{Gone, Out, Texts, Written};
use axum::Json;
use axum::response::{IntoResponse, Response};
use metal_candle::engine::Finished;
use serde_json::{Value, json};

/// An answer while it is written.
pub struct Answer {
    /// What it says of itself and the request.
    response: Value,
    items: Vec<Value>,
    open: Option<Open>,
    /// The number of the next event.
    sequence: u64,
}

/// An item that more may be added to.
struct Open {
    kind: Kind,
    id: String,
    text: String,
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Text,
    Reasoning,
}

impl Kind {
    /// The item of this kind with a text.
    fn item(self, id: &str, status: &str, content: Vec<Value>) -> Value {
        match self {
            Self::Text => json!({"id": id, "type": "message", "role": "assistant",
                "status": status, "content": content}),
            Self::Reasoning => json!({"id": id, "type": "reasoning", "summary": [],
                "status": status, "content": content}),
        }
    }

    fn part(self, text: &str) -> Value {
        match self {
            Self::Text => {
                json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []})
            }
            Self::Reasoning => json!({"type": "reasoning_text", "text": text}),
        }
    }

    /// What the names of its events begin with.
    fn events(self) -> &'static str {
        match self {
            Self::Text => "response.output_text",
            Self::Reasoning => "response.reasoning_text",
        }
    }
}

impl Answer {
    /// An answer without items.
    pub fn new(response: Value) -> Self {
        Self { response, items: Vec::new(), open: None, sequence: 0 }
    }

    fn event(&mut self, name: &str, mut fields: Value) -> Value {
        fields["type"] = name.into();
        fields["sequence_number"] = self.sequence.into();
        self.sequence += 1;
        fields
    }

    fn snapshot(&self, status: &str) -> Value {
        let mut response = self.response.clone();
        response["status"] = status.into();
        response["output"] = self.items.clone().into();
        response
    }

    /// What tells that it is begun.
    fn begin(&mut self) -> Vec<Value> {
        let response = self.snapshot("in_progress");
        ["response.created", "response.in_progress"]
            .map(|name| self.event(name, json!({"response": response})))
            .into()
    }

    /// Adds a part; gives the events that tell of it.
    fn add(&mut self, part: Part) -> Vec<Value> {
        match part {
            Part::Text(text) => self.add_text(Kind::Text, &text),
            Part::Reasoning(text) => self.add_text(Kind::Reasoning, &text),
            Part::Call(call) => self.add_call(call),
        }
    }

    fn add_text(&mut self, kind: Kind, text: &str) -> Vec<Value> {
        let mut events = Vec::new();
        if self.open.as_ref().is_none_or(|open| open.kind != kind) {
            events.extend(self.close("completed"));
            let id = new_id(if kind == Kind::Text { "msg_" } else { "rs_" });
            let output_index = self.items.len();
            let item = kind.item(&id, "in_progress", Vec::new());
            let added = json!({"output_index": output_index, "item": item});
            events.push(self.event("response.output_item.added", added));
            let part = json!({"item_id": id, "output_index": output_index, "content_index": 0,
                "part": kind.part("")});
            events.push(self.event("response.content_part.added", part));
            self.open = Some(Open { kind, id, text: String::new() });
        }
        let output_index = self.items.len();
        if let Some(open) = &mut self.open {
            open.text.push_str(text);
            let mut delta = json!({"item_id": open.id, "output_index": output_index,
                "content_index": 0, "delta": text});
            if kind == Kind::Text {
                delta["logprobs"] = json!([]);
            }
            events.push(self.event(&format!("{}.delta", kind.events()), delta));
        }
        events
    }

    fn add_call(&mut self, call: Call) -> Vec<Value> {
        let mut events = self.close("completed");
        let (id, output_index) = (new_id("fc_"), self.items.len());
        let Call { id: call_id, name, arguments } = call;
        let item = |status: &str, arguments: &str| {
            json!({"id": id, "type": "function_call", "status": status, "call_id": call_id,
                "name": name, "arguments": arguments})
        };
        let place =
            |key: &str| json!({"item_id": id, "output_index": output_index, key: arguments});
        let whole = item("completed", &arguments);
        for (name, fields) in [
            (
                "response.output_item.added",
                json!({"output_index": output_index, "item": item("in_progress", "")}),
            ),
            ("response.function_call_arguments.delta", place("delta")),
            ("response.function_call_arguments.done", {
                let mut done = place("arguments");
                done["name"] = name.as_str().into();
                done
            }),
            ("response.output_item.done", json!({"output_index": output_index, "item": whole})),
        ] {
            events.push(self.event(name, fields));
        }
        self.items.push(whole);
        events
    }

    /// Ends the item that is open.
    fn close(&mut self, status: &str) -> Vec<Value> {
        let Some(Open { kind, id, text }) = self.open.take() else { return Vec::new() };
        let output_index = self.items.len();
        let place = |key: &str, value: Value| json!({"item_id": id, "output_index": output_index, "content_index": 0, key: value});
        let mut done = place("text", text.as_str().into());
        if kind == Kind::Text {
            done["logprobs"] = json!([]);
        }
        let item = kind.item(&id, status, vec![kind.part(&text)]);
        let events = vec![
            self.event(&format!("{}.done", kind.events()), done),
            self.event("response.content_part.done", place("part", kind.part(&text))),
            self.event(
                "response.output_item.done",
                json!({"output_index": output_index, "item": item}),
            ),
        ];
        self.items.push(item);
        events
    }

    /// Ends the answer.
    fn end(&mut self, reply: &Reply, finished: &Finished) -> Vec<Value> {
        let is_whole = reply.reason(finished) != Reason::Length;
        let status = if is_whole { "completed" } else { "incomplete" };
        let mut events = Vec::new();
        if self.open.is_none() && self.items.is_empty() {
            events.extend(self.add_text(Kind::Text, ""));
        }
        events.extend(self.close(status));
        if !is_whole {
            self.response["incomplete_details"] = json!({"reason": "max_output_tokens"});
        }
        self.response["usage"] = json!({
            "input_tokens": finished.prompt_tokens,
            "input_tokens_details":
                {"cached_tokens": finished.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": finished.tokens,
            "output_tokens_details": {"reasoning_tokens": reply.reasoning_tokens()},
            "total_tokens": finished.prompt_tokens + finished.tokens,
        });
        self.response = self.snapshot(status);
        let response = json!({"response": self.response});
        events.push(self.event(&format!("response.{status}"), response));
        events
    }

    /// What an event of the text adds.
    fn take(&mut self, reply: &mut Reply, written: Written) -> Result<Vec<Value>> {
        let parts = match &written {
            Written::Prompt(_) => Vec::new(),
            Written::Piece(piece) => reply.take(piece.clone())?.0,
            Written::Finished(_) => reply.finish(),
        };
        let mut events: Vec<Value> = parts.into_iter().flat_map(|part| self.add(part)).collect();
        if let Written::Finished(finished) = &written {
            events.extend(self.end(reply, finished));
        }
        Ok(events)
    }
}

/// Waits for the text and answers with it.
///
/// # Errors
/// When it cannot be written to its end.
pub async fn whole(mut texts: Texts, mut reply: Reply, mut answer: Answer) -> Result<Response> {
    while let Some((_, written)) = texts.next().await? {
        answer.take(&mut reply, written)?;
    }
    Ok(Json(answer.response).into_response())
}

/// Tells the text as it is written.
///
/// # Errors
/// When nobody listens any more.
pub async fn tell(
    out: Out,
    mut texts: Texts,
    mut reply: Reply,
    mut answer: Answer,
) -> Result<(), Gone> {
    let mut events = answer.begin();
    loop {
        for event in events {
            out.named(event["type"].as_str().unwrap_or_default(), &event).await?;
        }
        let taken = match texts.next().await {
            Ok(Some((_, written))) => answer.take(&mut reply, written),
            Ok(None) => return Ok(()),
            Err(error) => Err(error),
        };
        events = match taken {
            Ok(events) => events,
            Err(error) => {
                let fields = json!({"code": error.code.unwrap_or(error.kind),
                    "message": error.message, "param": error.param});
                let event = answer.event("error", fields);
                return out.named("error", &event).await;
            }
        };
    }
}
