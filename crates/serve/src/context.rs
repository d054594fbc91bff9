//! How long a text may become.

use crate::app::App;
use crate::error::{ApiError, Result};
use crate::writing::TOO_LONG;

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
