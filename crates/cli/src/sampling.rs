//! The flags that say how a text is drawn.

use crate::errors::usage;
use clap::Args;
use metal_candle::files;
use metal_candle::generate::{GenerateOptions, SamplingOptions};
use serde_json::{Map, Value};
use std::path::Path;

const DEFAULT_TEMPERATURE: f64 = 0.7;

/// How tokens are drawn. What is not given comes from the model's `generation_config.json`.
#[derive(Debug, Clone, Default, Args)]
#[command(
    next_help_heading = "Sampling (defaults are those of the model's generation_config.json)"
)]
pub struct Sampling {
    /// Tokens at most [default: 256; of a server, what the model's context has room for]
    #[arg(
        short = 'n',
        long,
        value_name = "N",
        alias = "max-new-tokens",
        allow_negative_numbers = true
    )]
    max_tokens: Option<usize>,
    /// Divides the logits; 0 takes the likeliest token every time [default: 0.7 if the model doesn't say]
    #[arg(short, long, value_name = "X", alias = "temp", allow_negative_numbers = true)]
    temperature: Option<f64>,
    /// Only the K likeliest tokens; 0 is off
    #[arg(long, value_name = "K")]
    top_k: Option<usize>,
    /// Only the likeliest tokens that reach this probability together; 1 is off
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    top_p: Option<f64>,
    /// Only tokens at least this share as likely as the likeliest; 0 is off
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    min_p: Option<f64>,
    /// Makes tokens of the text so far less likely; 1 is off
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    repetition_penalty: Option<f64>,
    /// Taken from the logits of tokens written before, -2 to 2 [default: 0]
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    presence_penalty: Option<f64>,
    /// Taken from them for each time they were written, -2 to 2 [default: 0]
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    frequency_penalty: Option<f64>,
    /// Added to a token's logit; may be given several times
    #[arg(long, value_name = "ID=X", value_parser = bias)]
    logit_bias: Vec<(u32, f32)>,
    /// What the random draws follow from: the same seed gives the same text
    #[arg(long, value_name = "N", default_value_t = SamplingOptions::default().seed)]
    seed: u64,
    /// End the text before this; may be given several times
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    /// Go on after an end-of-sequence token
    #[arg(long)]
    ignore_eos: bool,
}

/// How a model's texts are drawn where nothing is said.
pub fn defaults(folder: &Path) -> anyhow::Result<GenerateOptions> {
    Sampling::default().resolve(folder)
}

fn bias(text: &str) -> Result<(u32, f32), String> {
    let wrong = || format!("`{text}` is not ID=X, a token's id and a number");
    let (id, bias) = text.split_once('=').ok_or_else(wrong)?;
    Ok((id.trim().parse().map_err(|_| wrong())?, bias.trim().parse().map_err(|_| wrong())?))
}

impl Sampling {
    /// What a request to a server says of it and of the template's variables, and the seed; what was not given is the
    /// server's to choose.
    pub fn request(
        &self,
        variables: Option<Map<String, Value>>,
    ) -> anyhow::Result<(Map<String, Value>, u64)> {
        let mut request = Map::new();
        let mut say = |key: &str, value: Option<Value>| {
            request.extend(value.map(|value| (key.to_string(), value)));
        };
        say("max_tokens", self.max_tokens.map(Value::from));
        say("top_k", self.top_k.map(Value::from));
        for (key, value) in [
            ("temperature", self.temperature),
            ("top_p", self.top_p),
            ("min_p", self.min_p),
            ("repetition_penalty", self.repetition_penalty),
            ("presence_penalty", self.presence_penalty),
            ("frequency_penalty", self.frequency_penalty),
        ] {
            // JSON has no such numbers, and null would be the default.
            if let Some(value) = value.filter(|value| !value.is_finite()) {
                return Err(usage(format!("{key}: is {value}, expected a finite number")));
            }
            say(key, value.map(Value::from));
        }
        let biases: Map<String, Value> =
            self.logit_bias.iter().map(|(id, bias)| (id.to_string(), (*bias).into())).collect();
        if self.logit_bias.iter().any(|(_, bias)| !bias.is_finite()) {
            return Err(usage("logit_bias: expected finite numbers"));
        }
        say("logit_bias", (!biases.is_empty()).then_some(Value::Object(biases)));
        say("stop", (!self.stop.is_empty()).then(|| self.stop.clone().into()));
        say("ignore_eos", self.ignore_eos.then_some(true.into()));
        say("chat_template_kwargs", variables.map(Value::Object));
        Ok((request, self.seed))
    }

    /// Whether somebody said how many tokens a text has at most.
    pub fn says_max_tokens(&self) -> bool {
        self.max_tokens.is_some()
    }

    /// The options for the model in `folder`.
    pub fn resolve(&self, folder: &Path) -> anyhow::Result<GenerateOptions> {
        let path = folder.join("generation_config.json");
        let config: Map<String, Value> =
            if path.exists() { files::read_json(&path)? } else { Map::new() };
        let number = |key: &str| -> anyhow::Result<Option<f64>> {
            match config.get(key) {
                None | Some(Value::Null) => Ok(None),
                Some(value) => value.as_f64().map(Some).ok_or_else(|| {
                    metal_candle::Error::file(&path, format!("{key} is {value}, expected a number"))
                        .into()
                }),
            }
        };
        let off = SamplingOptions::default();
        let sampled = config.get("do_sample").and_then(Value::as_bool) != Some(false);
        // What the file says of drawing does not hold where it says that nothing is drawn.
        let drawn = |given: Option<f64>, key: &str, default: f64| -> anyhow::Result<f64> {
            Ok(match given {
                Some(given) => given,
                None if sampled => number(key)?.unwrap_or(default),
                None => default,
            })
        };
        let temperature = match self.temperature {
            None if !sampled => 0.0,
            given => drawn(given, "temperature", DEFAULT_TEMPERATURE)?,
        };
        let options = GenerateOptions {
            max_tokens: self.max_tokens.unwrap_or(GenerateOptions::default().max_tokens),
            sampling: SamplingOptions {
                temperature,
                top_k: match self.top_k {
                    Some(top_k) => top_k,
                    None => drawn(None, "top_k", 0.0)? as usize,
                },
                top_p: drawn(self.top_p, "top_p", off.top_p)?,
                min_p: drawn(self.min_p, "min_p", off.min_p)?,
                repetition_penalty: match self.repetition_penalty {
                    Some(penalty) => penalty,
                    None => number("repetition_penalty")?.unwrap_or(off.repetition_penalty),
                },
                repetition_context: None,
                presence_penalty: self.presence_penalty.unwrap_or(off.presence_penalty),
                frequency_penalty: self.frequency_penalty.unwrap_or(off.frequency_penalty),
                logit_bias: self.logit_bias.iter().copied().collect(),
                seed: self.seed,
            },
            stop: self.stop.clone(),
            ignore_eos: self.ignore_eos,
            top_logprobs: 0,
            continues_prompt: false,
        };
        let is_given = |option: &str| match option {
            "temperature" => self.temperature.is_some(),
            "top_k" => self.top_k.is_some(),
            "top_p" => self.top_p.is_some(),
            "min_p" => self.min_p.is_some(),
            "repetition_penalty" => self.repetition_penalty.is_some(),
            _ => true,
        };
        match options.validate() {
            Err(metal_candle::Error::Option { option, message }) if !is_given(&option) => {
                return Err(metal_candle::Error::file(&path, format!("{option}: {message}")).into());
            }
            checked => checked.map_err(usage)?,
        }
        let ignored = not_applied(&config);
        if !ignored.is_empty() {
            tracing::warn!("{}: {} is not applied", path.display(), ignored.join(", "));
        }
        Ok(options)
    }
}

/// The keys of a `generation_config.json` that would change what a model writes, but not here.
fn not_applied(config: &Map<String, Value>) -> Vec<&str> {
    // With what each has where it does nothing.
    let keys = [
        ("num_beams", Some(1.0)),
        ("no_repeat_ngram_size", Some(0.0)),
        ("min_length", Some(0.0)),
        ("min_new_tokens", Some(0.0)),
        ("typical_p", Some(1.0)),
        ("epsilon_cutoff", Some(0.0)),
        ("eta_cutoff", Some(0.0)),
        ("penalty_alpha", Some(0.0)),
        ("guidance_scale", Some(1.0)),
        ("suppress_tokens", None),
        ("begin_suppress_tokens", None),
        ("bad_words_ids", None),
        ("sequence_bias", None),
        ("forced_bos_token_id", None),
        ("forced_eos_token_id", None),
        ("exponential_decay_length_penalty", None),
    ];
    let does_something = |key: &str, neutral: Option<f64>| match config.get(key) {
        None | Some(Value::Null) => false,
        Some(Value::Array(list)) => !list.is_empty(),
        Some(Value::Object(map)) => !map.is_empty(),
        Some(value) => neutral.is_none() || value.as_f64() != neutral,
    };
    keys.into_iter().filter(|(key, it)| does_something(key, *it)).map(|(key, _)| key).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_models_settings_are_checked_and_what_is_not_applied_is_known() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("generation_config.json");
        std::fs::write(&path, r#"{ "top_p": 1.5 }"#).unwrap();
        let error = |sampling: Sampling| sampling.resolve(folder.path()).unwrap_err().to_string();
        let of_file = error(Sampling::default());
        assert!(
            of_file.contains("generation_config.json") && of_file.contains("top_p"),
            "{of_file}"
        );
        let given = error(Sampling { top_p: Some(1.5), ..Sampling::default() });
        assert!(!given.contains("generation_config.json"), "{given}");
        let Value::Object(config) = serde_json::json!({
            "num_beams": 1, "no_repeat_ngram_size": 3, "suppress_tokens": [], "typical_p": null,
            "bad_words_ids": [[4]], "forced_eos_token_id": 2, "top_p": 0.9,
        }) else {
            panic!("an object")
        };
        let expected = ["no_repeat_ngram_size", "bad_words_ids", "forced_eos_token_id"];
        assert_eq!(not_applied(&config), expected);
    }

    #[test]
    fn the_help_tells_the_default_and_a_server_has_its_own() {
        let command = Sampling::augment_args(clap::Command::new("x"));
        let argument = command.get_arguments().find(|it| it.get_id() == "max_tokens").unwrap();
        let help = argument.get_help().unwrap().to_string();
        let default = format!("[default: {};", GenerateOptions::default().max_tokens);
        assert!(help.contains(&default), "{help}");
        let (request, _) = Sampling::default().request(None).unwrap();
        assert!(!request.contains_key("max_tokens"), "{request:?}");
        let said = Sampling { max_tokens: Some(7), ..Sampling::default() };
        assert_eq!(said.request(None).unwrap().0["max_tokens"], 7);
    }
}
