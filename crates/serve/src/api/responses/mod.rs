//! `POST /v1/responses`: texts and calls of functions. Nothing is kept, so a conversation is given as a whole each time.
//! `POST /v1/responses/input_tokens` counts the tokens of one.

mod answer;
mod input;

use crate::api::chat::{check_service_tier, messages};
use crate::app::{Shared, new_id, now};
use crate::body::Body;
use crate::constraint::Constraint;
use crate::conversation::{Conversation, template};
use crate::error::{ApiError, Result};
use crate::sampling::{Sampling, check_metadata};
use crate::tools::{Choice, Tool, check};
use crate::writing::{Texts, stream};
use answer::Answer;
use axum::extract::State;
use axum::response::Response;
use axum::routing::post;
use axum::{Json, Router};
use metal_candle::text::{Message, Tokenizer};
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::{Map, Value, json};

/// The field of the conversation.
const INPUT: &str = "input";
/// The field of the answer's format.
const FORMAT: &str = "text.format";

/// The routes.
pub fn routes() -> Router<Shared> {
    Router::new()
        .route("/v1/responses", post(respond))
        .route("/v1/responses/input_tokens", post(count_tokens))
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ResponseRequest {
    model: String,
    input: Input,
    instructions: Option<String>,
    max_output_tokens: Option<usize>,
    temperature: Option<f64>,
    top_p: Option<f64>,
    text: Option<TextField>,
    tools: Option<Vec<ToolField>>,
    tool_choice: Option<Value>,
    parallel_tool_calls: Option<bool>,
    metadata: Option<Map<String, Value>>,
    stream: Option<bool>,
    #[serde(rename = "stream_options")]
    _stream_options: Option<StreamOptions>,
    reasoning: Option<Reasoning>,
    service_tier: Option<String>,
    include: Option<Vec<String>>,
    truncation: Option<String>,
    store: Option<bool>,
    background: Option<bool>,
    top_logprobs: Option<usize>,
    /// Who asks, and what prompts are found by elsewhere, which change nothing.
    #[serde(rename = "user")]
    _user: Option<String>,
    #[serde(rename = "safety_identifier")]
    _safety_identifier: Option<String>,
    #[serde(rename = "prompt_cache_key")]
    _prompt_cache_key: Option<String>,
    background_options: Option<IgnoredAny>,
    context_management: Option<IgnoredAny>,
    conversation: Option<IgnoredAny>,
    max_tool_calls: Option<IgnoredAny>,
    moderation: Option<IgnoredAny>,
    previous_response_id: Option<IgnoredAny>,
    prompt: Option<IgnoredAny>,
    prompt_cache_options: Option<IgnoredAny>,
    prompt_cache_retention: Option<IgnoredAny>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected a string or a list of items")]
enum Input {
    Text(String),
    Items(Vec<Map<String, Value>>),
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct TextField {
    format: Option<Map<String, Value>>,
    verbosity: Option<IgnoredAny>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct StreamOptions {
    #[serde(rename = "include_obfuscation")]
    _include_obfuscation: Option<bool>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Reasoning {
    effort: Option<String>,
    summary: Option<IgnoredAny>,
    generate_summary: Option<IgnoredAny>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ToolField {
    #[serde(rename = "type")]
    kind: String,
    name: Option<String>,
    description: Option<String>,
    parameters: Option<Map<String, Value>>,
    /// Calls that must be made follow the schema in any case.
    #[serde(rename = "strict")]
    _strict: Option<bool>,
}

async fn respond(
    State(app): State<Shared>,
    Body(request): Body<ResponseRequest>,
) -> Result<Response> {
    request.refuse()?;
    let streams = request.stream.unwrap_or(false);
    let chosen = app.choose(&request.model).await?;
    let model = chosen.name.clone();
    let (prepared, asked) = app
        .blocking(move |app| {
            let asked = request.asked();
            let conversation = request.conversation(&chosen.tokenizer)?;
            let tools = conversation.tools.iter().map(shown).collect::<Vec<_>>();
            let drawn = conversation.sampling.options(app)?;
            let sampling = drawn.first().map(|options| options.sampling.clone());
            let prepared = conversation.prepare(app, &chosen)?;
            let (temperature, top_p) =
                sampling.map_or((0.0, 1.0), |sampling| (sampling.temperature, sampling.top_p));
            let known = json!({"tools": tools, "temperature": temperature, "top_p": top_p});
            Ok((prepared, merged(asked, known)))
        })
        .await?;
    let head = json!({
        "id": new_id("resp_"),
        "object": "response",
        "created_at": now(),
        "model": model,
        "error": null,
        "incomplete_details": null,
    });
    let texts = Texts::begin(&app, prepared.place, prepared.requests, streams).await?;
    let mut replies = prepared.replies;
    // A request without a number of choices has one.
    let reply = replies.pop().ok_or_else(|| ApiError::internal("there is no choice"))?;
    let answer = Answer::new(merged(head, asked));
    match streams {
        false => answer::whole(texts, reply, answer).await,
        true => Ok(stream(&app, |out| answer::tell(out, texts, reply, answer))),
    }
}

async fn count_tokens(
    State(app): State<Shared>,
    Body(request): Body<ResponseRequest>,
) -> Result<Json<Value>> {
    request.refuse()?;
    let model = request.model.clone();
    let read = move |tokenizer: &Tokenizer| request.conversation(tokenizer);
    let count = Conversation::counted(&app, &model, read).await?;
    Ok(Json(json!({"object": "response.input_tokens", "input_tokens": count})))
}

/// The fields of both objects.
fn merged(mut one: Value, other: Value) -> Value {
    if let (Value::Object(fields), Value::Object(more)) = (&mut one, other) {
        fields.extend(more);
    }
    one
}

/// A tool as answers repeat it.
fn shown(tool: &Tool) -> Value {
    let Tool { name, description, parameters } = tool;
    json!({"type": "function", "name": name, "description": description,
        "parameters": parameters, "strict": true})
}

impl ResponseRequest {
    /// Refuses what OpenAI's API has and this server hasn't.
    fn refuse(&self) -> Result<()> {
        let whole = "give the whole conversation as \"input\"; nothing is kept";
        for (field, given, instead) in [
            ("background_options", &self.background_options, "leave it out"),
            ("context_management", &self.context_management, "leave it out"),
            ("conversation", &self.conversation, whole),
            ("max_tool_calls", &self.max_tool_calls, "tools are called by the client"),
            ("moderation", &self.moderation, "leave it out"),
            ("previous_response_id", &self.previous_response_id, whole),
            ("prompt", &self.prompt, "give \"input\" and \"instructions\""),
            ("prompt_cache_options", &self.prompt_cache_options, "prompts are cached in any case"),
            ("prompt_cache_retention", &self.prompt_cache_retention, "prompts stay in memory"),
        ] {
            if given.is_some() {
                return Err(ApiError::unsupported(field, instead));
            }
        }
        let text = self.text.as_ref();
        let reasoning = self.reasoning.as_ref();
        let summarizes = |it: &Reasoning| it.summary.is_some() || it.generate_summary.is_some();
        for (field, is_asked, instead) in [
            ("background", self.background == Some(true), "wait for the answer or stream it"),
            ("store", self.store == Some(true), "answers are kept nowhere"),
            (
                "top_logprobs",
                self.top_logprobs.is_some_and(|it| it > 0),
                "/v1/chat/completions tells log-probabilities",
            ),
            (
                "truncation",
                self.truncation.as_ref().is_some_and(|it| it != "disabled"),
                "shorten the input",
            ),
            (
                "text.verbosity",
                text.is_some_and(|it| it.verbosity.is_some()),
                "say it in a message",
            ),
            ("reasoning.summary", reasoning.is_some_and(summarizes), "all of it is told"),
        ] {
            if is_asked {
                return Err(ApiError::unsupported(field, instead));
            }
        }
        // Thoughts are told as they are, so whoever keeps them has no need of encrypted ones.
        let asks = |it: &&String| *it != "reasoning.encrypted_content";
        if let Some(other) = self.include.iter().flatten().find(asks) {
            let other = metal_candle::readable(other);
            let what = format!("{other:?} is not supported; answers have all that there is");
            return Err(ApiError::field("include", what).coded("unsupported_parameter"));
        }
        check_service_tier(self.service_tier.as_deref())?;
        check_metadata(self.metadata.as_ref())
    }

    /// What answers repeat of the request.
    fn asked(&self) -> Value {
        let mut format = self.text.as_ref().and_then(|text| text.format.clone());
        if let Some(format) = &mut format {
            format.retain(|_, value| !value.is_null());
        }
        json!({
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata.clone().unwrap_or_default(),
            "parallel_tool_calls": self.parallel_tool_calls.unwrap_or(true),
            "text": {"format": format.map_or_else(|| json!({"type": "text"}), Value::Object)},
            "tool_choice": self.tool_choice.clone().unwrap_or_else(|| "auto".into()),
            "truncation": "disabled",
            "service_tier": "default",
            "background": false,
            "previous_response_id": null,
            "store": false,
        })
    }

    fn conversation(self, tokenizer: &Tokenizer) -> Result<Conversation> {
        let template = template(tokenizer, INPUT)?;
        let tools = self.tools.into_iter().flatten().enumerate().map(tool);
        let tools = tools.collect::<Result<Vec<_>>>()?;
        check(&tools)?;
        let choice = match self.tool_choice {
            // A function is named without an object of its own.
            Some(Value::Object(fields)) if fields.contains_key("name") => {
                let choice =
                    json!({"type": fields.get("type"), "function": {"name": fields.get("name")}});
                Choice::read(Some(&choice), &tools)?
            }
            // The usual choice is repeated where there is nothing to choose from.
            Some(Value::String(word)) if word == "auto" && tools.is_empty() => Choice::None,
            choice => Choice::read(choice.as_ref(), &tools)?,
        };
        let mut variables = Map::new();
        if let Some(effort) = self.reasoning.and_then(|reasoning| reasoning.effort) {
            if !template.mentions("reasoning_effort") {
                let instead = "this model's chat template makes no use of it";
                return Err(ApiError::unsupported("reasoning.effort", instead));
            }
            variables.insert("reasoning_effort".into(), effort.into());
        }
        let mut conversation = Vec::new();
        conversation.extend(self.instructions.map(|text| Message::new("system", text)));
        match self.input {
            Input::Text(text) => conversation.push(Message::new("user", text)),
            Input::Items(items) => {
                let items = items.into_iter().enumerate().map(input::message);
                let items = items.collect::<Result<Vec<_>>>()?;
                let items = messages::read(INPUT, items, template)?;
                conversation.extend(input::joined(&items));
            }
        }
        let format = self.text.and_then(|text| text.format).map(nested).transpose()?;
        Ok(Conversation {
            messages: conversation,
            field: INPUT,
            tools,
            choice,
            parallel: self.parallel_tool_calls.unwrap_or(true),
            variables,
            answer: Constraint::of_format(FORMAT, format)?,
            sampling: Sampling {
                temperature: self.temperature,
                top_p: self.top_p,
                ..Sampling::default()
            },
            max_tokens: self.max_output_tokens.map(|most| ("max_output_tokens", most)),
            logprobs: None,
        })
    }
}

/// A format as `/v1/chat/completions` has it: with an object of its own for a schema, which answers repeat.
fn nested(mut format: Map<String, Value>) -> Result<Value> {
    if format.get("type").and_then(Value::as_str) != Some("json_schema") {
        return Ok(Value::Object(format));
    }
    for key in ["name", "schema"] {
        if format.get(key).is_none_or(Value::is_null) {
            return Err(ApiError::field(format!("{FORMAT}.{key}"), "is missing"));
        }
    }
    format.shift_remove("type");
    Ok(json!({"type": "json_schema", "json_schema": format}))
}

fn tool((index, field): (usize, ToolField)) -> Result<Tool> {
    let place = format!("tools[{index}]");
    if field.kind != "function" {
        let instead = "there are tools of the type \"function\" alone";
        return Err(ApiError::unsupported(format!("{place}.type"), instead));
    }
    let Some(name) = field.name else {
        return Err(ApiError::field(format!("{place}.name"), "is missing"));
    };
    Tool::new(&place, name, field.description, field.parameters)
}
