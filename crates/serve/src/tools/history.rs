//! Tools, calls and their results in conversations, for the chat templates that know nothing of one or the other, or
//! whose format isn't in the table.

use super::Tool;
use super::formats::{Format, Placement, Shape};
use crate::error::{ApiError, Result};
use metal_candle::text::{ChatTemplate, Message};
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

/// The length of identifiers that Mistral's templates want.
const SHORT_ID: usize = 9;
/// The field of a message that has its calls.
const CALLS: &str = "tool_calls";
/// The field that has what the model thought, which templates find as `thinking`, too.
const THOUGHTS: &str = "reasoning_content";

/// The form of calls' arguments. Most templates want objects, which they write as their family does; some put a text
/// between others and fail with an object.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Arguments {
    /// An object.
    Objects,
    /// An object's JSON, as the client wrote it.
    Texts,
}

/// What a template writes of a conversation, by `render`, which is given the messages and the tools as the template can
/// have them.
///
/// # Errors
/// That of [`fit`], or of `render` where it fails with both forms of arguments: the one with objects.
pub fn rendered(
    (field, messages): (&str, &[Message]),
    tools: &[Tool],
    template: &ChatTemplate,
    render: impl Fn(&[Message], Option<&[Value]>) -> Result<String>,
) -> Result<String> {
    let format = Format::of(template);
    let fitted = |form: Arguments| {
        let messages = messages.iter().map(|message| with_arguments(message, form)).collect();
        fit((field, messages), tools, format, template)
    };
    let (objects, shown) = fitted(Arguments::Objects)?;
    let error = match render(&objects, shown.as_deref()) {
        Err(error) if objects.iter().any(|message| message.get(CALLS).is_some()) => error,
        other => return other,
    };
    let (texts, shown) = fitted(Arguments::Texts)?;
    render(&texts, shown.as_deref()).map_err(|_| error)
}

/// The message with the arguments of its calls in this form.
fn with_arguments(message: &Message, form: Arguments) -> Message {
    let Some(Value::Array(calls)) = message.get(CALLS) else { return message.clone() };
    let mut calls = calls.clone();
    for call in &mut calls {
        let Some(arguments) = call.pointer_mut("/function/arguments") else { continue };
        let changed = match (form, &*arguments) {
            (Arguments::Objects, Value::String(text)) => serde_json::from_str(text).ok(),
            (Arguments::Texts, Value::Object(_)) => Some(Value::from(arguments.to_string())),
            _ => None,
        };
        if let Some(changed) = changed {
            *arguments = changed;
        }
    }
    message.clone().with(CALLS, Value::Array(calls))
}

/// The conversation, which `field` has, as the template can have it, and the tools that the template is given.
///
/// # Errors
/// A 400 that names the field, when there is no message that could tell of tools.
fn fit(
    (field, mut messages): (&str, Vec<Message>),
    tools: &[Tool],
    format: &Format,
    template: &ChatTemplate,
) -> Result<(Vec<Message>, Option<Vec<Value>>)> {
    let mut shown: Vec<Value> = tools.iter().map(Tool::for_template).collect();
    if format.short_ids {
        messages = messages.into_iter().map(with_short_ids).collect();
    }
    if format.shape == Shape::Message {
        messages = with_single_calls(messages);
        // Its template writes the description without asking whether there is one.
        let functions =
            shown.iter_mut().filter_map(|tool| tool.get_mut("function")?.as_object_mut());
        functions.for_each(|it| {
            it.entry("description").or_insert_with(|| "".into());
        });
    }
    // Where the first message tells how calls are written, those of before are written so, too.
    let tells = format.placement == Placement::Text && !shown.is_empty();
    if tells || !template.mentions(CALLS) {
        messages = messages.into_iter().map(|message| told(message, format)).collect();
    }
    if shown.is_empty() {
        return Ok((messages, None));
    }
    match format.placement {
        Placement::Template => Ok((messages, Some(shown))),
        Placement::System => {
            if messages.first().is_none_or(|message| message.role() != "system") {
                messages.insert(0, Message::new("system", ""));
            }
            let tools = Value::from(Value::from(shown).to_string());
            if let Some(first) = messages.first_mut() {
                *first = first.clone().with("tools", tools);
            }
            Ok((messages, None))
        }
        Placement::Text => {
            let about = description(&shown, format);
            let first = messages.first_mut();
            let Some(first) = first.filter(|it| matches!(it.role(), "system" | "user")) else {
                let what = "the server doesn't know how this chat template's model writes calls, so a first message of the system \
                            or the user has to tell of tools, and there is none";
                return Err(ApiError::field(field, what));
            };
            *first = with_before(first, &format!("{about}\n\n"));
            Ok((messages, None))
        }
    }
}

/// The message with this text before its own: before that of its first part where there are several.
fn with_before(message: &Message, before: &str) -> Message {
    let mut content = message.get("content").cloned().unwrap_or_default();
    let text = match &mut content {
        Value::Array(parts) => parts.first_mut().and_then(|part| part.get_mut("text")),
        whole => Some(whole),
    };
    if let Some(text) = text {
        *text = Value::from(format!("{before}{}", text.as_str().unwrap_or_default()));
    }
    message.clone().with("content", content)
}

/// What a model is told of tools whose template knows nothing of them, or has a format that isn't in the table.
fn description(tools: &[Value], format: &Format) -> String {
    let tools: Vec<String> = tools.iter().map(Value::to_string).collect();
    let (open, close) = (format.open, format.close.unwrap_or_default());
    format!(
        "You may call these functions:\n{}\n\nTo call one, write:\n{open}\n{{\"name\": NAME, \"{}\": {{...}}}}\n{close}",
        tools.join("\n"),
        format.arguments
    )
}

/// The message with its calls as text, and a tool's result as what the user says.
fn told(message: Message, format: &Format) -> Message {
    if message.role() == "tool" && format.placement == Placement::Text {
        let result = message.text().unwrap_or_default();
        return Message::new("user", format!("<tool_response>\n{result}\n</tool_response>"));
    }
    let Some(Value::Array(calls)) = message.get(CALLS) else { return message };
    let written: Vec<String> = calls
        .iter()
        .filter_map(|call| call.get("function"))
        .map(|function| {
            let given = |key: &str| function.get(key).cloned().unwrap_or_default();
            let mut object = Map::new();
            object.insert("name".into(), given("name"));
            object.insert(format.arguments.into(), given("arguments"));
            Value::Object(object).to_string()
        })
        .collect();
    let (open, close) = (format.open, format.close.unwrap_or_default());
    let calls = match format.shape {
        Shape::Object(before, after) => {
            let each = written.iter().map(|call| format!("{open}{before}{call}{after}{close}"));
            each.collect::<Vec<_>>().join("\n")
        }
        // Its templates write calls themselves.
        Shape::Parameters | Shape::List | Shape::Named(_) | Shape::Message => {
            format!("{open}[{}]{close}", written.join(", "))
        }
    };
    let text = message.text().unwrap_or_default();
    let text = if text.is_empty() { calls } else { format!("{text}\n{calls}") };
    let mut fields = message.fields().clone();
    fields.shift_remove(CALLS);
    fields.insert("content".into(), Value::from(text));
    // It had a role, and has it still.
    Message::from_fields(fields).unwrap_or(message)
}

/// The messages with one call in each, directly before its result, as harmony's template writes the first call of a
/// message alone and takes a result for that of the call before it. What the model thought and said before a call is one
/// text, as the template refuses two.
fn with_single_calls(messages: Vec<Message>) -> Vec<Message> {
    let mut single = Vec::with_capacity(messages.len());
    let mut messages = messages.into_iter().peekable();
    while let Some(mut message) = messages.next() {
        let Some(Value::Array(calls)) = message.get(CALLS).cloned() else {
            single.push(message);
            continue;
        };
        let said = message.text().unwrap_or_default();
        let thoughts = message.get(THOUGHTS).and_then(Value::as_str).unwrap_or_default();
        if !said.is_empty() && !thoughts.is_empty() {
            let both = Value::from(format!("{thoughts}\n\n{said}"));
            message = message.with("content", "".into()).with(THOUGHTS, both);
        }
        let mut results = Vec::new();
        while let Some(result) = messages.next_if(|it| it.role() == "tool") {
            results.push(Some(result));
        }
        for (index, call) in calls.into_iter().enumerate() {
            let caller = match index {
                0 => message.clone(),
                _ => Message::new(message.role(), ""),
            };
            let id = call.get("id").cloned();
            single.push(caller.with(CALLS, Value::Array(vec![call])));
            let of_call = |it: &&mut Option<Message>| {
                it.as_ref().is_some_and(|it| id.is_some() && it.get("tool_call_id") == id.as_ref())
            };
            single.extend(results.iter_mut().filter(of_call).filter_map(Option::take));
        }
        single.extend(results.into_iter().flatten());
    }
    single
}

/// The message with identifiers of nine letters and digits, each for one of any length.
fn with_short_ids(message: Message) -> Message {
    let mut changed = message.clone();
    if let Some(Value::String(id)) = message.get("tool_call_id") {
        changed = changed.with("tool_call_id", Value::from(short_id(id)));
    }
    if let Some(Value::Array(calls)) = message.get(CALLS) {
        let mut calls = calls.clone();
        for call in &mut calls {
            if let Some(Value::String(id)) = call.get_mut("id") {
                *id = short_id(id);
            }
        }
        changed = changed.with(CALLS, Value::Array(calls));
    }
    changed
}

fn short_id(id: &str) -> String {
    if id.len() == SHORT_ID && id.chars().all(|it| it.is_ascii_alphanumeric()) {
        return id.to_string();
    }
    let hash = Sha256::digest(id.as_bytes());
    let digits: String = hash.iter().map(|byte| format!("{byte:02x}")).collect();
    digits.chars().take(SHORT_ID).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use metal_candle::text::RenderOptions;
    use serde_json::json;

    fn template(source: &str) -> ChatTemplate {
        ChatTemplate::new(source, Vec::new(), Vec::new(), Vec::new()).unwrap()
    }

    fn messages(value: Value) -> Vec<Message> {
        serde_json::from_value(value).unwrap()
    }

    fn tool() -> Tool {
        Tool::new("tools[0].function", "f".into(), Some("Does it.".into()), None).unwrap()
    }

    fn conversation() -> (&'static str, Vec<Message>) {
        let function = json!({"name": "f", "arguments": {"a": 1}});
        let call = json!({"id": "call_1", "type": "function", "function": function});
        let messages = messages(json!([
            {"role": "user", "content": "Do it."},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "done", "tool_call_id": "call_1"}
        ]));
        ("messages", messages)
    }

    #[test]
    fn templates_without_tools_are_told_in_text() {
        let plain = template("{{ messages }}");
        let (fitted, given) = fit(conversation(), &[tool()], Format::of(&plain), &plain).unwrap();
        assert_eq!(given, None);
        let text = |index: usize| fitted[index].text().unwrap();
        assert!(text(0).contains(r#""description":"Does it.""#) && text(0).ends_with("\n\nDo it."));
        assert_eq!(text(1), "<tool_call>\n{\"name\":\"f\",\"arguments\":{\"a\":1}}\n</tool_call>");
        assert_eq!(fitted[1].get("tool_calls"), None);
        assert_eq!(fitted[2].role(), "user");
        assert_eq!(text(2), "<tool_response>\ndone\n</tool_response>");
        let assistant = ("input", messages(json!([{"role": "assistant", "content": "a"}])));
        let error = fit(assistant, &[tool()], Format::of(&plain), &plain).unwrap_err();
        assert_eq!(error.param.as_deref(), Some("input"));
    }

    #[test]
    fn templates_with_tools_get_them() {
        let hermes = template("{{ tools }}{{ message.tool_calls }}<tool_call>");
        let (fitted, given) = fit(conversation(), &[tool()], Format::of(&hermes), &hermes).unwrap();
        assert_eq!(fitted, conversation().1);
        assert_eq!(given.unwrap()[0]["function"]["name"], "f");
        let phi = template("{{ message['tools'] }}<|/tool|>");
        let (fitted, given) = fit(conversation(), &[tool()], Format::of(&phi), &phi).unwrap();
        assert_eq!((fitted[0].role(), given), ("system", None));
        assert!(fitted[0].get("tools").unwrap().as_str().unwrap().starts_with("[{\"type\""));
        let call = "<|tool_call|>[{\"name\":\"f\",\"arguments\":{\"a\":1}}]<|/tool_call|>";
        assert_eq!(fitted[2].text().unwrap(), call);
        assert_eq!(fitted[3].role(), "tool");
    }

    #[test]
    fn mistral_gets_short_identifiers() {
        let mistral = template("{{ tool_calls }}[TOOL_CALLS]");
        let (fitted, _) = fit(conversation(), &[], Format::of(&mistral), &mistral).unwrap();
        let id = fitted[2].get("tool_call_id").unwrap().as_str().unwrap();
        assert_eq!(fitted[1].get("tool_calls").unwrap()[0]["id"], id);
        assert!(id.len() == 9 && id.chars().all(|it| it.is_ascii_alphanumeric()));
        assert_eq!(short_id("abcdefgh1"), "abcdefgh1");
    }

    /// The conversation as a template writes it, with arguments as this client wrote them.
    fn written(template: &ChatTemplate, arguments: Value, tools: &[Tool]) -> Result<String> {
        let function = json!({"name": "f", "arguments": arguments});
        let call = json!({"id": "call_1", "type": "function", "function": function});
        let messages = messages(json!([
            {"role": "user", "content": "Do it."},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "done", "tool_call_id": "call_1"}
        ]));
        rendered(("messages", &messages), tools, template, |messages, tools| {
            let options = RenderOptions { tools, ..RenderOptions::default() };
            Ok(template.render(messages, &options)?)
        })
    }

    #[test]
    fn templates_get_arguments_in_the_form_that_they_can_write() {
        let looped = |inner: &str| {
            template(&format!(
                "{{% for message in messages %}}{{% for call in message.tool_calls or [] %}}{inner}{{% endfor %}}{{% endfor %}}"
            ))
        };
        // As DeepSeek's R1 writes calls.
        let joined = looped("{{ '```json\n' + call['function']['arguments'] + '\n```' }}");
        let text = "{ \"a\":  1.0 }";
        assert_eq!(written(&joined, json!(text), &[]).unwrap(), format!("```json\n{text}\n```"));
        // Anthropic's clients give objects.
        let given = written(&joined, json!({"a": 1}), &[]).unwrap();
        assert_eq!(given, "```json\n{\"a\":1}\n```");
        let items = looped(
            "{% for key, value in call.function.arguments|items %}{{ key }}={{ value }}{% endfor %}",
        );
        assert_eq!(written(&items, json!("{\"a\": 1}"), &[]).unwrap(), "a=1");
        // Where neither will do, what is wrong with objects is told.
        let neither =
            looped("{{ raise_exception('mapping: ' ~ (call.function.arguments is mapping)) }}");
        let error = written(&neither, json!("{}"), &[]).unwrap_err();
        assert!(error.message.to_lowercase().contains("mapping: true"), "{}", error.message);
    }

    #[test]
    fn calls_are_written_as_the_first_message_tells() {
        // It writes calls in a form of its own, and tools, too.
        let own = template(
            "{{ tools }}{% for message in messages %}<{{ message.role }}>{{ message.content }}\
             {% for call in message.tool_calls or [] %}CALL {{ call.function.name }}{% endfor %}{% endfor %}",
        );
        let given = written(&own, json!("{\"a\": 1}"), &[tool()]).unwrap();
        assert!(given.contains("\n\nDo it.<assistant><tool_call>\n{\"name\":\"f\","), "{given}");
        assert!(given.contains("<user><tool_response>\ndone\n</tool_response>"), "{given}");
        assert!(!given.contains("CALL"), "{given}");
        // Without tools nobody is told of a form, and the template's own is right.
        let given = written(&own, json!("{\"a\": 1}"), &[]).unwrap();
        assert!(given.ends_with("<user>Do it.<assistant>CALL f<tool>done"), "{given}");
    }

    #[test]
    fn messages_have_one_call_each_and_its_result() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/templates/harmony.jinja");
        let harmony = template(&std::fs::read_to_string(path).unwrap());
        let call = |id: &str, name: &str| json!({"id": id, "type": "function", "function": {"name": name, "arguments": "{\"a\": 1}"}});
        let result =
            |id: &str| json!({"role": "tool", "content": format!("of {id}"), "tool_call_id": id});
        let written = |more: &[Value]| {
            let mut conversation = vec![
                json!({"role": "system", "content": "Be brief."}),
                json!({"role": "user", "content": "Do it."}),
                json!({"role": "assistant", "content": "I look.", "reasoning_content": "hm",
                    "tool_calls": [call("1", "f"), call("2", "g")]}),
                result("2"),
                result("1"),
            ];
            conversation.extend_from_slice(more);
            let messages = messages(conversation.into());
            let tool = Tool::new("tools", "f".into(), None, None).unwrap();
            rendered(("messages", &messages), &[tool], &harmony, |messages, tools| {
                let options = RenderOptions {
                    tools,
                    add_generation_prompt: true,
                    ..RenderOptions::default()
                };
                Ok(harmony.render(messages, &options)?)
            })
            .unwrap()
        };
        let called = |name: &str, id: &str| {
            format!(
                "<|start|>assistant to=functions.{name}<|channel|>commentary json<|message|>{{\"a\": 1}}<|call|>\
                 <|start|>functions.{name} to=assistant<|channel|>commentary<|message|>\"of {id}\"<|end|>"
            )
        };
        let both = format!("{}{}", called("f", "1"), called("g", "2"));
        let thoughts = "<|start|>assistant<|channel|>analysis<|message|>hm\n\nI look.<|end|>";
        let text = written(&[]);
        assert!(text.contains("Be brief.\n// \nf("), "{text}");
        let end = format!("Do it.<|end|>{thoughts}{both}<|start|>assistant");
        assert!(text.ends_with(&end), "{text}");
        // An answer makes its thoughts needless, and those before it.
        let answer = json!({"role": "assistant", "content": "Done.", "reasoning_content": "so"});
        let text = written(&[answer, json!({"role": "user", "content": "And?"})]);
        let end = "<|start|>assistant<|channel|>final<|message|>Done.<|end|><|start|>user<|message|>And?<|end|><|start|>assistant";
        assert!(text.ends_with(&format!("Do it.<|end|>{both}{end}")), "{text}");
        // A result of nothing stays where it can.
        assert!(written(&[result("3")]).ends_with("\"of 3\"<|end|><|start|>assistant"));
    }

    #[test]
    fn a_first_message_of_parts_tells_of_tools_in_its_first() {
        let plain = template("{{ messages }}");
        let parts = json!([{"type": "text", "text": "a "}, {"type": "text", "text": " b"}]);
        let parts = ("messages", messages(json!([{"role": "user", "content": parts}])));
        let (fitted, _) = fit(parts, &[tool()], Format::of(&plain), &plain).unwrap();
        let texts: Vec<&str> = fitted[0].texts().collect();
        assert!(texts[0].starts_with("You may call") && texts[0].ends_with("\n\na "), "{texts:?}");
        assert_eq!(texts[1..], [" b"]);
    }
}
