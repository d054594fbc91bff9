//! What the answers of `/v1/chat/completions` and `/v1/completions` and their chunks have in common.

use crate::sampling::UsageIn;
use crate::writing::Usage;
use serde::Serialize;

/// What says which program and version answered.
const FINGERPRINT: &str = concat!("metal-candle-", env!("CARGO_PKG_VERSION"));

/// An answer, or a chunk of one.
#[derive(Serialize)]
pub struct Completion<'a, Head, Choice> {
    #[serde(flatten)]
    head: &'a Head,
    object: &'static str,
    system_fingerprint: &'static str,
    choices: &'a [Choice],
    /// Left out of streams where nobody asks for it.
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Used>,
}

/// What was used.
#[derive(Debug, Serialize)]
#[serde(untagged)]
pub enum Used {
    /// Null: a later chunk tells it.
    Later,
    /// By a choice so far.
    SoFar {
        /// Tokens of its prompt.
        prompt_tokens: usize,
        /// Tokens of its text.
        completion_tokens: usize,
        /// Both.
        total_tokens: usize,
    },
    /// By all choices.
    All(Usage),
}

impl Used {
    /// As a chunk tells it of a choice with so many tokens of its prompt and its text.
    pub fn so_far(told: UsageIn, prompt_tokens: usize, completion_tokens: usize) -> Option<Self> {
        match told {
            UsageIn::None => None,
            UsageIn::Last => Some(Self::Later),
            UsageIn::Each => Some(Self::SoFar {
                prompt_tokens,
                completion_tokens,
                total_tokens: prompt_tokens + completion_tokens,
            }),
        }
    }
}

impl<'a, Head, Choice> Completion<'a, Head, Choice> {
    /// A whole answer.
    pub fn whole(
        object: &'static str,
        head: &'a Head,
        choices: &'a [Choice],
        usage: Usage,
    ) -> Self {
        Self::chunk(object, head, choices, Some(Used::All(usage)))
    }

    /// A chunk, with its usage where that is asked for.
    pub fn chunk(
        object: &'static str,
        head: &'a Head,
        choices: &'a [Choice],
        usage: Option<Used>,
    ) -> Self {
        Self { head, object, system_fingerprint: FINGERPRINT, choices, usage }
    }
}
