//! `POST /v1/embeddings`: the mean of a text's hidden states after the last norm, at length 1.
//!
//! The models here were made to write, not to compare texts, so these vectors are what such a model gives, not those of
//! a model for embeddings. Fewer `dimensions` than the model has are the first of them, at length 1 again.
//!
//! A text is read in one pass, beside which nothing else is computed there and whose memory grows with it, so texts are bounded
//! by less than the model's context, and wait for their turns without a thread.

use crate::adapters::Chosen;
use crate::app::{App, Shared};
use crate::body::Body;
use crate::context;
use crate::error::{ApiError, Result};
use axum::extract::State;
use axum::routing::post;
use axum::{Json, Router};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use candle_core::DType;
use metal_candle::autograd::Tape;
use metal_candle::devices;
use metal_candle::pass::Input;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Texts of a request, at most.
const MOST_INPUTS: usize = 2048;
/// Tokens of a text, at most, as OpenAI has them.
const MOST_TOKENS: usize = 8192;
/// Texts that are worked on at once: one is tokenised while another is computed.
pub const AT_ONCE: usize = 2;

/// The routes.
pub fn routes() -> Router<Shared> {
    Router::new().route("/v1/embeddings", post(embed))
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct EmbeddingRequest {
    model: String,
    input: Inputs,
    encoding_format: Option<Encoding>,
    dimensions: Option<usize>,
    /// Who asks, which changes nothing.
    #[serde(rename = "user")]
    _user: Option<String>,
}

#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Encoding {
    Float,
    /// The bytes of the numbers, the lowest first.
    Base64,
}

#[derive(Debug, Deserialize)]
#[serde(
    untagged,
    expecting = "expected a string, a list of strings, a list of token ids or a list of such lists"
)]
enum Inputs {
    Text(String),
    Tokens(Vec<u32>),
    Texts(Vec<String>),
    Lists(Vec<Vec<u32>>),
}

#[derive(Debug)]
enum Text {
    Text(String),
    Tokens(Vec<u32>),
}

impl Inputs {
    fn each(self) -> Vec<Text> {
        match self {
            Self::Text(text) => vec![Text::Text(text)],
            // An empty list is one of no texts.
            Self::Tokens(tokens) if tokens.is_empty() => Vec::new(),
            Self::Tokens(tokens) => vec![Text::Tokens(tokens)],
            Self::Texts(texts) => texts.into_iter().map(Text::Text).collect(),
            Self::Lists(lists) => lists.into_iter().map(Text::Tokens).collect(),
        }
    }
}

#[derive(Debug, Serialize)]
struct Embeddings {
    object: &'static str,
    data: Vec<Embedding>,
    model: String,
    usage: Usage,
}

#[derive(Debug, Serialize)]
struct Embedding {
    object: &'static str,
    index: usize,
    embedding: Numbers,
}

#[derive(Debug, Serialize)]
#[serde(untagged)]
enum Numbers {
    Float(Vec<f32>),
    Base64(String),
}

#[derive(Debug, Default, Serialize)]
struct Usage {
    prompt_tokens: usize,
    total_tokens: usize,
}

async fn embed(
    State(app): State<Shared>,
    Body(request): Body<EmbeddingRequest>,
) -> Result<Json<Embeddings>> {
    let most = app.options.timeout;
    tokio::time::timeout(most, answer(&app, request)).await.unwrap_or_else(|_| {
        let seconds = most.as_secs();
        let message = format!(
            "the embeddings were not computed within {seconds} s, as long as that may take; give fewer or shorter texts"
        );
        Err(ApiError::timed_out(message))
    })
}

async fn answer(app: &Shared, request: EmbeddingRequest) -> Result<Json<Embeddings>> {
    app.require_whole("embedding")?;
    let hidden = app.model.config().hidden_size;
    let dimensions = request.dimensions.unwrap_or(hidden);
    if !(1..=hidden).contains(&dimensions) {
        let what = format!("is {dimensions}, expected 1 to {hidden}");
        return Err(ApiError::field("dimensions", what));
    }
    let texts = request.input.each();
    if !(1..=MOST_INPUTS).contains(&texts.len()) {
        let what = format!("has {} texts, expected 1 to {MOST_INPUTS}", texts.len());
        return Err(ApiError::field("input", what));
    }
    let chosen = Arc::new(app.choose_on_first(&request.model).await?);
    let mut data = Vec::new();
    let mut usage = Usage::default();
    for (index, text) in texts.into_iter().enumerate() {
        let chosen = chosen.clone();
        // One by one, so that the work ends with the time for it, or when the client leaves.
        let place = app.embedding.clone().acquire_owned().await.map_err(ApiError::internal)?;
        let (tokens, vector) = app
            .blocking(move |app| {
                let _place = place;
                let tokens = tokens(app, &chosen, index, text)?;
                Ok((tokens.len(), vector(app, &chosen, &tokens, dimensions)?))
            })
            .await?;
        usage.prompt_tokens += tokens;
        usage.total_tokens += tokens;
        let embedding = match request.encoding_format.unwrap_or(Encoding::Float) {
            Encoding::Float => Numbers::Float(vector),
            Encoding::Base64 => {
                let bytes: Vec<u8> =
                    vector.iter().flat_map(|number| number.to_le_bytes()).collect();
                Numbers::Base64(STANDARD.encode(bytes))
            }
        };
        data.push(Embedding { object: "embedding", index, embedding });
    }
    Ok(Json(Embeddings { object: "list", data, model: chosen.name.clone(), usage }))
}

/// The tokens of a text, which the model can read.
fn tokens(app: &App, chosen: &Chosen, index: usize, text: Text) -> Result<Vec<u32>> {
    let field = format!("input[{index}]");
    let tokens = match text {
        Text::Text(text) => context::read(app, &chosen.tokenizer, (&field, &text), true)?,
        Text::Tokens(tokens) => tokens,
    };
    let vocabulary = app.model.config().vocab_size;
    if tokens.is_empty() {
        return Err(ApiError::field(field, "is empty, expected at least one token"));
    }
    context::check(app, &field, tokens.len())?;
    check_length(&field, tokens.len())?;
    match tokens.iter().find(|token| **token as usize >= vocabulary) {
        None => Ok(tokens),
        Some(token) => {
            let what = format!("has token {token}, but the model's vocabulary has {vocabulary}");
            Err(ApiError::field(field, what))
        }
    }
}

/// That a text isn't too long for one pass.
fn check_length(field: &str, tokens: usize) -> Result<()> {
    match tokens <= MOST_TOKENS {
        true => Ok(()),
        false => {
            let what =
                format!("has {tokens} tokens, expected at most {MOST_TOKENS}; embed it in parts");
            Err(ApiError::field(field, what))
        }
    }
}

fn vector(app: &App, chosen: &Chosen, tokens: &[u32], dimensions: usize) -> Result<Vec<f32>> {
    let mean = || -> metal_candle::Result<Vec<f32>> {
        let input = Input::sequence(tokens, app.model.device())?;
        let input = input.with_adapter(chosen.adapter.as_ref());
        let states = app.model.forward(&Tape::inference(), &input)?.into_tensor();
        Ok(states.to_dtype(DType::F32)?.mean(1)?.squeeze(0)?.to_vec1()?)
    };
    let mut vector = {
        let _turn = app.turns.hold();
        devices::step(app.model.device(), mean)?
    };
    vector.truncate(dimensions);
    normalize(&mut vector);
    Ok(vector)
}

/// Brings a vector to length 1, but for that of zeros.
fn normalize(vector: &mut [f32]) {
    let squares = vector.iter().map(|number| f64::from(*number).powi(2));
    let length = squares.sum::<f64>().sqrt();
    if length > 0.0 {
        vector.iter_mut().for_each(|number| *number = (f64::from(*number) / length) as f32);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vectors_get_length_1() {
        let mut vector = [3.0, 4.0];
        normalize(&mut vector);
        assert_eq!(vector, [0.6, 0.8]);
        let mut zeros = [0.0; 2];
        normalize(&mut zeros);
        assert_eq!(zeros, [0.0; 2]);
    }

    #[test]
    fn a_text_is_as_long_as_one_pass_at_most() {
        assert!(check_length("input[1]", MOST_TOKENS).is_ok());
        let error = check_length("input[1]", MOST_TOKENS + 1).unwrap_err();
        assert_eq!(error.param.as_deref(), Some("input[1]"));
        assert!(error.message.contains("has 8193 tokens, expected at most 8192"), "{error:?}");
    }
}
