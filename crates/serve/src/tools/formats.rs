//! The families' formats of tool calls and of thoughts: a table, and how a template's is found in it.

use super::harmony;
use metal_candle::text::ChatTemplate;

/// What stands before a call's identifier, where names are followed by one.
pub const CALL_ID: &str = "[CALL_ID]";

/// How a family writes tool calls.
#[derive(Debug, PartialEq)]
pub struct Format {
    /// What it is called.
    pub name: &'static str,
    /// Chat templates of the family have one of these in them.
    signs: &'static [&'static str],
    /// What calls begin with.
    pub open: &'static str,
    /// What they end with, where they don't end with the text.
    pub close: Option<&'static str>,
    /// Whether a call may also be an object without anything before it, if the text is nothing else.
    pub bare: bool,
    /// What stands between the markers.
    pub shape: Shape,
    /// The key of the arguments in a call's object.
    pub arguments: &'static str,
    /// How the tools get into the prompt.
    pub placement: Placement,
    /// Whether templates want identifiers of nine letters and digits.
    pub short_ids: bool,
}

/// What stands between the markers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Shape {
    /// An object for each call, with these texts before and after it; several calls have markers of their own.
    Object(&'static str, &'static str),
    /// A list of objects.
    List,
    /// A tool's name, this marker and its arguments.
    Named(&'static str),
    /// A tag with the tool's name and tags with the arguments; several calls have markers of their own.
    Parameters,
    /// None: a call is a message of the text, as thoughts and the answer are, with a header that names the tool; see
    /// `harmony.rs`.
    Message,
}

/// How the tools get into the prompt.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Placement {
    /// The chat template writes them.
    Template,
    /// The chat template writes them where the first message has them as a text.
    System,
    /// The first message is told of them, as the template knows nothing of tools or has a format that isn't in the table.
    Text,
}

/// The formats, of which the first counts that a template has a sign of.
static FORMATS: &[Format] = &[
    // gpt-oss.
    Format {
        name: "harmony",
        signs: &["<|channel|>analysis", "<|channel|>commentary", "<|channel|>final"],
        open: "",
        close: None,
        bare: false,
        shape: Shape::Message,
        arguments: "arguments",
        placement: Placement::Template,
        short_ids: false,
    },
    // Mistral's from the tokenizer of version 11 on (Mistral Small 3.1, Devstral, Ministral 3).
    Format {
        name: "mistral-named",
        signs: &["[ARGS]"],
        open: "[TOOL_CALLS]",
        close: None,
        bare: false,
        shape: Shape::Named("[ARGS]"),
        arguments: "arguments",
        placement: Placement::Template,
        short_ids: true,
    },
    Format {
        name: "mistral",
        signs: &["[TOOL_CALLS]"],
        open: "[TOOL_CALLS]",
        close: None,
        bare: false,
        shape: Shape::List,
        arguments: "arguments",
        placement: Placement::Template,
        short_ids: true,
    },
    Format {
        name: "phi4-mini",
        signs: &["<|/tool|>"],
        open: "<|tool_call|>",
        close: Some("<|/tool_call|>"),
        bare: false,
        shape: Shape::List,
        arguments: "arguments",
        placement: Placement::System,
        short_ids: false,
    },
    // Granite 3; its later models write as Hermes does.
    Format {
        name: "granite",
        signs: &["<|tool_call|>"],
        open: "<|tool_call|>",
        close: None,
        bare: false,
        shape: Shape::List,
        arguments: "arguments",
        placement: Placement::Template,
        short_ids: false,
    },
    // Qwen3-Coder, Qwen 3.5, Nemotron 3.
    Format {
        name: "qwen3-coder",
        // As it stands in a string of the template, and as it stands in its text.
        signs: &["<tool_call>\\n<function=", "<tool_call>\n<function="],
        open: "<tool_call>",
        close: Some("</tool_call>"),
        bare: false,
        shape: Shape::Parameters,
        arguments: "arguments",
        placement: Placement::Template,
        short_ids: false,
    },
    // Hermes, Qwen 2.5 and 3, SmolLM3, Granite 4.
    Format {
        name: "hermes",
        signs: &["<tool_call>"],
        open: "<tool_call>",
        close: Some("</tool_call>"),
        bare: false,
        shape: Shape::Object("\n", "\n"),
        arguments: "arguments",
        placement: Placement::Template,
        short_ids: false,
    },
    // Llama 3.1 to 3.3.
    Format {
        name: "llama3",
        signs: &["<|python_tag|>", "\"parameters\": dictionary of argument"],
        open: "<|python_tag|>",
        close: None,
        bare: true,
        shape: Shape::Object("", ""),
        arguments: "parameters",
        placement: Placement::Template,
        short_ids: false,
    },
];

/// For templates that know nothing of tools, or that have a format of their own: the model is told how to write.
static TOLD: Format = Format {
    name: "told",
    signs: &[],
    open: "<tool_call>",
    close: Some("</tool_call>"),
    bare: false,
    shape: Shape::Object("\n", "\n"),
    arguments: "arguments",
    placement: Placement::Text,
    short_ids: false,
};

/// Templates with one of these write calls otherwise than the table's formats of JSON, whose markers some of them have:
/// GLM's, functionary's, MiniMax's.
const OTHERS: [&str; 3] = ["<arg_key>", "<function=", "<invoke "];

impl Format {
    /// The format of models with this template.
    pub fn of(template: &ChatTemplate) -> &'static Self {
        let is_other = OTHERS.iter().any(|sign| template.contains(sign));
        let has_sign = |format: &&Self| {
            (!is_other || format.shape == Shape::Parameters)
                && format.signs.iter().any(|sign| template.contains(sign))
        };
        FORMATS.iter().find(has_sign).unwrap_or(&TOLD)
    }

    /// The texts that may be special tokens.
    pub fn markers(&self) -> impl Iterator<Item = &'static str> {
        let inner = match self.shape {
            Shape::Named(marker) => [Some(marker), Some(CALL_ID)],
            Shape::Object(..) | Shape::List | Shape::Parameters | Shape::Message => [None, None],
        };
        // Those of messages are the thoughts', too.
        let open = Some(self.open).filter(|open| !open.is_empty());
        [open, self.close].into_iter().chain(inner).flatten()
    }

    /// The format of a name, for tests.
    #[cfg(test)]
    pub fn named(name: &str) -> &'static Self {
        FORMATS.iter().find(|format| format.name == name).unwrap_or(&TOLD)
    }
}

/// How a family marks what it thinks before an answer.
#[derive(Debug, PartialEq)]
pub struct Thinking {
    /// What it begins with.
    pub open: &'static str,
    /// What it ends with.
    pub close: &'static str,
}

/// Qwen 3, SmolLM3, DeepSeek and others, and Magistral.
static THINKING: [Thinking; 2] = [
    Thinking { open: "<think>", close: "</think>" },
    Thinking { open: "[THINK]", close: "[/THINK]" },
];

impl Thinking {
    /// That of models with this template, if they think.
    pub fn of(template: &ChatTemplate) -> Option<&'static Self> {
        if Format::of(template).shape == Shape::Message {
            return Some(&harmony::THINKING);
        }
        THINKING.iter().find(|it| template.contains(it.open) || template.contains(it.close))
    }

    /// Whether thoughts are messages of the text, as calls and the answer are.
    pub fn is_in_messages(&self) -> bool {
        *self == harmony::THINKING
    }

    /// The texts that may be special tokens.
    pub fn markers(&self) -> Vec<&'static str> {
        match self.is_in_messages() {
            true => harmony::MARKERS.to_vec(),
            false => vec![self.open, self.close],
        }
    }

    /// Whether a prompt ends in thoughts, so that the text begins with them.
    pub fn is_open(&self, prompt: &str) -> bool {
        prompt.trim_end().ends_with(self.open)
    }

    /// Whether a prompt ends after thoughts, so that the text begins with the answer.
    pub fn is_over(&self, prompt: &str) -> bool {
        prompt.trim_end().ends_with(self.close)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn template(source: &str) -> ChatTemplate {
        ChatTemplate::new(source, Vec::new(), Vec::new(), Vec::new()).unwrap()
    }

    #[test]
    fn templates_show_their_format() {
        for (source, name) in [
            ("{{ '[TOOL_CALLS]' }}{{ name }}{{ '[ARGS]' }}", "mistral-named"),
            ("{{ '[TOOL_CALLS] [' }}", "mistral"),
            ("{{ '<|tool|>' + message['tools'] + '<|/tool|>' }}", "phi4-mini"),
            ("{{ '<|tool_call|>' }}", "granite"),
            ("{{ '<tool_call>\\n' }}", "hermes"),
            ("{{- '\\n<tool_call>\\n<function=' + tool_call.name + '>\\n' }}", "qwen3-coder"),
            ("<tool_call>\n<function={{ call.name }}>\n<parameter=", "qwen3-coder"),
            ("{{ '<seed:tool_call>\\n<function=' + call.name }}", "told"),
            ("{{ '<|python_tag|>' }}", "llama3"),
            ("{{ '<|start|>assistant<|channel|>final<|message|>' + content }}", "harmony"),
            ("{{ messages[0].content }}", "told"),
            ("{{ '<tool_call>' + name + '<arg_key>' }}", "told"),
            ("{{ '<|python_tag|>' }}{{ '<function=' + name + '>' }}", "told"),
            ("{{ ns_token + '<tool_call>' }}{{ '<invoke name=\"' }}", "told"),
        ] {
            assert_eq!(Format::of(&template(source)).name, name, "{source}");
        }
        assert_eq!(Thinking::of(&template("{{ x }}")), None);
        assert_eq!(Thinking::of(&template("{{ '<|user|>' + x + '<|end|>' }}")), None);
        let in_messages = Thinking::of(&template("{{ '<|channel|>final<|message|>' }}")).unwrap();
        assert!(in_messages.is_in_messages());
        assert!(in_messages.is_open("<|start|>assistant<|channel|>analysis<|message|>"));
        let begun = "<|start|>user<|message|>Hi.<|end|><|start|>assistant";
        assert!(!in_messages.is_open(begun) && !in_messages.is_over(begun));
        let thinking = Thinking::of(&template("{{ '<think>' }}")).unwrap();
        assert!(thinking.is_open("<|assistant|>\n<think>\n"));
        let over = "<|assistant|>\n<think>\n\n</think>\n\n";
        assert!(!thinking.is_open(over) && thinking.is_over(over));
    }
}
