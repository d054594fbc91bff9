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
    /// Two answers to one prompt, the first of which is preferred.
    Pair {
        /// The prompt with the better answer.
        chosen: Box<Body>,
        /// The prompt with the other.
        rejected: Box<Body>,
    },
    /// An answer of which somebody has said whether it is good.
    Labelled {
        /// The prompt with the answer.
        answer: Box<Body>,
        /// Whether it is.
        desirable: bool,
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
    /// What is tokenized by itself: both answers of a pair with their prompt, or all of another.
    pub fn parts(&self) -> Vec<&Self> {
        match self {
            Self::Pair { chosen, rejected } => vec![chosen, rejected],
            Self::Labelled { answer, .. } => vec![answer],
            other => vec![other],
        }
    }

    /// The texts of all its parts, in order.
    pub fn texts(&self) -> impl Iterator<Item = &str> {
        self.parts().into_iter().flat_map(Self::own_texts)
    }

    fn own_texts(&self) -> impl Iterator<Item = &str> {
        let (messages, texts): ([&[Message]; 2], Vec<&str>) = match self {
            Self::Messages { messages, .. } => ([messages, &[]], Vec::new()),
            Self::ChatCompletion { prompt, completion, .. } => ([prompt, completion], Vec::new()),
            Self::Instruction { before, instruction, input, output } => {
                ([before, &[]], vec![instruction, input, output])
            }
            Self::PromptCompletion { prompt, completion } => ([&[], &[]], vec![prompt, completion]),
            Self::Text { text } | Self::Document { text, .. } => ([&[], &[]], vec![text]),
            Self::Pair { .. } | Self::Labelled { .. } => ([&[], &[]], Vec::new()),
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
            Self::Pair { .. } | Self::Labelled { .. } => {
                self.parts().into_iter().any(Self::is_empty)
            }
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
            Self::Pair { .. } => "preference pairs",
            Self::Labelled { .. } => "labelled answers",
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
            Self::Pair { chosen, rejected } => {
                add(&chosen.fingerprint().to_le_bytes());
                add(&rejected.fingerprint().to_le_bytes());
            }
            Self::Labelled { answer, desirable } => {
                add(&answer.fingerprint().to_le_bytes());
                add(&[u8::from(*desirable)]);
            }
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
                Body::Pair { chosen: pair("a", "b").into(), rejected: pair("a", "c").into() },
                Body::Pair { chosen: pair("a", "c").into(), rejected: pair("a", "b").into() },
                Body::Labelled { answer: pair("a", "b").into(), desirable: true },
                Body::Labelled { answer: pair("a", "b").into(), desirable: false },
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
