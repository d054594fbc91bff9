//! Text to tokens and back: tokenizers, chat templates, and streaming that never splits a character.

mod fitted;
mod guard;
mod json;
mod message;
mod python;
mod spans;
mod stream;
mod template;
mod tokenizer;

pub use crate::files::companions::CHAT_TEMPLATE;
pub use message::{Message, is_model_role};
pub(crate) use message::{key_list, kind};
pub use spans::Rendered;
pub use stream::DecodeStream;
pub use template::{ChatTemplate, RenderOptions};
pub use tokenizer::{Encoded, Tokenizer, TokenizerFiles, chat_template_in};
