//! What a record says, and what can be asked of any.

use serde_json::Value;

use crate::hash::Hash;
use crate::text::Message;

/// What a record says.
#[derive(Debug, Clone, PartialEq)]
pub enum Body {
    /// A conversation.
    Messages {
        /// The messages, at least one.
        messages: Vec<Message>,
        /// The tools the model may call, as JSON schemas.
        tools: Option<Vec<Value>>,
    },
    /// A prompt and what should follow it, as plain text.
    PromptCompletion {
        /// What is given.
        prompt: String,
        /// What is to be learned.
        completion: String,
    },
    /// A conversation and how it should go on.
    ChatCompletion {
        /// The messages that are given, at least one.
        prompt: Vec<Message>,
        /// The messages to learn, at least one of them the model's.
        completion: Vec<Message>,
        /// The tools the model may call, as JSON schemas.
        tools: Option<Vec<Value>>,
    },
    /// Something to do and how it is done, as Alpaca has it.
    Instruction {
        /// The system message and the turns before, if there are any.
        before: Vec<Message>,
        /// What is to be done.
        instruction: String,
        /// What to do it with; may be empty.
        input: String,
        /// What is to be learned.
        output: String,
    },
    /// Text to go on learning the language from.
    Text {
        /// The text.
        text: String,
    },
    /// A part of a plain text file. It becomes as many examples as it takes, instead of being cut.
    Document {
        /// The text.
        text: String,
        /// Whether the file ends here.
        last: bool,
    },
}

impl Body {
    /// The texts of all its parts, in order.
    pub fn texts(&self) -> impl Iterator<Item = &str> {
        let (messages, texts): ([&[Message]; 2], Vec<&str>) = match self {
            Self::Messages { messages, .. } => ([messages, &[]], Vec::new()),
            Self::ChatCompletion { prompt, completion, .. } => ([prompt, completion], Vec::new()),
            Self::Instruction { before, instruction, input, output } => {
                ([before, &[]], vec![instruction, input, output])
            }
            Self::PromptCompletion { prompt, completion } => ([&[], &[]], vec![prompt, completion]),
            Self::Text { text } | Self::Document { text, .. } => ([&[], &[]], vec![text]),
        };
        messages.into_iter().flatten().flat_map(Message::texts).chain(texts)
    }

    /// Whether there is nothing to learn in it, whatever the loss counts: an empty completion or text.
    pub fn is_empty(&self) -> bool {
        match self {
            Self::PromptCompletion { completion, .. } => completion.is_empty(),
            Self::Instruction { output, .. } => output.is_empty(),
            Self::Text { text } | Self::Document { text, .. } => text.is_empty(),
            Self::Messages { .. } | Self::ChatCompletion { .. } => false,
        }
    }

    /// What people call such a record, in the plural.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Messages { .. } => "conversations",
            Self::PromptCompletion { .. } => "prompts with completions",
            Self::ChatCompletion { .. } => "conversations with completions",
            Self::Instruction { .. } => "instructions",
            Self::Text { .. } => "texts",
            Self::Document { .. } => "pieces of plain text",
        }
    }

    /// A hash of all that it says (XXH3).
    pub(super) fn fingerprint(&self) -> u64 {
        let mut hash = Hash::new();
        let mut add = |bytes: &[u8]| {
            hash.add(&(bytes.len() as u64).to_le_bytes());
            hash.add(bytes);
        };
        let json = |value: &dyn Fn() -> serde_json::Result<Vec<u8>>| value().unwrap_or_default();
        add(self.kind().as_bytes());
        match self {
            Self::Messages { messages, tools } => {
                add(&json(&|| serde_json::to_vec(&(messages, tools))));
            }
            Self::ChatCompletion { prompt, completion, tools } => {
                add(&json(&|| serde_json::to_vec(&(prompt, completion, tools))));
            }
            Self::Instruction { before, .. } => add(&json(&|| serde_json::to_vec(before))),
            Self::PromptCompletion { .. } | Self::Text { .. } | Self::Document { .. } => {}
        }
        self.texts().for_each(|text| add(text.as_bytes()));
        hash.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_have_one_fingerprint_when_they_say_the_same() {
        let messages = |role: &str, tools: Option<Vec<Value>>| Body::Messages {
            messages: vec![Message::new("user", "a"), Message::new(role, "b")],
            tools,
        };
        let pair = |prompt: &str, completion: &str| Body::PromptCompletion {
            prompt: prompt.into(),
            completion: completion.into(),
        };
        let bodies = || {
            [
                messages("assistant", None),
                messages("user", None),
                messages("assistant", Some(vec![Value::from("t")])),
                pair("a", "b"),
                pair("ab", ""),
                Body::Text { text: "ab".into() },
                Body::Document { text: "ab".into(), last: true },
            ]
        };
        let prints: Vec<u64> = bodies().iter().map(Body::fingerprint).collect();
        for (index, print) in prints.iter().enumerate() {
            assert!(!prints[..index].contains(print), "{:?}", bodies()[index]);
        }
        assert_eq!(prints, bodies().iter().map(Body::fingerprint).collect::<Vec<_>>());
        let texts = |body: &Body| body.texts().collect::<Vec<_>>().join("|");
        assert_eq!(texts(&messages("assistant", None)), "a|b");
        assert_eq!(texts(&pair("a", "b")), "a|b");
        assert_eq!(bodies().map(|body| body.is_empty())[3..5], [false, true]);
    }
}
