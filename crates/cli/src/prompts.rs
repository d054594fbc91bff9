//! Prompts to tokens.

use metal_candle::Result;
use metal_candle::text::{Message, RenderOptions, Tokenizer};

/// The tokens of a prompt: through the chat template as a user's message, if there is a template,
/// otherwise, or when `raw`, as it is.
pub fn encode(
    tokenizer: &Tokenizer,
    prompt: &str,
    system: Option<&str>,
    raw: bool,
) -> Result<Vec<u32>> {
    if raw || tokenizer.chat_template().is_none() {
        return tokenizer.encode(prompt, true);
    }
    let mut messages = Vec::new();
    messages.extend(system.map(|text| Message::new("system", text)));
    messages.push(Message::new("user", prompt));
    encode_chat(tokenizer, &messages)
}

/// The tokens of a conversation, ready for the model's turn.
pub fn encode_chat(tokenizer: &Tokenizer, messages: &[Message]) -> Result<Vec<u32>> {
    let options = RenderOptions { add_generation_prompt: true, ..RenderOptions::default() };
    let text = tokenizer.require_chat_template()?.render(messages, &options)?;
    tokenizer.encode(&text, false)
}
