//! Conversations as a chat template can write them.

use super::message::Message;
use super::template::{ChatTemplate, RenderOptions};
use serde_json::{Value, json};
use std::borrow::Cow;
use std::sync::PoisonError;

/// The role of instructions that newer conversations have in place of `system`.
const DEVELOPER: &str = "developer";

impl ChatTemplate {
    /// The messages with what this template doesn't write as what it does: parts of a content are joined to one text for
    /// roles whose parts it doesn't write itself, as many templates take a list for no content; and a `developer` is the
    /// `system` where it knows none.
    pub fn fitted<'a>(&self, messages: &'a [Message]) -> Cow<'a, [Message]> {
        let has_parts = |message: &Message| message.get("content").is_some_and(Value::is_array);
        let is_developer = |message: &Message| message.role() == DEVELOPER;
        if !messages.iter().any(|message| has_parts(message) || is_developer(message)) {
            return Cow::Borrowed(messages);
        }
        let knows_developer = self.mentions(DEVELOPER);
        let fitted = messages.iter().map(|message| {
            let mut message = message.clone();
            if is_developer(&message) && !knows_developer {
                message = message.with("role", Value::from("system"));
            }
            if !has_parts(&message) {
                return message;
            }
            match message.text() {
                Some(text) if !self.writes_parts(message.role()) => {
                    message.with("content", Value::from(text))
                }
                _ => message,
            }
        });
        Cow::Owned(fitted.collect())
    }

    /// Whether every part of a content that is a list is written, in messages of this role. It is tried once.
    fn writes_parts(&self, role: &str) -> bool {
        let mut known = self.writes_parts.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, writes)) = known.iter().find(|(known, _)| known == role) {
            return *writes;
        }
        let writes = self.writes_two_parts(role);
        known.push((role.to_string(), writes));
        writes
    }

    /// Tries it with two parts, of which a template may fail, print the list as it is, or leave out one.
    fn writes_two_parts(&self, role: &str) -> bool {
        const PARTS: [&str; 2] = ["qfirstq", "qsecondq"];
        let parts = PARTS.map(|text| json!({"type": "text", "text": text}));
        let message = Message::new(role, "").with("content", Value::from(parts.to_vec()));
        let user = || Message::new("user", "a");
        let message = match role {
            "tool" => message.with("tool_call_id", Value::from("abcdefgh1")),
            _ => message,
        };
        let conversation = match role {
            "user" => vec![message],
            "assistant" => vec![user(), message, user()],
            "tool" => {
                let function = json!({"name": "f", "arguments": {}});
                let call = json!({"id": "abcdefgh1", "type": "function", "function": function});
                let call = Message::new("assistant", "").with("tool_calls", json!([call]));
                vec![user(), call, message]
            }
            _ => vec![message, user()],
        };
        let options = RenderOptions { add_generation_prompt: true, ..RenderOptions::default() };
        let Ok(text) = self.render(&conversation, &options) else { return false };
        let after = text.split_once(PARTS[0]).map(|(_, after)| after);
        let between = after.and_then(|after| after.split_once(PARTS[1])).map(|(text, _)| text);
        // The key stands between them where the list is printed.
        between.is_some_and(|between| !between.contains("text"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn template(source: &str) -> ChatTemplate {
        ChatTemplate::new(source, vec![], vec![], vec![]).unwrap()
    }

    #[test]
    fn parts_are_joined_for_templates_that_would_leave_them_out() {
        let parts = json!([{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]);
        let messages = [
            Message::new("developer", "rules"),
            Message::new("user", "").with("content", parts),
            Message::new("assistant", "three"),
        ];
        let each = |content: &str| {
            template(&format!(
                "{{% for message in messages %}}<{{{{ message.role }}}}>{content}{{% endfor %}}"
            ))
        };
        let rendered = |template: &ChatTemplate, messages: &[Message]| {
            template.render(messages, &RenderOptions::default()).unwrap()
        };
        // As Qwen's write them.
        let strings = each("{{ message.content if message.content is string else '' }}");
        assert_eq!(rendered(&strings, &messages), "<developer>rules<user><assistant>three");
        let fitted = strings.fitted(&messages);
        assert_eq!(rendered(&strings, &fitted), "<system>rules<user>one two<assistant>three");
        let lists = each(
            "{% if message.content is string %}{{ message.content }}{% else %}\
             {% for part in message.content %}[{{ part.text }}]{% endfor %}{% endif %}\
             {% if message.role == 'developer' %}!{% endif %}",
        );
        let fitted = lists.fitted(&messages);
        assert_eq!(rendered(&lists, &fitted), "<developer>rules!<user>[one ][two]<assistant>three");
        assert!(matches!(lists.fitted(&messages[2..]), Cow::Borrowed(_)));
    }
}
