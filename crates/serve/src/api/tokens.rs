//! `POST /tokenize`, `POST /detokenize` and `GET /tokenizer_info`, as vLLM has them.

use crate::api::chat::messages;
use crate::app::Shared;
use crate::body::Body;
use crate::constraint::Constraint;
use crate::context;
use crate::conversation::{Conversation, MESSAGES, check_variables, template};
use crate::error::{ApiError, Result};
use crate::sampling::Sampling;
use crate::tools::{self, Choice, ToolField};
use axum::extract::State;
use axum::routing::{get, post};
use axum::{Json, Router};
use metal_candle::text::{Tokenizer, TokenizerFiles};
use serde::Deserialize;
use serde_json::{Map, Value, json};

/// The routes.
pub fn routes() -> Router<Shared> {
    Router::new()
        .route("/tokenize", post(tokenize))
        .route("/detokenize", post(detokenize))
        .route("/tokenizer_info", get(tokenizer_info))
}

/// A text or a conversation.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct TokenizeRequest {
    model: Option<String>,
    prompt: Option<String>,
    /// Around a text it is added by default; a conversation has it from its template.
    add_special_tokens: Option<bool>,
    return_token_strs: Option<bool>,
    messages: Option<Vec<Map<String, Value>>>,
    add_generation_prompt: Option<bool>,
    tools: Option<Vec<ToolField>>,
    chat_template_kwargs: Option<Map<String, Value>>,
}

async fn tokenize(
    State(app): State<Shared>,
    Body(mut request): Body<TokenizeRequest>,
) -> Result<Json<Value>> {
    let name = request.model.take();
    let chosen = app.choose(name.as_deref().unwrap_or(&app.options.model_name)).await?;
    app.blocking(move |app| {
        let tokenizer = &chosen.tokenizer;
        let strings = request.return_token_strs.unwrap_or(false);
        let add_special = request.add_special_tokens;
        let (text, add_special) = match request.prompt.take() {
            Some(prompt) => {
                request.has_text_alone()?;
                (prompt, add_special.unwrap_or(true))
            }
            None => {
                let goes_on = request.add_generation_prompt.unwrap_or(true);
                let conversation = request.conversation(tokenizer)?;
                let text = conversation.render(app, tokenizer, goes_on)?;
                (text, add_special.unwrap_or(false))
            }
        };
        let tokens = context::encode(app, tokenizer, &text, add_special)?;
        let name = |token: &u32| tokenizer.id_to_token(*token);
        let strings = strings.then(|| tokens.iter().map(name).collect::<Vec<_>>());
        Ok(Json(json!({
            "count": tokens.len(),
            "max_model_len": context::length(app),
            "tokens": tokens,
            "token_strs": strings,
        })))
    })
    .await
}

impl TokenizeRequest {
    fn has_text_alone(&self) -> Result<()> {
        let field = if self.messages.is_some() {
            "messages"
        } else if self.tools.is_some() {
            "tools"
        } else if self.chat_template_kwargs.is_some() {
            "chat_template_kwargs"
        } else if self.add_generation_prompt.is_some() {
            "add_generation_prompt"
        } else {
            return Ok(());
        };
        Err(ApiError::field(field, "cannot be given together with \"prompt\""))
    }

    fn conversation(self, tokenizer: &Tokenizer) -> Result<Conversation> {
        let Some(messages) = self.messages else {
            return Err(ApiError::field("prompt", "is missing, as is \"messages\""));
        };
        let template = template(tokenizer, MESSAGES)?;
        let variables = self.chat_template_kwargs.unwrap_or_default();
        check_variables("chat_template_kwargs", &variables, template)?;
        let tools = tools::read(self.tools)?;
        Ok(Conversation {
            messages: messages::read(MESSAGES, messages, template)?,
            field: MESSAGES,
            choice: Choice::read(None, &tools)?,
            tools,
            parallel: true,
            variables,
            answer: Constraint::None,
            sampling: Sampling::default(),
            max_tokens: None,
            logprobs: None,
        })
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct DetokenizeRequest {
    model: Option<String>,
    tokens: Vec<u32>,
}

async fn detokenize(
    State(app): State<Shared>,
    Body(request): Body<DetokenizeRequest>,
) -> Result<Json<Value>> {
    let name = request.model.as_deref().unwrap_or(&app.options.model_name);
    let chosen = app.choose(name).await?;
    app.blocking(move |_| {
        let tokenizer = &chosen.tokenizer;
        let unknown = |(_, token): &(usize, &u32)| tokenizer.id_to_token(**token).is_none();
        if let Some((index, token)) = request.tokens.iter().enumerate().find(unknown) {
            let what = format!("there is no token {token}");
            return Err(ApiError::field(format!("tokens[{index}]"), what));
        }
        Ok(Json(json!({"prompt": tokenizer.decode(&request.tokens, false)?})))
    })
    .await
}

/// What the base's `tokenizer_config.json` says, and its chat template.
async fn tokenizer_info(State(app): State<Shared>) -> Result<Json<Value>> {
    app.blocking(|app| {
        let files = TokenizerFiles::read(&app.folder)?;
        let mut info = files.tokenizer_config;
        info.shift_remove("chat_template");
        let templates = &files.chat_templates;
        let default = templates.iter().find(|(name, _)| name == "default").or(templates.first());
        if let Some((_, source)) = default {
            info.insert("chat_template".into(), source.as_str().into());
        }
        match info.is_empty() {
            false => Ok(Json(Value::Object(info))),
            true => Err(ApiError::not_found("nothing is known of this model's tokenizer")),
        }
    })
    .await
}
