//! What models are compared on.

use std::path::Path;

use serde_json::{Value, json};

use crate::Result;
use crate::data::{Body, Record, read_records};
use crate::text::Message;

/// A conversation and the tools that the model may call in it.
#[derive(Debug, Clone)]
pub struct Conversation {
    /// The messages, at least one.
    pub messages: Vec<Message>,
    /// As JSON schemas.
    pub tools: Option<Vec<Value>>,
}

/// Texts and conversations.
#[derive(Debug, Clone, Default)]
pub struct Samples {
    /// Plain texts.
    pub texts: Vec<String>,
    /// What the chat template renders.
    pub conversations: Vec<Conversation>,
}

/// Prose in several scripts, code, numbers, white space and emoji: what vocabularies and the rules that split a text
/// treat in ways of their own.
const TEXTS: [&str; 13] = [
    "The lighthouse keeper climbed the stairs every evening, lit the lamp, and wrote the weather into a book: wind from \
     the west, clear sky, nothing to report. On the third of March he wrote more than usual, for a ship had come in \
     without anyone on board, and the harbour master didn't believe him until he saw it himself.",
    "Water boils at 100 degrees Celsius at sea level, but on a mountain of 3,000 metres it boils at about 90, because \
     the air presses less on its surface. That's why potatoes take longer there.",
    "Die Möwen folgten dem Schiff bis weit hinter die Mole. Größe, Übermut und Fleiß sind verschiedene Dinge, sagte die \
     Köchin, und schälte weiter Kartoffeln.",
    "L'été dernier, nous avons traversé la forêt jusqu'à l'étang où les hérons dorment debout. Où êtes-vous allés, \
     vous ?",
    "Вчера вечером шёл снег, и к утру весь двор стал белым. Дети вышли из дома раньше обычного.",
    "春天的时候，河边的柳树先绿了。老人们坐在桥上下棋，孩子们放风筝。东京の朝は早く、駅にはもう人が並んでいた。",
    "كان البحر هادئا في الصباح، وخرج الصيادون قبل شروق الشمس. नदी के किनारे एक छोटा सा गाँव था।",
    "def mean(values: list[float]) -> float:\n    \"\"\"The arithmetic mean.\"\"\"\n    if not values:\n        raise \
     ValueError(\"no values\")\n    return sum(values) / len(values)\n",
    "fn main() {\n\tlet words: Vec<&str> = \"a b  c\".split(' ').collect();\n\tassert_eq!(words.len(), 4); // one is \
     empty\n}\n",
    "{\"name\": \"Ada\", \"born\": 1815, \"tags\": [\"maths\", null, true], \"ratio\": -1.5e-3}",
    "3.14159265358979 1,234,567.89 0x1F 2026-03-14T09:26:53Z 12:30 7/8 100% $5.00 v1.10.2 https://example.org/a?b=c&d=1#e",
    "Well done! 👍🏽 The family 👨‍👩‍👧 waved 🇫🇷 from the boat ⛵️… “quoted” – naïve ½ ∑ √2 ≠ ﬁ \u{200b}end.",
    " Leading space,   several   spaces,\ttabs\t\tand\n\nempty lines.\r\n  - indented\n\n\n   \nI'm, you're, we'll, \
     DON'T.  ",
];

impl Samples {
    /// Those that come with this library.
    pub fn built_in() -> Self {
        let say = |role: &str, content: &str| Message::new(role, content);
        let question = say("user", "What is the capital of France?");
        let answer = say("assistant", "The capital of France is Paris.");
        let plain = |messages: Vec<Message>| Conversation { messages, tools: None };
        let tool = json!({ "type": "function", "function": {
            "name": "weather",
            "description": "The weather of a place.",
            "parameters": {
                "type": "object",
                "properties": { "place": { "type": "string", "description": "A town." } },
                "required": ["place"],
            },
        } });
        let conversations = vec![
            plain(vec![question.clone(), answer.clone()]),
            plain(vec![
                say("system", "You answer in one sentence."),
                question,
                answer,
                say("user", "  And of Japan?\n"),
                say("assistant", "That is Tokyo."),
            ]),
            plain(vec![
                say("user", "Write a line of Python that prints the squares of 1 to 5."),
                say("assistant", "```python\nprint([n * n for n in range(1, 6)])\n```"),
            ]),
            Conversation {
                messages: vec![say("user", "Is it raining in Oslo?")],
                tools: Some(vec![tool]),
            },
        ];
        Self { texts: TEXTS.map(String::from).to_vec(), conversations }
    }

    /// Those of a file of data, as training reads it: conversations stay conversations, everything else is text.
    ///
    /// # Errors
    /// As [`read_records`].
    pub fn read(path: impl AsRef<Path>) -> Result<Self> {
        let mut samples = Self::default();
        for Record { body, .. } in read_records(path.as_ref())? {
            match body {
                Body::Messages { messages, tools } => {
                    samples.conversations.push(Conversation { messages, tools });
                }
                Body::ChatCompletion { mut prompt, completion, tools } => {
                    prompt.extend(completion);
                    samples.conversations.push(Conversation { messages: prompt, tools });
                }
                Body::PromptCompletion { prompt, completion } => {
                    samples.texts.push(prompt + &completion);
                }
                Body::Text { text } | Body::Document { text, .. } => samples.texts.push(text),
                other => samples.texts.push(other.texts().collect::<Vec<_>>().join("\n")),
            }
        }
        Ok(samples)
    }
}
