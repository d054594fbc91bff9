//! `POST /v1/messages` and `POST /v1/messages/count_tokens`, as Anthropic's clients send them.

mod answer;
mod blocks;

use crate::app::{Shared, new_id};
use crate::body::Body;
use crate::constraint::Constraint;
use crate::conversation::{Conversation, MESSAGES, check_variables, template};
use crate::error::{ApiError, Result};
use crate::sampling::{Sampling, within};
use crate::tools::{Choice, Tool, check};
use crate::writing::{Texts, stream};
use answer::Head;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use axum::{Json, Router};
use metal_candle::text::Tokenizer;
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::{Map, Value, json};

/// The routes.
pub fn routes() -> Router<Shared> {
    Router::new()
        .route("/v1/messages", post(messages))
        .route("/v1/messages/count_tokens", post(count_tokens))
}

/// Whether a path is one of these routes'.
pub fn has(path: &str) -> bool {
    path == "/v1/messages" || path.starts_with("/v1/messages/")
}

/// The field of the answer's format.
const FORMAT: &str = "output_config.format";

/// A request to continue a conversation, or to count its tokens.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct MessagesRequest {
    model: String,
    messages: Vec<Map<String, Value>>,
    max_tokens: Option<usize>,
    system: Option<Value>,
    stop_sequences: Option<Vec<String>>,
    stream: Option<bool>,
    temperature: Option<f64>,
    top_p: Option<f64>,
    top_k: Option<i64>,
    tools: Option<Vec<ToolField>>,
    tool_choice: Option<ToolChoice>,
    thinking: Option<Thinking>,
    service_tier: Option<String>,
    /// Who asks, which changes nothing.
    #[serde(rename = "metadata")]
    _metadata: Option<Metadata>,
    context_management: Option<ContextManagement>,
    output_config: Option<OutputConfig>,
    /// Prompts are cached in any case.
    #[serde(rename = "cache_control")]
    _cache_control: Option<IgnoredAny>,
    container: Option<IgnoredAny>,
    mcp_servers: Option<IgnoredAny>,
    output_format: Option<IgnoredAny>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ContextManagement {
    edits: Option<Vec<Value>>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct OutputConfig {
    effort: Option<String>,
    format: Option<OutputFormat>,
}

#[derive(Debug, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
enum OutputFormat {
    JsonSchema { schema: Map<String, Value> },
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Metadata {
    #[serde(rename = "user_id")]
    _user_id: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ToolField {
    #[serde(rename = "type")]
    kind: Option<String>,
    name: String,
    description: Option<String>,
    input_schema: Option<Map<String, Value>>,
    /// Prompts are cached in any case.
    #[serde(rename = "cache_control")]
    _cache_control: Option<IgnoredAny>,
    /// Calls that must be made follow the schema in any case.
    #[serde(rename = "strict")]
    _strict: Option<bool>,
    /// A call is told when it is whole.
    #[serde(rename = "eager_input_streaming")]
    _eager_input_streaming: Option<bool>,
}

#[derive(Debug, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
enum ToolChoice {
    Auto { disable_parallel_tool_use: Option<bool> },
    Any { disable_parallel_tool_use: Option<bool> },
    Tool { name: String, disable_parallel_tool_use: Option<bool> },
    None {},
}

#[derive(Debug, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
enum Thinking {
    Disabled {},
    Enabled {
        #[serde(rename = "budget_tokens")]
        _budget_tokens: Option<u64>,
    },
    Adaptive {
        #[serde(rename = "display")]
        _display: Option<IgnoredAny>,
    },
}

/// An error as Anthropic's clients know it.
pub struct Failure(ApiError);

impl From<ApiError> for Failure {
    fn from(error: ApiError) -> Self {
        Self(error)
    }
}

impl Failure {
    fn body(error: &ApiError) -> Value {
        let kind = match error.status {
            StatusCode::UNAUTHORIZED => "authentication_error",
            StatusCode::FORBIDDEN => "permission_error",
            StatusCode::NOT_FOUND => "not_found_error",
            StatusCode::PAYLOAD_TOO_LARGE => "request_too_large",
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            status if status.is_server_error() => "api_error",
            _ => "invalid_request_error",
        };
        let message = error.for_anthropic.as_deref().unwrap_or(&error.message);
        let what = json!({"type": kind, "message": message});
        json!({"type": "error", "error": what, "request_id": null})
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let body = Json(Self::body(&self.0));
        // Its status and headers are those of any error.
        let (mut parts, _) = self.0.into_response().into_parts();
        parts.headers.remove(axum::http::header::CONTENT_LENGTH);
        (parts.status, parts.headers, body).into_response()
    }
}

type Asked = Result<Body<MessagesRequest>, ApiError>;

async fn messages(State(app): State<Shared>, request: Asked) -> Result<Response, Failure> {
    let Body(request) = request?;
    request.refuse()?;
    if request.max_tokens.is_none() {
        return Err(Failure(ApiError::field("max_tokens", "is missing")));
    }
    let streams = request.stream.unwrap_or(false);
    let stop = request.stop_sequences.clone().unwrap_or_default();
    let model = request.model.clone();
    let read = move |tokenizer: &Tokenizer| request.conversation(tokenizer);
    let prepared = Conversation::prepared(&app, &model, read).await?;
    let head = Head { id: new_id("msg_"), model, prompt_tokens: prepared.prompt_tokens, stop };
    let texts = Texts::begin(&app, prepared.place, prepared.requests, streams).await?;
    let mut replies = prepared.replies;
    // A request without a number of choices has one.
    let reply = replies.pop().ok_or_else(|| ApiError::internal("there is no choice"))?;
    match streams {
        false => Ok(answer::whole(texts, reply, head).await?),
        true => Ok(stream(&app, |out| answer::tell(out, texts, reply, head))),
    }
}

async fn count_tokens(State(app): State<Shared>, request: Asked) -> Result<Json<Value>, Failure> {
    let Body(request) = request?;
    request.refuse()?;
    let model = request.model.clone();
    let read = move |tokenizer: &Tokenizer| request.conversation(tokenizer);
    let count = Conversation::counted(&app, &model, read).await?;
    Ok(Json(json!({"input_tokens": count})))
}

impl MessagesRequest {
    /// Refuses what Anthropic's API has and this server hasn't.
    fn refuse(&self) -> Result<()> {
        for (field, given, instead) in [
            ("container", &self.container, "leave it out"),
            ("mcp_servers", &self.mcp_servers, "leave it out"),
            ("output_format", &self.output_format, "give \"output_config\" with a \"format\""),
        ] {
            if given.is_some() {
                return Err(ApiError::unsupported(field, instead));
            }
        }
        let edits = self.context_management.iter().flat_map(|it| &it.edits).flatten();
        for (index, edit) in edits.enumerate() {
            let keeps =
                |keep: Value| *edit == json!({"type": "clear_thinking_20251015", "keep": keep});
            if !keeps(json!("all")) && !keeps(json!({"type": "all"})) {
                let instead = "messages are read as they are, so an edit may be \"clear_thinking_20251015\" with \
                               \"keep\": \"all\" alone";
                let place = format!("context_management.edits[{index}]");
                return Err(ApiError::unsupported(place, instead));
            }
        }
        match self.service_tier.as_deref() {
            None | Some("auto" | "standard_only") => Ok(()),
            Some(_) => Err(ApiError::unsupported("service_tier", "there is \"auto\" alone")),
        }
    }

    fn conversation(self, tokenizer: &Tokenizer) -> Result<Conversation> {
        let template = template(tokenizer, MESSAGES)?;
        if let Some(temperature) = self.temperature {
            within("temperature", temperature, 0.0, 1.0)?;
        }
        let tools = self.tools.into_iter().flatten().enumerate().map(tool);
        let tools = tools.collect::<Result<Vec<_>>>()?;
        check(&tools)?;
        let (choice, alone) = match self.tool_choice {
            None if tools.is_empty() => (Choice::None, None),
            None => (Choice::Auto, None),
            Some(ToolChoice::None {}) => (Choice::None, None),
            Some(ToolChoice::Auto { disable_parallel_tool_use: alone }) => (Choice::Auto, alone),
            Some(ToolChoice::Any { disable_parallel_tool_use: alone }) => (Choice::Required, alone),
            Some(ToolChoice::Tool { name, disable_parallel_tool_use: alone }) => {
                (Choice::Named(name), alone)
            }
        };
        choice.check(&tools)?;
        let mut variables = Map::new();
        match self.thinking {
            // Whether it thinks, and how long, is up to the model.
            None | Some(Thinking::Adaptive { .. }) => {}
            Some(Thinking::Disabled {}) if !template.mentions("enable_thinking") => {}
            Some(Thinking::Disabled {}) => {
                variables.insert("enable_thinking".into(), false.into());
            }
            Some(Thinking::Enabled { .. }) => {
                let instead =
                    "a model that thinks does so with \"adaptive\", and not with \"disabled\"";
                return Err(ApiError::unsupported("thinking.type", instead));
            }
        }
        check_variables("thinking", &variables, template)?;
        let mut answer = Constraint::None;
        if let Some(OutputConfig { effort, format }) = self.output_config {
            // A hint, which clients send to every model.
            if let Some(effort) = effort.filter(|_| template.mentions("reasoning_effort")) {
                variables.insert("reasoning_effort".into(), effort.into());
            }
            if let Some(OutputFormat::JsonSchema { schema }) = format {
                answer = Constraint::schema(FORMAT, Value::Object(schema))?;
            }
        }
        let stop = self.stop_sequences.map(Value::from);
        if let Some(stop) = &stop {
            crate::sampling::stops("stop_sequences", stop)?;
        }
        Ok(Conversation {
            messages: blocks::read(self.system, self.messages, template)?,
            field: MESSAGES,
            tools,
            choice,
            parallel: !alone.unwrap_or(false),
            variables,
            answer,
            sampling: Sampling {
                temperature: self.temperature,
                top_p: self.top_p,
                top_k: self.top_k,
                stop,
                ..Sampling::default()
            },
            max_tokens: self.max_tokens.map(|most| ("max_tokens", most)),
            logprobs: None,
        })
    }
}

fn tool((index, field): (usize, ToolField)) -> Result<Tool> {
    let place = format!("tools[{index}]");
    if field.kind.as_ref().is_some_and(|kind| kind != "custom") {
        let instead = "there are tools with a schema of their own alone";
        return Err(ApiError::unsupported(format!("{place}.type"), instead));
    }
    let Some(schema) = field.input_schema else {
        return Err(ApiError::field(format!("{place}.input_schema"), "is missing"));
    };
    Tool::new(&place, field.name, field.description, Some(schema))
}
