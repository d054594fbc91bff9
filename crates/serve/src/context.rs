//! How long a text may become.

use crate::app::App;
use crate::error::{ApiError, Result};
use crate::writing::TOO_LONG;
use metal_candle::text::Tokenizer;
use std::sync::PoisonError;

/// Bytes of a text whose tokens are found while those of no other such text are, as that takes a hundred times as much
/// memory.
const LARGE: usize = 1 << 20;
/// Bytes of a text that is short enough for its tokens to be counted in any case.
const LARGEST_SHORT: usize = 64 << 10;
/// How much longer than its tokens' bytes a text may be: a tokenizer may make spaces one, or other characters of many.
const SHORTENED: usize = 4;

/// The tokens that a prompt and its text may have together.
pub fn length(app: &App) -> usize {
    app.model.config().max_position_embeddings
}

/// How many tokens are written after a prompt at most: as many as `asked` for by a field, or else as the model's context
/// and the engine's cache have room for.
///
/// # Errors
/// A 400 that names `prompt`, the field of the prompt, or the field that asks for too many.
pub fn room(
    app: &App,
    prompt: (&str, usize),
    asked: Option<(&'static str, usize)>,
) -> Result<usize> {
    let context = length(app);
    let (field, tokens) = prompt;
    let left = context.saturating_sub(tokens);
    let too_long = |field: &str, what: String| Err(ApiError::field(field, what).coded(TOO_LONG));
    match asked {
        _ if left == 0 => {
            let what = format!(
                "has {tokens} tokens, which leaves none of the model's context of {context}"
            );
            too_long(field, what)
        }
        Some((field, 0)) => Err(ApiError::field(field, "is 0, expected at least 1")),
        Some((field, most)) if most > left => {
            let what = format!(
                "is {most}, but after a prompt of {tokens} tokens {left} are left of the model's context of {context}"
            );
            too_long(field, what)
        }
        Some((_, most)) => Ok(most),
        None => {
            let cache =
                app.options.engine.cache_tokens.unwrap_or_else(|| app.replicas.cache_tokens());
            match left.min(cache.saturating_sub(tokens)) {
                0 => {
                    let what =
                        format!("has {tokens} tokens, and the server's cache has room for {cache}");
                    too_long(field, what)
                }
                most => Ok(most),
            }
        }
    }
}

/// The tokens of a text.
///
/// # Errors
/// When the tokenizer fails.
pub fn encode(app: &App, tokenizer: &Tokenizer, text: &str, add_special: bool) -> Result<Vec<u32>> {
    let _alone = (text.len() >= LARGE)
        .then(|| app.large_text.lock().unwrap_or_else(PoisonError::into_inner));
    Ok(tokenizer.encode(text, add_special)?)
}

/// The tokens of the text that a field has, and that the model is to read.
///
/// # Errors
/// A 400 that names the field, for a text that is too long in any case, whose tokens aren't even found.
pub fn read(
    app: &App,
    tokenizer: &Tokenizer,
    (field, text): (&str, &str),
    add_special: bool,
) -> Result<Vec<u32>> {
    let context = length(app);
    let most = context.saturating_mul(app.longest_token).saturating_mul(SHORTENED);
    if text.len() > most.max(LARGEST_SHORT) {
        let what = format!(
            "has {} bytes, which are more tokens than the model's context of {context}",
            text.len()
        );
        return Err(ApiError::field(field, what).coded(TOO_LONG));
    }
    encode(app, tokenizer, text, add_special)
}
