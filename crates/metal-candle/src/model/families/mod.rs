//! Families of models: a file each says what a family's `config.json` means.
//!
//! A family's `read` starts with what all have in common ([`Config::common`], with the defaults of its
//! configuration class in `transformers`) and states what differs. Another family is a file here, its two
//! lines in this one, and its fixture.

mod gemma2;
mod gemma3;
mod gpt_oss;
mod granite;
mod llama;
mod ministral;
mod ministral3;
mod mistral;
mod mixtral;
mod olmo2;
mod phi3;
mod qwen2;
mod qwen3;
mod qwen3_moe;
mod smollm3;
#[cfg(test)]
pub(super) mod testing;

use serde_json::Value;

use super::config::Config;
use super::config::keys::Keys;
use crate::Result;
use crate::files::cut;

/// A family of models that the decoder can be.
#[derive(Debug)]
pub struct Architecture {
    /// In messages.
    name: &'static str,
    model_type: &'static str,
    class_name: &'static str,
    /// The `model_type` and the class of checkpoints that hold a model of this family as a part, beside one that
    /// sees images.
    with_images: Option<(&'static str, &'static str)>,
    read: fn(Keys) -> Result<Config>,
}

impl PartialEq for Architecture {
    fn eq(&self, other: &Self) -> bool {
        self.model_type == other.model_type
    }
}

impl Eq for Architecture {}

impl Architecture {
    /// Every supported family.
    pub const ALL: [&'static Self; 15] = [
        &llama::FAMILY,
        &mistral::FAMILY,
        &mixtral::FAMILY,
        &ministral::FAMILY,
        &ministral3::FAMILY,
        &qwen2::FAMILY,
        &qwen3::FAMILY,
        &qwen3_moe::FAMILY,
        &gemma2::FAMILY,
        &gemma3::FAMILY,
        &phi3::FAMILY,
        &smollm3::FAMILY,
        &olmo2::FAMILY,
        &granite::FAMILY,
        &gpt_oss::FAMILY,
    ];

    /// The `model_type` in `config.json`.
    pub fn model_type(&self) -> &'static str {
        self.model_type
    }

    /// The entry of `architectures` in `config.json`.
    pub fn class_name(&self) -> &'static str {
        self.class_name
    }

    /// Reads a file of this family.
    pub(super) fn read(&self, keys: Keys) -> Result<Config> {
        (self.read)(keys)
    }

    /// The family that `model_type` names, or `architectures` in a file without it.
    pub(super) fn find(keys: Keys) -> Result<&'static Self> {
        let model_type = keys.text("model_type")?;
        let classes = match keys.get("architectures") {
            None | Some(Value::Null) => Vec::new(),
            Some(found) => {
                let names = found
                    .as_array()
                    .and_then(|classes| classes.iter().map(Value::as_str).collect());
                match names {
                    Some(names) => names,
                    None => return Err(keys.unexpected("architectures", "a list of names", found)),
                }
            }
        };
        let known = |by: fn(&Self) -> &'static str| Self::ALL.map(by).join(", ");
        let unknown = |key: &str, found: String| {
            let hint = Self::ALL.iter().find(|family| {
                family.with_images.is_some_and(|(other_type, other_class)| {
                    model_type == Some(other_type) || classes.contains(&other_class)
                })
            });
            let hint = hint.map_or(String::new(), |family| {
                format!(
                    " (of {}, the text-only checkpoints can be used, not those with images)",
                    family.name
                )
            });
            keys.unsupported(
                key,
                format!(
                    "{found}{hint}; the supported families are {}, as {}",
                    known(Self::model_type),
                    known(Self::class_name)
                ),
            )
        };
        match model_type {
            Some(model_type) => {
                let Some(family) = Self::ALL.into_iter().find(|a| a.model_type == model_type)
                else {
                    return Err(unknown("model_type", format!("{:?}", cut(model_type))));
                };
                if !classes.is_empty() && !classes.contains(&family.class_name) {
                    return Err(keys.unsupported(
                        "architectures",
                        format!(
                            "{} of model_type {model_type:?}; of this family, {} is supported",
                            cut(&format!("{classes:?}")),
                            family.class_name
                        ),
                    ));
                }
                Ok(family)
            }
            None if classes.is_empty() => Err(keys.invalid(
                "model_type",
                format!("missing; expected one of {}", known(Self::model_type)),
            )),
            None => Self::ALL
                .into_iter()
                .find(|a| classes.contains(&a.class_name))
                .ok_or_else(|| unknown("architectures", cut(&format!("{classes:?}")))),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::testing::{fixtures, parse};
    use super::*;
    use crate::Error;

    #[test]
    fn both_formats_of_every_fixture_mean_the_same() {
        let mut families = Vec::new();
        for (name, [mut new, mut old]) in fixtures() {
            assert!(new.dtype.is_some());
            new.raw = Value::Null;
            old.raw = Value::Null;
            assert_eq!(new, old, "{name}");
            families.push(new.architecture);
        }
        for family in Architecture::ALL {
            assert!(families.contains(&family), "{} has no fixture", family.name);
        }
    }

    #[test]
    fn an_architecture_is_found_by_type_or_class_and_others_are_refused_by_name() {
        let by_class = parse(json!({ "architectures": ["Gemma3ForCausalLM"] })).unwrap();
        assert_eq!(by_class.architecture.model_type(), "gemma3_text");
        for (value, expected) in [
            (json!({ "model_type": "gpt2" }), "\"gpt2\""),
            (json!({ "architectures": ["MambaForCausalLM"] }), "MambaForCausalLM"),
            (
                json!({ "model_type": "llama", "architectures": ["LlamaForSequenceClassification"] }),
                "LlamaForSequenceClassification",
            ),
        ] {
            let error = parse(value).unwrap_err();
            assert!(matches!(error, Error::Unsupported(_)));
            assert!(error.to_string().contains(expected), "{error}");
        }
        let error = parse(json!({ "model_type": "gpt2" })).unwrap_err().to_string();
        for architecture in Architecture::ALL {
            assert!(error.contains(architecture.model_type()), "{error}");
        }
        assert!(parse(json!({})).unwrap_err().to_string().contains("model_type: missing"));
    }

    #[test]
    fn checkpoints_with_images_are_told_of_the_text_only_ones() {
        for (model_type, class, name) in [
            ("gemma3", "Gemma3ForConditionalGeneration", "Gemma 3"),
            ("mistral3", "Mistral3ForConditionalGeneration", "Ministral 3"),
        ] {
            for value in [
                json!({ "model_type": model_type, "architectures": [class] }),
                json!({ "architectures": [class] }),
            ] {
                let error = parse(value).unwrap_err().to_string();
                assert!(error.contains(&format!("of {name}, the text-only")), "{error}");
            }
        }
    }
}
