//! What the answers of `/v1/chat/completions` and `/v1/completions` and their chunks have in common.

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
    /// Null but in a stream's last chunk, and left out of streams where nobody asks for it.
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Option<Usage>>,
}

impl<'a, Head, Choice> Completion<'a, Head, Choice> {
    /// A whole answer.
    pub fn whole(
        object: &'static str,
        head: &'a Head,
        choices: &'a [Choice],
        usage: Usage,
    ) -> Self {
        Self::chunk(object, head, choices, Some(Some(usage)))
    }

    /// A chunk, with its usage where that is asked for.
    pub fn chunk(
        object: &'static str,
        head: &'a Head,
        choices: &'a [Choice],
        usage: Option<Option<Usage>>,
    ) -> Self {
        Self { head, object, system_fingerprint: FINGERPRINT, choices, usage }
    }
}
