//! `POST /v1/chat/completions`.

mod answer;
pub mod messages;

use crate::app::{Shared, new_id, now};
use crate::body::Body;
use crate::constraint::Constraint;
use crate::conversation::{Conversation, MESSAGES, check_variables, template};
use crate::error::{ApiError, Result};
use crate::sampling::{alternatives, check_metadata, request};
use crate::tools::{self, Choice, ToolField};
use crate::writing::{Texts, stream};
use answer::Head;
use axum::Router;
use axum::extract::State;
use axum::response::Response;
use axum::routing::post;
use metal_candle::text::Tokenizer;
use serde::de::IgnoredAny;
use serde_json::{Map, Value};

/// The routes.
pub fn routes() -> Router<Shared> {
    Router::new().route("/v1/chat/completions", post(complete))
}

request! {
    /// A request to continue a conversation.
    ChatRequest {
        messages: Vec<Map<String, Value>>,
        max_tokens: Option<usize>,
        max_completion_tokens: Option<usize>,
        logprobs: Option<bool>,
        top_logprobs: Option<usize>,
        response_format: Option<Value>,
        tools: Option<Vec<ToolField>>,
        tool_choice: Option<Value>,
        parallel_tool_calls: Option<bool>,
        reasoning_effort: Option<String>,
        chat_template_kwargs: Option<Map<String, Value>>,
        metadata: Option<Map<String, Value>>,
        store: Option<bool>,
        service_tier: Option<String>,
        modalities: Option<Vec<String>>,
        /// What OpenAI's servers find a prompt's cache by; this one finds it by the prompt.
        #[serde(rename = "prompt_cache_key")]
        _prompt_cache_key: Option<String>,
        /// Who asks, which changes nothing.
        #[serde(rename = "safety_identifier")]
        _safety_identifier: Option<String>,
        prompt_cache_retention: Option<String>,
        audio: Option<IgnoredAny>,
        function_call: Option<IgnoredAny>,
        functions: Option<IgnoredAny>,
        moderation: Option<IgnoredAny>,
        prediction: Option<IgnoredAny>,
        prompt_cache_options: Option<IgnoredAny>,
        verbosity: Option<IgnoredAny>,
        web_search_options: Option<IgnoredAny>,
    }
}

async fn complete(State(app): State<Shared>, Body(request): Body<ChatRequest>) -> Result<Response> {
    request.refuse()?;
    let streaming = request.streaming()?;
    let service_tier = request.service_tier.as_ref().map(|_| "default");
    let model = request.model.clone();
    let read = move |tokenizer: &Tokenizer| request.conversation(tokenizer);
    let prepared = Conversation::prepared(&app, &model, read).await?;
    let texts = Texts::begin(&app, prepared.place, prepared.requests, streaming.is_some()).await?;
    let head = Head { id: new_id("chatcmpl-"), created: now(), model, service_tier };
    let (replies, prompt) = (prepared.replies, prepared.prompt_tokens);
    match streaming {
        None => answer::whole(texts, replies, head).await,
        Some(usage) => {
            Ok(stream(&app, |out| answer::tell(out, texts, replies, head, prompt, usage)))
        }
    }
}

impl ChatRequest {
    /// Refuses what OpenAI's API has and this server hasn't.
    fn refuse(&self) -> Result<()> {
        let texts = "there are texts alone";
        let tools = "give \"tools\" and \"tool_choice\"";
        for (field, given, instead) in [
            ("audio", &self.audio, texts),
            ("function_call", &self.function_call, tools),
            ("functions", &self.functions, tools),
            ("moderation", &self.moderation, "leave it out"),
            ("prediction", &self.prediction, "leave it out"),
            ("prompt_cache_options", &self.prompt_cache_options, "prompts are cached in any case"),
            ("verbosity", &self.verbosity, "say it in a message"),
            ("web_search_options", &self.web_search_options, "give a tool that searches"),
        ] {
            if given.is_some() {
                return Err(ApiError::unsupported(field, instead));
            }
        }
        if self.modalities.as_ref().is_some_and(|it| it.iter().any(|kind| kind != "text")) {
            return Err(ApiError::unsupported("modalities", texts));
        }
        if self.store == Some(true) {
            return Err(ApiError::unsupported("store", "answers are kept nowhere"));
        }
        if self.prompt_cache_retention.as_ref().is_some_and(|it| it != "in_memory") {
            return Err(ApiError::unsupported("prompt_cache_retention", "prompts stay in memory"));
        }
        check_service_tier(self.service_tier.as_deref())?;
        check_metadata(self.metadata.as_ref())
    }

    /// What is to be continued, and how.
    fn conversation(mut self, tokenizer: &Tokenizer) -> Result<Conversation> {
        let sampling = self.sampling();
        let answer = Constraint::of_format("response_format", self.response_format.take())?;
        let answer = answer.or(self.guided()?)?;
        let tools = tools::read(self.tools)?;
        let choice = Choice::read(self.tool_choice.as_ref(), &tools)?;
        if self.parallel_tool_calls.is_some() && tools.is_empty() {
            return Err(ApiError::field(
                "parallel_tool_calls",
                "needs \"tools\", and there are none",
            ));
        }
        let logprobs = match (self.logprobs.unwrap_or(false), self.top_logprobs) {
            (false, Some(1..)) => {
                return Err(ApiError::field("top_logprobs", "needs \"logprobs\": true"));
            }
            (false, _) => None,
            (true, count) => Some(alternatives("top_logprobs", count.unwrap_or(0))?),
        };
        let max_tokens = match (self.max_tokens, self.max_completion_tokens) {
            (Some(old), Some(new)) if old != new => {
                let what = format!("is {old}, but max_completion_tokens is {new}");
                return Err(ApiError::field("max_tokens", what));
            }
            (_, Some(most)) => Some(("max_completion_tokens", most)),
            (most, None) => most.map(|most| ("max_tokens", most)),
        };
        let template = template(tokenizer, MESSAGES)?;
        let mut variables = self.chat_template_kwargs.unwrap_or_default();
        check_variables("chat_template_kwargs", &variables, template)?;
        if let Some(effort) = self.reasoning_effort {
            let field = "reasoning_effort";
            if !template.mentions(field) {
                let instead = "this model's chat template makes no use of it";
                return Err(ApiError::unsupported(field, instead));
            }
            variables.insert(field.into(), effort.into());
        }
        Ok(Conversation {
            messages: messages::read(MESSAGES, self.messages, template)?,
            field: MESSAGES,
            tools,
            choice,
            parallel: self.parallel_tool_calls.unwrap_or(true),
            variables,
            answer,
            sampling,
            max_tokens,
            logprobs,
        })
    }
}

/// That a request wants the only tier that there is.
///
/// # Errors
/// A 400 for another one.
pub fn check_service_tier(tier: Option<&str>) -> Result<()> {
    match tier {
        None | Some("auto" | "default") => Ok(()),
        Some(_) => Err(ApiError::unsupported("service_tier", "there is \"default\" alone")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::body::parse;
    use serde_json::json;

    #[test]
    fn what_this_server_has_not_is_refused_by_name() {
        let refused = |field: &str, value: Value| {
            let mut request = json!({"model": "m", "messages": []});
            request[field] = value;
            let request: ChatRequest = parse(request.to_string().as_bytes()).unwrap();
            request.refuse().unwrap_err().param.unwrap()
        };
        for field in [
            "audio",
            "function_call",
            "functions",
            "moderation",
            "prediction",
            "prompt_cache_options",
            "verbosity",
            "web_search_options",
        ] {
            assert_eq!(refused(field, json!({})), field);
        }
        assert_eq!(refused("store", json!(true)), "store");
        assert_eq!(refused("service_tier", json!("flex")), "service_tier");
        assert_eq!(refused("modalities", json!(["text", "audio"])), "modalities");
        assert_eq!(refused("metadata", json!({"a": 1})), "metadata");
        let unknown = parse::<ChatRequest>(br#"{"model": "m", "messages": [], "tempratur": 1}"#);
        assert!(unknown.unwrap_err().message.contains("`tempratur`"));
        let plain = json!({"model": "m", "messages": [], "store": false, "audio": null,
            "service_tier": "auto", "modalities": ["text"], "user": "u", "safety_identifier": "s"});
        parse::<ChatRequest>(plain.to_string().as_bytes()).unwrap().refuse().unwrap();
    }
}
