//! How long a text may become.

use crate::app::App;
use crate::error::{ApiError, Result};
use crate::writing::TOO_LONG;
use metal_candle::text::Tokenizer;
use std::sync::{Mutex, MutexGuard, PoisonError};
use tokio::sync::{Semaphore, SemaphorePermit};

/// Bytes of a text whose tokens are found while those of no other such text are, as that takes a hundred times as much
/// memory.
const LARGE: usize = 1 << 20;
/// Such texts that wait for each other, each on a thread, at most.
const LARGE_AT_ONCE: usize = 64;
/// Bytes of a text that is short enough for its tokens to be counted in any case.
const LARGEST_SHORT: usize = 64 << 10;
/// How much longer than its tokens' bytes a text may be: a tokenizer may make spaces one, or other characters of many.
const SHORTENED: usize = 4;

/// The tokens that a prompt and its text may have together.
pub fn length(app: &App) -> usize {
    app.model.config().context()
}

/// A 400 about a text that is too long, in the words by which clients of either API know it and turn to a model that
/// reads more: `found` is what of the model's `context` is too much, `for_anthropic` all of it.
fn too_long(context: usize, field: &str, found: String, for_anthropic: Option<String>) -> ApiError {
    let message = format!("This model's maximum context length is {context} tokens, {found}");
    let error = ApiError::invalid(message).about(field).coded(TOO_LONG);
    ApiError { for_anthropic: for_anthropic.map(String::into_boxed_str), ..error }
}

/// That a text with so many tokens, after which nothing is written, is no longer than the model reads.
///
/// # Errors
/// A 400 that names the text's field.
pub fn check(app: &App, field: &str, tokens: usize) -> Result<()> {
    let context = length(app);
    if tokens <= context {
        return Ok(());
    }
    let found = format!("but there are {tokens} in {field}; reduce its length");
    Err(too_long(context, field, found, None))
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
    let (context, cache) = (length(app), app.replicas.cache_tokens());
    let room = context.min(cache);
    let of_cache = match cache < context {
        true => format!("of which the server's cache has room for {cache}, "),
        false => String::new(),
    };
    let (field, tokens) = prompt;
    let left = room.saturating_sub(tokens);
    match asked {
        _ if left == 0 => {
            let found = format!(
                "{of_cache}but there are {tokens} in {field}, which leaves none for an answer; reduce its length"
            );
            let most = room.saturating_sub(1);
            let for_anthropic = format!("prompt is too long: {tokens} tokens > {most} maximum");
            Err(too_long(context, field, found, Some(for_anthropic)))
        }
        Some((asked, 0)) => Err(ApiError::field(asked, "is 0, expected at least 1")),
        Some((asked, most)) if most > left => {
            let found = format!(
                "{of_cache}but {asked} is {most}, and {left} are left after {tokens} in {field}; ask for fewer"
            );
            let for_anthropic = format!(
                "input length and `{asked}` exceed context limit: {tokens} + {most} > {room}, decrease input length \
                 or `{asked}` and try again"
            );
            Err(too_long(context, asked, found, Some(for_anthropic)))
        }
        Some((_, most)) => Ok(most),
        None => Ok(left),
    }
}

/// Large texts, whose tokens are found one after the other.
#[derive(Debug)]
pub struct LargeTexts {
    places: Semaphore,
    alone: Mutex<()>,
}

impl Default for LargeTexts {
    fn default() -> Self {
        Self { places: Semaphore::new(LARGE_AT_ONCE), alone: Mutex::default() }
    }
}

impl LargeTexts {
    /// Waits until no other is there.
    ///
    /// # Errors
    /// A 429 where too many wait already.
    fn enter(&self) -> Result<(MutexGuard<'_, ()>, SemaphorePermit<'_>)> {
        let place = self.places.try_acquire().map_err(|_| {
            let most = LARGE_AT_ONCE;
            ApiError::busy(format!("{most} texts of {LARGE} bytes and more are being read already"))
        })?;
        Ok((self.alone.lock().unwrap_or_else(PoisonError::into_inner), place))
    }
}

/// The tokens of a text.
///
/// # Errors
/// When the tokenizer fails, and a 429 for a large text while too many others are read.
pub fn encode(app: &App, tokenizer: &Tokenizer, text: &str, add_special: bool) -> Result<Vec<u32>> {
    let _alone = match text.len() >= LARGE {
        true => Some(app.large_texts.enter()?),
        false => None,
    };
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
    let (context, bytes) = (length(app), text.len());
    let of_token = app.longest_token.max(1).saturating_mul(SHORTENED);
    if bytes > context.saturating_mul(of_token).max(LARGEST_SHORT) {
        let found =
            format!("but there are more in the {bytes} bytes of {field}; reduce its length");
        let least = bytes.div_ceil(of_token);
        let for_anthropic =
            format!("prompt is too long: at least {least} tokens > {context} maximum");
        return Err(too_long(context, field, found, Some(for_anthropic)));
    }
    encode(app, tokenizer, text, add_special)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_large_texts_wait_for_each_other() {
        let texts = LargeTexts::default();
        assert!(texts.enter().is_ok());
        let waiting: Vec<_> = (0..LARGE_AT_ONCE).map(|_| texts.places.try_acquire()).collect();
        assert!(waiting.iter().all(Result::is_ok));
        assert_eq!(texts.enter().unwrap_err().status.as_u16(), 429);
        drop(waiting);
        assert!(texts.enter().is_ok());
    }
}
