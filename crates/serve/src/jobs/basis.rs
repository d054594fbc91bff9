//! What the options of a server decide of a run's bits. It is kept in the run's folder, so that a server with other options,
//! which cannot go on with the run, says what they were.

use crate::app::App;
use metal_candle::text::Tokenizer;
use metal_candle::{Error, files};
use serde::{Deserialize, Serialize};
use std::path::Path;

const NAME: &str = "server_options.json";

/// The options that decide.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Basis {
    dtype: String,
    quantize: Option<String>,
    base_compute: Option<String>,
    /// A hash of the template, or of the one that the model to begin with has of its own.
    chat_template: Option<String>,
}

impl Basis {
    /// Those of this server, for a job whose model has this tokenizer.
    pub fn of(app: &App, tokenizer: &Tokenizer) -> Self {
        let setting = app.options.quantization.map(|quantization| quantization.setting());
        let value = |key: &str| {
            setting.filter(|(name, _)| *name == key).map(|(_, value)| value.to_string())
        };
        let template = tokenizer.chat_template();
        Self {
            dtype: app.model.dtype().as_str().into(),
            quantize: value("quantize"),
            base_compute: value("base_compute"),
            chat_template: template.map(|template| format!("{:016x}", template.fingerprint())),
        }
    }

    /// Those that the run in a folder was begun with; `None` where nothing is kept, as by servers of former versions.
    pub fn kept(folder: &Path) -> Option<Self> {
        files::read_json(folder.join(NAME)).ok()
    }

    /// Keeps them in a run's folder. A run goes on without: they are for words alone.
    pub fn keep(&self, folder: &Path) {
        if Self::kept(folder).as_ref() == Some(self) {
            return;
        }
        let path = folder.join(NAME);
        let written = serde_json::to_vec(self)
            .map_err(|error| Error::file(&path, error.to_string()))
            .and_then(|bytes| files::write_bytes_atomic(&path, bytes));
        if let Err(error) = written {
            tracing::warn!("the options that a job was begun with are not kept: {error}");
        }
    }

    /// Why a run that was begun with other options waits; `None` where they are the same.
    pub fn refusal(&self, begun: &Self) -> Option<String> {
        let pairs = [
            ("dtype", Some(&self.dtype), Some(&begun.dtype)),
            ("quantize", self.quantize.as_ref(), begun.quantize.as_ref()),
            ("base_compute", self.base_compute.as_ref(), begun.base_compute.as_ref()),
        ];
        let differing = pairs.into_iter().filter(|(_, now, before)| now != before);
        let mut differences: Vec<String> = differing
            .map(|(key, now, before)| {
                let flag = format!("--{}", key.replace('_', "-"));
                let advice = match before {
                    Some(before) => format!("start it with {flag} {before}"),
                    None => format!("start it without {flag}"),
                };
                let [now, before] = [now, before].map(|it| it.map_or("none", String::as_str));
                format!("{key} is {now}, and was {before} ({advice})")
            })
            .collect();
        if self.chat_template != begun.chat_template {
            differences.push(
                "the chat template is not what it was (--chat-template gives another)".into(),
            );
        }
        (!differences.is_empty()).then(|| {
            format!(
                "The job waits, as the server has other options than the one that began it: {}. Nothing of it is lost: \
                 resume it once the server has the former options, or cancel it.",
                differences.join("; ")
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_differs_is_named_with_the_way_back() {
        let begun = Basis {
            dtype: "bf16".into(),
            quantize: Some("q8_0".into()),
            base_compute: None,
            chat_template: Some("1".into()),
        };
        assert_eq!(begun.refusal(&begun), None);
        let now = Basis {
            dtype: "f32".into(),
            quantize: None,
            base_compute: Some("int8".into()),
            chat_template: None,
        };
        let told = now.refusal(&begun).unwrap();
        for part in [
            "dtype is f32, and was bf16 (start it with --dtype bf16)",
            "quantize is none, and was q8_0 (start it with --quantize q8_0)",
            "base_compute is int8, and was none (start it without --base-compute)",
            "the chat template is not what it was",
            "resume it",
        ] {
            assert!(told.contains(part), "{part}: {told}");
        }
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(Basis::kept(folder.path()), None);
        begun.keep(folder.path());
        assert_eq!(Basis::kept(folder.path()), Some(begun));
    }
}
