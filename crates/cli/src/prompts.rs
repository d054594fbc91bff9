//! Prompts to tokens.

use metal_candle::Result;
use metal_candle::text::{Message, RenderOptions, Tokenizer};
use serde_json::{Map, Value};

/// Whether a prompt is continued as it is instead of being a user's message.
pub fn is_continued(tokenizer: &Tokenizer, raw: bool) -> bool {
    raw || tokenizer.chat_template().is_none()
}

/// The tokens of a prompt: through the chat template as a user's message, if there is a template,
/// otherwise, or when `raw`, as it is. `variables` are for the template.
pub fn encode(
    tokenizer: &Tokenizer,
    prompt: &str,
    system: Option<&str>,
    raw: bool,
    variables: &Map<String, Value>,
) -> Result<Vec<u32>> {
    if is_continued(tokenizer, raw) {
        return tokenizer.encode(prompt, true);
    }
    let mut messages = Vec::new();
    messages.extend(system.map(|text| Message::new("system", text)));
    messages.push(Message::new("user", prompt));
    encode_chat(tokenizer, &messages, variables)
}

/// The tokens of a conversation, ready for the model's turn. `variables` are for the template.
pub fn encode_chat(
    tokenizer: &Tokenizer,
    messages: &[Message],
    variables: &Map<String, Value>,
) -> Result<Vec<u32>> {
    let options = RenderOptions {
        add_generation_prompt: true,
        variables: Some(variables),
        ..RenderOptions::default()
    };
    let template = tokenizer.require_chat_template()?;
    let text = template.render(&template.fitted(messages), &options)?;
    tokenizer.encode(&text, false)
}
